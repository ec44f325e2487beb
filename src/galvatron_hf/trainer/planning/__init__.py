# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The automatic plan: profile, search, calibration, and predicted against measured."""
