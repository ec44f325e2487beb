# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Exchange of Python objects and errors between ranks; none of it counts as communication of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


T = TypeVar("T")


def is_rank_0() -> bool:
    """Returns True on rank 0 and without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def host_group() -> ProcessGroup:
    """Returns the group in which ranks exchange what is in the host's memory: the default group, or one of gloo beside
    it if the default group moves tensors of a GPU alone. The first call is collective.
    """
    world = dist.group.WORLD
    return world if "cpu:" in dist.get_backend_config() else _gloo_beside(world)


@functools.lru_cache(maxsize=1)
def _gloo_beside(world: ProcessGroup) -> ProcessGroup:
    return dist.new_group(backend="gloo")


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order, tensors on the CPU; the values must pickle. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, _on_host(value), group=host_group())
    return gathered


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value, tensors on the CPU; it must pickle. Collective."""
    message = [_on_host(value) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0, group=host_group())
    return message[0]


def _on_host(value: Any) -> Any:
    # Every rank would unpickle a tensor of a GPU on that GPU, and make a context there.
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if type(value) is dict:
        return {key: _on_host(one) for key, one in value.items()}
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value


def from_rank_0(work: Callable[[], T]) -> T:
    """Returns the result of `work` on rank 0; if it fails, every rank raises ValueError. Collective."""
    result = problem = cause = None
    if is_rank_0():
        try:
            result = work()
        except Exception as error:  # of any kind: the other ranks must not wait for this one
            problem, cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", error
    result, problem = gather_objects((result, problem))[0]
    if problem is not None:
        raise ValueError(problem) from cause
    return result


def on_every_rank(work: Callable[[], T], *, rank_0_first: bool = False) -> T:
    """Calls `work`, which must not be collective, on every rank, on rank 0 first if asked to. Collective.

    Raises:
        ValueError: on every rank, if `work` raised anything on one; names the rank if others succeeded.
    """
    rank, result = dist.get_rank() if dist.is_initialized() else 0, None
    for turn in (rank == 0, rank != 0) if rank_0_first else (True,):
        problem = cause = None
        if turn:
            try:
                result = work()
            except Exception as error:  # of any kind: the other ranks must not wait for this one
                known = isinstance(error, (OSError, ValueError))
                problem, cause = str(error) if known else f"{type(error).__name__}: {error}", error
        problems = gather_objects(problem)
        failed = {index: found for index, found in enumerate(problems) if found is not None}
        if failed:
            alike = rank_0_first or (len(failed) == len(problems) and len(set(problems)) == 1)
            told = problems[min(failed)] if alike else "; ".join(f"rank {i}: {found}" for i, found in failed.items())
            raise ValueError(told) from cause
    return result
