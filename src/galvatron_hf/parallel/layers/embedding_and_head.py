# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Puts a plan onto the ends of a model: embedding, final norm and head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.lora import module_copies
from galvatron_hf.models.slots import MissingModule
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers.vocab_parallel import Head, parallel_embeddings, whole_module
from galvatron_hf.parallel.layers.whole_row_layer import OwnHead
from galvatron_hf.plan.resolved import ResolvedPlan, ResolvedStage
from galvatron_hf.plan.schedule import actions, most_in_flight


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """Holds the ends of the model that this rank has.

    Attributes:
        embedding (`dict[str, list[nn.Module]]`): for each stack whose first layer the rank has, the token embedding
            and what else is before the layer.
        head (`nn.Module`, *optional*): None if the rank has none.
        whole (`list[nn.Module]`): modules that the rank holds whole, see [`ModelAdapter.whole_modules`].
        tied (`bool`): whether the rank has both ends with one weight, which then belongs to the stage's own unit.
        lookup (`bool`): whether the embedding does nothing but look up rows of its weight, which no other module has.
        shared (`bool`): whether another module has a weight of the head, which then belongs to the stage's own unit.
    """

    embedding: dict[str, list[nn.Module]]
    head: nn.Module | None
    whole: list[nn.Module]
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
        lookups, head = _present(adapter.lookups(model)), adapter.head(model)
        last = not isinstance(head, MissingModule)
        tied = bool(lookups) and last and lookups[0].weight is head.weight
        if lookups and resolved.embedding.weights.tensor > 1:
            embedding_mesh = mesh.weights(resolved.embedding.weights)
            for shared in {id(module.weight): module.weight for module in lookups}.values():
                together = [module for module in lookups if module.weight is shared]
                for copies in zip(*(module_copies(module) for module in together), strict=True):
                    parallel_embeddings(copies, embedding_mesh)
            for module in _present(adapter.beside_lookups(model)):
                whole_module(module, embedding_mesh, "embedding")
            if tied:
                head.weight = lookups[0].weight
        if last and adapter.structure is not None and not adapter.fused_head:
            OwnHead(head)
        elif last:
            head_mesh = mesh.weights(resolved.head.weights)
            if resolved.head.weights.tensor > 1:
                for module in adapter.final_norms(model):
                    whole_module(module, head_mesh, "head")
            for module in module_copies(head):
                Head(
                    module,
                    head_mesh,
                    adapter.logit_transform(model.config),
                    tied,
                    recompute_logits_in_backward=_several_in_flight(resolved),
                    logit_bias=None if adapter.logit_bias is None else lambda: getattr(model, adapter.logit_bias),
                )
        return cls(
            embedding={stack.name: _present(adapter.embeddings(model, [stack.name])) for stack in adapter.stacks},
            head=head if last else None,
            whole=_present(adapter.whole_modules(model).values()),
            resolved=resolved,
            mesh=mesh,
            tied=tied,
            lookup=adapter.structure is None
            or all(_is_lookup(module) and not _has_shared_weight(model, module) for module in lookups),
            shared=last and _has_shared_weight(model, head),
        )

    def embedding_of(self, stage: ResolvedStage) -> list[nn.Module]:
        """Returns what a stage has before the first layers of stacks."""
        found = [module for part in stage.parts if part.is_first for module in self.embedding[part.stack]]
        return list({id(module): module for module in found}.values())

    def add_units(self, units: ShardedUnits, stage: ResolvedStage, root: nn.Module) -> None:
        """Makes the units of a stage's ends, and its root unit, which orders the units of its layers."""
        alone = stage.is_first and stage.is_last
        # One stage begins its backward right after its forward; in a pipeline other micro-batches may come between.
        embedding = self.embedding_of(stage) if self.lookup else []
        for module, end, options in (
            (embedding, self.resolved.embedding, dict(needed_in_backward=not all(map(_is_lookup, embedding)))),
            ([self.head] if stage.is_last and not self.shared else [], self.resolved.head, dict(stay_gathered=alone)),
        ):
            if module and not self.tied:
                mesh, sharding = self.mesh.weights(end.weights), end.strategy.sharding
                for unused in _unused(module):
                    units.add(unused, mesh, sharding, stage=stage.index, **options)
                units.add(module, mesh, sharding, stage=stage.index, **options)
        # What a family has beside its ends belongs to them; a stage between has no weights left for the root.
        first = self.resolved.embedding if stage.is_first else stage.layers[0]
        owner = self.resolved.head if stage.is_last else first
        mesh, sharding = self.mesh.weights(owner.weights), owner.strategy.sharding
        units.add_root(root, mesh, sharding, stage=stage.index, stay_gathered=alone)


def _is_lookup(module: nn.Module) -> bool:
    """Tells whether a module does nothing but look up rows of its weight, whose backward does without it."""
    return isinstance(module, nn.Embedding) and len(list(module.parameters())) == 1


def _present(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules that this rank has."""
    return [module for module in modules if not isinstance(module, MissingModule)]


def _unused(modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules in whose place a trained copy of PEFT computes: they are gathered only if they run."""
    return [one for module in modules for one in module_copies(module)[:-1]]


def _has_shared_weight(model: PreTrainedModel, end: nn.Module) -> bool:
    """Tells whether another module has a weight of an embedding or a head."""
    own = {id(weight) for weight in end.parameters()}
    outside = (module for module in model.modules() if module is not end)
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
