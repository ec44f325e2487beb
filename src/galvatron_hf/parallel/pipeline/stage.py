# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One stage's part of a model: the family's own forward, from tokens or the stage before to the head or the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.adapter import DecoderAdapter
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan.layout import Layout


class MissingModule(nn.Module):
    """Stands for a module that another stage has; what it returns changes no sum."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return torch.zeros(())


class StageInput(nn.Module):
    """Stands for the layer before a stage's first: lets in what was received."""

    def __init__(self, take: Callable[[], torch.Tensor]):
        super().__init__()
        self.take = take

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.take()


class StageModule(nn.Module):
    """A stage's layers inside the family's own base model, and the root of the stage's FSDP2 units.

    The base model's list of layers keeps its length, so that a family that counts its layers counts right; in place of
    other stages' layers stand identities. The micro-batch is the current one.

    Args:
        model ([`PreTrainedModel`]): the model, with the modules of this rank's stages.
        adapter ([`DecoderAdapter`]): its family.
        mesh ([`StageMesh`]): the ranks.
        current ([`CurrentMicroBatch`]): shared with the blocks.
        index (`int`): of the stage.
        layers (`range`): global indices of its layers.
        is_first, is_last (`bool`): whether it has the embedding, and the head.
        layouts (`tuple[Layout, Layout]`): those of its first and its last layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: DecoderAdapter,
        mesh: StageMesh,
        current: CurrentMicroBatch,
        *,
        index: int,
        layers: range,
        is_first: bool,
        is_last: bool,
        layouts: tuple[Layout, Layout],
    ):
        super().__init__()
        self.index, self.is_first, self.is_last, self.layouts = index, is_first, is_last, layouts
        self.adapter, self.mesh, self.current = adapter, mesh, current
        self._model = (model,)  # seen here, owned elsewhere
        self._received: torch.Tensor | None = None
        base = model.base_model
        whole = base.get_submodule(adapter.layers)
        ends = [base.get_submodule(name) for name in adapter.positional] if is_first else []
        ends += [model.get_input_embeddings()] if is_first else []
        ends += [base.get_submodule(adapter.final_norm), model.get_output_embeddings()] if is_last else []
        alone = is_first and is_last
        self.ends = nn.ModuleList([model] if alone else ends)
        places = [whole[place] if place in layers else PipelineIdentityLayer() for place in range(len(whole))]
        if not is_first:
            places[layers.start - 1] = StageInput(self._enter)
        self.layers = whole if alone else nn.ModuleList(places)
        norm = base.get_submodule(adapter.final_norm)
        self.norm = getattr(norm.forward, "original", norm.forward)
        norm.forward = FinalNormHook(current, mesh, self.norm)

    def forward(self, received: torch.Tensor | None, request: HeadRequest | None):
        """Runs the current micro-batch.

        Args:
            received (`torch.Tensor`, *optional*): hidden states at the boundary, this rank's part; None at the first
                stage.
            request ([`HeadRequest`], *optional*): what is wanted of the head; None but at the last stage.

        Returns:
            `torch.Tensor`: hidden states at the boundary behind, or `tuple`: what [`Head`] returns.
        """
        batch, states = self.current.value, self.states(received)
        self.current.place = "head" if self.is_last else "exit"
        hidden = redistribute(
            states,
            self.layouts[1],
            batch.head if self.is_last else batch.boundary,
            grid=batch.grid,
            index=self.mesh.index,
            groups=self.mesh.groups,
        )
        if not self.is_last:
            return hidden
        return self._model[0].get_output_embeddings()(self.norm(hidden), request)

    def states(self, received: torch.Tensor | None) -> torch.Tensor:
        """What the stage's last layer leaves of the current micro-batch, in that layer's layout."""
        batch = self.current.value
        self.current.place = "embedding" if self.is_first else "entry"
        self._received = received
        inputs, positions = self._inputs(batch, received)
        device = batch.input_ids.device
        part = batch.grid.rectangle(batch.embedding, self.mesh.index)
        stream = random_stream(device, *batch.key, -1, part.row_start, part.position_start)
        with stream, self._own_layers():
            self._model[0].base_model(
                **inputs,
                # The blocks bring the masks of their own rows; a prepared mask keeps the family from making one.
                attention_mask=self._prepared_mask(device),
                position_ids=positions,
                use_cache=False,
            )
        return batch.final_hidden.pop()

    def _inputs(
        self, batch: MicroBatch, received: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        part = batch.grid.rectangle(batch.embedding, self.mesh.index)
        positions = batch.positions()
        if self.adapter.positional:
            rows = slice(part.row_start, part.row_stop) if positions.shape[0] > 1 else slice(None)
            positions = positions[rows, part.position_start : part.position_stop]
        if received is None:
            ids = batch.input_ids[part.row_start : part.row_stop, part.position_start : part.position_stop]
            return {"input_ids": ids}, positions
        # What the family makes of embeddings was made in the first stage: here one zero stands for each token.
        return {"inputs_embeds": received.new_zeros(*part.shape, 1)}, positions

    def _enter(self) -> torch.Tensor:
        batch = self.current.value
        received, self._received = self._received, None
        return redistribute(
            received,
            batch.boundary,
            self.layouts[0],
            grid=batch.grid,
            index=self.mesh.index,
            groups=self.mesh.groups,
        )

    @contextlib.contextmanager
    def _own_layers(self) -> Iterator[None]:
        base, name = self._model[0].base_model, self.adapter.layers
        whole = getattr(base, name)
        setattr(base, name, self.layers)
        try:
            yield
        finally:
            setattr(base, name, whole)

    def _prepared_mask(self, device: torch.device):
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        types = getattr(self.current.config, "layer_types", None)
        return mask if types is None else dict.fromkeys(types, mask)


class FinalNormHook:
    """Stands where the final norm stood: keeps the hidden states, and returns a shape for the family to handle."""

    def __init__(self, current: CurrentMicroBatch, mesh: StageMesh, original: Callable):
        self.current, self.mesh, self.original = current, mesh, original

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        batch = self.current.value
        batch.final_hidden.append(hidden)
        part = batch.grid.rectangle(batch.embedding, self.mesh.index)
        return torch.empty(*part.shape, hidden.shape[-1], device="meta")
