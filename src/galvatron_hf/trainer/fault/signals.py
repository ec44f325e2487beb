# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ends training in order when a signal asks for it: one more step at most, one save, on all ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)

# SLURM sends SIGTERM before a time limit or a preemption, or what --signal names; launchers forward SIGTERM.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop. More signals ask for the same."""

    def __init__(self):
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals while the body runs, and then gives them back to whoever had them."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets no other thread take signals
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


class StopCallback(TrainerCallback):
    """Saves once and ends training at the end of the step in which the ranks agreed on it."""

    def __init__(self):
        self.agreed = False

    def on_step_end(self, args, state, control, **kwargs):
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.agreed:  # and has saved
            control.should_save = control.should_evaluate = False


class StoppingMixin:
    """The part of [`GalvatronMixin`] that stops on SIGTERM and SIGUSR1; see there.

    Each rank adds whether it was asked to the sum that the norm of the gradients needs anyway, so that all of them
    know in the same step.
    """

    _stop_request: StopRequest
    _stop_callback: StopCallback

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Takes signals while the body trains."""
        self._stop_request, self._stop_callback = StopRequest(), StopCallback()
        if self.parallel is None:
            yield
            return
        self.add_callback(self._stop_callback)
        try:
            with self._stop_request.listening():
                yield
        finally:
            self.remove_callback(self._stop_callback)

    def _stop_vote(self) -> float:
        return float(self._stop_request.received is not None)

    def _count_stop_votes(self, votes: float) -> None:
        """Called on every rank with the sum of all ranks' votes, before the optimizer's step."""
        if votes == 0 or self._stop_callback.agreed:
            return
        self._stop_callback.agreed = True
        if self._stop_request.received is not None:
            logger.warning(
                f"Rank {self.args.process_index} got {self._stop_request.received.name}: all ranks finish step "
                f"{self.state.global_step + 1}, save, and end training."
            )
