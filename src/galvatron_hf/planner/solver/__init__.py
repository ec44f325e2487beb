# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Solves integer arrays exactly: one option per layer and a cut into stages."""
