# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Starts a training job with faults, waits for its end, and tells what it left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from plans import pipeline_plans, pipelined
from ranks import run_ranks


HERE = Path(__file__).parent


def plans() -> dict[str, ParallelPlan]:
    """Returns plans of four ranks, and cheaper ones of two, without and with a pipeline."""
    S = LayerStrategy
    whole = VocabularyStrategy(sharding="replicate")
    layers = (S(tensor=2), S(sharding="zero2"), S(ulysses=2, recompute="full"), S(sharding="replicate"))
    return {
        "layers": single_stage(layers, 4, micro_batches=2),
        "replicate": single_stage((S(sharding="replicate"),) * 4, 4, embedding=whole, head=whole, micro_batches=2),
        "pipeline": pipeline_plans()["1f1b_mixed"],
        "layers_of_two": single_stage(layers, 2, micro_batches=2),
        "pipeline_of_two": pipelined([(0,), (1,)], (S(), S(recompute="full"), S(), S()), cuts=[1]),
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds the end of a job.

    Attributes:
        code (`int`): exit status of the launcher.
        text (`str`): what it and the ranks wrote to stderr.
        seconds (`float`): from the start to the end.
        left (`list[int]`): processes of the job that were still there, and were then killed.
    """

    code: int
    text: str
    seconds: float
    left: list[int]


@dataclass(kw_only=True)
class Job:
    """Runs a training script, again and again in the same folder.

    Attributes:
        folder (`Path`): for the job file, the logs and `output_dir`.
        plan (`str`): of [`plans`].
        options (`dict`): training arguments beside those of [`trainer_runs.arguments`].
    """

    folder: Path
    plan: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.output_dir = self.folder / "run"
        self.ranks = plans()[self.plan].world_size

    def launch(
        self,
        *faults,
        resume: str | bool | None = None,
        launcher: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        while_running: Callable[[subprocess.Popen], None] | None = None,
        timeout: float = 600.0,
    ) -> Outcome:
        """Runs under torchrun, with `launcher` and `environment` added to its own; nothing of it stays afterwards."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.ranks)]
        command += [*launcher, str(HERE / "train.py"), str(self._write(faults, resume))]
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+") as text:
            process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"} | (environment or {}),
                stderr=text,
                start_new_session=True,
            )
            try:
                if while_running is not None:
                    while_running(process)
                code = process.wait(timeout)
            finally:
                left = self._end(process)
            text.seek(0)
            return Outcome(code=code, text=text.read(), seconds=time.monotonic() - begin, left=left)

    def fork(self, *faults, resume: str | bool | None = None, timeout: float = 600.0, grace: float = 60.0) -> None:
        """Runs on forks of this process, which start faster than a launcher.

        Raises:
            AssertionError: if a rank fails, with the tracebacks of all that fail within `grace` seconds of the first.
        """
        path = str(self._write(faults, resume))

        def work() -> None:
            import train

            # What Trainer gives the group if it makes it.
            limit = timedelta(seconds=self.options.get("ddp_timeout", timeout))
            dist.distributed_c10d._set_pg_timeout(limit)
            train.main(path)

        AcceleratorState._reset_state(True)  # a Trainer in this process may have set it up
        run_ranks(work, self.ranks, timeout=timeout, grace=grace)

    def fork_and_kill(self, steps: int, seconds: float, **options) -> None:
        """Runs as [`Job.fork`] and kills all ranks at once, some seconds after so many steps have been logged."""
        logged = len(self._log_lines()) + steps
        process = multiprocessing.get_context("fork").Process(target=self.fork, kwargs=options)
        process.start()
        while process.is_alive() and len(self._log_lines()) < logged:
            time.sleep(0.02)
        process.join(seconds)
        process.kill()  # the ranks die with it
        process.join()
        time.sleep(0.2)

    def logs(self, name: str = "loss") -> dict[int, float]:
        """Returns a logged value by step; a later attempt's in place of an earlier one's."""
        values = {}
        for line in self._log_lines():
            logged = json.loads(line)
            values |= {logged["step"]: logged[name]} if name in logged else {}
        return values

    def _log_lines(self) -> list[str]:
        """Returns the lines of all attempts, but one that is being written."""
        paths = sorted(self.folder.glob("logs.*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
        lines = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
        return [line for line in lines if line.endswith("\n")]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.output_dir.glob("checkpoint-*"))

    def pids(self) -> list[int]:
        """Returns the processes that have this job's folder on their command line."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if f"{self.folder}/".encode() in line and int(process.name) != os.getpid():
                found.append(int(process.name))
        return found

    def _write(self, faults, resume: str | bool | None) -> Path:
        plan = self.folder / "plan.json"
        plans()[self.plan].to_json(plan)
        job = dict(
            output_dir=str(self.output_dir),
            logs=str(self.folder),
            plan=str(plan),
            options=dict(save_strategy="steps", save_steps=2) | self.options,
            faults=[asdict(fault) for fault in faults],
            resume=str(resume) if isinstance(resume, Path) else resume,
        )
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        return path

    def _end(self, process: subprocess.Popen) -> list[int]:
        """Kills what is left of a job, and returns what that was."""
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = self.pids()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left
