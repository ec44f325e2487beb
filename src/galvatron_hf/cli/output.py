# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Output of commands: files and tables."""

from __future__ import annotations

import argparse
import os

from rich.console import Console


PIPE_WIDTH = 250  # of tables for a file or another command, which have no width; rich draws them as wide as they are


def console() -> Console:
    """Returns the console of the standard output."""
    made = Console()
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH)


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
