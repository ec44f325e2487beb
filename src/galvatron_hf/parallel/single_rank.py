# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The first rank of a stage without the others: the runtime's own layers and ends, in one process without a group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import split_fused_projections
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch, ParallelLayer
from galvatron_hf.parallel.parallelize import EmbeddingAndHead, parallelize_layers, stage_module
from galvatron_hf.parallel.pipeline.forward import ModelRunner
from galvatron_hf.parallel.pipeline.stage import StageModule
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy


@dataclass(frozen=True)
class SingleRankWeights:
    """Stands for a [`WeightMesh`]: weights are plain tensors, cut by tensor ranks and not sharded.

    Args:
        tensor_degree (`int`): tensor ranks.
    """

    tensor_degree: int
    tensor_index: int = 0

    @property
    def tensor_group(self) -> FakeProcessGroup:
        return FakeProcessGroup(self.tensor_degree)

    def cut(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The first rank's piece, which is the largest."""
        data = parameter.data
        if dim is not None:
            data = data.narrow(dim, 0, -(-data.shape[dim] // self.tensor_degree)).clone()
        return nn.Parameter(data, requires_grad=parameter.requires_grad)


class SingleRankStage:
    """Stands for a [`StageMesh`], and for its cache of groups.

    Args:
        size (`int`): ranks of the stage.
    """

    index = 0

    def __init__(self, size: int):
        self.size, self.stage_ranks, self.groups = size, tuple(range(size)), self

    def weights(self, strategy: LayerStrategy | VocabularyStrategy) -> SingleRankWeights:
        return SingleRankWeights(strategy.tensor)

    def strided(self, stride: int, size: int) -> FakeProcessGroup | None:
        return self.block(size)

    def block(self, size: int) -> FakeProcessGroup | None:
        return None if size == 1 else FakeProcessGroup(size)


@dataclass(frozen=True, kw_only=True)
class SingleRank:
    """What one rank computes with.

    Attributes:
        model ([`PreTrainedModel`]): with the rank's weights.
        blocks (`list[ParallelLayer]`): around its layers.
        stage ([`StageModule`]): its only stage.
        forward ([`ModelRunner`]): also the model's.
        current ([`CurrentMicroBatch`]): shared by the blocks.
    """

    model: PreTrainedModel
    blocks: list[ParallelLayer]
    stage: StageModule
    forward: ModelRunner
    current: CurrentMicroBatch


def single_rank(model: PreTrainedModel, plan: ParallelPlan) -> SingleRank:
    """Rewrites a model in place as [`parallelize`] does, for rank 0 of a plan of one stage; nothing is collective.

    Weights are whole where data parallelism would shard them, and gradients are summed over nobody. Which numbers come
    out means nothing; shapes, memory and work are the rank's.

    Args:
        model ([`PreTrainedModel`]): a causal language model, on any device, meta too.
        plan ([`ParallelPlan`]): of one stage.

    Raises:
        ValueError: if the plan does not fit the model; the model is untouched then.
    """
    adapter = adapter_for(model)
    check_model(model, adapter, plan)
    layers, places = adapter.layers(model), adapter.places(model)
    for layer, place in zip(layers, places, strict=True):
        split_fused_projections(layer, place.stack, model.base_model.config)
    mesh, current = SingleRankStage(plan.world_size), CurrentMicroBatch(model.base_model.config)
    EmbeddingAndHead.of(model, adapter, plan, mesh)
    blocks = parallelize_layers(layers, places, range(len(layers)), plan, mesh, current, entered=False)
    stage = stage_module(0, blocks, model, plan, adapter, mesh, current)
    model.forward = ModelRunner(model, plan, mesh, current, [stage])
    return SingleRank(model=model, blocks=blocks, stage=stage, forward=model.forward, current=current)
