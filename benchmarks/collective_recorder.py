# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Records every collective that a process issues, below all code of this project."""

from collections import Counter

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")


class CollectiveRecorder(TorchDispatchMode):
    """Counts the operators of PyTorch's `c10d` and `_c10d_functional` libraries while it is entered.

    All collectives of PyTorch are such operators, in the forward, the backward and recompute. Other operators
    (broadcasts, sends, barriers) are counted under their own names. Groups of one rank are left out.

    Attributes:
        calls (`Counter`): number of calls by (kind, ranks of the group, bytes of this rank's input).
    """

    def __init__(self):
        super().__init__()
        self.calls: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor handles the operator first; its collectives come back here
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args)) | kwargs
            if (ranks := _group_size(given)) > 1:
                tensors = tree_leaves([given[argument] for argument in _INPUTS if argument in given])
                size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
                self.calls[_KINDS.get(name, name), ranks, size] += 1
        return func(*args, **kwargs)


def totals(calls: Counter[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """Returns for each kind the number of calls and the bytes of this rank's inputs."""
    found: dict[str, tuple[int, int]] = {}
    for (kind, _, size), count in sorted(calls.items()):
        calls_so_far, bytes_so_far = found.get(kind, (0, 0))
        found[kind] = calls_so_far + count, bytes_so_far + count * size
    return found


def _group_size(given: dict) -> int:
    """Returns the number of ranks of an operator's group; 0 for operators without a group."""
    if "process_group" in given:
        return ProcessGroup.unbox(given["process_group"]).size()
    if "group_name" not in given:
        return 0
    group = given["group_name"]
    return (_resolve_process_group(group) if isinstance(group, str) else group).size()
