# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Hyperparameter search with optuna on several ranks.

Rank 0 runs the study and the other ranks follow it from trial to trial. transformers has them count trials and decide
about pruning by themselves, so that a pruned trial or a `timeout` leaves them waiting; here rank 0 tells them.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from transformers.trainer_utils import HPSearchBackend


class _SearchEnded(Exception):
    """Ends a following rank's loop of trials."""


class _Result:
    """Sent in the place of a trial when the study is over."""

    def __init__(self, best=None, failure: str | None = None):
        self.best, self.failure = best, failure


class SearchMixin:
    """The part of [`GalvatronMixin`] that searches hyperparameters; see there."""

    def hyperparameter_search(
        self, hp_space=None, compute_objective=None, n_trials=20, direction="minimize", backend=None, *args, **kwargs
    ):
        """See [`~transformers.Trainer.hyperparameter_search`]; every rank returns rank 0's result.

        Raises:
            ValueError: for a backend other than optuna on several ranks.
        """
        search = super().hyperparameter_search
        if self.args.world_size == 1:
            return search(hp_space, compute_objective, n_trials, direction, backend, *args, **kwargs)
        if backend not in (None, "optuna", HPSearchBackend.OPTUNA):
            raise ValueError(
                f"hyperparameter_search has backend {str(backend)!r}, which starts processes of its own; "
                "use backend='optuna' on several ranks."
            )
        if self.args.process_index == 0:
            return self._lead_search(search, hp_space, compute_objective, n_trials, direction, *args, **kwargs)
        self._search_result = None
        try:
            # Without end: rank 0 says when it is over.
            search(hp_space, compute_objective, sys.maxsize, direction, "optuna", *args, **kwargs)
        except _SearchEnded:
            self.hp_search_backend = None
        return self._search_result

    def _lead_search(self, search, hp_space, compute_objective, n_trials, direction, *args, **kwargs):
        result = _Result(failure="it was interrupted")
        try:
            result = _Result(search(hp_space, compute_objective, n_trials, direction, "optuna", *args, **kwargs))
        except Exception as error:
            result = _Result(failure=f"{type(error).__name__}: {error}")
            raise
        finally:
            dist.broadcast_object_list([result], src=0)
        return result.best

    def train(self, resume_from_checkpoint=None, trial=None, *args, **kwargs):
        """As Trainer's; the end of a search arrives as a trial, and a pruned one ends on all ranks."""
        if isinstance(trial, _Result):
            if trial.failure is not None:
                raise RuntimeError(f"The hyperparameter search failed on rank 0 ({trial.failure}); see its traceback.")
            self._search_result = trial.best
            raise _SearchEnded
        following = self.hp_search_backend is not None and self.args.world_size > 1 and self.args.process_index > 0
        if not following:
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)
        import optuna  # the search's own dependency, not the project's

        try:
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)
        except optuna.TrialPruned:
            return None  # optuna's study, which the exception is for, is on rank 0

    def _report_to_hp_search(self, trial, step: int, metrics: dict[str, float]) -> None:
        if self.hp_search_backend is None or trial is None or self.args.world_size == 1:
            super()._report_to_hp_search(trial, step, metrics)
            return
        import optuna

        pruned = [False]
        try:
            super()._report_to_hp_search(trial, step, metrics)
        except optuna.TrialPruned:
            pruned = [True]
        dist.broadcast_object_list(pruned, src=0)
        if pruned[0]:
            raise optuna.TrialPruned
