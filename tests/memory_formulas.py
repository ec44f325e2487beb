# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank holds, in closed form: weights, gradients, optimizer state, activations over a schedule. For a
layer with experts also the bytes that it sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.schedule import Action, Work


ADAM_STEP_BYTES = 4  # AdamW counts its steps in one fp32 scalar per parameter tensor


def piece(size: int, degree: int, index: int) -> int:
    """Returns the length of piece `index` of a dimension on `degree` ranks: ceil(size / degree) until none is left."""
    chunk = -(-size // degree)
    return max(0, min(chunk, size - index * chunk))


def shard_elements(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> int:
    """Returns the elements of a weight on one rank.

    Args:
        shape (`Sequence[int]`): of the whole weight.
        cuts (`Sequence[tuple[int, int, int]]`): (dimension, degree, index) of each mesh axis that cuts it, tensor
            before shard.

    Returns:
        `int`: the product of the pieces.
    """
    local = list(shape)
    for dim, degree, index in cuts:
        local[dim] = piece(local[dim], degree, index)
    return math.prod(local)


def adam_bytes(elements: int, master_bytes: int = 4) -> int:
    """Returns the bytes of AdamW's state for one parameter tensor: two moments like its shard, and its step."""
    return 2 * elements * master_bytes + ADAM_STEP_BYTES


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Holds the sizes of one Llama-like layer.

    Attributes:
        hidden (`int`): H, features between layers.
        intermediate (`int`): I, features between the two projections of the gated MLP.
        heads (`int`): attention heads.
        key_value_heads (`int`): key/value heads that the attention kernel sees in one whole model: those of the model,
            or `heads` where they are repeated before the kernel.
        head_dim (`int`): D, features of a head.
    """

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int


def saved_activation_bytes(shape: LayerShape, strategy: LayerStrategy, tokens: int, element_bytes: int = 4) -> int:
    """Returns the bytes that one Llama-like layer keeps from its forward for its backward, in fp32 to the byte.

    With T tokens, t tensor ranks, u Ulysses ranks, and s = t under Megatron-SP, else 1, a rank has n = T / (u s)
    tokens between the regions, r = T / u inside them, and all T for its share of the heads inside attention:

    - each of the two norms: its input and its normalised input, `2 n H`, and the reciprocal root of each token, `n`;
    - the input of each of the two regions: `r H`;
    - queries and attention's output: `2 T heads D / (t u)`; keys and values: `2 T key_value_heads D / (t u)`;
    - the kernel's log-sum-exp of each query: `T heads / (t u)`, always fp32;
    - under Ulysses also the output after the exchange back, which the output projection reads: `r heads D / t`;
    - gate, its activation, up, and their product: `4 r I / t`.

    Weights and the position embeddings, which all layers share, are not counted. With full recompute only the layer's
    input stays: `n H`.

    Args:
        shape ([`LayerShape`]): of the layer.
        strategy ([`LayerStrategy`]): how it is computed.
        tokens (`int`): T, rows of the rank's data group times positions.
        element_bytes (`int`, *optional*, defaults to 4): of an activation's element.

    Source: the terms of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for a
    gated MLP and an attention kernel that saves no scores.
    """
    tensor, ulysses = strategy.tensor, strategy.ulysses
    region = tokens // ulysses
    between = region // (tensor if strategy.megatron_sp else 1)
    if strategy.recompute == "full":
        return element_bytes * between * shape.hidden
    norms = 2 * (2 * between * shape.hidden + between)
    inputs = 2 * region * shape.hidden
    heads = 2 * tokens * (shape.heads + shape.key_value_heads) * shape.head_dim // (tensor * ulysses)
    exchanged = region * shape.heads * shape.head_dim // tensor if ulysses > 1 else 0
    mlp = 4 * region * shape.intermediate // tensor
    log_sum = 4 * tokens * shape.heads // (tensor * ulysses)
    return element_bytes * (norms + inputs + heads + exchanged + mlp) + log_sum


# ---- Experts ----


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Holds the sizes of the experts of one layer.

    Attributes:
        hidden (`int`): H, features between layers.
        intermediate (`int`): I, features between the two projections of one gated expert.
        experts (`int`): E, on all ranks together.
        top_k (`int`): k, experts of a token.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def elements(self) -> int:
        """Returns the elements of the weights of all experts, `3 E I H`."""
        return 3 * self.experts * self.intermediate * self.hidden


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Says how many rows a rank sends to the experts of a layer, its tokens times k, and how many arrive there. Those
    that stay on the rank are in both.
    """

    sent: int
    received: int


def expert_shards(strategy: LayerStrategy, ranks: int) -> int:
    """Returns s, the ranks that shard each expert. A copy of a layer has `d t` ranks: d shards, t tensor ranks. Of
    these x ranks have different experts, and the ranks that are left, `s = d t / x`, share them. It is 1 under
    "replicate" and where x is no divisor.
    """
    copy = 1 if strategy.sharding == "replicate" else strategy.resolved_shard_degree(ranks) * strategy.tensor
    return copy // strategy.expert if copy % strategy.expert == 0 else 1


def expert_elements(shape: ExpertShape, strategy: LayerStrategy, ranks: int) -> int:
    """Returns the elements of experts' weights on one rank, `3 E I H / (x s)`; for degrees that divide E, I and H."""
    return shape.elements // (strategy.expert * expert_shards(strategy, ranks))


@dataclass(frozen=True, kw_only=True)
class ExpertCollectives:
    """Holds the collectives of one layer's experts on one rank, counted by (kind, ranks, bytes of this rank's input):
    those of `activations` in one micro-batch, and those of `weights` in a step.
    """

    activations: Counter
    weights: Counter


def expert_collectives(
    shape: ExpertShape,
    strategy: LayerStrategy,
    ranks: int,
    *,
    tokens: int,
    rows: RoutedRows | None = None,
    micro_batches: int = 1,
    element_bytes: int = 4,
) -> ExpertCollectives:
    """Returns what the experts of one layer send. With x expert ranks, t ranks that have the same tokens, and e bytes
    of an element:

    - numbers of rows, one all-to-all of `8 E` bytes, in the first forward alone;
    - rows to the experts, `sent H e`, and back, `received H e`; in the forward, in the backward and in a recompute;
    - where t ranks come with the same tokens, each with its part of `ceil(tokens / t)`: a gather of the results,
      `part H e`, in the forward, and in the backward gathers of the gradients of hidden states and of the weights of
      choices, `part k 4`;
    - weights, `W = 3 E I H / (x s)` elements on a rank: under zero3 two gathers a micro-batch of `W e` over s ranks,
      under zero2 one a step; one reduce-scatter a micro-batch, of `s W 4`; one sum a step over the
      `ranks / (x s)` copies, of `W 4`.

    Args:
        tokens (`int`): tokens that come to the experts of this rank, those of its tensor ranks.
        rows ([`RoutedRows`], *optional*): needed where x > 1.
    """
    expert, shards = strategy.expert, expert_shards(strategy, ranks)
    copies = 1 if strategy.megatron_sp else strategy.tensor
    activations, weights, row = Counter(), Counter(), shape.hidden * element_bytes
    if expert > 1:
        passes = 3 if strategy.recompute == "full" else 2
        activations["all_to_all", expert, 8 * shape.experts] += 1
        activations["all_to_all", expert, rows.sent * row] += passes
        activations["all_to_all", expert, rows.received * row] += passes
    if copies > 1:
        part = -(-tokens // copies)
        activations["all_gather", copies, part * row] += 2
        activations["all_gather", copies, part * shape.top_k * 4] += 1
    piece_elements, replicas = expert_elements(shape, strategy, ranks), ranks // (expert * shards)
    if shards > 1:
        gathers = 2 * micro_batches if strategy.sharding == "zero3" else 1
        weights["all_gather", shards, piece_elements * element_bytes] += gathers
        weights["reduce_scatter", shards, shards * piece_elements * 4] += micro_batches
    if replicas > 1:
        weights["all_reduce", replicas, piece_elements * 4] += 1
    return ExpertCollectives(activations=activations, weights=weights)


def saved_expert_layer_bytes(
    layer: LayerShape,
    shape: ExpertShape,
    strategy: LayerStrategy,
    tokens: int,
    rows: RoutedRows | None = None,
    element_bytes: int = 4,
) -> int:
    """Returns the bytes that a layer with experts in the place of its MLP keeps from its forward for its backward.

    With the symbols of [`saved_activation_bytes`], n tokens between the regions, of which the rank takes m to the
    experts (n / t where t ranks have the same ones), p = m k choices, and q rows that arrive:

    - attention as in a dense layer; the input of the router is not gathered: `n H`;
    - the router: probabilities, their sum over the choices, and the weights of choices, `n (E + 1 + k)` in fp32; the
      experts of each token, `n k` of 8 bytes;
    - the experts: their input, both halves of their first projection, its activation, and their product,
      `q (H + 4 I)`; the weight of each row, `q`; the order of rows and its inverse, 16 bytes a row; where each of the
      E / x experts begins, 4 bytes each;
    - with x > 1 ranks: what came back for each choice, `p H`; the weights of choices, `p` in fp32; where each choice
      comes from and goes back to, 16 bytes each;
    - with x = 1 all p choices are rows: q = p. The result of each choice is kept, `p H`, and 8 bytes for its weight's
      place.

    With full recompute only the layer's input stays: `n H`.
    """
    attention = saved_activation_bytes(replace(layer, intermediate=0), strategy, tokens, element_bytes)
    if strategy.recompute == "full":
        return attention
    region = tokens // strategy.ulysses
    copies = 1 if strategy.megatron_sp else strategy.tensor
    between = region // (strategy.tensor // copies)
    attention -= element_bytes * (region - between) * shape.hidden
    router = 4 * between * (shape.experts + 1 + shape.top_k) + 8 * between * shape.top_k
    choices = between // copies * shape.top_k
    arrived = choices if strategy.expert == 1 else rows.received
    inside = arrived * (element_bytes * (shape.hidden + 4 * shape.intermediate + 1) + 16)
    inside += 4 * shape.experts // strategy.expert
    results = choices * (element_bytes * shape.hidden + (8 if strategy.expert == 1 else 4 + 16))
    return attention + router + inside + results


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Describes the bytes that one stage holds of one micro-batch on one rank.

    Attributes:
        saved (`int`): what autograd keeps from the forward to the backward: [`saved_activation_bytes`] of the stage's
            layers and what its ends save.
        received (`int`): hidden states that come from the stage before, and as much gradient that goes back to it;
            0 in the first stage.
        entered (`int`): of `received`, what is counted in `saved` already. The first layer saves its input, which is
            the received tensor itself where it lies as it is received: 1 rank or layers without `tensor`.
        result (`int`): the hidden states for the next stage, which wait with their graph for their gradient; in the
            last stage the loss.
        returned (`int`): the gradient that comes from the next stage; 0 in the last stage.
        kept_for_weights (`int`): gradients that a backward of the input leaves for that of the weights.
        logged (`int`): what stays of a micro-batch until the end of the step: the detached loss.
    """

    saved: int
    received: int = 0
    entered: int = 0
    result: int = 0
    returned: int = 0
    kept_for_weights: int = 0
    logged: int = 0


def bytes_over_schedule(
    order: Iterable[Action], stages: Mapping[int, StageBytes], sends_under_way: int
) -> Iterator[int]:
    """
    Yields the bytes of activations and boundary tensors on one rank after each action; the largest is the peak.

    Args:
        order (`Iterable[Action]`): what the rank's list does, see [`galvatron_hf.plan.schedule.actions`].
        stages (`Mapping[int, StageBytes]`): the rank's stages.
        sends_under_way (`int`): gradients that may be on their way to the stage before when the oldest is let go.

    Yields:
        `int`: the sum over the rank's stages of

        - `saved + result + received - entered` for each micro-batch in flight, of which there are at most
          [`galvatron_hf.plan.schedule.most_in_flight`];
        - `received` and `returned` for each receive that is posted and not used yet; the first stage's backward of the
          input does nothing, and its `returned` stays for that of the weights;
        - `received` for each gradient that waits to be sent or is on its way;
        - `kept_for_weights` between the two halves of a zero-bubble backward.

        What an action needs while it runs is not among them, nor are weights and their gradients.
    """
    now, leaving = 0, []
    for action in order:
        stage = stages[action.stage]
        if action.work is Work.RECEIVE_FORWARD:
            now += stage.received
        elif action.work is Work.RECEIVE_BACKWARD:
            now += stage.returned
        elif action.work is Work.FORWARD:
            now += stage.saved - stage.entered + stage.result + stage.logged
        elif action.work is Work.BACKWARD_INPUT:
            now += stage.kept_for_weights + stage.received - (stage.returned if stage.received else 0)
        elif action.work is Work.BACKWARD_WEIGHT:
            now -= stage.saved - stage.entered + stage.result + stage.received + stage.kept_for_weights
            now -= 0 if stage.received else stage.returned
        elif action.work is Work.BACKWARD:
            # The received tensor goes, its gradient comes.
            now -= stage.saved - stage.entered + stage.result + stage.returned
        elif action.work is Work.SEND_BACKWARD:
            leaving.append(stage.received)
            now -= leaving.pop(0) if len(leaving) > sends_under_way else 0
        yield now


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Describes the bytes that one unit of weights adds to its shard between two micro-batches of a step.

    Attributes:
        gathered (`int`): weights that stay gathered, from the stage's first forward to its last backward.
        gradients (`int`): gradients, from the stage's first backward on.
    """

    gathered: int
    gradients: int


def unit_bytes(
    weights: Sequence[Sequence[int]], sharding: str, degree: int, *, split_backward: bool = False
) -> UnitBytes:
    """
    Returns the bytes of one unit between two micro-batches, in fp32.

    - `zero3`: no weight stays gathered, gradients are shards.
    - `zero2`: all weights stay gathered; gradients are shards. Shards are padded to equal size in both.
    - `replicate`: the weights are whole anyway; gradients are whole.
    - Where a zero-bubble schedule splits the backward, gradients are whole under `zero2` too, until the step's end.

    The reduction also keeps its last input until the next: the whole gradient of one unit.

    Args:
        weights (`Sequence[Sequence[int]]`): shapes of the unit's weights, as tensor parallelism has left them.
        sharding (`str`): "replicate", "zero2" or "zero3".
        degree (`int`): number of ranks that share the weights, by their first dimensions.
        split_backward (`bool`): whether the schedule is a zero-bubble one.
    """
    whole = sum(math.prod(shape) for shape in weights)
    if sharding == "replicate":
        return UnitBytes(gathered=0, gradients=4 * whole)
    shard = sum(shard_elements(shape, [(0, degree, 0)]) for shape in weights)
    return UnitBytes(
        gathered=4 * degree * shard if sharding == "zero2" else 0,
        gradients=4 * (whole if split_backward else shard),
    )
