# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes as the first rank of a stage alone: the runtime's own layers and ends in one process without groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import split_fused_projections
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.parallel.layers.embedding_and_head import EmbeddingAndHead
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.stage_layers import parallelize_layers
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.stage_module import StageModule
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.parallel.whole_row_stage import WholeRowStage
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.resolved import GroupKey, MeshShape, ResolvedPlan


@dataclass(frozen=True)
class SingleRankWeights:
    """Replaces a [`WeightMesh`]: weights are plain tensors, cut by tensor ranks and not sharded."""

    tensor_degree: int
    tensor_index: int = 0

    @property
    def tensor_group(self) -> FakeProcessGroup:
        return FakeProcessGroup(self.tensor_degree)

    def cut(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Returns the first rank's piece, which is the largest."""
        data = parameter.data
        if dim is not None:
            data = data.narrow(dim, 0, -(-data.shape[dim] // self.tensor_degree)).clone()
        return nn.Parameter(data, requires_grad=parameter.requires_grad)


class SingleRankStage:
    """Replaces a [`StageMesh`] in one process without groups."""

    index = 0

    def __init__(self, size: int):
        self.size = size

    def weights(self, shape: MeshShape) -> SingleRankWeights:
        return SingleRankWeights(shape.tensor)

    def group(self, key: GroupKey) -> FakeProcessGroup | None:
        return self.block(key.size)

    def block(self, size: int) -> FakeProcessGroup | None:
        return None if size == 1 else FakeProcessGroup(size)


@dataclass(frozen=True, kw_only=True)
class SingleRank:
    """Holds one rank's model and the parts that run it; `current` is shared by the blocks."""

    model: PreTrainedModel
    resolved: ResolvedPlan
    blocks: list[ParallelLayer]
    stage: StageModule
    runner: ModelRunner
    current: CurrentMicroBatch


def single_rank(model: PreTrainedModel, plan: ParallelPlan) -> SingleRank:
    """Rewrites a model on any device, meta too, as [`parallelize`] does for rank 0 of a plan of one stage; not
    collective. Weights that data parallelism would shard are whole, and gradients are not summed. The results mean
    nothing; shapes, memory and work are those of the rank. A refused plan leaves the model untouched.
    """
    adapter = adapter_for(model)
    resolved = check_model(model, adapter, plan)
    adapter.prepare_layers(model)
    adapter.join_lookups(model)
    split_fused_projections(model, adapter)
    mesh, current = SingleRankStage(plan.world_size), CurrentMicroBatch()
    EmbeddingAndHead.cut(model, adapter, resolved, mesh)
    (stage,) = resolved.stages
    blocks = parallelize_layers(model, adapter, stage, mesh, current)
    stage_class = StageModule if adapter.structure is None else WholeRowStage
    module = stage_class(model, adapter, mesh, current, stage)
    model.forward = runner = ModelRunner(model, resolved, mesh, current, [module])
    return SingleRank(model=model, resolved=resolved, blocks=blocks, stage=module, runner=runner, current=current)
