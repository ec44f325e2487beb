# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Puts a plan onto the ends of a model: embedding, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.slots import MissingModule
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers.vocab_parallel import Head, parallel_embedding, whole_module
from galvatron_hf.parallel.layers.whole_row_layer import OwnHead
from galvatron_hf.plan.resolved import ResolvedPlan, ResolvedStage
from galvatron_hf.plan.schedule import actions, most_in_flight


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """Holds the ends of the model that this rank has.

    Attributes:
        embedding (`list[nn.Module]`): the token embedding and learned positions; empty if the rank has none.
        head (`nn.Module`, *optional*): None if the rank has none.
        tied (`bool`): whether the rank has both ends with one weight, which then belongs to the stage's own unit.
        lookup (`bool`): whether the embedding does nothing but look up rows of its weight.
        shared (`bool`): whether another module has a weight of the head, which then belongs to the stage's own unit.
    """

    embedding: list[nn.Module]
    head: nn.Module | None
    resolved: ResolvedPlan
    mesh: StageMesh
    tied: bool
    lookup: bool = True
    shared: bool = False

    @classmethod
    def cut(
        cls, model: PreTrainedModel, adapter: ModelAdapter, resolved: ResolvedPlan, mesh: StageMesh
    ) -> EmbeddingAndHead:
        """Cuts the ends over the vocabulary; must come before other code replaces their forwards."""
        (embedding, *positional), head = adapter.embeddings(model), adapter.head(model)
        first, last = not isinstance(embedding, MissingModule), not isinstance(head, MissingModule)
        tied = first and last and adapter.ties_embeddings(model)
        if first and resolved.embedding.weights.tensor > 1:
            embedding_mesh = mesh.weights(resolved.embedding.weights)
            parallel_embedding(embedding, embedding_mesh)
            for module in positional:
                whole_module(module, embedding_mesh, "embedding")
            if tied:
                head.weight = embedding.weight
        if last and adapter.structure is not None and not adapter.fused_head:
            OwnHead(head)
        elif last:
            head_mesh = mesh.weights(resolved.head.weights)
            if resolved.head.weights.tensor > 1:
                whole_module(adapter.final_norm(model), head_mesh, "head")
            Head(
                head,
                head_mesh,
                adapter.logit_transform(model.config),
                tied,
                recompute_logits_in_backward=_several_in_flight(resolved),
            )
        return cls(
            embedding=[embedding, *positional] if first else [],
            head=head if last else None,
            resolved=resolved,
            mesh=mesh,
            tied=tied,
            lookup=not first or (isinstance(embedding, nn.Embedding) and len(list(embedding.parameters())) == 1),
            shared=last and _has_shared_weight(model, head),
        )

    def add_units(self, units: ShardedUnits, stage: ResolvedStage, root: nn.Module) -> None:
        """Makes the units of a stage's ends, and its root unit, which orders the units of its layers."""
        alone = stage.is_first and stage.is_last
        # One stage begins its backward right after its forward; in a pipeline other micro-batches may come between.
        first, last = stage.is_first and self.lookup, stage.is_last and not self.shared
        for module, end, options in (
            (self.embedding if first else [], self.resolved.embedding, dict(needed_in_backward=False)),
            ([self.head] if last else [], self.resolved.head, dict(stay_gathered=alone)),
        ):
            if module and not self.tied:
                mesh, sharding = self.mesh.weights(end.weights), end.strategy.sharding
                units.add(module, mesh, sharding, stage=stage.index, **options)
        # A stage before the last has no weights left for the root.
        owner = self.resolved.head if stage.is_last else stage.layers[0]
        mesh, sharding = self.mesh.weights(owner.weights), owner.strategy.sharding
        units.add_root(root, mesh, sharding, stage=stage.index, stay_gathered=alone)


def _has_shared_weight(model: PreTrainedModel, head: nn.Module) -> bool:
    own = {id(weight) for weight in head.parameters()}
    outside = (module for module in model.modules() if module is not head)
    return any(id(weight) in own for module in outside for weight in module.parameters(recurse=False))


def _several_in_flight(resolved: ResolvedPlan) -> bool:
    """Returns True if the last stage holds several micro-batches between forward and backward. Zero-bubble schedules
    do too, but run the head's backward twice: for them its gradients are computed once, in the forward.
    """
    if not resolved.is_pipeline or resolved.plan.schedule == "zero_bubble":
        return False
    last = resolved.stages[-1]
    order = actions(resolved.pipeline, resolved.plan.micro_batch_count)[last.pipeline_rank]
    return most_in_flight(order, last.index) > 1
