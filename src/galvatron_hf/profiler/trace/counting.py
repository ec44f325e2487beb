# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts FLOPs, moved bytes, saved bytes and peak bytes of one part of a model, usually on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galvatron_hf.profiler.trace.isolated_layers import Part
from galvatron_hf.utils.compat import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_MM,
    GROUPED_MM_BACKWARD,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
    written_arguments,
)


aten = torch.ops.aten


def _causal_share(causal: bool) -> float:
    return 0.5 if causal else 1.0


def _flash_forward(query, key, value, dropout_p=0.0, is_causal=False, **unused) -> int:
    return int(_causal_share(is_causal) * sdpa_flop_count(query.shape, key.shape, value.shape))


def _flash_backward(grad, query, key, value, out, lse, dropout_p, is_causal, **unused) -> int:
    return int(_causal_share(is_causal) * sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_forward(rows, weight, offsets, out_val=None, **unused) -> int:
    return 2 * rows.shape[0] * weight.shape[1] * weight.shape[2]


def _grouped_backward(rows, weight, offsets, grad, out_val=None, **unused) -> int:
    return 2 * _grouped_forward(rows, weight, offsets)


# PyTorch has no formula for the CPU kernel and for a product added in place, and its others ignore the causal mask.
_FORMULAS = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    CPU_ATTENTION: _flash_forward,
    CPU_ATTENTION_BACKWARD: _flash_backward,
    GROUPED_MM: _grouped_forward,
    GROUPED_MM_BACKWARD: _grouped_backward,
}


@dataclass(frozen=True, kw_only=True)
class OperationCount:
    """Counts the operations of one pass. `flops` are of matrix products and attention; a causal mask halves those of
    attention. `moved_bytes` are those that all other operations read and write.
    """

    flops: int
    moved_bytes: int

    def __add__(self, other: OperationCount) -> OperationCount:
        return OperationCount(flops=self.flops + other.flops, moved_bytes=self.moved_bytes + other.moved_bytes)

    def __sub__(self, other: OperationCount) -> OperationCount:
        return OperationCount(flops=self.flops - other.flops, moved_bytes=self.moved_bytes - other.moved_bytes)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Holds operations and bytes of one part in a micro-batch. Bytes exclude weights and their gradients.

    Attributes:
        forward_after_last_saved ([`OperationCount`]): Forward after the last tensor that autograd saves.
        saved_bytes (`int`): Storages that autograd keeps for the backward, without inputs shared by all parts.
        forward_peak_bytes, backward_peak_bytes (`int`): Peak of each pass, with the part's input.
    """

    forward: OperationCount
    backward: OperationCount
    forward_after_last_saved: OperationCount
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int

    @property
    def working_bytes(self) -> int:
        """Returns the peak of the bytes that are not saved."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes) - self.saved_bytes


class _Counter(TorchDispatchMode):
    """Adds up FLOPs and moved bytes, and follows the lifetimes of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = OperationCount(flops=0, moved_bytes=0)
        self._events: list[
            tuple[int, int]
        ] = []  # (number of a storage, its bytes when created or minus them when freed)
        self._numbers: dict[int, int] = {}  # of storages that are alive
        self._born, self._gradients = 0, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = {storage_key(tensor) for tensor in inputs}
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor for tensor in outputs if storage_key(tensor) not in here]
        writes = any(written_arguments(operation))
        formula = _FORMULAS.get(operation.overloadpacket)
        if formula is not None:
            self.operations += OperationCount(flops=formula(*args, **(kwargs or {}), out_val=results), moved_bytes=0)
        elif fresh or writes:
            read = fresh if operation.overloadpacket is aten.embedding else inputs
            self.operations += OperationCount(flops=0, moved_bytes=sum(tensor.nbytes for tensor in (*read, *fresh)))
        for tensor in fresh:
            self.note(tensor)
        return results

    def note(self, tensor: torch.Tensor) -> None:
        """Counts the tensor's memory until it is freed."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._numbers:
            self._born += 1
            self._numbers[key] = self._born
            self._events.append((self._born, storage.nbytes()))
            weakref.finalize(storage, self._gone, key, self._born, storage.nbytes())

    def _gone(self, key: int, number: int, size: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._events.append((number, -size))

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Excludes the tensor's memory, also for the past."""
        self._gradients.add(self._numbers.get(storage_key(tensor)))

    @property
    def moment(self) -> int:
        """Returns the current time for [`_Counter.peak_bytes`]."""
        return len(self._events)

    def peak_bytes(self, begin: int, end: int) -> int:
        now = peak = 0
        for place, (number, size) in enumerate(self._events[:end]):
            now += 0 if number in self._gradients else size
            peak = max(peak, now) if place >= begin else 0
        return peak


class _Saved:
    """Collects the storages that autograd keeps, except `excluded`; calls `kept` whenever it keeps a tensor."""

    def __init__(self, excluded: Iterable[torch.Tensor], kept: Callable[[], None]):
        self.excluded, self.kept = {storage_key(tensor) for tensor in excluded}, kept
        self.storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept()
        if storage_key(tensor) not in self.excluded:
            self.storages[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def saved_tensors(part: Part, kept: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, int]:
    """Runs the forward; returns its output and the bytes that autograd keeps for the backward. `kept` is called before
    autograd keeps a tensor, weights included.
    """
    saved = _Saved([*part.parameters(), *part.shared], kept)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        output = part.run()
    size = saved.nbytes
    saved.storages.clear()
    return output, size


def count(part: Part) -> Counts:
    """Counts one forward and one backward of a part."""
    counter = _Counter()
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: counter.is_gradient(parameter.grad))
        for parameter in part.parameters()
        if parameter.requires_grad
    ]
    try:
        if part.input is not None:
            counter.note(part.input)
        with counter:
            until = counter.operations

            def note_work() -> None:
                nonlocal until
                until = counter.operations

            output, saved_bytes = saved_tensors(part, note_work)
            forward, middle = counter.operations, counter.moment
            with torch.autograd.set_multithreading_enabled(False):  # the counter sees this thread alone
                if output.requires_grad:  # not that of a frozen embedding
                    output.backward(torch.ones_like(output))
            end = counter.moment
    finally:
        for hook in hooks:
            hook.remove()
        part.forget_gradients()
    return Counts(
        forward=forward,
        backward=counter.operations - forward,
        forward_after_last_saved=forward - until,
        saved_bytes=saved_bytes,
        forward_peak_bytes=counter.peak_bytes(0, middle),
        backward_peak_bytes=counter.peak_bytes(middle, end),
    )
