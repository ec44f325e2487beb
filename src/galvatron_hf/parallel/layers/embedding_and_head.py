# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Puts a plan onto the ends of a model: embedding, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.lora import module_copies
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers.vocab_parallel import Head, parallel_embedding, whole_module
from galvatron_hf.parallel.pipeline.pruning import MissingModule
from galvatron_hf.plan.resolved import ResolvedPlan, ResolvedStage
from galvatron_hf.plan.schedule import actions, most_in_flight


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """Holds the ends of the model that this rank has.

    Attributes:
        embedding (`list[nn.Module]`): the token embedding and learned positions; empty if the rank has none.
        head (`nn.Module`, *optional*): None if the rank has none.
        tied (`bool`): whether the rank has both ends with one weight, which then belongs to the stage's own unit.
    """

    embedding: list[nn.Module]
    head: nn.Module | None
    resolved: ResolvedPlan
    mesh: StageMesh
    tied: bool

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
            for module in module_copies(embedding):
                parallel_embedding(module, embedding_mesh)
            for module in positional:
                whole_module(module, embedding_mesh, "embedding")
            if tied:
                head.weight = embedding.weight
        if last:
            head_mesh = mesh.weights(resolved.head.weights)
            if resolved.head.weights.tensor > 1:
                whole_module(adapter.final_norm(model), head_mesh, "head")
            for module in module_copies(head):
                Head(
                    module,
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
        )

    def add_units(self, units: ShardedUnits, stage: ResolvedStage, root: nn.Module) -> None:
        """Makes the units of a stage's ends, and its root unit, which orders the units of its layers."""
        alone = stage.is_first and stage.is_last
        # One stage begins its backward right after its forward; in a pipeline other micro-batches may come between.
        for module, end, options in (
            (self.embedding if stage.is_first else [], self.resolved.embedding, dict(needed_in_backward=False)),
            ([self.head] if stage.is_last else [], self.resolved.head, dict(stay_gathered=alone)),
        ):
            if module and not self.tied:
                mesh, sharding = self.mesh.weights(end.weights), end.strategy.sharding
                for unused in _unused(module):
                    units.add(unused, mesh, sharding, stage=stage.index, **options)
                units.add(module, mesh, sharding, stage=stage.index, **options)
        # A stage before the last has no weights left for the root.
        owner = self.resolved.head if stage.is_last else stage.layers[0]
        mesh, sharding = self.mesh.weights(owner.weights), owner.strategy.sharding
        units.add_root(root, mesh, sharding, stage=stage.index, stay_gathered=alone)


def _unused(modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules in whose place a trained copy of PEFT computes: they are gathered only if they run."""
    return [one for module in modules for one in module_copies(module)[:-1]]


def _several_in_flight(resolved: ResolvedPlan) -> bool:
    """Returns True if the last stage holds several micro-batches between forward and backward. Zero-bubble schedules
    do too, but run the head's backward twice: for them its gradients are computed once, in the forward.
    """
    if not resolved.is_pipeline or resolved.plan.schedule == "zero_bubble":
        return False
    last = resolved.stages[-1]
    order = actions(resolved.pipeline, resolved.plan.micro_batch_count)[last.pipeline_rank]
    return most_in_flight(order, last.index) > 1
