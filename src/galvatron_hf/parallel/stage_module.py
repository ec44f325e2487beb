# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One stage, of a pipeline or the only one: the family's own forward, from tokens or a received state to the head or
the next stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.adapter import HIDDEN, ModelAdapter, base_model, masks_by_type
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan.layout import Layout
from galvatron_hf.plan.resolved import ResolvedStage


class StageInput(nn.Module):
    """Replaces the layer before the first one of a stage: returns the received hidden states."""

    def __init__(self, enter: Callable[[], torch.Tensor]):
        super().__init__()
        self.enter = enter

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.enter()


class StageModule(nn.Module):
    """Runs a stage's layers inside the family's own base model; the root of the stage's FSDP2 units. Identities
    replace the layers of other stages, because a family may count its layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: ModelAdapter,
        mesh: StageMesh,
        current: CurrentMicroBatch,
        resolved: ResolvedStage,
    ):
        super().__init__()
        self.resolved, self.index = resolved, resolved.index
        self.is_first, self.is_last = resolved.is_first, resolved.is_last
        self.adapter, self.mesh, self.current = adapter, mesh, current
        self._model = (model,)  # in a tuple, so that it is no submodule
        self._received: LayerState | None = None
        alone, ends = self.is_first and self.is_last, []
        if self.is_first:
            ends += adapter.embeddings(model)
        if self.is_last:
            ends += [adapter.final_norm(model), adapter.head(model)]
        self.ends = nn.ModuleList([model] if alone else ends)
        whole = [base_model(model).get_submodule(stack.layers) for stack in adapter.stacks]
        self.stacks = nn.ModuleList(whole if alone else self._own_stacks(model, resolved.span))
        norm = adapter.final_norm(model)
        self.norm = getattr(norm.forward, "original", norm.forward)
        norm.forward = FinalNormHook(current, mesh, self.norm)

    def _own_stacks(self, model: PreTrainedModel, layers: range) -> list[nn.ModuleList]:
        """Makes the lists of layers of all stacks, with identities in the place of other stages' layers."""
        places = self.adapter.places(model)
        kept = self.adapter.layers(model)
        kept = [layer if index in layers else PipelineIdentityLayer() for index, layer in enumerate(kept)]
        if not self.is_first:
            kept[layers.start - 1] = StageInput(self._enter)
        of_stack = [[place.index for place in places if place.stack is stack] for stack in self.adapter.stacks]
        return [nn.ModuleList([kept[index] for index in indices]) for indices in of_stack]

    def forward(self, received: LayerState | None, request: HeadRequest | None):
        """Runs the current micro-batch from this rank's part of the received state, None at the first stage. Returns
        its part of the next state, or at the last stage the output of [`Head`] for `request`. That is None elsewhere,
        and where no output is wanted.
        """
        batch, states = self.current.value, self.states(received)
        if self.is_last and request is None:
            return None, None
        self.current.location = "head" if self.is_last else "exit"
        state = LayerState.in_layout(self.resolved.layers[-1].layout, {HIDDEN: states})
        state = self._move(state, batch.ends.head if self.is_last else batch.ends.boundary)
        if self.is_last:
            return self.adapter.head(self._model[0])(self.norm(state.hidden), request)
        # The other tensors have the layout of the boundary already, and go on to the next stage.
        passed = {} if received is None else received.tensors
        return LayerState.in_layout(batch.ends.boundary, {**passed, **state.tensors})

    def states(self, received: LayerState | None) -> torch.Tensor:
        """Returns the hidden states that the stage's last layer leaves of the current micro-batch, in its layout."""
        batch = self.current.value
        self.current.location = "embedding" if self.is_first else "entry"
        self._received = received
        inputs, positions = self._inputs(batch)
        device = batch.input_ids.device
        part = batch.grid.rectangle(batch.ends.embedding, self.mesh.index)
        stream = random_stream(device, *batch.key, -1, part.row_start, part.position_start)
        # The layers bring the masks of their own rows; a prepared mask keeps the family from making one.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        # The layers keep what the routers' loss needs; the family would keep the logits of all layers.
        has_experts = any(stack.experts is not None for stack in self.adapter.stacks)
        options = {"output_router_logits": False} if has_experts else {}
        with stream, self._own_layers():
            base_model(self._model[0])(
                **inputs,
                attention_mask=masks_by_type(self.current.config, mask),
                position_ids=positions,
                use_cache=False,
                **options,
            )
        return batch.final_hidden.pop()

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns the base model's tokens, or stand-ins for their embeddings, and the position ids."""
        part = batch.grid.rectangle(batch.ends.embedding, self.mesh.index)
        positions = batch.positions()
        if any(stack.positional for stack in self.adapter.stacks):
            rows = slice(part.row_start, part.row_stop) if positions.shape[0] > 1 else slice(None)
            positions = positions[rows, part.position_start : part.position_stop]
        if self._received is None:
            ids = batch.input_ids[part.row_start : part.row_stop, part.position_start : part.position_stop]
            return {"input_ids": ids}, positions
        # The first stage has applied what the family does to embeddings: here one zero stands for each token.
        return {"inputs_embeds": self._received.hidden.new_zeros(*part.shape, 1)}, positions

    def _enter(self) -> torch.Tensor:
        """Returns the received hidden states in the layout of the first layer."""
        received, self._received = self._received, None
        hidden = LayerState.in_layout(received.layouts[HIDDEN], {HIDDEN: received.hidden})
        return self._move(hidden, self.resolved.layers[0].layout).hidden

    def _move(self, state: LayerState, layout: Layout) -> LayerState:
        grid = self.current.value.grid
        return state.redistribute(layout, grid=grid, mesh=self.mesh)

    @contextlib.contextmanager
    def _own_layers(self) -> Iterator[None]:
        base, names = base_model(self._model[0]), [stack.layers for stack in self.adapter.stacks]
        whole = [base.get_submodule(name) for name in names]
        for name, layers in zip(names, self.stacks, strict=True):
            base.set_submodule(name, layers)
        try:
            yield
        finally:
            for name, layers in zip(names, whole, strict=True):
                base.set_submodule(name, layers)


class FinalNormHook:
    """Replaces the final norm's forward: keeps the hidden states, and returns a tensor without memory."""

    def __init__(self, current: CurrentMicroBatch, mesh: StageMesh, original: Callable):
        self.current, self.mesh, self.original = current, mesh, original

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        batch = self.current.value
        batch.final_hidden.append(hidden)
        part = batch.grid.rectangle(batch.ends.embedding, self.mesh.index)
        return torch.empty(*part.shape, hidden.shape[-1], device="meta")
