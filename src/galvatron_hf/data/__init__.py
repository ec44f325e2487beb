# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Data: the same global batch as Trainer's, on every rank."""
