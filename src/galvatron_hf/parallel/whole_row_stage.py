# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One stage of a family that runs on whole rows: the family's own forward on the rank's rows of the micro-batch, from
token ids to logits. Where a stage begins or ends inside it, modules that take the places of others say so. Hidden
states go to the layouts of the layers and come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.losses import logits_of
from galvatron_hf.models.packing import mask_of_packed_row
from galvatron_hf.models.slots import (
    HeadSlot,
    LayerSlot,
    MissingModule,
    StageEnd,
    StageInput,
    StageOutput,
    absent,
)
from galvatron_hf.models.structure import Structure
from galvatron_hf.models.trial_run import forward_options
from galvatron_hf.models.whole_rows import WholeRowAdapter
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch, MicroBatch
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.parallel_layer import hidden_of
from galvatron_hf.parallel.layers.rng import numpy_stream, random_stream
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan.layout import Layout
from galvatron_hf.plan.resolved import ResolvedStage


class _LastLayer(LayerSlot):
    """Runs the last layer of a model, and passes its hidden states through `leave`."""

    def __init__(self, layer: nn.Module, first: str, returns: int | None, leave: Callable):
        super().__init__(layer, first, returns)
        self.layer, self.leave = layer, leave

    def forward(self, *args, **kwargs):
        return self._returned(self.leave(hidden_of(self.layer(*args, **kwargs))))


class WholeRowStage(nn.Module):
    """Runs a stage's layers inside the family's own forward; the root of the stage's FSDP2 units. It has the interface
    of [`StageModule`].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: WholeRowAdapter,
        mesh: StageMesh,
        current: CurrentMicroBatch,
        resolved: ResolvedStage,
    ):
        super().__init__()
        self.resolved, self.index = resolved, resolved.index
        self.is_first, self.is_last = resolved.is_first, resolved.is_last
        self.adapter, self.mesh, self.current = adapter, mesh, current
        self.structure, self.family = adapter.structure, type(model)
        self._model = (model,)  # in a tuple, so that it is no submodule
        self._received: torch.Tensor | None = None
        (self.stack,) = adapter.stacks
        self.options = forward_options(self.family)
        self.head_name = self.structure.head
        self._head_slot = (HeadSlot(adapter.head(model)),)
        self._absent = {} if self.is_first else self._without_embedding(model)
        self.layers = nn.ModuleList(self._own_layers(model))
        self.ends = nn.ModuleList([model] if self.is_first and self.is_last else self._own_ends(model))

    def _without_embedding(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """Returns what takes the places of the modules before the first layer."""
        return {name: absent(model.get_submodule(name)) for name in self.structure.before}

    def _own_layers(self, model: PreTrainedModel) -> list[nn.Module]:
        """Returns the list of layers, in which others take the places of those of other stages."""
        whole, span = model.get_submodule(self.structure.layers), self.resolved.span
        own = [layer if index in span else LayerSlot(layer, *self._form) for index, layer in enumerate(whole)]
        if not self.is_first:
            own[span.start - 1] = StageInput(whole[span.start - 1], *self._form, enter=self._enter)
        if not self.is_last:
            own[span.stop] = StageOutput(whole[span.stop], *self._form)
        elif self.stack.cut:
            own[-1] = _LastLayer(own[-1], *self._form, leave=self._leave)
        return own

    def _own_ends(self, model: PreTrainedModel) -> list[nn.Module]:
        names = (*self.structure.before, *self.structure.unused) if self.is_first else ()
        names += (*self.structure.after, self.head_name) if self.is_last else ()
        return [model.get_submodule(name) for name in names]

    def forward(
        self, received: LayerState | None, request: HeadRequest | None, inside: Callable[[], Any] | None = None
    ):
        """Runs the current micro-batch from this rank's part of the received state, None at the first stage. Returns
        its part of the next state, or at the last stage the sum of losses and the logits for `request`; None for each
        that is not wanted. Or returns what `inside` returns, while the stage's own weights are gathered.
        """
        if inside is not None:
            return inside()
        batch = self.current.value
        if batch.last.documents is not None and not self.stack.cut:
            raise ValueError(
                f"The attention of {self.family.__name__} does not call the registered attention function, so packed "
                "documents would attend to each other; train with packing='none'."
            )
        stops = request is None or self.adapter.fused_head
        result = self.states(received, stops_at_head=stops)
        if self.is_last and request is None:
            return None, None
        if self.is_last and not stops:
            loss = self.adapter.loss
            rows = None if request.targets is None else len(request.targets)
            logits = result[:rows] if loss.of_rows else result
            summed = None if rows is None else loss.sum_of_logits(logits, request.targets, request.label_smoothing)
            return summed, result if request.logits else None
        if not self.is_last:
            self.current.location = "exit"
            hidden = self._move(result, self.resolved.layers[-1].layout, batch.ends.boundary)
            return LayerState.in_layout(batch.ends.boundary, {self.stack.name: hidden})
        self.current.location = "head"
        return self.adapter.head(self._model[0])(result, request)

    def embedded(self) -> torch.Tensor:
        """Returns the hidden states before the first layer."""
        first, *others = self.layers
        with self._with_layers([StageOutput(first, *self._form), *others]):
            return self.states(None)

    def after_layers(self, hidden: torch.Tensor, request: HeadRequest) -> torch.Tensor:
        """Returns what a stage with all layers returns for `hidden`, the output of the last one."""
        *others, last = self.layers
        layers = [*(LayerSlot(layer, *self._form) for layer in others), StageInput(last, *self._form, lambda: hidden)]
        self._absent = self._without_embedding(self._model[0])
        try:
            with self._with_layers(layers):
                return self(None, request)[0]
        finally:
            self._absent = {}

    @property
    def _form(self) -> tuple[str, int | None]:
        """Returns the arguments of [`LayerSlot`]."""
        return self.structure.first, self.structure.returns

    @contextlib.contextmanager
    def _with_layers(self, layers: list[nn.Module]) -> Iterator[None]:
        """Lets others take the places of the stage's layers while the body runs."""
        own, self.layers = self.layers, nn.ModuleList(layers)
        try:
            yield
        finally:
            self.layers = own

    def states(self, received: LayerState | None, stops_at_head: bool = True) -> torch.Tensor:
        """Returns the hidden states after the stage's last layer, at the last stage the input of the head or, unless
        it `stops_at_head`, the logits that the family returns.
        """
        batch = self.current.value
        self.current.location = "embedding" if self.is_first else "entry"
        self._received = None if received is None else received.tensors[self.stack.name]
        part = batch.last.grid.rectangle(batch.ends.embedding, self.mesh.index)
        key = (*batch.key, -1, part.row_start, part.position_start)
        # Families of audio draw masks of positions from NumPy's generator.
        numbers = numpy_stream(*key) if self.structure.audio else contextlib.nullcontext()
        with random_stream(batch.device, *key), numbers, self._in_place(stops_at_head):
            try:
                output = self.family.forward(self._model[0], **self._inputs(batch), **self.options)
            except StageEnd as end:
                return end.hidden
            finally:
                batch.shared.clear()
        return logits_of(output)

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Returns the rank's rows of what the caller gave, or its packs of a packed row."""
        tokens = batch.last
        part = tokens.grid.rectangle(batch.ends.embedding, self.mesh.index)
        given = dict(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, position_ids=tokens.position_ids
        )
        found = given if self.structure.takes_tokens else {}
        found = {name: value for name, value in (found | tokens.others).items() if value is not None}
        rows = slice(part.row_start, part.row_stop)
        positions = slice(part.position_start, min(part.position_stop, tokens.real_length))
        whole = (tokens.length,)
        own = {name: x[rows, positions] if x.shape[1:2] == whole else x[rows] for name, x in found.items()}
        if tokens.documents is not None:
            config = self.stack.config(self._model[0])
            own["attention_mask"] = mask_of_packed_row(config, self.stack.causal, batch.device)
        return own

    def _enter(self) -> torch.Tensor:
        """Returns the received hidden states in the layout of the layers."""
        received, self._received = self._received, None
        return self._move(received, self.current.value.ends.boundary, self.resolved.layers[0].layout)

    def _leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output of the last layer as whole rows, without added positions."""
        batch = self.current.value
        self.current.location = "head"
        hidden = self._move(hidden, self.resolved.layers[-1].layout, batch.ends.head)
        return hidden[:, : batch.last.real_length]

    def _move(self, hidden: torch.Tensor, source: Layout, layout: Layout) -> torch.Tensor:
        return redistribute(hidden, source, layout, grid=self.current.value.last.grid, mesh=self.mesh)

    @contextlib.contextmanager
    def _in_place(self, stops_at_head: bool) -> Iterator[None]:
        """Puts this stage's modules into the model, and switches caches off, while the body runs."""
        model = self._model[0]
        caches = getattr(model.config, "use_cache", False)
        own: dict[str, nn.Module] = {self.structure.layers: self.layers, **self._absent}
        if self.is_last and stops_at_head:
            own[self.head_name] = self._head_slot[0]
        before = {name: model.get_submodule(name) for name in own}
        _put(model, own)
        if caches:  # a forward without the option asks the configuration, and recompute would fill the cache twice
            model.config.use_cache = False
        try:
            yield
        finally:
            _put(model, before)
            if caches:
                model.config.use_cache = True


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        model.set_submodule(name, module)


def prune_whole_rows(model: PreTrainedModel, structure: Structure, own: Sequence[ResolvedStage]) -> None:
    """Keeps the modules of this rank's stages, under their names, and replaces all others."""
    kept = {index for stage in own for index in stage.span}
    for index, layer in enumerate(model.get_submodule(structure.layers)):
        if index not in kept:
            slot = LayerSlot(layer, structure.first, structure.returns)
            model.set_submodule(f"{structure.layers}.{index}", slot)
    gone: list[str] = []
    if not any(stage.is_first for stage in own):
        gone += (*structure.before, *structure.unused)
    if not any(stage.is_last for stage in own):
        gone += (*structure.after, structure.head)
    elsewhere = [name for name in (*structure.after, structure.head, structure.layers) if name not in gone]
    for name in gone:
        module = model.get_submodule(name)
        inside = [other for other in (*elsewhere, *structure.unused) if other.startswith(f"{name}.")]
        if next(module.children(), None) is None or (name in structure.before and not inside):
            model.set_submodule(name, absent(module) if name in structure.before else MissingModule())
        else:  # its children have their own names
            for weight, _ in list(module.named_parameters(recurse=False)):
                setattr(module, weight, None)
