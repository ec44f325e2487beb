# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs layers and ends of a family on whole rows alone, between stand-ins inside the family's own forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.input_names import IMAGES
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, Part


@dataclass(kw_only=True)
class IsolatedRows(IsolatedLayers):
    """Holds the parts of one rank that has whole rows. Micro-batches are rows of equal length without a mask."""

    def __post_init__(self):
        # Layers are run alone: their micro-batches need no row for each rank.
        self.rank.runner.resolved = replace(self.rank.resolved, whole_rows=False)

    def micro_batch(self, tokens: int, length: int, ratio: float | None = None) -> MicroBatch:
        adapter = self.rank.stage.adapter
        ids = torch.zeros(tokens // length, length, dtype=torch.long, device=self.device)
        batch = batch_of_rows(adapter, ids, self.dtype) | {"input_ids": ids}
        return self.rank.runner.micro_batch(**batch, whole_loss=False)

    def embedding(self, batch: MicroBatch) -> Part:
        rank, adapter = self.rank, self.rank.stage.adapter
        modules = [*adapter.embeddings(rank.model), *self._named(adapter.structure.before)]

        def run() -> torch.Tensor:
            with rank.current.active(batch):
                return rank.stage.embedded()

        return Part(run=run, input=None, modules=tuple(modules), shared=(batch.first.input_ids,))

    def head(self, batch: MicroBatch) -> Part:
        rank, adapter = self.rank, self.rank.stage.adapter
        own = batch.last.grid.rectangle(batch.ends.head, 0)
        hidden, targets = self._states(own.shape), batch.targets[: own.row_stop]
        request = HeadRequest(targets=targets if adapter.loss.of_rows else targets.flatten())

        def run() -> torch.Tensor:
            with rank.current.active(batch):
                return rank.stage.after_layers(hidden, request)

        modules = [adapter.head(rank.model), *self._named(adapter.structure.after)]
        return Part(run=run, input=hidden, modules=tuple(modules), shared=(request.targets,))

    def _named(self, names: tuple[str, ...]) -> list[nn.Module]:
        return [self.rank.model.get_submodule(name) for name in names]


def batch_of_rows(adapter: ModelAdapter, ids: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns rows of tokens [B, S], or as many images, with labels; the values of images and labels do not matter."""
    labels, structure = adapter.loss.example(ids), adapter.structure
    if structure is None or structure.images is None:
        return {"input_ids": ids, **labels}
    return {IMAGES: torch.zeros(len(ids), *structure.images, dtype=dtype, device=ids.device), **labels}


def isolated_layers(small: PreTrainedModel, strategy: LayerStrategy, vocabulary: int = 1, **options: Any):
    """Returns the parts of a model of [`one_of_each`] under a strategy; see [`IsolatedLayers.from_model`]."""
    kind = IsolatedLayers if adapter_for(small).structure is None else IsolatedRows
    return kind.from_model(small, strategy, vocabulary, **options)
