# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A parallelised model as a training loop sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.utils import ModelOutput

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.models.lora import module_copies
from galvatron_hf.models.packing import Packing
from galvatron_hf.models.slots import MissingModule
from galvatron_hf.parallel.comm.dtensor import local_tensor, replicas
from galvatron_hf.parallel.comm.mesh import StageMesh, WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.executor import Batch, Executor
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.model_runner import ModelRunner, StreamPosition
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.weights.adapted_model import AdaptedModel
from galvatron_hf.parallel.whole_batch import WholeBatchForward
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.resolved import ResolvedPlan
from galvatron_hf.plan.supported import require_compilable
from galvatron_hf.utils.compat import scale_tensors, tensor_norms


@dataclass(kw_only=True)
class ParallelModel:
    """Holds a model that [`parallelize`] has parallelised.

    Attributes:
        model ([`PreTrainedModel`]): its parameters are DTensors; under a pipeline it has those of this rank's stages.
        resolved ([`ResolvedPlan`]): the plan compiled for the model.
        adapter ([`ModelAdapter`]): the tables of its family.
        world ([`WorldMesh`]): meshes and groups of all stages; `mesh` has those of this rank's stages.
        units ([`ShardedUnits`]): the parts of the model that are gathered and reduced together.
        family (`type`): the model's own class.
        runner ([`ModelRunner`]): runs the stages of this rank; the model's `forward` is a [`WholeBatchForward`].
        blocks (`list[ParallelLayer]`): the layers of this rank's stages with their strategies, in order.
        timeline ([`Timeline`]): records when the work of each micro-batch begins and ends.
        pipeline ([`Pipeline`], *optional*): runs the stages of a plan that has several.
        tied ([`TiedWeights`], *optional*): a tied weight whose copies lie on different stages.
        adapted ([`AdaptedModel`], *optional*): the given model without values, if it has adapters.
    """

    model: PreTrainedModel
    plan: ParallelPlan
    resolved: ResolvedPlan
    adapter: ModelAdapter
    world: WorldMesh
    mesh: StageMesh
    units: ShardedUnits
    family: type[PreTrainedModel]
    runner: ModelRunner
    fused: FusedNames
    blocks: list[ParallelLayer]
    timeline: Timeline
    pipeline: Pipeline | None = None
    tied: TiedWeights | None = None
    adapted: AdaptedModel | None = None

    @cached_property
    def executor(self) -> Executor:
        return Executor(
            model=self.model,
            runner=self.runner,
            plan=self.plan,
            units=self.units,
            timeline=self.timeline,
            pipeline=self.pipeline,
            tied=self.tied,
        )

    @property
    def forward(self) -> WholeBatchForward:
        """Returns the object that is the `forward` of the model."""
        return self.model.forward

    @property
    def config(self) -> PreTrainedConfig:
        """Returns the configuration of the last stack."""
        return self.adapter.stacks[-1].config(self.model)

    @cached_property
    def packing(self) -> Packing:
        """Returns how the rows of a batch become documents of a packed row."""
        return self.adapter.packing(self.model)

    @property
    def streams(self) -> StreamPosition:
        """Returns the position of the random streams; a training loop sets `seed` once and `step` before each step."""
        return self.runner.position

    @property
    def layers(self) -> list[nn.Module]:
        """Returns the layers of this rank's stages, in order."""
        layers = self.adapter.layers(self.model)
        return [layer for layer in layers if not isinstance(layer, PipelineIdentityLayer)]

    def compile(self, backend: str = "inductor", mode: str | None = None, **options: Any) -> None:
        """Compiles every layer by itself, with its attention and its collectives, and the head with its loss; the
        embedding runs as it is. Layers of one class and strategy share their graphs; the first steps compile.

        Args:
            backend, mode, options: of `torch.compile`.

        Raises:
            ValueError: for a zero-bubble schedule, and for modes that record CUDA graphs.
        """
        require_compilable(self.plan, backend, mode)
        for block in self.blocks:
            block.compile(backend=backend, mode=mode, **options)
        head = self.adapter.head(self.model)
        for module in () if isinstance(head, MissingModule) else module_copies(head):
            module.forward.compile(backend=backend, mode=mode, **options)

    def tied_names(self) -> list[str]:
        """Returns the names under which a weight appears a second time in the state dict. A copy of a weight that has
        the same name on several stages is none.
        """
        seen, tied = set(), []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            saved = None if self.tied is None else self.tied.name_of(tensor)
            if id(tensor) in seen or saved not in (None, name):
                tied.append(name)
            seen.add(id(tensor))
        return tied

    def parameter_names(self) -> dict[int, str]:
        """Returns the name of each parameter by its `id`; tied copies share a name."""
        self.units.reshard()
        names: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            saved = None if self.tied is None else self.tied.name_of(tensor)
            names.setdefault(id(tensor), saved or name)
        return names

    def recompute_layers(self, kind: str | None) -> None:
        """Has all layers recompute their forward ("full") or not ("none") from now on, or as the plan says (None)."""
        for block in self.blocks:
            block.recompute = block.resolved.strategy.recompute if kind is None else kind

    def keep_rings(self, keeps: bool) -> None:
        """Has layers that are computed again keep the output of attention in rings, so that nothing is sent again; the
        same on every rank.
        """
        self.runner.current.keeps_rings = keeps

    def forward_backward(
        self,
        batch: Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
        **options,
    ) -> torch.Tensor:
        """Runs forward and backward of a global batch in the plan's micro-batches.

        Args:
            batch (`Mapping[str, torch.Tensor]`): [B, S] tensors with `labels` or `shift_labels`, the same on every
                rank. Or a list of micro-batches, packed ones as [`galvatron_hf.data.packing.pack`] makes them.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): targets of the global batch; counted if absent.
            options: passed to the model's forward.

        Returns:
            `torch.Tensor`: the loss of the global batch, an fp32 scalar, the same on every rank.
        """
        return self.executor.train(batch, num_items_in_batch=num_items_in_batch, **options)

    def evaluate(self, batch: Batch, **options) -> ModelOutput:
        """Computes loss and logits of a batch without gradients; see [`Executor.evaluate`]."""
        return self.executor.evaluate(batch, **options)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def share_index(self) -> int:
        """Returns the index of this rank's share of an evaluated batch's rows, all of which are equal in size."""
        pipeline_rank = 0 if self.pipeline is None else self.pipeline.pipeline_rank
        return self.mesh.index * (self.plan.world_size // self.mesh.size) + pipeline_rank

    def share_order(self) -> list[int]:
        """Returns the ranks in the order of their shares of an evaluated batch."""
        return [ranks[index] for index in range(self.mesh.size) for ranks in self.plan.rank_groups]

    def grad_norm(self) -> torch.Tensor:
        """Returns the 2-norm of all gradients, an fp32 scalar. A gradient that several ranks hold counts once."""
        return self.sum_with_grad_norm()[0]

    def sum_with_grad_norm(self, *values: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of all gradients (fp32) and the sums of `values` over all ranks (fp64), in one
        collective.
        """
        counted = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.tied is not None:
            counted = [parameter for parameter in counted if not self.tied.is_copy(parameter)]
        by_copies: dict[int, list[torch.Tensor]] = {}
        for parameter in counted:
            by_copies.setdefault(replicas(parameter.grad), []).append(local_tensor(parameter.grad))
        # Numbers are written by the device: a copy from the host's memory would wait for it.
        sums = torch.zeros(1 + len(values), dtype=torch.float64, device=self.device)
        for copies, gradients in by_copies.items():
            sums[0] += tensor_norms(gradients).double().square().sum() / copies
        for index, value in enumerate(values, start=1):
            sums[index].fill_(value)
        everywhere = not by_copies.keys() - {self.plan.world_size} and self.pipeline is None
        if everywhere and not values:
            sums *= self.plan.world_size  # every rank has all gradients
        else:
            dist.all_reduce(sums)
        return sums[0].sqrt().float(), sums[1:]

    def clip_grad_norm_(self, max_norm: float, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Scales all gradients to a norm of at most `max_norm`; returns the norm before, which may be given."""
        norm = self.grad_norm() if norm is None else norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        scale_tensors([local_tensor(gradient) for gradient in gradients], scale)
        return norm


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Gives every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            dist.broadcast(tensor.data, src=0)
