# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: CUDA tensors without memory, on a build of PyTorch for the CPU. It notes each place where
the host would wait for the device, and each collective in the order of its communicator. Kernels, streams and memory
are not played. Import this module before torch, in a process of its own; `IDLE_DEVICE` names the library of
idle_device.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os


ctypes.CDLL(os.environ["IDLE_DEVICE"]).register_device()  # before torch is imported

import traceback  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._tools.fake_collectives  # noqa: E402, F401  (shapes of collectives)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.distributed_c10d import _resolve_process_group  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from galvatron_hf.parallel.comm.mesh import StageMesh  # noqa: E402
from galvatron_hf.utils import device  # noqa: E402


HOST, DEVICE = "cpu", "cuda"
# Operators that return when the device has computed their input: their result's size or value is on the host.
READ_BACK = {
    "aten::_local_scalar_dense": 0.0,
    "aten::is_nonzero": True,
    "aten::equal": True,
    "aten::allclose": True,
    "aten::nonzero": None,
    "aten::masked_select": None,
    "aten::_unique2": None,
}


@dataclass(eq=False)
class Seen:
    """Holds what a rank has done.

    Attributes:
        waits (`list[str]`): the kind and the place of each wait of the host.
        order (`dict[str, list]`): the collectives of each communicator of several ranks, by the communicator's name.
        members (`dict[str, list[int]]`): its ranks.
        issued (`list[str]`): the communicators of the collectives as they came, and "" for each wait of the host.
    """

    waits: list[str] = field(default_factory=list)
    order: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, list[int]] = field(default_factory=dict)
    issued: list[str] = field(default_factory=list)

    def wait(self, kind: str) -> None:
        self.waits.append(f"{kind} at {_place()}")
        self.issued.append("")

    def clear(self) -> None:
        self.waits.clear()
        self.order.clear()
        self.issued.clear()


def _place() -> str:
    """Returns the innermost line of galvatron_hf, or of a library if there is none."""
    frames = traceback.extract_stack()[:-2]
    own = [frame for frame in frames if "/galvatron_hf/" in frame.filename]
    libraries = [frame for frame in frames if "site-packages" in frame.filename and "/torch/_" not in frame.filename]
    frame = (own or libraries or frames)[-1]
    return f"{frame.filename.split('/galvatron_hf/')[-1].split('site-packages/')[-1]} in {frame.name}"


class _Stream:
    device, device_type, device_index, stream_id, priority = torch.device(DEVICE, 0), 20, 0, 0, 0

    def __init__(self, device=None, priority=0, **options):
        self.priority = priority

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        return event or torch.cuda.Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args, **options): ...

    def record(self, stream=None): ...

    def wait(self, stream=None): ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 1.0


def _install(seen: Seen) -> None:
    """Replaces torch.cuda by functions that do nothing, or note a wait."""
    cuda, default, current = torch.cuda, _Stream(), []

    @contextlib.contextmanager
    def stream(one) -> Iterator[None]:
        current.append(one or default)
        try:
            yield
        finally:
            current.pop()

    class Stream(_Stream):
        def synchronize(self) -> None:
            seen.wait("Stream.synchronize")

    class Event(_Event):
        def synchronize(self) -> None:
            seen.wait("Event.synchronize")

    generator = torch.Generator()
    values = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "StreamContext": stream,
        "current_stream": lambda device=None: current[-1] if current else default,
        "default_stream": lambda device=None: default,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: seen.wait("torch.cuda.synchronize"),
        "empty_cache": lambda: seen.wait("torch.cuda.empty_cache"),
        "default_generators": (generator,),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a GPU that is not there",
    }
    for name, value in values.items():
        setattr(cuda, name, value)
    torch.Tensor.record_stream = lambda self, stream: None


class _Watch(TorchDispatchMode):
    """Notes what the operators of a rank do: values that are read back, blocking copies between host and device, and
    the kind, the dtype and the size of each collective and message.
    """

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if operator.namespace in ("c10d", "_c10d_functional"):
            self._collective(operator, args, kwargs)
            return operator(*args, **kwargs)
        name = operator._schema.name
        devices = [one.device.type for one in args if isinstance(one, torch.Tensor)]
        if name in READ_BACK and DEVICE in devices:
            self.seen.wait(name)
        if name in READ_BACK and READ_BACK[name] is not None and any(isinstance(one, FakeTensor) for one in args):
            return READ_BACK[name]
        if name == "aten::_pin_memory":
            pinned = args[0].clone()
            pinned.is_pinned_memory = True
            return pinned
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            self._copy(args[0], torch.device(kwargs["device"]).type, kwargs.get("non_blocking"))
        if name == "aten::copy_":
            self._copy(args[1], devices[0], args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return operator(*args, **kwargs)

    def _copy(self, source: torch.Tensor, target: str, non_blocking: bool | None) -> None:
        """Notes a copy that is not told to be asynchronous, or cannot be: the host's memory is not pinned."""
        if {source.device.type, target} == {HOST, DEVICE}:
            if not non_blocking or not getattr(source, "is_pinned_memory", target == HOST):
                self.seen.wait(f"copy from {source.device.type} to {target}")

    def _collective(self, operator, args: tuple, kwargs: dict[str, Any]) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        group = given.get("process_group", given.get("group_name"))
        group = _resolve_process_group(group) if isinstance(group, str) else group
        if group is not None:
            group = group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
            self._note(operator._schema.name.split("::")[1], group, given)

    def _note(self, kind: str, group: ProcessGroup, given: dict[str, Any]) -> None:
        if group.size() == 1:
            return
        tensors = [one for one in tree_leaves(list(given.values())) if isinstance(one, torch.Tensor)]
        sizes = [[str(one.dtype), one.numel()] for one in tensors]
        splits = {name: list(value) for name, value in given.items() if "split_sizes" in name and value is not None}
        self.seen.order[group.group_name].append([kind, sizes, splits])
        self.seen.issued.append(group.group_name)
        self.seen.members[group.group_name] = dist.get_process_group_ranks(group)


def _make_meshes_of_true_tensors() -> None:
    """Device meshes hold ranks in tensors, whose values are needed."""
    names = ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "_create_sub_mesh")
    names += ("_create_flatten_mesh", "from_group", "_get_slice_mesh_layout", "get_coordinate", "size")
    names += ("get_local_rank", "_compute_coordinate_on_dim", "_is_current_rank_part_of_mesh")
    for owner, name in [*((DeviceMesh, name) for name in names), (StageMesh, "weights")]:
        raw = vars(owner).get(name)
        inner = getattr(raw, "__func__", raw)
        if not callable(inner) or hasattr(inner, "of_true_tensors"):
            continue

        def call(*args, inner=inner, **kwargs):
            with unset_fake_temporarily():
                return inner(*args, **kwargs)

        call.of_true_tensors = True
        setattr(owner, name, type(raw)(call) if isinstance(raw, (staticmethod, classmethod)) else call)


def without_work() -> None:
    """Lets operators be traced on the device outside of [`rank_with_gpu`]."""
    _install(Seen())


@contextlib.contextmanager
def rank_with_gpu(rank: int, world_size: int) -> Iterator[Seen]:
    """Lets the body be one rank of a world whose collectives do nothing; yields what it has seen."""
    seen = Seen()
    _install(seen)
    _make_meshes_of_true_tensors()
    torch.autograd.set_multithreading_enabled(False)  # the modes hold for this thread alone
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Watch(seen), mock.patch.object(device, "FakeTensor", ()):
            yield seen  # tensors are pinned as true ones are
    finally:
        dist.destroy_process_group()
