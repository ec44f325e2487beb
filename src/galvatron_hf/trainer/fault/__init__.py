# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Faults: non-finite steps, signals, lost ranks."""
