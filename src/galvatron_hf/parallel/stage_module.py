# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One stage, of a pipeline or the only one: the family's own forward of its stacks, from tokens or a received state to
the head or the next stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, base_model
from galvatron_hf.models.attention_masks import masks_by_type, prepared_mask
from galvatron_hf.models.slots import LayerSlot, StageEnd, StageInput, StageOutput
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch, HeadRows, MicroBatch
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.activation.token_move import move_tokens
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.parallel_layer import hidden_of
from galvatron_hf.parallel.layers.position_embeddings import count_from_own_position
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.plan.layout import Layout
from galvatron_hf.plan.resolved import ResolvedStage, StackPart


_HIDDEN = "hidden_states"  # the first argument of a layer


class _LastLayer(nn.Module):
    """Runs the last layer of a stack on this stage, and ends the stack's forward. A stack reads attributes of its
    layers.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args, **kwargs) -> None:
        raise StageEnd(hidden_of(self.layer(*args, **kwargs)))


@dataclass(kw_only=True)
class StackRun:
    """Runs the layers that a stage has of one stack.

    Attributes:
        layers (`nn.ModuleList`): what takes the place of the stack's list of layers.
        after (`tuple[nn.Module, ...]`): what the stack applies after its last layer.
        received (`torch.Tensor`, *optional*): the hidden states before the first layer, on their way there.
    """

    part: StackPart
    stack: StackAdapter
    layers: nn.ModuleList
    after: tuple[nn.Module, ...]
    received: torch.Tensor | None = None


class StageModule(nn.Module):
    """Runs a stage's layers inside the family's own stacks; the root of the stage's FSDP2 units. Identities replace
    the layers of other stages, because a family may count its layers.
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
        self.runs = tuple(self._run_of(model, part) for part in resolved.parts)
        for run in self.runs:
            if run.part.is_first and run.stack.tokens.positions is None:
                self._count_positions(run)
        if self.is_first and self.is_last:
            owned = [model]
        else:
            owned = adapter.embeddings(model, [part.stack for part in resolved.parts if part.is_first])
            owned += [adapter.layers(model)[index] for index in resolved.span]
            owned += [*adapter.final_norms(model), adapter.head(model)] if self.is_last else []
        self.owned = nn.ModuleList(owned)

    def _run_of(self, model: PreTrainedModel, part: StackPart) -> StackRun:
        stack = self.adapter.stack(part.stack)
        after = tuple(self.adapter.after_layers(model, stack))
        run = StackRun(part=part, stack=stack, layers=nn.ModuleList(), after=after)
        places = [place for place in self.adapter.places(model) if place.stack is stack]
        layers, span = self.adapter.layers(model), range(part.layers[0].index, part.layers[-1].index + 1)
        for place in places:
            if place.index == span[-1]:
                slot = _LastLayer(layers[place.index])
            elif place.index in span:
                slot = layers[place.index]
            elif place.index == span.start - 1:
                slot = StageInput(layers[place.index], _HIDDEN, stack.outputs, enter=lambda: self._enter(run))
            else:
                slot = LayerSlot(layers[place.index], _HIDDEN, stack.outputs)
            run.layers.append(slot)
        return run

    def _count_positions(self, run: StackRun) -> None:
        """Makes a stack that is given no positions count from this rank's first."""
        for name in run.stack.positional:
            count_from_own_position(
                base_model(self._model[0]).get_submodule(name),
                self.current,
                run.stack.name,
                lambda: self._embedding_rectangle(run, self.current.value),
            )

    def forward(
        self, received: LayerState | None, request: HeadRequest | None, inside: Callable[[], Any] | None = None
    ):
        """Runs the current micro-batch from this rank's part of the received state, None at the first stage. Returns
        its part of the next state, or at the last stage the output of [`Head`] for `request`. That is None elsewhere,
        and where no output is wanted. If the micro-batch has [`HeadRows`], the last stage returns its part of the
        head's input in these rows instead. Or returns what `inside` returns, while the stage's own weights are
        gathered.
        """
        if inside is not None:
            return inside()
        batch = self.current.value
        states = {} if received is None else dict(received.tensors)
        try:
            for run in self.runs:
                states[run.part.stack] = self._run(run, states, leaves=request is not None or not run.part.is_end)
        finally:
            batch.shared.clear()
        if not self.is_last:
            return LayerState.in_layout(batch.ends.boundary, {name: states[name] for name in self.resolved.sends})
        if request is None:
            return None, None
        if batch.head_rows is not None:
            return self._in_rows(states[self.runs[-1].part.stack], batch, batch.head_rows)
        if request.logits and not torch.is_grad_enabled():
            for stack in (run.stack for run in self.runs if run.stack.reads is not None):
                own = states[stack.reads][:, : batch.streams[stack.reads].real_length]
                batch.read[f"{stack.reads}_last_hidden_state"] = own
        self.current.location = "head"
        return self.adapter.head(self._model[0])(states[self.runs[-1].part.stack], request)

    def states(self, received: LayerState | None) -> torch.Tensor:
        """Returns the hidden states that the stage's last layer leaves of the current micro-batch, in its layout."""
        states, last = {} if received is None else dict(received.tensors), self.runs[-1]
        try:
            for run in self.runs:
                states[run.part.stack] = self._run(run, states, leaves=run is not last)
        finally:
            self.current.value.shared.clear()
        return states[last.part.stack]

    def embedded(self) -> torch.Tensor:
        """Returns the hidden states before the first layer of the stage's first stack."""
        run = self.runs[0]
        outputs = run.stack.outputs
        layers, run.layers = run.layers, nn.ModuleList([StageOutput(one, _HIDDEN, outputs) for one in run.layers])
        try:
            return self._run(run, {}, leaves=False)
        finally:
            run.layers = layers

    def _run(self, run: StackRun, states: dict[str, torch.Tensor], leaves: bool) -> torch.Tensor:
        """Runs one stack, from what it receives to its last layer on this stage. If hidden states leave the layers,
        they are the stack's output, or what goes on to the next stage, in the layout of the head's input or of the
        boundary.
        """
        batch, stack = self.current.value, run.stack
        self.current.location = "embedding" if run.part.is_first else "entry"
        run.received = states.get(stack.name)
        part = self._embedding_rectangle(run, batch)
        number = self.adapter.stacks.index(stack)
        module = base_model(self._model[0])
        module = module.get_submodule(stack.module) if stack.module else module
        stream = random_stream(batch.device, *batch.key, -1 - 2 * number, part.row_start, part.position_start)
        try:
            with stream, self._own_layers(run):
                module(**self._inputs(run, batch, states))
        except StageEnd as end:
            hidden = end.hidden
        return self._left(run, batch, hidden) if leaves else hidden

    def _left(self, run: StackRun, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Moves hidden states out of the last layer's layout, and applies what comes after the stack's last layer."""
        self.current.location = "head" if run.part.is_end else "exit"
        layout = batch.ends.head if run.part.is_end else batch.ends.boundary
        last = run.part.layers[-1]
        hidden = self._redistribute(run, hidden, last.layout, layout, source_context=last.strategy.context)
        if run.part.is_last and run.after:
            part = batch.streams[run.stack.name].grid.rectangle(layout, self.mesh.index)
            number = self.adapter.stacks.index(run.stack)
            with random_stream(batch.device, *batch.key, -2 - 2 * number, part.row_start, part.position_start):
                for module in run.after:
                    hidden = module(hidden)
        return hidden

    def _in_rows(self, hidden: torch.Tensor, batch: MicroBatch, rows: HeadRows) -> torch.Tensor:
        """Moves the head's input of a packed row to the padded rows: [own rows, S, H], zeros where there is no token
        of the micro-batch.
        """
        moved = move_tokens(
            hidden, batch.last.documents, rows.deal, src=batch.ends.head, dst=rows.layout, mesh=self.mesh
        )
        return moved.unflatten(1, (-1, rows.length))[0]

    def _embedding_rectangle(self, run: StackRun, batch: MicroBatch):
        return batch.streams[run.stack.name].grid.rectangle(batch.ends.embedding, self.mesh.index)

    def _inputs(self, run: StackRun, batch: MicroBatch, states: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Returns the arguments of a stack's forward."""
        stack, stream = run.stack, batch.streams[run.stack.name]
        mask = prepared_mask(batch.device)  # the layers bring the masks of their own rows
        inputs = {"attention_mask": masks_by_type(stack.config(self._model[0]), mask)}
        part = self._embedding_rectangle(run, batch)
        if run.part.is_first:
            inputs["input_ids"] = stream.input_ids[
                part.row_start : part.row_stop, part.position_start : part.position_stop
            ]
        else:
            # An earlier stage has applied what the family does to embeddings: here one zero stands for each token.
            inputs["inputs_embeds"] = states[stack.name].new_zeros(*part.shape, 1)
        if stack.tokens.positions is not None:
            positions = stream.positions()
            if stack.positional:
                rows = slice(part.row_start, part.row_stop) if positions.shape[0] > 1 else slice(None)
                positions = positions[rows, part.position_start : part.position_stop]
            inputs["position_ids"] = positions
        if stack.reads is not None:
            inputs |= {"encoder_hidden_states": states[stack.reads], "encoder_attention_mask": mask}
        if stack.causal:
            inputs["use_cache"] = False
        if any(one.experts is not None for one in self.adapter.stacks):
            # The layers keep what the routers' loss needs; the family would keep the logits of all layers.
            inputs["output_router_logits"] = False
        return inputs

    def _enter(self, run: StackRun) -> torch.Tensor:
        """Returns the received hidden states in the layout of the first layer."""
        received, run.received = run.received, None
        first = run.part.layers[0]
        boundary = self.current.value.ends.boundary
        return self._redistribute(run, received, boundary, first.layout, context=first.strategy.context)

    def _redistribute(
        self,
        run: StackRun,
        hidden: torch.Tensor,
        source: Layout,
        layout: Layout,
        *,
        source_context: int | None = None,
        context: int | None = None,
    ) -> torch.Tensor:
        """Moves hidden states between layouts, and between the deals of layers with other context degrees."""
        stream = self.current.value.streams[run.stack.name]
        given, wanted = stream.in_deal_of(source_context), stream.in_deal_of(context)
        if given is not wanted:
            return move_tokens(hidden, given.documents, wanted.documents, src=source, dst=layout, mesh=self.mesh)
        return redistribute(hidden, source, layout, grid=given.grid, mesh=self.mesh)

    @contextlib.contextmanager
    def _own_layers(self, run: StackRun) -> Iterator[None]:
        base = base_model(self._model[0])
        whole = base.get_submodule(run.stack.layers)
        base.set_submodule(run.stack.layers, run.layers)
        try:
            yield
        finally:
            base.set_submodule(run.stack.layers, whole)
