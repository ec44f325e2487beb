# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank holds, in closed form: weights, gradients, optimizer state, a layer's saved activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_hf.plan import LayerStrategy


ADAM_STEP_BYTES = 4  # AdamW counts its steps in one fp32 scalar per parameter tensor


def piece(size: int, degree: int, index: int) -> int:
    """Length of piece `index` of a dimension that `degree` ranks share: ceil(size / degree) until nothing is left."""
    chunk = -(-size // degree)
    return max(0, min(chunk, size - index * chunk))


def shard_elements(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> int:
    """Elements of a weight on one rank.

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
    """Optimizer state of AdamW for one parameter tensor: two moments like its shard, and its step."""
    return 2 * elements * master_bytes + ADAM_STEP_BYTES


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one Llama-like layer.

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
    """Bytes that one Llama-like layer keeps from its forward pass for its backward pass, in fp32 to the byte.

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
