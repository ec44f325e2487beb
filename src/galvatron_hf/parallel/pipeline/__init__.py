# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages and the runtime that executes their schedule."""
