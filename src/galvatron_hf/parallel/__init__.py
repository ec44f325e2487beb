# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The runtime: puts a plan onto a model and computes under it."""
