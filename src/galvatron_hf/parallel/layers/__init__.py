# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Parallel layers: tensor parallelism, attention, vocabulary-parallel embedding, head and loss."""
