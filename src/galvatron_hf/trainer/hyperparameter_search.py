# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Hyperparameter search with optuna on several ranks.

Rank 0 runs the study, and the other ranks follow it from trial to trial. In transformers every rank counts trials and
decides about pruning by itself, so a pruned trial or a `timeout` leaves ranks waiting. Here rank 0 decides for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import HPSearchBackend

from galvatron_hf.parallel.comm.objects import broadcast_object


class _StudyEnded(Exception):
    """Ends a following rank's loop of trials."""


class _Result:
    """Takes the place of a trial when the study is over."""

    def __init__(self, best: Any = None, failure: str | None = None):
        self.best, self.failure = best, failure


class SharedStudy:
    """Keeps the ranks of a hyperparameter search together."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self._best: Any = None

    def search(
        self, search: Callable[..., Any], hp_space, compute_objective, n_trials, direction, backend, *args, **kwargs
    ):
        """Runs `search` ([`~transformers.Trainer.hyperparameter_search`]) on all ranks; every rank returns rank 0's
        result. A backend other than optuna on several ranks raises ValueError.
        """
        if self.world_size == 1:
            return search(hp_space, compute_objective, n_trials, direction, backend, *args, **kwargs)
        if backend not in (None, "optuna", HPSearchBackend.OPTUNA):
            raise ValueError(
                f"hyperparameter_search has backend {str(backend)!r}, which starts processes of its own; "
                "use backend='optuna' on several ranks."
            )
        if self.rank == 0:
            return self._lead(
                lambda: search(hp_space, compute_objective, n_trials, direction, "optuna", *args, **kwargs)
            )
        self._best = None
        try:
            search(hp_space, compute_objective, sys.maxsize, direction, "optuna", *args, **kwargs)  # rank 0 ends it
        except _StudyEnded:
            pass
        return self._best

    def _lead(self, search: Callable[[], Any]) -> Any:
        result = _Result(failure="it was interrupted")
        try:
            result = _Result(search())
        except Exception as error:
            result = _Result(failure=f"{type(error).__name__}: {error}")
            raise
        finally:
            broadcast_object(result)
        return result.best

    def train(self, train: Callable[[], Any], trial: Any, searching: bool) -> Any:
        """Trains for rank 0's trial; the end of the study arrives in the place of a trial."""
        if isinstance(trial, _Result):
            if trial.failure is not None:
                raise RuntimeError(f"The hyperparameter search failed on rank 0 ({trial.failure}); see its traceback.")
            self._best = trial.best
            raise _StudyEnded
        if not (searching and self.world_size > 1 and self.rank > 0):
            return train()
        import optuna  # a dependency of the search, not of the project

        try:
            return train()
        except optuna.TrialPruned:
            return None  # the exception is meant for optuna's study, which is on rank 0

    def report(self, report: Callable[[], None]) -> None:
        """Reports a trial's metrics; every rank raises `optuna.TrialPruned` if rank 0's study prunes the trial."""
        import optuna

        pruned = False
        try:
            report()
        except optuna.TrialPruned:
            pruned = True
        if broadcast_object(pruned):
            raise optuna.TrialPruned
