# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The forward of one layer under its strategy: layout, inputs, local weights, recompute."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from galvatron_hf.models.adapter import LayerInputs, StackAdapter
from galvatron_hf.parallel.activation.documents import DocumentBounds, HeldDocuments, held_documents
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch, MicroBatch, TokenStream
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.activation.token_move import move_tokens, positions_in
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, local_parameters
from galvatron_hf.plan.layout import Layout, Rectangle
from galvatron_hf.plan.resolved import ResolvedLayer
from galvatron_hf.utils.device import to_device


if TYPE_CHECKING:
    from galvatron_hf.parallel.layers.experts import ParallelExperts
    from galvatron_hf.parallel.layers.relative_bias import SharedBias


# Graphs of one class of layers, of all strategies together; PyTorch's own limit of 8 is for one function and shape.
RECOMPILE_LIMIT = 64


def hidden_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """Returns the hidden states of what a layer returns."""
    return output[0] if isinstance(output, tuple) else output


def layer_output(stack: StackAdapter, hidden: torch.Tensor) -> torch.Tensor | tuple:
    """Returns hidden states in the form in which a layer of a stack returns them."""
    return hidden if stack.outputs is None else (hidden, *[None] * (stack.outputs - 1))


@dataclass(kw_only=True)
class ParallelLayer:
    """Runs one layer under its strategy; replaces the layer's `forward`.

    Attributes:
        stack ([`StackAdapter`]): the layer's stack, and `config` its configuration.
        layer_type (`str`, *optional*): key of its mask, in families with several.
        views (`list[LocalParameter]`): local views of its parameters.
        current ([`CurrentMicroBatch`]): shared by all layers of the model.
        original (`Callable`): the family's `forward` of the layer.
        bias ([`SharedBias`], *optional*): makes the bias of its scores, if the stack has one.
        alone (`bool`): whether the plan has one stage.
        recompute (`str`): whether the forward runs again for the backward; as the strategy says, if no step differs.
    """

    resolved: ResolvedLayer
    layer: nn.Module
    stack: StackAdapter
    config: PreTrainedConfig
    layer_type: str | None
    mesh: StageMesh
    views: list[LocalParameter]
    current: CurrentMicroBatch
    original: Callable
    bias: SharedBias | None = None
    alone: bool = True

    def __post_init__(self):
        self.recompute = self.resolved.strategy.recompute
        self.attended = False
        self.bounds: DocumentBounds | HeldDocuments | None = None
        self.experts: ParallelExperts | None = None  # set by who makes the layer, if it has experts
        self.name = f"layer {self.resolved.index}"
        self.signature = inspect.signature(self.original)
        self.hidden_name = next(iter(self.signature.parameters))
        self.layer.gradient_checkpointing = False

    @property
    def inputs(self) -> LayerInputs:
        return self.stack.inputs

    def stream(self, batch: MicroBatch) -> TokenStream:
        """Returns the tokens of the layer's stack, in the order of its deal."""
        return batch.streams[self.stack.name].in_deal_of(self.resolved.strategy.context)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple:
        if self.current.whole_rows:
            with local_parameters(self.views):
                return self.original(*args, **kwargs)
        batch = self.current.value
        self._begin()
        bound = self.signature.bind_partial(*args, **kwargs)
        arguments = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        source = self.resolved.source or batch.ends.embedding
        hidden = self._moved(batch, arguments.pop(self.hidden_name), source)
        states = {name: arguments.pop(name) for name in self.inputs.states if name in arguments}
        arguments = self._inputs(batch, arguments, hidden.dtype)
        arguments |= {name: self._moved(batch, tensor, source) for name, tensor in states.items()}
        if self.recomputes:
            # Random streams are keyed, so that recompute needs no saved state of the generator.
            output = checkpoint(self._compute, batch, hidden, arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            output = self._compute(batch, hidden, arguments)
        hidden = hidden_of(output)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(self._begin)
        return output if self.stack.outputs is None else layer_output(self.stack, hidden)

    def _moved(self, batch: MicroBatch, tensor: torch.Tensor, source: Layout) -> torch.Tensor:
        if self.inputs.of_own_rows and self.resolved.source is None:
            tensor = self._with_added_positions(batch, tensor)
        given = batch.streams[self.stack.name].in_deal_of(self.resolved.source_context)
        own, layout = self.stream(batch), self.resolved.layout
        if given is not own:
            return move_tokens(tensor, given.documents, own.documents, src=source, dst=layout, mesh=self.mesh)
        return redistribute(tensor, source, layout, grid=own.grid, mesh=self.mesh)

    def _in_own_order(self, batch: MicroBatch, tensor: torch.Tensor) -> torch.Tensor:
        """Returns [1, S, ...] of all tokens of a packed row in the order of the layer's deal."""
        given, own = batch.streams[self.stack.name], self.stream(batch)
        if given is own or tensor.ndim < 2 or tensor.shape[1] != given.length:
            return tensor
        key = "order", id(tensor), self.resolved.strategy.context
        if key not in batch.shared:
            order = torch.from_numpy(positions_in(given.documents, own.documents).clip(min=0))
            # The tensor is kept, so that no other one has its id.
            batch.shared[key] = tensor, tensor.index_select(1, to_device(order, tensor.device))
        return batch.shared[key][1]

    def _with_added_positions(self, batch: MicroBatch, tensor: torch.Tensor) -> torch.Tensor:
        """Lengthens [B, S, ...] by the positions that layouts need, which repeat the last one."""
        stream = self.stream(batch)
        added = stream.length - stream.real_length
        if not added or tensor.shape[1] != stream.real_length:
            return tensor
        return torch.cat([tensor, tensor[:, -1:].expand(-1, added, *tensor.shape[2:])], dim=1)

    def _of_attended_rows(self, batch: MicroBatch, tensor: torch.Tensor) -> torch.Tensor:
        """Returns [1, S, ...] for all rows as it is, and [own rows, S, ...] for the rows of this layer's attention.
        Without position ids a stack makes one row for all, see [`~galvatron_hf.models.layer_arguments`]. Those of a
        rank's packs [1, own T, ...] become those of all packs, which the layers share.
        """
        stream = self.stream(batch)
        if stream.documents is not None:
            key = "positions", id(tensor)
            if key not in batch.shared:
                # The tensor is kept, so that no other one has its id.
                batch.shared[key] = tensor, self._of_rows(batch, tensor, Layout(data=1, replicas=self.mesh.size))
            return batch.shared[key][1]
        tensor = self._with_added_positions(batch, tensor)
        if tensor.shape[0] == 1 and stream.position_ids is None:
            return tensor
        data = self.resolved.attention_layout.data
        return self._of_rows(batch, tensor, Layout(data=data, replicas=self.mesh.size // data))

    def _of_rows(self, batch: MicroBatch, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return redistribute(tensor, batch.ends.embedding, layout, grid=self.stream(batch).grid, mesh=self.mesh)

    def _read(self, batch: MicroBatch, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the output of the stack that the layer reads, in a layout that layers share."""
        name, layout = self.stack.reads, self.resolved.layout
        if (name, layout) not in batch.shared:
            batch.shared[name, layout] = redistribute(
                tensor, batch.ends.boundary, layout, grid=batch.streams[name].grid, mesh=self.mesh
            )
        return batch.shared[name, layout]

    @property
    def recomputes(self) -> bool:
        """Tells whether the forward that runs now is computed again for the backward, or is that again."""
        return self.recompute == "full" and torch.is_grad_enabled()

    def compile(self, **options: Any) -> None:
        """Compiles the family's forward of the layer by `torch.compile` with `options`; what the layer communicates
        before it, its masks, weights and recompute stay outside.
        """
        self.original = torch.compile(self.original, recompile_limit=RECOMPILE_LIMIT, **options)

    def _begin(self, gradient: torch.Tensor | None = None) -> None:
        self.current.location = self.name

    def rectangle(self, batch: MicroBatch) -> Rectangle:
        """Returns the rows and positions of this rank in this layer."""
        return self.stream(batch).grid.rectangle(self.resolved.layout, self.mesh.index)

    def attention_rectangle(self, batch: MicroBatch) -> Rectangle:
        """Returns the rows and positions that enter the attention module, after Megatron-SP has gathered positions."""
        return self.stream(batch).grid.rectangle(self.resolved.attention_layout, self.mesh.index)

    def pack(self, batch: MicroBatch) -> Rectangle:
        """Returns the packs of a packed row that this rank and the other sequence ranks attend to together."""
        return self.stream(batch).grid.rectangle(self.resolved.pack_layout, self.mesh.index)

    def document_bounds(self) -> DocumentBounds | HeldDocuments | None:
        """Returns the documents of the rank in attention, None for rows that are not packed; records the call."""
        self.attended = True
        return self.bounds

    def kept_rings(self) -> dict | None:
        """Returns where the layer keeps the output of attention in rings for its recompute; None if it does not."""
        if not (self.current.keeps_rings and self.recomputes):
            return None
        return self.current.value.attended.setdefault(self.resolved.index, {})

    def read_bounds(self) -> DocumentBounds | None:
        """Returns the bounds of the documents of the stack that the layer reads, in attention."""
        batch = self.current.value
        read = batch.streams[self.stack.reads]
        if read.documents is None:
            return None
        return self._held(read)

    def longest(self, batch: MicroBatch) -> int:
        """Returns the positions that attend to each other: of a row, or of the longest document of a packed row."""
        stream = self.stream(batch)
        return stream.length if stream.documents is None else self._held(stream).longest

    def _held(self, stream: TokenStream) -> DocumentBounds | HeldDocuments:
        """Returns what the rank has of the documents of a packed row."""
        layout = self.resolved.pack_layout
        return held_documents(stream.documents, layout.data, self.mesh.index // layout.replicas)

    def _compute(self, batch: MicroBatch, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        rectangle = self.rectangle(batch)
        key = (*batch.key, self.resolved.index, rectangle.row_start, rectangle.position_start)
        stream = random_stream(hidden.device, *key) if self.layer.training else contextlib.nullcontext()
        self.attended, self.bounds, documents = False, None, self.stream(batch).documents
        if documents is not None:
            self.bounds = self._held(self.stream(batch))
            self.bounds.on(hidden.device)  # a compiled layer finds the copy
        self._forget()
        try:
            with self.current.active(batch), stream, local_parameters(self.views):
                output = self.original(hidden, **arguments)
        finally:
            self._forget()  # a recompute stops at the last tensor that the backward needs, by an exception
        if not self.attended and self.resolved.strategy.ulysses > 1:
            raise ValueError(
                f"The attention of {type(self.layer).__name__} does not call the registered attention function, so "
                "its heads cannot be exchanged for positions; use ulysses 1."
            )
        if documents is not None and not self.attended:
            raise ValueError(
                f"The attention of {type(self.layer).__name__} does not call the registered attention function, so "
                "packed documents would attend to each other; train with packing='none'."
            )
        if not isinstance(output, torch.Tensor) and not self.alone and self.stack.outputs is None:
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
        packed = self.stream(batch).documents is not None
        first = self.pack(batch).position_start if packed else self.attention_rectangle(batch).row_start
        heads = self.mesh.index % self.resolved.head_shards
        return random_stream(batch.device, *batch.key, self.resolved.index, first, heads, 1)

    def inner_stream(self, number: int):
        """Returns a stream for a dropout of cut features: each rank drops those of its own tokens and channels."""
        batch, index = self.current.value, self.mesh.index
        part = self.attention_rectangle(batch)
        shard = index % self.resolved.strategy.tensor
        key = (self.resolved.index, part.row_start, part.position_start, shard, number)
        return random_stream(batch.device, *batch.key, *key)

    def _inputs(self, batch: MicroBatch, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        rectangle, stream, inputs = self.attention_rectangle(batch), self.stream(batch), self.inputs
        prepared = {}
        for name, value in arguments.items():
            if name == inputs.mask:
                masks = stream.attention_masks(rectangle, self.config, dtype)
                value = masks[self.layer_type] if isinstance(masks, dict) else masks
            elif name == inputs.read:
                value = self._read(batch, value)
            elif name == inputs.read_mask:
                read = batch.streams[self.stack.reads]
                value = read.masks_for_readers(stream.length, rectangle, self.config, dtype)
            elif name == inputs.bias:
                value = self.bias.of_heads(batch, self)
            elif name == inputs.no_bias:
                value = torch.zeros(1, 1, 1, 1, dtype=dtype, device=batch.device)
            elif name in inputs.split_with_positions:
                whole = (value,) if isinstance(value, torch.Tensor) else value
                whole = tuple(self._in_own_order(batch, tensor) for tensor in whole)
                if inputs.of_own_rows:
                    whole = tuple(self._of_attended_rows(batch, tensor) for tensor in whole)
                parts = tuple(_part(tensor, stream, rectangle, positions=True) for tensor in whole)
                value = parts[0] if isinstance(value, torch.Tensor) else parts
            elif name in inputs.whole_positions and isinstance(value, torch.Tensor):
                value = self._in_own_order(batch, value)
                if inputs.of_own_rows and value.ndim > 1:
                    value = self._of_attended_rows(batch, value)
                if stream.documents is not None:
                    value = _part(value, stream, self.pack(batch), positions=value.ndim > 1)
                else:
                    value = _part(value, stream, rectangle, positions=False)
            elif isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{type(self.layer).__name__} gets a tensor {name!r}, which its adapter has no layout for; leave "
                    "it out of the batch."
                )
            prepared[name] = value
        return prepared


def draw_inner_dropout(block: ParallelLayer) -> None:
    """Takes the dropout of cut features out of a layer: each tensor rank drops its own, from a stream of its own."""
    for index, (name, attribute) in enumerate(block.stack.inner_dropout.items()):
        owner_name, _, last = attribute.rpartition(".")
        owner, module = block.layer.get_submodule(owner_name), block.layer.get_submodule(name)
        probability = getattr(owner, last)
        setattr(owner, last, 0.0)
        if probability > 0.0:
            module.register_forward_pre_hook(_Dropout(block, 2 + index, probability))


@dataclass(frozen=True)
class _Dropout:
    """Drops entries of a module's input, as a hook before its forward."""

    block: ParallelLayer
    stream: int
    probability: float

    @torch.compiler.disable(reason="a keyed random stream sets the state of a generator")
    def __call__(self, module: nn.Module, inputs: tuple) -> tuple:
        if not module.training:
            return inputs
        with self.block.inner_stream(self.stream):
            return (F.dropout(inputs[0], self.probability), *inputs[1:])


def _part(tensor: torch.Tensor, stream: TokenStream, rectangle: Rectangle, positions: bool) -> torch.Tensor:
    """Returns the rectangle's rows of [1 or B, S, ...], and if `positions` only its positions."""
    if tensor.shape[0] == stream.rows and stream.rows > 1:
        tensor = tensor[rectangle.row_start : rectangle.row_stop]
    return tensor[:, rectangle.position_start : rectangle.position_stop] if positions else tensor
