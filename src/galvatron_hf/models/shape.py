# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Shapes of the weights of a model, from which its costs under a plan are counted; loads no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from galvatron_hf.plan.layout import second_cut


@dataclass(frozen=True, kw_only=True)
class WeightShape:
    """Describes one weight or bias, with its cut over tensor ranks.

    Args:
        shape (`tuple[int, ...]`): shape of the whole weight, as the runtime holds it: output features first in a
            linear layer, input features first in a `Conv1D`.
        cut (`int`, *optional*): the dimension that tensor ranks cut. None leaves the weight whole on each of them.
        used_in_part (`bool`): whether each tensor rank holds the whole weight but uses it for its own heads alone (a
            norm of queries or keys). Its gradient is then a share of a sum.
        heads (`int`, *optional*): key/value heads along `cut`. With more tensor ranks than heads the weight is whole
            on each of them and used in part.
        of_experts (`bool`): whether the weight is that of all experts of a layer, one after the other along dimension
            0. The ranks over which experts are spread are meant then, where this class speaks of tensor ranks.
        trained (`bool`): whether the weight is trained. A frozen one has no gradient and no optimizer state.
        stored_bytes (`int`): bytes of an element at rest.
    """

    shape: tuple[int, ...]
    cut: int | None = None
    used_in_part: bool = False
    heads: int | None = None
    of_experts: bool = False
    trained: bool = True
    stored_bytes: int = 4

    def cut_dim(self, tensor: int) -> int | None:
        """Returns the dimension that `tensor` ranks cut; None if each of them holds the whole."""
        return None if tensor == 1 or self.is_copied(tensor) else self.cut

    def is_copied(self, tensor: int) -> bool:
        """Tells whether `tensor` ranks each hold the whole because there are fewer heads than ranks."""
        return self.heads is not None and self.heads < tensor

    def local_shape(self, tensor: int, index: int = 0) -> tuple[int, ...]:
        """Returns the shape on rank `index` of `tensor`: an even share, or ceil(n / tensor) until nothing is left."""
        cut = self.cut_dim(tensor)
        if cut is None:
            return self.shape
        size = self.shape[cut]
        chunk = -(-size // tensor)
        local = max(0, min(chunk, size - index * chunk))
        return tuple(local if dim == cut else extent for dim, extent in enumerate(self.shape))

    def sums_gradient(self, tensor: int, megatron_sp: bool) -> bool:
        """Tells whether the gradients of `tensor` ranks are shares of a sum, which an all-reduce makes."""
        whole = tensor > 1 and self.cut_dim(tensor) is None and not self.of_experts
        return whole and (megatron_sp or self.used_in_part or self.is_copied(tensor))

    def shard_dim(self, tensor: int, shards: int) -> int | None:
        """Returns the dimension that `shards` ranks share of what `tensor` ranks hold; None if they can share none. It
        is dimension 0, unless tensor ranks have cut that into pieces that `shards` does not divide evenly. Few experts
        would leave some of many ranks without a piece: then another dimension is shared.
        """
        if self.of_experts:
            dim = second_cut(self.shape, tensor, shards)
            return 0 if dim is None and tensor == 1 else dim
        return second_cut(self.shape, tensor, shards) if self.cut_dim(tensor) == 0 else 0

    def can_be_sharded(self, tensor: int, shards: int) -> bool:
        """Tells whether `shards` ranks can share what `tensor` ranks hold."""
        return shards == 1 or self.shard_dim(tensor, shards) is not None

    def shard_elements(self, tensor: int, index: int, shards: int) -> int:
        """Returns the elements of one of `shards` pieces; padding of dimension 0 to a multiple counts."""
        local = self.local_shape(tensor, index)
        if self.shard_dim(tensor, shards) == 0:
            return -(-local[0] // shards) * math.prod(local[1:])
        return math.prod(local) // shards


def product_elements(weights: Iterable[WeightShape], chosen: float = 1.0) -> float:
    """Returns the elements of the weights of matrix products that a token meets; of experts the share `chosen`."""
    return sum(
        math.prod(weight.shape) * (chosen if weight.of_experts else 1.0) for weight in weights if len(weight.shape) > 1
    )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Holds the weights of a language model, by the part of the model that owns them.

    Args:
        hidden (`int`): H, features of the hidden states.
        embedding (`tuple[WeightShape, ...]`): the token embedding, then learned positions, if the model has any.
        final_norm (`tuple[WeightShape, ...]`): the norm before the head.
        head (`tuple[WeightShape, ...]`): the head's weight and bias; without the weight if it is the embedding's
            (`tied`).
        regions (`int`): tensor-parallel regions of a layer, each entered and left once: attention, MLP.
        saves_after_last_region (`bool`): whether a layer keeps something for its backward that is computed after its
            last region (a norm of the region's output). Recompute then runs that region's exit too.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[tuple[WeightShape, ...], ...]
    embedding: tuple[WeightShape, ...]
    final_norm: tuple[WeightShape, ...]
    head: tuple[WeightShape, ...]
    tied: bool
    regions: int = 2
    saves_after_last_region: bool = False

    @classmethod
    def llama(
        cls,
        *,
        vocab: int,
        hidden: int,
        intermediate: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        tied: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
    ) -> "ModelShape":
        """Makes the shapes of a model built like Llama, as Mistral and Qwen2 are; arguments as in `LlamaConfig`."""
        kv_heads = kv_heads or heads
        head_dim = head_dim or hidden // heads
        query, key_value = heads * head_dim, kv_heads * head_dim
        columns = [(query, hidden, None), (key_value, hidden, kv_heads), (key_value, hidden, kv_heads)]
        weights = [WeightShape(shape=(hidden,)), WeightShape(shape=(hidden,))]
        for out, features, cut_heads in columns:
            weights += _column(out, features, attention_bias, cut_heads)
        weights += _row(hidden, query, attention_bias)
        weights += 2 * _column(intermediate, hidden, mlp_bias)
        weights += _row(hidden, intermediate, mlp_bias)
        vocabulary = WeightShape(shape=(vocab, hidden), cut=0)
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=(tuple(weights),) * layers,
            embedding=(vocabulary,),
            final_norm=(WeightShape(shape=(hidden,)),),
            head=() if tied else (vocabulary,),
            tied=tied,
        )


def _column(out: int, features: int, bias: bool, heads: int | None = None) -> list[WeightShape]:
    weight = WeightShape(shape=(out, features), cut=0, heads=heads)
    return [weight, WeightShape(shape=(out,), cut=0, heads=heads)] if bias else [weight]


def _row(out: int, features: int, bias: bool) -> list[WeightShape]:
    weight = WeightShape(shape=(out, features), cut=1)
    return [weight, WeightShape(shape=(out,))] if bias else [weight]
