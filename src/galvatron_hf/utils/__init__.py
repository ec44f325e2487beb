# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tools that every other package may import: progress bars, the machine, the allocator, private names."""
