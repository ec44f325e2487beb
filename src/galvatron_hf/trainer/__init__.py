# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face, under a parallel plan."""
