# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lets tests import their helpers (`from ranks import run_ranks`) by name, whatever the import mode."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
