# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes the time and memory of a strategy, a layer and a step."""
