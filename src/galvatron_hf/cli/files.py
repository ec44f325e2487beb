# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

import argparse
import os


def output_file(path: str) -> str:
    """A path of `--output`, refused before any work is done if no file can be written there."""
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path!r} is a folder: give a file in it")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{path!r} is in no folder that exists: make {folder!r} first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path!r} is in a folder that may not be written: give another one")
    return path
