# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The command `galvatron`. Each of its commands is the module of the same name."""
