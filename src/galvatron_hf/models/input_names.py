# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The names under which families get what their rows are made of."""

TOKENS, IMAGES, AUDIO = "input_ids", "pixel_values", "input_values"
