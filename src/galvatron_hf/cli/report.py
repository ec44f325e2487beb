# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron report`: makes one HTML page of a training run."""

from __future__ import annotations

import argparse
import os

from galvatron_hf.cli.output import json_text, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron report`."""
    parser.description = (
        "Make one HTML page of a training run from the files in its output_dir: its plan, predicted and measured step "
        "time and memory, losses, padding and balance. The page loads nothing from anywhere."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the output_dir of a run under a plan")
    parser.add_argument(
        "--output", type=output_file, metavar="FILE", help="where to write the page (default: RUN_DIR/report.html)"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="the timeline.json of the run, or its folder (default: the run's trace_dir)"
    )
    parser.add_argument("--json", action="store_true", help="print what the page shows as one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Writes the page."""
    from galvatron_hf.cli.pictures import loaded

    reading, making = loaded("report.run"), loaded("report.page")
    report = reading.read_run(given.run_dir, given.trace)
    path = given.output or os.path.join(given.run_dir, "report.html")
    text = making.report_page(report)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    if given.json:
        print(json_text(making.report_values(report)))
    else:
        print(f"The report is in {path}.")
    return 0
