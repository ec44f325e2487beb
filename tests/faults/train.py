# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with the faults of a job file, and writes losses to a file as they come.

Run as `torchrun ... tests/faults/train.py JOB.json`, or call [`main`] on forked ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from transformers import TrainerCallback  # noqa: E402

from faults import Fault, Inject  # noqa: E402
from trainer_runs import trainer  # noqa: E402


class Losses(TrainerCallback):
    """Appends what is logged to a file of this attempt, one JSON object a line, numbers to the last bit."""

    def __init__(self, folder: str):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.path = os.path.join(folder, f"logs.{attempt}.jsonl")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with open(self.path, "a") as file:
                file.write(json.dumps({**logs, "step": state.global_step}) + "\n")


def main(path: str) -> None:
    """Trains as a job file says; see [`job.Job`]."""
    job = json.loads(Path(path).read_text())
    inject = Inject([Fault(**fault) for fault in job["faults"]])
    made = trainer(
        job["output_dir"],
        job["plan"],
        options=job["options"],
        callbacks=[Losses(job["logs"]), inject],
    )
    inject.trainer = made
    made.train(resume_from_checkpoint=job["resume"])


if __name__ == "__main__":
    main(sys.argv[1])
