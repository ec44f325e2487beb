# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The forward of one layer under its strategy: layout, inputs, local weights, recompute."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from galvatron_hf.models.adapter import HIDDEN, LayerInputs
from galvatron_hf.parallel.activation.documents import DocumentBounds
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, local_parameters
from galvatron_hf.plan.layout import Rectangle
from galvatron_hf.plan.resolved import ResolvedLayer


if TYPE_CHECKING:
    from galvatron_hf.parallel.layers.experts import ParallelExperts


# Graphs of one class of layers, of all strategies together; PyTorch's own limit of 8 is for one function and shape.
RECOMPILE_LIMIT = 64


class CurrentMicroBatch:
    """Holds the micro-batch that is computed now, in forward or recompute; one for each parallelised model. `location`
    names the part that computes, such as "layer 3", for reports of hanging ranks.
    """

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        self.value: MicroBatch | None = None
        self.location = "embedding"

    @contextlib.contextmanager
    def active(self, batch: MicroBatch) -> Iterator[None]:
        outer, self.value = self.value, batch
        try:
            yield
        finally:
            self.value = outer


@dataclass(kw_only=True)
class ParallelLayer:
    """Runs one layer under its strategy; replaces the layer's `forward`.

    Attributes:
        layer_type (`str`, *optional*): key of its mask, in families with several.
        inputs ([`LayerInputs`]): the tensors that it takes after the hidden states.
        views (`list[LocalParameter]`): local views of its parameters.
        current ([`CurrentMicroBatch`]): shared by all layers of the model.
        original (`Callable`): the family's `forward` of the layer.
        alone (`bool`): whether the plan has one stage.
    """

    resolved: ResolvedLayer
    layer: nn.Module
    layer_type: str | None
    inputs: LayerInputs
    mesh: StageMesh
    views: list[LocalParameter]
    current: CurrentMicroBatch
    original: Callable
    alone: bool = True

    def __post_init__(self):
        self.attended = False
        self.bounds: DocumentBounds | None = None
        self.experts: ParallelExperts | None = None  # set by who makes the layer, if it has experts
        self.name = f"layer {self.resolved.index}"
        self.signature = inspect.signature(self.original)
        self.hidden_name = next(iter(self.signature.parameters))
        self.layer.gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = self.current.value
        self._begin()
        bound = self.signature.bind_partial(*args, **kwargs)
        arguments = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        names = [name for name in self.inputs.states if name in arguments]
        state = LayerState.in_layout(
            self.resolved.source or batch.ends.embedding,
            {HIDDEN: arguments.pop(self.hidden_name), **{name: arguments.pop(name) for name in names}},
        ).redistribute(self.resolved.layout, grid=batch.grid, mesh=self.mesh)
        hidden = state.hidden
        arguments = self._inputs(batch, arguments, hidden.dtype) | {name: state.tensors[name] for name in names}
        if self.recomputes:
            # Random streams are keyed, so that recompute needs no saved state of the generator.
            output = checkpoint(self._compute, batch, hidden, arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            output = self._compute(batch, hidden, arguments)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._begin)
        return output

    @property
    def recomputes(self) -> bool:
        """Tells whether the forward that runs now is computed again for the backward, or is that again."""
        return self.resolved.strategy.recompute == "full" and torch.is_grad_enabled()

    def compile(self, **options: Any) -> None:
        """Compiles the family's forward of the layer by `torch.compile` with `options`; what the layer communicates
        before it, its masks, weights and recompute stay outside.
        """
        self.original = torch.compile(self.original, recompile_limit=RECOMPILE_LIMIT, **options)

    def _begin(self, gradient: torch.Tensor | None = None) -> None:
        self.current.location = self.name

    def rectangle(self, batch: MicroBatch) -> Rectangle:
        """Returns the rows and positions of this rank in this layer."""
        return batch.grid.rectangle(self.resolved.layout, self.mesh.index)

    def attention_rectangle(self, batch: MicroBatch) -> Rectangle:
        """Returns the rows and positions that enter the attention module, after Megatron-SP has gathered positions."""
        return batch.grid.rectangle(self.resolved.attention_layout, self.mesh.index)

    def pack(self, batch: MicroBatch) -> Rectangle:
        """Returns the packs of a packed row that this rank and the other sequence ranks attend to together."""
        return batch.grid.rectangle(self.resolved.pack_layout, self.mesh.index)

    def document_bounds(self) -> DocumentBounds | None:
        """Returns the bounds of the documents in attention, None for rows that are not packed; records the call."""
        self.attended = True
        return self.bounds

    def _compute(self, batch: MicroBatch, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        rectangle = self.rectangle(batch)
        key = (*batch.key, self.resolved.index, rectangle.row_start, rectangle.position_start)
        stream = random_stream(hidden.device, *key) if self.layer.training else contextlib.nullcontext()
        self.attended, self.bounds = False, None
        if batch.documents is not None:
            self.bounds = batch.documents.bounds_within(self.pack(batch))
            self.bounds.on(hidden.device)  # a compiled layer finds the copy
        self._forget()
        try:
            with self.current.active(batch), stream, local_parameters(self.views):
                output = self.original(hidden, **arguments)
        finally:
            self._forget()  # a recompute stops at the last tensor that the backward needs, by an exception
        if batch.documents is not None and not self.attended:
            raise ValueError(
                f"The attention of {type(self.layer).__name__} does not call the registered attention function, so "
                "packed documents would attend to each other; train with packing='none'."
            )
        if not isinstance(output, torch.Tensor) and not self.alone:
            raise ValueError(
                f"{type(self.layer).__name__} returns a {type(output).__name__}, and a model is cut into pipeline "
                "stages only between layers that return their hidden states; use one stage."
            )
        return output

    def _forget(self) -> None:
        if self.experts is not None:
            self.experts.forget()

    def dropout_stream(self):
        """Returns the stream of attention dropout: each rank drops the weights of its own rows (or pack) and heads."""
        batch = self.current.value
        packed = batch.documents is not None
        first = self.pack(batch).position_start if packed else self.attention_rectangle(batch).row_start
        heads = self.mesh.index % self.resolved.head_shards
        device = batch.input_ids.device
        return random_stream(device, *batch.key, self.resolved.index, first, heads, 1)

    def _inputs(self, batch: MicroBatch, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        rectangle = self.attention_rectangle(batch)
        prepared = {}
        for name, value in arguments.items():
            if name == "attention_mask":
                masks = batch.attention_masks(rectangle, self.current.config, dtype)
                value = masks[self.layer_type] if isinstance(masks, dict) else masks
            elif name in self.inputs.split_with_positions:
                whole = (value,) if isinstance(value, torch.Tensor) else value
                parts = tuple(_part(tensor, batch, rectangle, positions=True) for tensor in whole)
                value = parts[0] if isinstance(value, torch.Tensor) else parts
            elif name in self.inputs.whole_positions and isinstance(value, torch.Tensor):
                if batch.documents is not None:
                    value = _part(value, batch, self.pack(batch), positions=value.ndim > 1)
                else:
                    value = _part(value, batch, rectangle, positions=False)
            elif isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{type(self.layer).__name__} gets a tensor {name!r}, which its adapter has no layout for; leave "
                    "it out of the batch."
                )
            prepared[name] = value
        return prepared


def _part(tensor: torch.Tensor, batch: MicroBatch, rectangle: Rectangle, positions: bool) -> torch.Tensor:
    """Returns the rectangle's rows of [1 or B, S, ...], and if `positions` only its positions."""
    if tensor.shape[0] == batch.rows and batch.rows > 1:
        tensor = tensor[rectangle.row_start : rectangle.row_stop]
    return tensor[:, rectangle.position_start : rectangle.position_stop] if positions else tensor
