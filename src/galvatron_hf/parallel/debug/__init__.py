# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Diagnosis: non-finite values and blocked collectives."""
