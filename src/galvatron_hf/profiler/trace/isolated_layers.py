# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs each distinct layer and each end of a model alone, as one rank of the runtime runs it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.trial_run import bound_arguments
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer, layer_output
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.parallel.single_rank import SingleRank, single_rank
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.deal import Deal
from galvatron_hf.utils.compat import without_forward_pre_hooks


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs one layer, the embedding, or the head with the loss. `input` are its hidden states, a leaf; None for the
    embedding. `run` uses the weights of `modules`, and inputs (`shared`) that all parts of the micro-batch share.
    """

    run: Callable[[], torch.Tensor]
    input: torch.Tensor | None
    modules: tuple[nn.Module, ...]
    shared: tuple[torch.Tensor, ...] = ()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def forget_gradients(self) -> None:
        for leaf in (*self.parameters(), *self.shared, *(() if self.input is None else (self.input,))):
            leaf.grad = None


@dataclass(kw_only=True)
class IsolatedLayers:
    """Holds the parts of one rank under one strategy. Hidden states have format `dtype`. Micro-batches are documents
    in one row if `packed`, else rows of equal length without a mask. `copies` layers of each kind run as one part. A
    row has `length_ratio` tokens in the last of two stacks for each in the first.
    """

    rank: SingleRank
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    packed: bool = True
    copies: int = 1
    length_ratio: float = 1.0

    @classmethod
    def from_model(
        cls,
        small: PreTrainedModel,
        strategy: LayerStrategy,
        vocabulary: int = 1,
        packed: bool = True,
        copies: int = 1,
        length_ratio: float = 1.0,
    ) -> IsolatedLayers:
        """Cuts a copy of a model of [`one_of_each`]; the copy stays on the meta device. All layers have `strategy`,
        dense ones with expert degree 1, and `vocabulary` is the tensor degree of embedding and head. The stage has
        max(tensor * ulysses, expert, vocabulary) ranks. Raises `ValueError` if the strategy does not fit the model.
        """
        ranks = max(strategy.tensor * strategy.ulysses, strategy.expert, vocabulary)
        ends = VocabularyStrategy(tensor=vocabulary)
        adapter = adapter_for(small)
        stacks = adapter.stack_sizes(small)
        layers = tuple(strategy if count else replace(strategy, expert=1) for count in adapter.expert_counts(small))
        plan = ParallelPlan(world_size=ranks, stacks=stacks, layers=layers, embedding=ends, head=ends)
        rank = single_rank(copy.deepcopy(small), plan)
        return cls(rank=rank, packed=packed, copies=copies, length_ratio=length_ratio)

    def give_memory(self, device: torch.device, dtype: torch.dtype) -> None:
        """Creates random weights of `dtype` on a device, or fake weights under a fake mode."""
        self.device, self.dtype = device, dtype
        made: dict[int, nn.Parameter] = {}
        for module in self.rank.model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in made:
                    # Denormal or uninitialized numbers could be slower.
                    weight = torch.ones(parameter.shape, dtype=dtype, device=device)
                    weight = weight if weight.ndim < 2 else weight.normal_(std=0.02)
                    made[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                setattr(module, name, buffer.to(device))

    def micro_batch(self, tokens: int, length: int, ratio: float | None = None) -> MicroBatch:
        """Returns a micro-batch of `tokens` positions in documents of `length`; a second stack has `ratio` times as
        many, by default `length_ratio`.
        """
        adapter = self.rank.stage.adapter
        if not self.packed:
            lengths = [length, self.target_length(length, ratio)][: len(adapter.stacks)]
            shape = dict(dtype=torch.long, device=self.device)
            ids = [torch.zeros(tokens // length, one, **shape) for one in lengths]
            names = (stack.tokens.ids for stack in adapter.stacks)
            labels = adapter.loss.example(ids[-1])
            return self.rank.runner.micro_batch(**dict(zip(names, ids, strict=True)), **labels, whole_loss=False)
        packs = self.rank.resolved.packs
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(tokens, device=self.device).remainder(length)[None]
        documents = Deal.of_documents(
            bounds=tuple(range(0, tokens + 1, length)), cuts=tuple(range(0, tokens + 1, tokens // packs))
        )
        return self.rank.runner.micro_batch(
            ids, position_ids=positions, shift_labels=ids, documents=documents, whole_loss=False
        )

    def target_length(self, length: int, ratio: float | None = None) -> int:
        """Returns the tokens that a row has in the last stack."""
        return max(1, round(length * (self.length_ratio if ratio is None else ratio)))

    def layers(self, batch: MicroBatch) -> list[Part]:
        """Returns one part for each kind of layer: all its copies, one after the other."""
        captured, count = self._capture(batch), self.copies
        starts = range(0, len(self.rank.blocks), count)
        return [self._layers(self.rank.blocks[at : at + count], batch, captured[at : at + count]) for at in starts]

    def _capture(self, batch: MicroBatch) -> list[dict[str, Any]]:
        """Returns the arguments that the model passes to each layer besides hidden states."""
        captured: list[dict[str, Any]] = []

        def keep(block: ParallelLayer, *args, **kwargs) -> torch.Tensor | tuple:
            hidden, others = bound_arguments(block.signature, args, kwargs)
            captured.append(others)
            states = hidden.new_zeros(*block.rectangle(batch).shape, hidden.shape[-1])
            return layer_output(block.stack, states)

        with torch.no_grad(), self.rank.current.active(batch), self._forwards(keep):
            self.rank.stage.states(None)
        return captured

    @contextlib.contextmanager
    def _forwards(self, forward: Callable[..., torch.Tensor | tuple]):
        """Lets the layers run `forward`, which gets their block first, while the body runs."""
        layers = [block.layer for block in self.rank.blocks]
        forwards = [layer.forward for layer in layers]
        for block in self.rank.blocks:
            block.layer.forward = functools.partial(forward, block)
        try:
            yield
        finally:
            for layer, own in zip(layers, forwards, strict=True):
                layer.forward = own

    def _layers(self, blocks: list[ParallelLayer], batch: MicroBatch, captured: list[dict[str, Any]]) -> Part:
        hidden = self._states(blocks[0].rectangle(batch).shape)
        shared = self._shared(blocks[0], batch)
        shared += tuple(one for others in captured for one in tensors_of(others.values()))

        def run() -> torch.Tensor:
            output = hidden
            for block, others in zip(blocks, captured, strict=True):
                resolved = block.resolved
                block.resolved = replace(resolved, source=resolved.layout)  # no redistribution of the input
                try:
                    with self.rank.current.active(batch):
                        output = block.layer(output, **others)
                finally:
                    block.resolved = resolved
                output = output if isinstance(output, torch.Tensor) else output[0]
            return output

        return Part(run=run, input=hidden, modules=tuple(block.layer for block in blocks), shared=shared)

    def _shared(self, block: ParallelLayer, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Gives a micro-batch what the layers of a stack share and have gradients for, as leaves: the output of the
        stack that they read, and the bias of their scores.
        """
        found, name = {}, block.stack.reads
        if name is not None:
            layout = block.resolved.layout
            found[name, layout] = self._states(batch.streams[name].grid.rectangle(layout, 0).shape)
        if block.bias is not None:
            with torch.no_grad():
                block.bias.of_heads(batch, block)
            own = {
                key: value for key, value in batch.shared.items() if key[1] == "bias" and key[0] == block.stack.name
            }
            found |= {key: value.detach().to(self.dtype).requires_grad_() for key, value in own.items()}
        batch.shared.update(found)
        return tuple(found.values())

    def top_k(self, batch: MicroBatch) -> list[int]:
        """Returns for each kind of layer how many experts a token chooses, 0 for a dense one."""
        found = [0] * (len(self.rank.blocks) // self.copies)
        for kind, part in enumerate(self.layers(batch)):
            experts = self.rank.blocks[kind * self.copies].experts
            if experts is not None:

                def keep(hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, kind=kind):
                    found[kind] = choices.shape[1]
                    return hidden

                experts.module.forward = keep
                try:
                    with torch.no_grad():
                        part.run()
                finally:
                    experts.module.forward = experts
        return found

    def experts(self, kind: int, tokens: int, top_k: int, received: int = 1) -> Part:
        """Returns the part of the experts of one kind of layer, with permutations, for `tokens` tokens of the rank
        that choose all experts equally often. `received` times as many choices arrive as the rank sends.
        """
        experts = self.rank.blocks[kind * self.copies].experts
        self.receive(kind, received)
        hidden = self._states((tokens,))
        choices = torch.arange(tokens * top_k, device=self.device).remainder(experts.count).view(tokens, top_k)
        weights = torch.full((tokens, top_k), 1 / top_k, dtype=self.dtype, device=self.device, requires_grad=True)

        def run() -> torch.Tensor:
            return experts.module(hidden, choices, weights)

        return Part(run=run, input=hidden, modules=(experts.module,), shared=(choices, weights))

    def receive(self, kind: int, received: int) -> None:
        """Lets `received` times as many choices arrive at the experts of a kind as the rank sends."""
        experts = self.rank.blocks[kind * self.copies].experts
        if experts.group is not None:
            experts.group = replace(experts.group, received=received)

    def embedding(self, batch: MicroBatch) -> Part:
        """Returns the part from token ids to the input of the first layer, with the inputs shared by all layers."""
        rank, stage = self.rank, self.rank.stage
        modules = stage.adapter.embeddings(rank.model)

        def run() -> torch.Tensor:
            with rank.current.active(batch):
                return stage.embedded()

        return Part(run=run, input=None, modules=tuple(modules), shared=(batch.first.input_ids,))

    def head(self, batch: MicroBatch) -> Part:
        """Returns the part from the output of the last layer to the loss."""
        own = batch.last.grid.rectangle(batch.ends.head, 0)
        hidden = self._states(own.shape)
        targets = batch.targets[own.row_start : own.row_stop, own.position_start : own.position_stop].flatten()
        request, stage = HeadRequest(targets=targets), self.rank.stage
        head, norms = stage.adapter.head(self.rank.model), stage.adapter.final_norms(self.rank.model)

        def run() -> torch.Tensor:
            with self.rank.current.active(batch):
                states = hidden
                for norm in norms:
                    states = norm(states)
                return head(states, request)[0]

        return Part(run=run, input=hidden, modules=(*norms, head), shared=(targets,))

    @contextlib.contextmanager
    def without_regions(self):
        """Makes the tensor-parallel regions and the experts return their input while the body runs; norms, routers and
        residuals remain.
        """
        places = self.rank.stage.adapter.places(self.rank.model)
        with contextlib.ExitStack() as changes:
            for block in self.rank.blocks:
                stack = places[block.resolved.index].stack
                if block.experts is not None:
                    changes.callback(setattr, block.experts.module, "forward", block.experts.module.forward)
                    block.experts.module.forward = _skip_experts
                for name in (*stack.regions_of(block.layer), *stack.ends_of_regions(block.layer)):
                    region = block.layer.get_submodule(name)
                    changes.enter_context(without_forward_pre_hooks(region))
                    changes.callback(setattr, region, "forward", region.forward)
                    outputs = stack.attention_outputs if name in stack.attention else None
                    region.forward = functools.partial(_give_back, block, outputs)
            yield

    def _states(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = max(self.rank.stage.adapter.state_features(self.rank.model).values())
        return torch.randn(*shape, size, device=self.device).to(self.dtype).requires_grad_()


def tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments of a layer, and in tuples of them."""
    values = (one for value in arguments for one in (value if isinstance(value, tuple) else (value,)))
    return [one for one in values if isinstance(one, torch.Tensor)]


def _skip_experts(hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Replaces the forward of experts; the router still has gradients."""
    return hidden * weights.sum(-1, keepdim=True)


def _give_back(layer: ParallelLayer, outputs: int | None, hidden_states: torch.Tensor, *args, **kwargs):
    """Replaces a region's forward. Attention returns a tuple of so many `outputs`, and the layer expects it to ask for
    document bounds.
    """
    if outputs is None:
        return hidden_states
    layer.document_bounds()
    return hidden_states, *[None] * (outputs - 1)
