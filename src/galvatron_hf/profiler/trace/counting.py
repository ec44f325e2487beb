# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts FLOPs, moved bytes, saved bytes and peak bytes of one part of a model, usually on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galvatron_hf.profiler.trace.isolated_layers import Part
from galvatron_hf.utils.compat import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_MM,
    GROUPED_MM_BACKWARD,
    VARLEN_ATTENTION,
    VARLEN_ATTENTION_BACKWARD,
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


# What kernels of attention read is small beside what they compute: their time follows from FLOPs alone.
_ATTENTION = {CPU_ATTENTION: False, CPU_ATTENTION_BACKWARD: True}  # and whether it is the backward
_VARLEN = {VARLEN_ATTENTION: False, VARLEN_ATTENTION_BACKWARD: True}
_PRODUCTS = {False: 2, True: 5}  # of attention: the backward computes scores again
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_SELECTIONS = {
    aten.embedding,
    aten.gather,
    aten.index,
    aten.index_select,
}  # read what they give, not all that they get
_ADDITIONS = {aten.scatter_add_, aten.index_add_, aten.scatter_}  # write where they are told, not all that they get


_SUMS = ("product_flops", "moved_bytes", "launches", "fused_bytes", "fused_launches")


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """Describes a call of fused attention over documents of `length` tokens. A window is as fast as documents twice as
    long as it, in which a token of a causal one sees as many on average.
    """

    head_dim: int
    length: int
    causal: bool
    backward: bool


@dataclass(frozen=True, kw_only=True)
class OperationCount:
    """Counts the operations of one pass.

    Attributes:
        product_flops (`int`): FLOPs of matrix products.
        attention_flops (`Mapping[AttentionKernel, int]`): FLOPs of fused attention; a causal mask halves them.
        moved_bytes (`int`): Bytes that products write, and that all other operations read and write.
        launches (`int`): Operations that compute or move something.
        fused_bytes, fused_launches (`int`): The same if torch.compile makes one kernel of operations that follow each
            other without a product or attention between them: what only they read is not moved.
    """

    product_flops: int = 0
    attention_flops: Mapping[AttentionKernel, int] = field(default_factory=dict)
    moved_bytes: int = 0
    launches: int = 0
    fused_bytes: int = 0
    fused_launches: int = 0

    @property
    def flops(self) -> int:
        """Returns the FLOPs of products and attention."""
        return self.product_flops + sum(self.attention_flops.values())

    def __add__(self, other: OperationCount) -> OperationCount:
        return self._combined(other, 1)

    def __sub__(self, other: OperationCount) -> OperationCount:
        return self._combined(other, -1)

    def _combined(self, other: OperationCount, sign: int) -> OperationCount:
        kernels = {**self.attention_flops, **other.attention_flops}
        return OperationCount(
            attention_flops={
                kernel: self.attention_flops.get(kernel, 0) + sign * other.attention_flops.get(kernel, 0)
                for kernel in kernels
            },
            **{name: getattr(self, name) + sign * getattr(other, name) for name in _SUMS},
        )


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


def pairs_in_window(length: int, left: int, right: int) -> int:
    """Returns the pairs of a query and a key in a document of `length` tokens, if a query sees so many tokens before
    and after itself; -1 for all.
    """

    def on_one_side(reach: int) -> int:
        seen = length - 1 if reach < 0 else min(reach, length - 1)
        return seen * (seen + 1) // 2 + (length - 1 - seen) * seen

    return length + on_one_side(left) + on_one_side(right)


def _varlen(args: tuple, backward: bool) -> OperationCount:
    """Counts a call of the kernel for documents, which all have equal lengths."""
    query, length = args[backward], args[8 if backward else 6]
    left, right = args[13 if backward else 9]
    tokens, heads, head_dim = query.shape
    kernel = AttentionKernel(
        head_dim=head_dim,
        length=length if left < 0 else min(length, 2 * (left + 1)),
        causal=right == 0,
        backward=backward,
    )
    pairs = tokens // length * pairs_in_window(length, left, right)
    return OperationCount(attention_flops={kernel: _PRODUCTS[backward] * 2 * heads * head_dim * pairs}, launches=1)


def _counted(operation, args: tuple, kwargs: dict, results, inputs: list, fresh: list) -> OperationCount:
    """Returns the count of one operation; `fresh` are its results that do not share memory with its inputs."""
    packet = operation.overloadpacket
    formula = _FORMULAS.get(packet)
    places = [place for place, writes in enumerate(written_arguments(operation)) if writes and place < len(args)]
    written = tree_leaves(([args[place] for place in places], kwargs.get("out", [])))
    if packet in _VARLEN:
        return _varlen(args, _VARLEN[packet])
    if packet in _ATTENTION:
        backward = _ATTENTION[packet]
        query, key = args[backward], args[backward + 1]
        causal = bool(args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False)))
        kernel = AttentionKernel(head_dim=query.shape[-1], length=key.shape[-2], causal=causal, backward=backward)
        flops = formula(*args, **kwargs, out_val=results)
        return OperationCount(attention_flops={kernel: flops}, launches=1)
    if formula is not None:
        flops = formula(*args, **kwargs, out_val=results)
        return OperationCount(product_flops=flops, moved_bytes=_nbytes((*fresh, *written)), launches=1)
    if packet in _ALLOCATIONS or not (fresh or written):
        return OperationCount()
    if packet in _ADDITIONS:
        moved = 3 * _nbytes([one for one in inputs if one is not written[0]])
    else:
        moved = _nbytes((*(fresh if packet in _SELECTIONS else inputs), *fresh, *written))
    return OperationCount(moved_bytes=moved, launches=1)


class _Log:
    """Keeps the operations of a trace in their order, to say what fused ones move."""

    def __init__(self) -> None:
        self.entries: list[tuple[bool, int, dict[int, int], dict[int, int]]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, fuses: bool, moved_bytes: int, read: dict[int, int], made: dict[int, int]) -> None:
        """Adds an operation; `read` and `made` are bytes by storage. One that fuses may become part of a kernel."""
        self.entries.append((fuses, moved_bytes, read, made))

    def fused(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the bytes that operations `begin` to `end` move if they are fused, and their kernels. A kernel reads
        each tensor that it has not made once, and writes what is read after it or never.
        """
        last_read = {number: index for index, (_, _, read, _) in enumerate(self.entries) for number in read}
        moved = kernels = 0
        index = begin
        while index < end:
            stop = index + 1
            if self.entries[index][0]:
                while stop < end and self.entries[stop][0]:
                    stop += 1
                read, made = {}, {}
                for _, _, more_read, more_made in self.entries[index:stop]:
                    read |= {number: size for number, size in more_read.items() if number not in made}
                    made |= more_made
                moved += sum(read.values())
                moved += sum(size for number, size in made.items() if not index <= last_read.get(number, -1) < stop)
            else:
                moved += self.entries[index][1]
            kernels, index = kernels + 1, stop
        return moved, kernels


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Counter(TorchDispatchMode):
    """Adds up FLOPs and moved bytes, and follows the lifetimes of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = OperationCount()
        self.log = _Log()
        self._events: list[
            tuple[int, int]
        ] = []  # (number of a storage, its bytes when created or minus them when freed)
        self._numbers: dict[int, int] = {}  # of storages that are alive
        self._born, self._gradients = 0, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        if isinstance(results, torch.device):  # as of two operations in three on fake tensors
            return results
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = {storage_key(tensor) for tensor in inputs}
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor for tensor in outputs if storage_key(tensor) not in here]
        found = _counted(operation, args, kwargs or {}, results, inputs, fresh)
        self.operations += found
        for tensor in fresh:
            self.note(tensor)
        if found.launches:
            fuses = not found.flops
            self.log.add(fuses, found.moved_bytes, self._sizes(inputs), self._sizes(fresh))
        return results

    def _sizes(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Returns the bytes of tensors by the number of their storage; weights have none but their key."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            number = self._numbers.get(key, key)
            sizes[number] = max(sizes.get(number, 0), tensor.nbytes)
        return sizes

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
            until, until_entry = counter.operations, 0

            def note_work() -> None:
                nonlocal until, until_entry
                until, until_entry = counter.operations, len(counter.log)

            output, saved_bytes = saved_tensors(part, note_work)
            forward, middle, middle_entry = counter.operations, counter.moment, len(counter.log)
            with torch.autograd.set_multithreading_enabled(False):  # the counter sees this thread alone
                if output.requires_grad:  # not that of a frozen embedding
                    output.backward(torch.ones_like(output))
            end = counter.moment
    finally:
        for hook in hooks:
            hook.remove()
        part.forget_gradients()
    log = counter.log

    def with_fused(work: OperationCount, begin: int, end: int) -> OperationCount:
        moved, kernels = log.fused(begin, end)
        return replace(work, fused_bytes=moved, fused_launches=kernels)

    return Counts(
        forward=with_fused(forward, 0, middle_entry),
        backward=with_fused(counter.operations - forward, middle_entry, len(log)),
        forward_after_last_saved=with_fused(forward - until, until_entry, middle_entry),
        saved_bytes=saved_bytes,
        forward_peak_bytes=counter.peak_bytes(0, middle),
        backward_peak_bytes=counter.peak_bytes(middle, end),
    )
