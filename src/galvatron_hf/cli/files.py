# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Output files of commands."""

from __future__ import annotations

import argparse
import os


def output_file(path: str) -> str:
    """Checks before any work that a file can be written to the path of `--output`, and returns the path."""
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path!r} is a folder: give a file in it")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{path!r} is in a folder that does not exist: make {folder!r} first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path!r} is in a folder without write permission: give another one")
    return path
