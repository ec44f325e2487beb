# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws plans, predictions, measurements and data with matplotlib, and makes the report of a training run."""
