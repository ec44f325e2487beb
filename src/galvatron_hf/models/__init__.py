# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model families as tables: one adapter each, shapes of weights, names of fused weights."""
