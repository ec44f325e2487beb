# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tells which methods of Trainer the user has written, in a subclass or on the object, and refuses those that no run
under a plan calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer


_IN_CHECKPOINTER = "all ranks write a checkpoint together; override _save_checkpoint or save_model"
# Methods of Trainer that no run under a plan calls: why, and what to override in their place.
NEVER_CALLED = {
    "_save_optimizer_and_scheduler": _IN_CHECKPOINTER,
    "_save_rng_state": _IN_CHECKPOINTER,
    "_save_scaler": _IN_CHECKPOINTER,
    "_issue_warnings_after_load": "weights that are missing or unexpected are refused; override _load_from_checkpoint",
    "_has_mixed_mesh_grads": "the norm is that of all ranks' gradients; override _clip_grad_norm",
    "_mixed_mesh_grad_norm": "the norm is that of all ranks' gradients; override _clip_grad_norm",
    "_update_auto_batch_size": "auto_find_batch_size is refused; set the batch size",
    "_tune_save_checkpoint": "ray is refused; use optuna",
}

_COMPUTE = (
    "training_step",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_context_parallel_inputs",
)


class Guard:
    """Stands in front of a method while a Trainer works: calls `work` with the method and its arguments."""

    def __init__(self, trainer: Trainer, name: str, work: Callable[..., Any]):
        self.of_object = name in vars(trainer)
        self.method, self.work = getattr(trainer, name), work

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.work(self.method, *args, **kwargs)


def overrides(trainer: Trainer, name: str) -> bool:
    """Returns whether a class of the user's own, above the mixin, or the object defines a method of Trainer."""
    own = vars(trainer).get(name)
    if own is not None and (not isinstance(own, Guard) or own.of_object):
        return True
    for one in type(trainer).__mro__:
        if one.__module__.startswith("transformers.") or vars(one).get("_is_mixin", False):
            return False
        if name in vars(one):
            return True
    return False


def check_overrides(trainer: Trainer) -> None:
    """Raises ValueError if the user has written a method that no run under a plan calls."""
    for name, reason in NEVER_CALLED.items():
        if overrides(trainer, name):
            raise ValueError(f"{type(trainer).__name__} overrides {name}, which a plan never calls: {reason}.")


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives an object other attributes while the body runs."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


def has_custom_loss(trainer: Trainer) -> bool:
    """Returns whether the loss is not the model's own: `compute_loss_func`, or an own `compute_loss`."""
    return trainer.compute_loss_func is not None or overrides(trainer, "compute_loss")


def has_custom_step(trainer: Trainer) -> bool:
    """Returns whether batches are computed with methods or a loss of the user's own."""
    return has_custom_loss(trainer) or any(overrides(trainer, name) for name in _COMPUTE)


def computes_batches(trainer: Trainer) -> bool:
    """Returns whether Trainer's own step computes each batch: because it is a custom one, or because a step's loss is
    divided by the number of its batches, and not by that of their targets.
    """
    divides = not trainer.model_accepts_loss_kwargs or trainer.loss_is_scaled_for_ga is False
    return has_custom_step(trainer) or (divides and trainer.args.gradient_accumulation_steps > 1)


def predicts_batches(trainer: Trainer) -> bool:
    """Returns whether Trainer's own prediction step computes each batch, with methods or a loss of the user's own."""
    names = ("prediction_step", *_COMPUTE[1:])
    return has_custom_loss(trainer) or any(overrides(trainer, name) for name in names)
