# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Faults as data: what goes wrong on which rank in which step, and how it is made to happen.

A kind is a function of the trainer and the fault, called on the fault's rank when training begins; it arranges for the
fault to happen later:

```python
@kind
def kill_in_forward(trainer, fault):
    in_forward(trainer, fault, lambda output: kill())
```
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from galvatron_hf.checkpoint import folder
from galvatron_hf.checkpoint.manifest import FileEntry
from galvatron_hf.checkpoint.storage import StateWriter
from galvatron_hf.trainer.checkpoint import checkpoint_writer


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Describes one thing that goes wrong.

    Attributes:
        rank (`int`): where.
        step (`int`): the optimizer step, counted from 1.
        kind (`str`): of `KINDS`.
        micro_batch (`int`): of the step, for what happens in a forward or a backward.
        attempt (`int`): in which attempt of an elastic launch.
    """

    rank: int
    step: int
    kind: str
    micro_batch: int = 0
    attempt: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of fault; use one of {', '.join(sorted(KINDS))}.")


def fail_at(rank: int, step: int, kind: str, **more: int) -> Fault:
    """Returns a fault, whose arguments are in the order in which one says them."""
    return Fault(rank=rank, step=step, kind=kind, **more)


KINDS: dict[str, Callable[[Trainer, Fault], None]] = {}


def kind(arrange: Callable[[Trainer, Fault], None]) -> Callable[[Trainer, Fault], None]:
    """Adds a kind of fault under its function's name."""
    KINDS[arrange.__name__] = arrange
    return arrange


class Inject(TrainerCallback):
    """Arranges this rank's faults when training begins."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        self.trainer: Trainer | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        for fault in self.faults:
            if (fault.rank, fault.attempt) == (args.process_index, attempt):
                KINDS[fault.kind](self.trainer, fault)


# ---- When ----


def in_forward(trainer: Trainer, fault: Fault, happen: Callable[[torch.Tensor], Any]) -> None:
    """Calls `happen` with the output of this rank's second layer; what it returns takes the output's place."""
    position = trainer.parallel.runner.current

    def after_layer(module, inputs, output):
        _, step, micro_batch = position.value.key
        if (step + 1, micro_batch) == (fault.step, fault.micro_batch) and torch.is_grad_enabled():
            return happen(output)

    trainer.parallel.layers[min(1, len(trainer.parallel.layers) - 1)].register_forward_hook(after_layer)


def in_backward(trainer: Trainer, fault: Fault, happen: Callable[[torch.Tensor], Any]) -> None:
    """Calls `happen` with the gradient of that output; what it returns takes the gradient's place."""

    def watch(output: torch.Tensor) -> None:
        output.register_hook(happen)

    in_forward(trainer, fault, watch)


def at_step_begin(trainer: Trainer, fault: Fault, happen: Callable[[], Any]) -> None:
    """Calls `happen` before the step's first forward."""

    class AtStepBegin(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step + 1 == fault.step:
                happen()

    trainer.add_callback(AtStepBegin())


# ---- What ----


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("this rank fails")


def fall_asleep() -> None:
    time.sleep(1000)


def poisoned(tensor: torch.Tensor, value: float = float("nan")) -> torch.Tensor:
    """Returns a copy whose first row has one wrong number."""
    wrong = torch.zeros_like(tensor)
    wrong[0, 0, 0] = value
    return tensor + wrong


@kind
def kill_in_forward(trainer: Trainer, fault: Fault) -> None:
    in_forward(trainer, fault, lambda output: kill())


@kind
def kill_in_backward(trainer: Trainer, fault: Fault) -> None:
    in_backward(trainer, fault, lambda gradient: kill())


@kind
def kill_in_collective(trainer: Trainer, fault: Fault) -> None:
    """Kills the rank after it has begun the step's first sum over all ranks; others may have what it sent."""
    all_reduce = dist.all_reduce

    def dying(*args, **options):
        all_reduce(*args, **options | {"async_op": True})
        kill()

    at_step_begin(trainer, fault, lambda: setattr(dist, "all_reduce", dying))


@kind
def raise_in_forward(trainer: Trainer, fault: Fault) -> None:
    in_forward(trainer, fault, lambda output: fail())


@kind
def sleep_in_forward(trainer: Trainer, fault: Fault) -> None:
    in_forward(trainer, fault, lambda output: fall_asleep())


@kind
def sleep_in_backward(trainer: Trainer, fault: Fault) -> None:
    in_backward(trainer, fault, lambda gradient: fall_asleep())


@kind
def stop_process(trainer: Trainer, fault: Fault) -> None:
    """Stops the whole process, its threads too."""
    in_forward(trainer, fault, lambda output: os.kill(os.getpid(), signal.SIGSTOP))


@kind
def sigterm(trainer: Trainer, fault: Fault) -> None:
    in_forward(trainer, fault, lambda output: os.kill(os.getpid(), signal.SIGTERM))


@kind
def sigterm_to_group(trainer: Trainer, fault: Fault) -> None:
    """Sends SIGTERM to the process group of the rank from another process, as torchrun does. A worker of a loader ends
    quietly if its parent sends it.
    """
    os.setpgid(0, 0)
    command = ["bash", "-c", f"kill -TERM -- -{os.getpid()}"]
    in_forward(trainer, fault, lambda output: subprocess.run(command, check=True, start_new_session=True) and None)


@kind
def sigusr1(trainer: Trainer, fault: Fault) -> None:
    in_backward(trainer, fault, lambda gradient: os.kill(os.getpid(), signal.SIGUSR1))


@kind
def nan_in_forward(trainer: Trainer, fault: Fault) -> None:
    in_forward(trainer, fault, poisoned)


@kind
def nan_in_backward(trainer: Trainer, fault: Fault) -> None:
    in_backward(trainer, fault, poisoned)


@kind
def inf_in_backward(trainer: Trainer, fault: Fault) -> None:
    in_backward(trainer, fault, lambda gradient: poisoned(gradient, float("inf")))


@kind
def nan_once(trainer: Trainer, fault: Fault) -> None:
    """Spoils a gradient once, as a flipped bit does: computed again, the gradient is right."""
    values = iter([float("nan")])
    in_backward(trainer, fault, lambda gradient: poisoned(gradient, next(values, 0.0)))


@kind
def sigterm_and_again(trainer: Trainer, fault: Fault) -> None:
    """Sends SIGTERM, and again while the ranks save."""
    sigterm(trainer, fault)
    save = trainer.save_model

    def save_model(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*args, **options)

    trainer.save_model = save_model


@kind
def slow_steps(trainer: Trainer, fault: Fault) -> None:
    """Makes each step take half a second longer from this one on, so that a signal from outside meets a step."""

    class Slow(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step + 1 >= fault.step:
                time.sleep(0.5)

    trainer.add_callback(Slow())


# ---- In the middle of a save: of the checkpoint after the fault's step ----


def in_save(trainer: Trainer, fault: Fault, owner: Any, name: str, happen: Callable[[], Any] = kill) -> None:
    """Calls `happen` when a function of the save begins."""
    real = getattr(owner, name)

    def failing(*args, **options):
        if trainer.state.global_step == fault.step:
            happen()
        return real(*args, **options)

    setattr(owner, name, failing)


@kind
def kill_before_writing(trainer: Trainer, fault: Fault) -> None:
    """Kills the rank before it writes its pieces; the others write theirs."""
    in_save(trainer, fault, StateWriter, "write_data")


@kind
def kill_before_checksums(trainer: Trainer, fault: Fault) -> None:
    in_save(trainer, fault, FileEntry, "from_file")


@kind
def kill_before_manifest(trainer: Trainer, fault: Fault) -> None:
    in_save(trainer, fault, folder, "write_file")


@kind
def kill_before_rename(trainer: Trainer, fault: Fault) -> None:
    in_save(trainer, fault, folder.os, "rename")


@kind
def kill_between_rename_and_prune(trainer: Trainer, fault: Fault) -> None:
    in_save(trainer, fault, checkpoint_writer, "prune")


@kind
def kill_in_prune(trainer: Trainer, fault: Fault) -> None:
    """Kills the rank after it has deleted one file of the checkpoint that is to go."""
    rmtree = folder.shutil.rmtree

    def interrupted(path, **options):
        if trainer.state.global_step == fault.step and os.path.basename(path).startswith("deleted-"):
            if os.path.isdir(path):
                os.unlink(os.path.join(path, "config.json"))
                kill()
        return rmtree(path, **options)

    folder.shutil.rmtree = interrupted


@kind
def read_only_disk(trainer: Trainer, fault: Fault) -> None:
    """Makes the mounted output folder read-only."""
    command = ["mount", "-o", "remount,ro", trainer.args.output_dir]
    at_step_begin(trainer, fault, lambda: subprocess.run(command, check=True))
