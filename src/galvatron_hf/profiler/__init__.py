# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What planning needs to know of machines and models, and the measurements that tell it."""
