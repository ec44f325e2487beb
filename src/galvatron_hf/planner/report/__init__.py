# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reports where a plan's time and memory go, and what well-known plans take."""
