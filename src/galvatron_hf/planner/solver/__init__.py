# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The exact solver: integer arrays in, one option per layer and a cut into stages out."""
