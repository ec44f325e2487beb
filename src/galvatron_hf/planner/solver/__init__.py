# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The exact solver of the search problem: arrays in, strategies out."""
