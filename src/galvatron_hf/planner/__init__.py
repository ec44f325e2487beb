# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Searches for a plan and predicts its cost, from profiles alone; imports neither torch nor the runtime."""
