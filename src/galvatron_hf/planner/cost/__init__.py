# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The cost model: time and memory of a strategy, a layer, a step."""
