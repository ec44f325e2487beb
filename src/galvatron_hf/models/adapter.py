# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Describes a model family as data: its stacks of layers, its inputs, and its ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.heads import Heads
from galvatron_hf.models.lora import family_name
from galvatron_hf.models.losses import NEXT_TOKEN, LossKind, RouterLossKind
from galvatron_hf.models.packing import Packing, Pairs
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.resolved import ResolvedPlan, resolve
from galvatron_hf.plan.strategies import DEFAULT_STACK
from galvatron_hf.utils.compat import decoder_ids_of_labels


if TYPE_CHECKING:
    from galvatron_hf.models.structure import Structure


class Style(Enum):
    """Says how tensor ranks hold a module of a layer."""

    COLUMN = "column"  # output features cut: every rank computes its own heads or channels
    ROW = "row"  # input features cut: outputs are summed over the ranks
    REPLICATED_PARTIAL_GRAD = "inside"  # whole on every rank, applied to that rank's heads: its gradients are summed
    ALL_FEATURES = "all features"  # whole too, applied to the features of all ranks, of which a rank keeps its own


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Describes a projection that computes several outputs at once; it is split so that each part has plain shards.
    `parts` are names in the order of the fused output, `sizes` returns the output features of each.
    """

    parts: tuple[str, ...]
    sizes: Callable[[PreTrainedConfig], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ExpertsAdapter:
    """Describes the experts of a layer that has them; names are those of modules inside the layer.

    Attributes:
        module (`str`): the module whose weights [experts, ...] are those of all experts. It is called with hidden
            states [tokens, features], and with the experts and the weights [tokens, top_k] of each token.
        router (`str`): the module that chooses the experts.
        logits (`int`): the index of its logits [tokens, experts] in its output.
        shared (`str`, *optional*): an MLP beside the experts that every token goes through, in layers that have it.
    """

    module: str
    router: str
    logits: int = 0
    shared: str | None = None


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """Applies the family's function to logits `z`: `softcap * tanh(scale * z / softcap)`, or `scale * z`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.scale if self.scale != 1.0 else logits
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """Describes a bias that all layers of a stack add to the scores of their self-attention: one number for each head
    and each bucket of distances between positions. It belongs to no layer: every rank holds it whole, and uses it for
    the heads that it computes.

    Attributes:
        table (`str`): the embedding [buckets, heads], inside the base model.
        attention (`str`): the module of a layer whose scores it is added to.
        buckets (`Callable[[nn.Module, int, torch.device], torch.Tensor]`): returns the buckets [S, S] of `S`
            positions, from a layer's attention module.
        marks (`tuple[str, ...]`): attributes of that module that say whether it has the table.
    """

    table: str
    attention: str
    buckets: Callable[[nn.Module, int, torch.device], torch.Tensor]
    marks: tuple[str, ...] = ()

    def inside_layer(self, layers: str) -> str:
        """Returns the name of the table inside the layer that has it, of the module list `layers`."""
        return self.table.removeprefix(f"{layers}.").partition(".")[2]


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Names the tensors that a stack passes to a layer after its hidden states.

    Attributes:
        mask (`str`): the mask of its self-attention.
        read (`str`, *optional*): the output of the stack that it reads; `read_mask` is the mask of that attention.
        bias (`str`, *optional*): the bias of the scores of its self-attention, [1, heads, S, S].
        no_bias (`str`, *optional*): a bias that adds nothing.
        states (`tuple[str, ...]`): tensors in the layout of the hidden states, which are moved with them.
        split_with_positions (`frozenset[str]`): tensors, or tuples of them, [1 or B, S, ...]: a rank takes its rows
            and positions.
        whole_positions (`frozenset[str]`): tensors [1 or B, S]: attention takes a rank's rows and all their positions.
        of_own_rows (`bool`): whether the stack makes these tensors for a rank's own rows, without added positions.
    """

    mask: str = "attention_mask"
    read: str | None = None
    read_mask: str | None = None
    bias: str | None = None
    no_bias: str | None = None
    states: tuple[str, ...] = ()
    split_with_positions: frozenset[str] = frozenset({"position_embeddings"})
    whole_positions: frozenset[str] = frozenset({"position_ids", "cache_position"})
    of_own_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class StackInputs:
    """Names the entries of a batch that are those of one stack: tokens, their mask, and their positions if the stack
    takes any.
    """

    ids: str = "input_ids"
    mask: str | None = "attention_mask"
    positions: str | None = "position_ids"


@dataclass(frozen=True, kw_only=True)
class StackAdapter:
    """Describes one stack of layers of a model. Module names are those inside the base model (`module`, `layers`,
    `after`, `embedding`, `positional`, `before`), or inside a layer.

    Attributes:
        name (`str`): its name in a plan's `stacks`.
        module (`str`): the module whose forward runs the layers; empty if it is the base model itself.
        layers (`str`): the module list.
        after (`tuple[str, ...]`): the modules that it applies after its last layer, in order.
        embedding (`str`, *optional*): the module that looks up its tokens, if it is another one than the model's
            `get_input_embeddings()`.
        positional (`tuple[str, ...]`): learned position embeddings.
        before (`tuple[str, ...]`): other modules with weights between the token embedding and the first layer.
        tokens ([`StackInputs`]): the names of its inputs in a batch.
        reads (`str`, *optional*): the stack whose output its layers read, through the attention modules `cross`.
        causal (`bool`): whether tokens attend to earlier ones alone.
        outputs (`int`, *optional*): the length of the tuple that a layer returns, whose first entry is the hidden
            states; None if it returns these alone. The stack does without the other entries.
        bias ([`RelativeBias`], *optional*): a bias that all layers share.
        own_bias (`str`, *optional*): the embedding [buckets, heads] inside the self-attention of a layer whose numbers
            are added to its scores; tensor ranks cut it by heads.
        attention (`tuple[str, ...]`): the attention modules of a layer, which return `attention_outputs` entries.
        regions (`tuple[str, ...]`): modules of a layer whose input enters a tensor-parallel region. Those that a layer
            lacks, or that contain its experts, are none; the experts are not in a region.
        experts ([`ExpertsAdapter`], *optional*): the experts of the layers that have them; other layers are dense.
        styles (`Mapping[str, Style]`): the style of each module; empty if the stack supports no tensor degree over 1,
            for the reason `unsupported`.
        fused (`Mapping[str, Fused]`): the parts of each fused module.
        key_value (`tuple[str, ...]`): the modules that compute keys and values, cut by key/value heads.
        per_head (`tuple[str, ...]`): parameters of an attention module that have one entry for each head.
        local_attributes (`Mapping[str, str]`): maps "module.attribute", which counts heads or features, to the heads
            whose cut divides it: "heads" or "key_value_heads".
        inner_dropout (`Mapping[str, str]`): for modules with cut input features, the attribute of the layer with the
            probability of the dropout of these features. Tensor ranks draw from streams of their own then.
        config_name (`str`, *optional*): the attribute of the configuration that is the stack's own, if there are
            several; by default that of a text.
        layer_count, layer_types (`str`): the configuration's attributes with the number of layers and, in some
            families, the type of each.
        inputs ([`LayerInputs`]): the tensors that its layers take after the hidden states.
        cut (`bool`): whether its layers may compute pieces of rows, and parts of heads and features.
        prepare (`Callable`, *optional*): changes the forward of a layer, in place, before it is cut; it computes the
            same.
    """

    name: str = DEFAULT_STACK
    module: str = ""
    layers: str = "layers"
    after: tuple[str, ...] = ("norm",)
    embedding: str | None = None
    positional: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    tokens: StackInputs = field(default_factory=StackInputs)
    reads: str | None = None
    cross: tuple[str, ...] = ()
    causal: bool = True
    outputs: int | None = None
    bias: RelativeBias | None = None
    own_bias: str | None = None
    attention: tuple[str, ...] = ("self_attn",)
    attention_outputs: int = 2
    regions: tuple[str, ...] = ("self_attn", "mlp")
    experts: ExpertsAdapter | None = None
    styles: Mapping[str, Style] = field(default_factory=dict)
    unsupported: str | None = None
    fused: Mapping[str, Fused] = field(default_factory=dict)
    key_value: tuple[str, ...] = ("self_attn.k_proj", "self_attn.v_proj")
    per_head: tuple[str, ...] = ("sinks",)
    local_attributes: Mapping[str, str] = field(default_factory=dict)
    inner_dropout: Mapping[str, str] = field(default_factory=dict)
    heads: Callable[[PreTrainedConfig], Heads] = Heads.from_config
    config_name: str | None = None
    layer_count: str = "num_hidden_layers"
    layer_types: str = "layer_types"
    inputs: LayerInputs = field(default_factory=LayerInputs)
    cut: bool = True
    prepare: Callable[[nn.Module], None] | None = None

    @property
    def module_names(self) -> tuple[str, ...]:
        """Returns the names of the modules inside the base model that the stack declares."""
        named = [self.layers, *self.after, *self.positional, *self.before]
        named += [] if self.embedding is None else [self.embedding]
        return (*named, *([] if self.bias is None else [self.bias.table]))

    def config(self, model: PreTrainedModel) -> PreTrainedConfig:
        """Returns the configuration of the stack."""
        base = base_model(model)
        config = base.get_submodule(self.module).config if self.module else base.config
        return getattr(config, self.config_name) if self.config_name else config.get_text_config()

    def style(self, name: str) -> Style | None:
        """Returns the style of a module of a layer; the parts of a fused projection have the style of the whole, and
        those of a module with an adapter that of the module.
        """
        name = family_name(name)
        owner = name.rsplit(".", 1)[0]
        return self.styles.get(name) or (self.styles.get(owner) if owner in self.fused else None)

    def is_per_head(self, name: str) -> bool:
        """Tells whether a parameter of a layer has one entry for each head."""
        owner, _, parameter = name.rpartition(".")
        return owner in self.attention and parameter in self.per_head

    def experts_of(self, layer: nn.Module) -> nn.Module | None:
        """Returns the module with the weights of all experts of a layer; None for a dense layer."""
        return None if self.experts is None else _submodule(layer, self.experts.module)

    def is_expert(self, name: str, layer: nn.Module) -> bool:
        """Tells whether a module of a layer is, or lies in, the module of its experts."""
        return self.experts_of(layer) is not None and _within(name, self.experts.module)

    def regions_of(self, layer: nn.Module) -> tuple[str, ...]:
        """Returns the modules of one layer whose input enters a tensor-parallel region."""
        found = [region for region in self.regions if _submodule(layer, region) is not None]
        if self.experts_of(layer) is not None:
            found = [region for region in found if not _within(self.experts.module, region)]
        return tuple(found)

    def ends_of_regions(self, layer: nn.Module) -> tuple[str, ...]:
        """Returns the modules that leave a region which another module has entered: of an MLP whose two projections
        are modules of the layer, the second.
        """
        rows = (name for name, style in self.styles.items() if style is Style.ROW)
        return tuple(name for name in rows if _submodule(layer, name) is not None and not self.in_region(name, layer))

    def in_region(self, name: str, layer: nn.Module) -> bool:
        """Tells whether a module of a layer lies in a tensor-parallel region."""
        return any(_within(name, region) for region in self.regions_of(layer))

    def types(self, config: PreTrainedConfig) -> list[str] | None:
        """Returns the type of each layer; None in families whose layers have one type."""
        return getattr(config, self.layer_types, None)


def _submodule(layer: nn.Module, name: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(name)


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a causal language model below its head. Some families of models with images call it "model"
    whatever their `base_model_prefix`.
    """
    base = model.base_model
    return model.model if base is model and isinstance(getattr(model, "model", None), PreTrainedModel) else base


def embedding_names(model: PreTrainedModel) -> list[str]:
    """Returns the names of the embeddings that share the weight of the model's token embedding, itself included."""
    weight = model.get_input_embeddings().weight
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if isinstance(module, nn.Embedding) and module.weight is weight]


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Locates a layer in its model: `index` counts on from stack to stack, `local_index` within the layer's stack."""

    index: int
    stack: StackAdapter
    local_index: int

    @property
    def name(self) -> str:
        """Returns the name of the layer inside the base model."""
        return f"{self.stack.layers}.{self.local_index}"

    def type(self, model: PreTrainedModel) -> str | None:
        """Returns the type of the layer; None in families whose layers have one type."""
        types = self.stack.types(self.stack.config(model))
        return None if types is None else types[self.local_index]


@dataclass(frozen=True, kw_only=True)
class ModelAdapter:
    """Describes one model family: stacks of layers, in the order of the forward pass, between an embedding and a head.
    `logit_transform` is what the family does after its head, `logit_bias` names a buffer [1, V] that it adds to the
    logits; `loss` is computed from labels and logits. `router_loss` returns what the family adds to it for its routers
    if it is asked to, None if nothing. `structure` is given if the family's own forward runs on whole rows, at least
    before and after the layers, see [`~galvatron_hf.models.whole_rows`].
    """

    stacks: tuple[StackAdapter, ...] = (StackAdapter(),)
    logit_transform: Callable[[PreTrainedConfig], LogitTransform] = lambda config: LogitTransform()
    logit_bias: str | None = None
    loss: LossKind = NEXT_TOKEN
    router_loss: Callable[[PreTrainedModel], RouterLossKind | None] = lambda model: None
    structure: Structure | None = None

    def stack_sizes(self, model: PreTrainedModel) -> dict[str, int]:
        """Returns the number of layers of each stack, as a plan's `stacks` has them."""
        return {stack.name: len(base_model(model).get_submodule(stack.layers)) for stack in self.stacks}

    def places(self, model: PreTrainedModel) -> list[LayerPlace]:
        """Returns the place of every layer in the order of global indices."""
        sizes = self.stack_sizes(model)
        locals_ = [(stack, index) for stack in self.stacks for index in range(sizes[stack.name])]
        return [LayerPlace(index=i, stack=stack, local_index=local) for i, (stack, local) in enumerate(locals_)]

    def layers(self, model: PreTrainedModel) -> list[nn.Module]:
        """Returns the layers of all stacks in the order of global indices."""
        return [layer for stack in self.stacks for layer in base_model(model).get_submodule(stack.layers)]

    def prepare_layers(self, model: PreTrainedModel) -> None:
        """Changes the forwards of layers whose stack says so."""
        for place, layer in zip(self.places(model), self.layers(model), strict=True):
            if place.stack.prepare is not None:
                place.stack.prepare(layer)

    def keep_layers(self, model: PreTrainedModel, stack: StackAdapter, local_indices: list[int]) -> None:
        """Drops all other layers of a stack, from the model and from its configuration."""
        base = base_model(model)
        whole = base.get_submodule(stack.layers)
        base.set_submodule(stack.layers, nn.ModuleList([whole[index] for index in local_indices]))
        configs = (model.config, base.config, stack.config(model))
        for config in {id(config): config for config in configs}.values():
            types = stack.types(config)
            if types is not None:
                with contextlib.suppress(AttributeError):  # of a property that follows from the number of layers
                    setattr(config, stack.layer_types, [types[index] for index in local_indices])
            setattr(config, stack.layer_count, len(local_indices))

    def with_tokens_of_all(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch with the tokens of every stack; what it lacks is made of its labels, as the family does."""
        batch = dict(batch)
        for name in (stack.tokens.ids for stack in self.stacks if batch.get(stack.tokens.ids) is None):
            labels = batch.get(self.loss.labels)
            if labels is None:
                raise ValueError(f"The batch has neither {name} nor {self.loss.labels} to make them of; add one.")
            batch[name] = decoder_ids_of_labels(model, labels)
        return batch

    def with_positions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch whose `input_ids` [B, S] have the rows and positions of the first stack's hidden states."""
        return dict(batch)

    def packing(self, model: PreTrainedModel) -> Packing:
        """Returns how the rows of a batch become documents of a packed row."""
        readers = self.readers
        if not readers:
            return Packing(loss=self.loss)
        (target,) = readers
        return Packing(
            loss=self.loss,
            pairs=Pairs(
                source=target.reads,
                target=target.name,
                ids=target.tokens.ids,
                mask=target.tokens.mask,
                counts_columns=any(stack.positional for stack in self.stacks),
                complete=functools.partial(self.with_tokens_of_all, model),
            ),
            obstacle=self._pairs_obstacle(model),
        )

    def _pairs_obstacle(self, model: PreTrainedModel) -> str | None:
        if any(stack.own_bias is not None for stack in self.stacks):
            return "makes a bias of all positions in its attention"
        positional = (base_model(model).get_submodule(name) for stack in self.stacks for name in stack.positional)
        if any(hasattr(module, "create_position_ids_from_input_ids") for module in positional):
            return "makes its positions of its tokens"
        return None

    @property
    def readers(self) -> tuple[StackAdapter, ...]:
        """Returns the stacks whose layers read the output of another."""
        return tuple(stack for stack in self.stacks if stack.reads is not None)

    def other_inputs(self, batch: Mapping[str, Any], rows: int) -> list[str]:
        """Returns the names of further tensors of a batch that the family's forward gets, one entry for each row."""
        return []

    def stack(self, name: str) -> StackAdapter:
        return next(stack for stack in self.stacks if stack.name == name)

    def lookups(self, model: PreTrainedModel, stacks: Collection[str] | None = None) -> list[nn.Module]:
        """Returns the modules that look up tokens, of all stacks or of those with the given names. They share one
        weight; the first has the name under which it is saved.
        """
        found = [model.get_input_embeddings()] if stacks is None or self.stacks[0].name in stacks else []
        for stack in self.stacks:
            if stack.embedding is not None and (stacks is None or stack.name in stacks):
                found.append(base_model(model).get_submodule(stack.embedding))
        return list({id(module): module for module in found}.values())

    def join_lookups(self, model: PreTrainedModel) -> None:
        """Makes one module of the embeddings that share a weight: that with the name under which it is saved."""
        names = embedding_names(model)
        for name in names[1:]:
            model.set_submodule(name, model.get_submodule(names[0]))

    def beside_lookups(self, model: PreTrainedModel, stacks: Collection[str] | None = None) -> list[nn.Module]:
        """Returns learned position embeddings and other modules before the first layer, of all stacks or of some."""
        chosen = [stack for stack in self.stacks if stacks is None or stack.name in stacks]
        names = [name for stack in chosen for name in (*stack.positional, *stack.before)]
        return [base_model(model).get_submodule(name) for name in names]

    def embeddings(self, model: PreTrainedModel, stacks: Collection[str] | None = None) -> list[nn.Module]:
        """Returns the token embedding, then what else is before the first layer, of all stacks or of some."""
        return [*self.lookups(model, stacks), *self.beside_lookups(model, stacks)]

    def after_layers(self, model: PreTrainedModel, stack: StackAdapter) -> list[nn.Module]:
        """Returns the modules that a stack applies after its last layer, in order."""
        return [base_model(model).get_submodule(name) for name in stack.after]

    def final_norms(self, model: PreTrainedModel) -> list[nn.Module]:
        """Returns the modules between the last layer and the head."""
        return self.after_layers(model, self.stacks[-1])

    def whole_modules(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """Returns by name the modules that no end and no layer owns: every rank of a stage that uses them holds them
        whole, for its own tokens or heads.
        """
        names = [name for stack in self.stacks[:-1] for name in stack.after]
        names += [stack.bias.table for stack in self.stacks if stack.bias is not None]
        return {name: base_model(model).get_submodule(name) for name in names}

    def head(self, model: PreTrainedModel) -> nn.Module:
        """Returns the module that makes logits from hidden states."""
        return model.get_output_embeddings()

    def ties_embeddings(self, model: PreTrainedModel) -> bool:
        """Tells whether embedding and head share one weight."""
        lookups = self.lookups(model)
        return bool(lookups) and self.head(model).weight is lookups[0].weight

    def resolve(self, model: PreTrainedModel, plan: ParallelPlan) -> ResolvedPlan:
        heads = [place.stack.heads(place.stack.config(model)) for place in self.places(model)]
        return resolve(
            plan,
            heads=[(one.query, one.key_value) for one in heads],
            tied=self.ties_embeddings(model),
            experts=self.expert_counts(model),
            reads={stack.name: stack.reads for stack in self.stacks if stack.reads is not None},
            has_whole_weights=bool(self.whole_modules(model)),
            biased=[stack.name for stack in self.stacks if stack.bias is not None],
            whole_rows=self.structure is not None,
        )

    def adds_router_loss(self, model: PreTrainedModel) -> bool:
        """Tells whether the model's configuration asks for the loss of its routers, and the family has one."""
        return getattr(model.config, "output_router_logits", False) and self.router_loss(model) is not None

    def expert_counts(self, model: PreTrainedModel) -> list[int]:
        """Returns the number of experts of each layer, 0 for a dense one."""
        found = zip(self.places(model), self.layers(model), strict=True)
        modules = [place.stack.experts_of(layer) for place, layer in found]
        return [0 if module is None else next(module.parameters()).shape[0] for module in modules]

    def state_features(self, model: PreTrainedModel) -> dict[str, int]:
        """Returns the features of the hidden states of each stack, which pass from layer to layer and between pipeline
        stages.
        """
        return {stack.name: stack.config(model).hidden_size for stack in self.stacks}
