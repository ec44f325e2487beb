# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Stores profiles of machines and models as values and as JSON. Imports no torch."""
