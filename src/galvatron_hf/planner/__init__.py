# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The search for a plan and the prediction of its cost, from profiles alone; imports neither torch nor the runtime."""
