# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of activations and the micro-batch that they describe."""
