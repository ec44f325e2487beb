# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Small tools that every other package may import: progress bars, the machine, the allocator."""
