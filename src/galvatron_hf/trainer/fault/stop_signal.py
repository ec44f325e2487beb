# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""An orderly end of training after SIGTERM or SIGUSR1: all ranks finish the same step, save once, and stop."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)

# SLURM sends SIGTERM, or the signal of --signal, before a time limit or a preemption; launchers forward SIGTERM.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal(TrainerCallback):
    """Receives signals, and as a callback saves once and ends training in the step in which the ranks agreed. Each
    rank votes in the sum that the gradient norm needs anyway, so that all ranks learn of a signal in the same step.
    `received` is the last signal of this process; `agreed` tells if all ranks know of a signal.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.agreed = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals while the body runs, and restores the earlier handlers afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets no other thread handle signals
            return
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: set by a library in C, which Python cannot set again
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    @property
    def vote(self) -> float:
        """Returns this rank's part of the sum of votes: 1 after a signal, else 0."""
        return float(self.received is not None)

    def count_votes(self, votes: float, step: int, rank: int) -> None:
        """Takes the sum of all ranks' votes before the optimizer's step; `step` and `rank` are for the log."""
        if votes == 0 or self.agreed:
            return
        self.agreed = True
        if self.received is not None:
            logger.warning(
                f"Rank {rank} got {self.received.name}: all ranks finish step {step}, save, and end training."
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.agreed:  # the checkpoint has been saved
            control.should_save = control.should_evaluate = False


def keep_workers(loader: DataLoader) -> None:
    """Has the workers of a loader leave the process group of their rank. torchrun sends a signal to the whole group:
    SIGTERM would end the workers, and with them the rank that has to save.
    """
    given = loader.worker_init_fn
    is_kept = isinstance(given, functools.partial) and given.func is _leave_group
    if loader.num_workers > 0 and not is_kept:
        loader.worker_init_fn = functools.partial(_leave_group, given)


def _leave_group(initialize: Callable[[int], None] | None, worker: int) -> None:
    os.setpgid(0, 0)
    if initialize is not None:
        initialize(worker)
