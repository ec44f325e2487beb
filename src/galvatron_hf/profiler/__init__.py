# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a plan costs, worked out from the plan and the model's shapes alone; never imports the runtime."""
