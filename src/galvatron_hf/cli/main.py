# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the command line and runs the command that it names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from galvatron_hf.cli import checkpoint, data, env, profile_hardware, profile_model, search


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `galvatron`.

    Args:
        arguments (`Sequence[str]`, *optional*): what follows the command's name; that of this process if absent.

    Returns:
        `int`: the exit code: 0, or 1 if what was asked for could not be done or was found wanting.
    """
    parser = argparse.ArgumentParser(prog="galvatron", description="Train large Hugging Face models on many devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checkpoint.add_to(commands)
    data.add_to(commands)
    env.add_to(commands)
    profile_hardware.add_to(commands)
    profile_model.add_to(commands)
    search.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except (ValueError, OSError) as error:
        print(f"galvatron: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
