# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: sharded and replicated weights, tied weights across stages."""
