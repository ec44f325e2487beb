# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs layers and ends of a family on whole rows alone, between stand-ins inside the family's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.trial_run import bound_arguments
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, Part, tensors_of


@dataclass(kw_only=True)
class IsolatedRows(IsolatedLayers):
    """Holds the parts of one rank that has whole rows. Micro-batches are rows of equal length without a mask."""

    def micro_batch(self, tokens: int, length: int, ratio: float | None = None) -> MicroBatch:
        adapter = self.rank.stage.adapter
        ids = torch.zeros(tokens // length, length, dtype=torch.long, device=self.device)
        return self.rank.runner.micro_batch(ids, **adapter.loss.example(ids), whole_loss=False)

    def _capture(self, batch: MicroBatch) -> list[tuple[torch.Size, dict[str, Any]]]:
        """Returns the shape of the hidden states and the other arguments with which the family calls each layer."""
        captured: list[tuple[torch.Size, dict[str, Any]]] = []
        returns = self.rank.stage.structure.returns

        def keep(block: ParallelLayer, *args: Any, **kwargs: Any) -> torch.Tensor | tuple:
            hidden, others = bound_arguments(block.signature, args, kwargs)
            captured.append((hidden.shape, others))
            return hidden if returns is None else (hidden, *[None] * (returns - 1))

        with torch.no_grad(), self.rank.current.active(batch), self._forwards(keep):
            self.rank.stage.states(None)
        return captured

    def _layers(
        self, blocks: list[ParallelLayer], batch: MicroBatch, captured: list[tuple[torch.Size, dict[str, Any]]]
    ) -> Part:
        hidden = torch.randn(captured[0][0], device=self.device).to(self.dtype).requires_grad_()
        shared = tuple(value for _, others in captured for value in tensors_of(others.values()))

        def run() -> torch.Tensor:
            output = hidden
            for block, (_, others) in zip(blocks, captured, strict=True):
                with self.rank.current.active(batch):
                    output = block.layer(output, **others)
                output = output if isinstance(output, torch.Tensor) else output[0]
            return output

        return Part(run=run, input=hidden, modules=tuple(block.layer for block in blocks), shared=shared)

    def embedding(self, batch: MicroBatch) -> Part:
        rank, adapter = self.rank, self.rank.stage.adapter
        modules = [*adapter.embeddings(rank.model), *self._named(adapter.structure.before)]

        def run() -> torch.Tensor:
            with rank.current.active(batch):
                return rank.stage.embedded()

        return Part(run=run, input=None, modules=tuple(modules), shared=(batch.first.input_ids,))

    def head(self, batch: MicroBatch) -> Part:
        rank, adapter = self.rank, self.rank.stage.adapter
        hidden = self._states(batch.last.input_ids.shape)
        request = HeadRequest(targets=batch.targets if adapter.loss.of_rows else batch.targets.flatten())

        def run() -> torch.Tensor:
            with rank.current.active(batch):
                return rank.stage.after_layers(hidden, request)

        modules = [adapter.head(rank.model), *self._named(adapter.structure.after)]
        return Part(run=run, input=hidden, modules=tuple(modules), shared=(request.targets,))

    def _named(self, names: tuple[str, ...]) -> list[nn.Module]:
        return [self.rank.model.get_submodule(name) for name in names]


def isolated_layers(small: PreTrainedModel, strategy: LayerStrategy, vocabulary: int = 1, **options: Any):
    """Returns the parts of a model of [`one_of_each`] under a strategy; see [`IsolatedLayers.from_model`]."""
    kind = IsolatedLayers if adapter_for(small).structure is None else IsolatedRows
    return kind.from_model(small, strategy, vocabulary, **options)
