# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: the units of weights that are gathered and reduced together, and all uses of FSDP2. ZeRO (arXiv
1910.02054) is that of `torch.distributed.fsdp.fully_shard`, one unit per layer with a mesh of its own. Gradients are
summed, not averaged: the loss is already divided by the global number of targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.data_parallel.replicated import ReplicatedUnit
from galvatron_hf.plan import Precision
from galvatron_hf.utils.compat import (
    call_after_backward,
    drop_gathered_weights,
    finish_fsdp_backward,
    reset_sharded_parameters,
)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Returns the FSDP2 policy of a precision: weights are cast on use, gradients reduced in `precision.reduce`."""
    compute, reduce = DTYPES[precision.activations], DTYPES[precision.reduce]
    if compute is DTYPES[precision.master] and reduce is compute:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


@dataclass(frozen=True, kw_only=True)
class _ShardedUnit:
    """Holds a module that FSDP2 manages."""

    module: FSDPModule
    sharding: str
    stage: int


class ShardedUnits:
    """Holds the units of one model and says when each communicates in a step of several micro-batches.
    - `zero3`: weights are gathered for each use, gradients reduced after each micro-batch.
    - `zero2`: weights stay gathered from a step's first use to its last, gradients are reduced after each micro-batch.
    - `replicate`: weights are whole on every rank, gradients are reduced once, during the last micro-batch's backward.
    Several copies of the weights have their gradients summed once, in the last micro-batch. FSDP2 holds sharded
    weights, [`ReplicatedUnit`] replicated ones. With `wait_at_end`, [`ShardedUnits.finish_step`] waits for sums over
    copies. Otherwise the last backward's end does, which would delay the backward of another stage of the same rank.
    """

    def __init__(self, precision: Precision, wait_at_end: bool = False):
        self.compute, self.reduce = DTYPES[precision.activations], DTYPES[precision.reduce]
        self.policy = mixed_precision(precision)
        self.sharded: list[_ShardedUnit] = []
        self.replicated: list[tuple[ReplicatedUnit, tuple[int, ...]]] = []
        self._taken: set[int] = set()
        self.wait_at_end = wait_at_end
        self._ending = self._held = False

    def add(
        self,
        module: nn.Module | list[nn.Module],
        mesh: WeightMesh,
        sharding: str,
        *,
        stage: int = 0,
        later_stages: Sequence[int] = (),
        stay_gathered: bool = False,
        needed_in_backward: bool = True,
        of_experts: bool = False,
    ) -> None:
        """Makes one unit of the parameters of `module` that are in no unit yet.

        Args:
            sharding (`str`): "replicate", "zero2" or "zero3".
            later_stages (`Sequence[int]`): later stages of this rank that use replicated weights too: the backward of
                `stage` ends after theirs.
            stay_gathered (`bool`): whether weights under `zero3` stay gathered from the forward to the backward, which
                follows at once.
            needed_in_backward (`bool`): whether the backward reads the weights; that of a lookup does not.
            of_experts (`bool`): whether the weights are those of a layer's experts, and the mesh is theirs.
        """
        modules = module if isinstance(module, list) else [module]
        if sharding == "replicate":
            unit = ReplicatedUnit(modules, self._taken, mesh, self.compute, self.reduce, self._backward_runs)
            for part in modules:
                part.register_forward_pre_hook(lambda *unused: unit.unshard(), prepend=True)
            self.replicated.append((unit, (stage, *later_stages)))
            return
        shard_degree = mesh.data.size(-1)
        fully_shard(
            module,
            mesh=mesh.data,
            reshard_after_forward=sharding == "zero3" and not stay_gathered,
            # Hidden states are in the compute format already; the weights of choices keep their own.
            mp_policy=replace(self.policy, cast_forward_inputs=False) if of_experts else self.policy,
            shard_placement_fn=lambda parameter: shard_placement(parameter, shard_degree, of_experts),
            ignored_params={weight.sharded_param for unit, _ in self.replicated for weight in unit.weights},
        )
        unit = modules[0]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_unshard_in_backward(needed_in_backward)
        self.sharded.append(_ShardedUnit(module=unit, sharding=sharding, stage=stage))
        self._taken.update(id(parameter) for part in modules for parameter in part.parameters())

    def add_root(
        self, module: nn.Module, mesh: WeightMesh, sharding: str, *, stage: int = 0, stay_gathered: bool = True
    ) -> None:
        """Makes a unit of the remaining weights of a stage, and FSDP2's root, which orders all units of the stage."""
        if sharding == "replicate":
            self.add(module, mesh, sharding, stage=stage)
        if sharding != "replicate" or any(unit.stage == stage for unit in self.sharded):
            kind = "zero2" if sharding == "replicate" else sharding
            self.add(module, mesh, kind, stage=stage, stay_gathered=stay_gathered)

    def reshard(self) -> None:
        """Frees gathered weights, and those that a failed pass has begun to gather, so that the model's parameters are
        the shards again.
        """
        for unit in self.sharded:
            drop_gathered_weights(unit.module)
            unit.module.reshard()
        for unit, _ in self.replicated:
            unit.reshard()

    def replace_weights(self, model: nn.Module, new: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Replaces all weights of `model`, whose units these are, by tensors of the same pieces."""
        self.reshard()
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old one, so that no other takes its id
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, new(parameter)
                setattr(module, name, made[id(parameter)][1])
        for unit, _ in self.replicated:
            for weight in unit.weights:
                weight.sharded_param = made[id(weight.sharded_param)][1]
        for unit in self.sharded:
            reset_sharded_parameters(unit.module)

    def begin_micro_batch(self, last: bool, *, stage: int = 0, keep_gradients: bool = False) -> None:
        """Prepares every unit of a stage for a micro-batch's backward; `last` marks the stage's last backward of the
        step. With `keep_gradients` all gradients, and all weights, wait for [`ShardedUnits.reduce_kept_gradients`].
        """
        for unit in self._of_stage(stage):
            unit.module.set_is_last_backward(last)
            unit.module.set_requires_gradient_sync(not keep_gradients, recurse=False)
            unit.module.set_requires_all_reduce(last, recurse=False)
            freed = (last or unit.sharding == "zero3") and not keep_gradients
            unit.module.set_reshard_after_backward(freed, recurse=False)
        for unit, stages in self.replicated:
            if stage in stages:
                unit.begin(last and stage == stages[0])
        self._ending = False

    def collect(self, stage: int) -> None:
        """Collects replicated weights' gradients that a split backward made, for which no hooks ran."""
        for unit, stages in self.replicated:
            if stage in stages:
                unit.collect()

    def reduce_kept_gradients(self, stage: int) -> None:
        """Reduces the gradients that a step has kept, for schedules with a split backward, which FSDP2 does not see.
        `torch.distributed.pipelining` does the same at the end of its schedules.
        """
        self.begin_micro_batch(last=True, stage=stage)
        finish_fsdp_backward([unit.module for unit in self._of_stage(stage)])  # the root was added last
        self._finish()

    def prefetch_forward(self, layers: Sequence[Sequence[nn.Module]]) -> None:
        """Makes the forward of each sharded layer gather its experts, and then the next layer, before it computes;
        `layers` are in order, each with its experts if it has them. FSDP2 alone gathers a unit when the host reaches
        it, too late where the host is not ahead of the device. Experts gather nothing ahead: a recompute may run their
        forward before FSDP2 knows of their backward, and would gather the next layer, whose backward is over.
        """
        for (layer, *experts), following in zip(layers, [*layers[1:], ()], strict=True):
            ahead = [module for module in (*experts, *following[:1]) if isinstance(module, FSDPModule)]
            if isinstance(layer, FSDPModule) and ahead:
                layer.set_modules_to_forward_prefetch(ahead)

    def prefetch_backward(
        self, stage: nn.Module, layers: Sequence[Sequence[nn.Module]], embedding: nn.Module | None
    ) -> None:
        """Makes the backward of each sharded unit gather the next one that it needs, and that of the embedding
        nothing. `layers` are those of the stage in the order of the forward, each with its experts if it has them.
        FSDP2 would gather the module whose forward ran before, which in a pipeline may be another micro-batch's. After
        the embedding's backward it would be a layer whose weights then wait for the next micro-batch.
        """
        sharded = [unit for units in reversed(layers) for unit in units if isinstance(unit, FSDPModule)]
        for unit, following in zip(sharded, [*sharded[1:], *sharded[-1:]], strict=True):
            unit.set_modules_to_backward_prefetch([following])
        if isinstance(embedding, FSDPModule) and isinstance(stage, FSDPModule):
            embedding.set_modules_to_backward_prefetch([stage])  # the root, which has no weights in the first stage

    def _of_stage(self, stage: int) -> list[_ShardedUnit]:
        return [unit for unit in self.sharded if unit.stage == stage]

    def _backward_runs(self) -> None:
        """Has [`ShardedUnits._finish`] called at the end of the backward that runs now, a step's last."""
        if not self._ending:
            self._ending = True
            call_after_backward(self._finish)

    def _finish(self) -> None:
        for unit, _ in self.replicated:
            if unit.last and self.wait_at_end:
                unit.start()
            elif unit.last:
                unit.finish()
        self._ending = False

    def finish_step(self) -> None:
        """Ends the step of replicated units that have not ended it: sums over copies still run after the last backward
        of all stages, and a unit that was frozen saw no backward.
        """
        for unit, _ in self.replicated:
            if unit.last:
                unit.finish()

    def release_after_evaluation(self, model: nn.Module) -> None:
        """Frees gathered weights after every forward pass that no backward follows. The gathered weights of `zero2`,
        `replicate`, the head and the root stay until a backward pass. Without one, the next forward pass would not use
        weights that are loaded in between.
        """

        def release(*unused) -> None:
            if not torch.is_grad_enabled() and not self._held:
                self.reshard()

        model.register_forward_hook(release)

    @contextlib.contextmanager
    def several_forwards(self) -> Iterator[None]:
        """Frees gathered weights after the last of several forward passes without gradients, which the body runs."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.reshard()


def shard_placement(parameter: nn.Parameter, shard_degree: int, of_experts: bool = False) -> Shard:
    """Returns the placement with which FSDP2 shards a parameter that tensor ranks may have cut already."""
    cut, tensor = None, 1
    if isinstance(parameter, DTensor):
        (placement,), tensor = parameter.placements, parameter.device_mesh.size()
        cut = placement.dim if placement.is_shard() else None
    weight = WeightShape(shape=tuple(parameter.shape), cut=cut, of_experts=of_experts)
    dim = weight.shard_dim(tensor, shard_degree)
    dim = 0 if dim is None and shard_degree == 1 else dim
    assert dim is not None, "check_model lets no such plan through"
    return Shard(dim)
