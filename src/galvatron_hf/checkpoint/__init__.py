# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints: folders, manifest and formats."""
