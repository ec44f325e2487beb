# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer state: initialisation, loading, distributed checkpoints, export."""
