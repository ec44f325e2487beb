# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the command line and runs the command in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module


COMMANDS = {
    "checkpoint": "inspect, verify or export checkpoints",
    "data": "show a dataset's lengths and the cost of each way to batch them",
    "env": "show versions, devices and the launcher's settings, for bug reports",
    "profile-hardware": "measure links, matrix products and memory of this machine",
    "profile-model": "measure forward, backward and memory of a model's layers on this machine",
    "search": "find the fastest plan for a model on a cluster",
    "estimate": "predict time and memory of a plan",
    "rent": "compare offers of devices: time and price of a run, and the cheapest in time",
    "explain": "show where a plan's time and memory go, and faster plans",
    "plot": "draw a plan, a step, memory, lengths, a deal, or predictions against measurements",
    "report": "make one HTML page of a training run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `galvatron` with the arguments (default: this process's); returns the exit code: 1 after a failure, and if
    nobody reads the output to its end; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        given = _parsed(arguments)
        code = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports it again at its end
        return 1
    except KeyboardInterrupt:
        print("galvatron: stopped.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"galvatron: {error}", file=sys.stderr)
        return 1


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; wrong ones end the process with the usage."""
    parser = argparse.ArgumentParser(prog="galvatron", description="Train large Hugging Face models on many devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments[:1]:  # only this command's module is imported, so that --help stays fast
            import_module(f"galvatron_hf.cli.{name.replace('-', '_')}").add_arguments(command)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
