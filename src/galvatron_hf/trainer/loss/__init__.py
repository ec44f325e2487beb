# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Losses under a plan: custom losses, per-token outputs, embedding noise."""
