# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the parts of a parallel plan: strategies, stages, number formats and dynamic sequence groups."""

import math
from dataclasses import dataclass, replace

from galvatron_hf.plan.validation import (
    MAX_RANKS,
    MAX_TOKENS,
    check_bool,
    check_choice,
    check_int,
    divisors,
    nearest,
    show,
)


DEFAULT_STACK = "decoder"  # the name of the stack, if a plan has one and the caller does not name it
SHARDINGS = ("replicate", "zero2", "zero3")
RECOMPUTES = ("none", "full")
RECOMPUTES_NOT_YET = ("selective", "offload")
DTYPES = ("fp32", "bf16", "fp16")
COMPUTE_DTYPES = (*DTYPES, "fp8")
MASTER_DTYPES = ("fp32", "bf16")
SEQUENCE_KINDS = ("ring", "gather", "ulysses")


def _check_sharding(sharding: str, shard_degree: int | None) -> None:
    check_choice("sharding", sharding, SHARDINGS)
    if shard_degree is None:
        return
    check_int("shard_degree", shard_degree, high=MAX_RANKS)
    if sharding == "replicate" and shard_degree != 1:
        raise ValueError(
            f"shard_degree is {shard_degree} under sharding 'replicate', where every rank holds a whole copy: "
            "drop shard_degree or use sharding 'zero3'"
        )


@dataclass(frozen=True, kw_only=True)
class LayerStrategy:
    """
    States how the R ranks of a stage compute one layer.

    Ranks of a stage are ordered with tensor innermost, then ulysses, context and data. Ulysses and context ranks hold
    the same weights as data ranks, so they count as sharding ranks.

    Args:
        tensor (`int`, defaults to 1): Ranks over which every weight matrix is split (arXiv 1909.08053).
        megatron_sp (`bool`, defaults to `False`): Whether positions are split over the tensor ranks between the matrix
            products (arXiv 2205.05198). Needs `tensor` > 1.
        ulysses (`int`, defaults to 1): Ranks that split positions outside attention and heads inside
            (arXiv 2309.14509).
        context (`int`, defaults to 1): Ranks that split positions everywhere; keys and values pass in a ring
            (arXiv 2310.01889).
        sharding (`str`, defaults to `"zero3"`): `"replicate"` (every rank holds all weights), `"zero2"` (gradients and
            optimizer state are sharded, arXiv 1910.02054) or `"zero3"` (weights too).
        shard_degree (`int`, *optional*): Ranks that hold the shards of one replica, a divisor of R / tensor. None
            means R / tensor; fewer is hybrid sharding (several replicas).
        expert (`int`, defaults to 1): Ranks over which experts are spread, a multiple of `tensor` that divides R. 1
            shards experts like any other weight.
        recompute (`str`, defaults to `"none"`): `"full"` keeps only the layer's input and computes the rest again in
            the backward pass.

    Raises:
        `ValueError`: in one sentence, if a value is impossible for every number of ranks.
    """

    tensor: int = 1
    megatron_sp: bool = False
    ulysses: int = 1
    context: int = 1
    sharding: str = "zero3"
    shard_degree: int | None = None
    expert: int = 1
    recompute: str = "none"

    def __post_init__(self):
        for name in ("tensor", "ulysses", "context", "expert"):
            check_int(name, getattr(self, name), high=MAX_RANKS)
        check_bool("megatron_sp", self.megatron_sp)
        _check_sharding(self.sharding, self.shard_degree)
        if type(self.recompute) is str and self.recompute in RECOMPUTES_NOT_YET:
            raise ValueError(f"recompute is {self.recompute!r}, which is not available yet: use 'full' or 'none'")
        check_choice("recompute", self.recompute, RECOMPUTES)
        if self.megatron_sp and self.tensor == 1:
            raise ValueError(
                "megatron_sp is true with tensor=1, which leaves no ranks to split positions over: "
                "use megatron_sp=false or tensor=2"
            )
        if self.expert != 1 and self.expert % self.tensor:
            multiple = max(1, round(self.expert / self.tensor)) * self.tensor
            raise ValueError(
                f"expert is {self.expert}, which is not a multiple of tensor={self.tensor}: use expert={multiple}"
            )

    @property
    def sequence_degree(self) -> int:
        """Returns the number of pieces into which the positions of data ranks are split between layers."""
        return self.ulysses * (self.tensor if self.megatron_sp else 1)

    def data_degree(self, ranks: int) -> int:
        """Returns R / (tensor * ulysses * context), the groups of ranks with different rows, for R = `ranks`."""
        self.check_ranks(ranks)
        return ranks // (self.tensor * self.ulysses * self.context)

    def token_degree(self, ranks: int) -> int:
        """Returns R / (tensor * ulysses), the groups of ranks with different tokens: rows or, with `context` ranks,
        parts of documents, for R = `ranks`.
        """
        return self.data_degree(ranks) * self.context

    def resolved_shard_degree(self, ranks: int) -> int:
        """Returns the number of ranks that hold the shards of one replica of the (tensor-split) weights, for R =
        `ranks`. It is `shard_degree` if given, 1 under `"replicate"`, else R / tensor.
        """
        self.check_ranks(ranks)
        return _resolved_shard_degree(self, ranks)

    def check_ranks(self, ranks: int) -> None:
        """Raises `ValueError` with the nearest strategy that works, if the degrees do not fit R = `ranks`."""
        taken = self.tensor * self.ulysses * self.context
        if ranks % taken:
            degrees = f"tensor={self.tensor}, ulysses={self.ulysses} and context={self.context}"
            problem = f"{degrees} take groups of {taken} ranks, which do not divide the {ranks} ranks of its stage"
        elif self.shard_degree is not None and (ranks // self.tensor) % self.shard_degree:
            problem = _shard_problem(self, ranks)
        elif ranks % self.expert:
            problem = f"expert={self.expert} does not divide the {ranks} ranks of its stage"
        else:
            return
        fitting = self.nearest_fitting(ranks)
        changed = [
            f"{name}={getattr(fitting, name)}".replace("False", "false")
            for name in ("tensor", "megatron_sp", "ulysses", "context", "shard_degree", "expert")
            if getattr(fitting, name) != getattr(self, name)
        ]
        raise ValueError(f"{problem}: use {', '.join(changed)}")

    def nearest_fitting(self, ranks: int) -> "LayerStrategy":
        """Returns the strategy with the nearest degrees (smallest product of ratios) that fits R = `ranks`."""
        best = None
        for tensor in divisors(ranks):
            for ulysses in divisors(ranks // tensor):
                rest = ranks // (tensor * ulysses)
                for context in divisors(rest) if self.context > 1 else (1,):
                    wanted = (self.tensor, self.ulysses, self.context)
                    cost = sum(abs(math.log(a / b)) for a, b in zip(wanted, (tensor, ulysses, context)))
                    # A rounded cost makes ties real ties, and ties go to the larger degrees.
                    key = (round(cost, 9), -tensor, -ulysses, -context)
                    if best is None or key < best[0]:
                        best = (key, tensor, ulysses, context)
        _, tensor, ulysses, context = best
        shard_degree = self.shard_degree
        if shard_degree is not None:
            shard_degree = nearest(shard_degree, divisors(ranks // tensor))
        expert = nearest(self.expert, [1] + [tensor * d for d in divisors(ranks // tensor)])
        return replace(
            self,
            tensor=tensor,
            ulysses=ulysses,
            context=context,
            megatron_sp=self.megatron_sp and tensor > 1,
            shard_degree=shard_degree,
            expert=expert if self.expert > 1 else 1,
        )


@dataclass(frozen=True, kw_only=True)
class VocabularyStrategy:
    """States how the R ranks of a stage compute the embedding (with positions) or the head (with the final norm).

    Args:
        tensor (`int`, defaults to 1): Ranks that split the vocabulary.
        sharding (`str`, defaults to `"zero3"`): As in [`LayerStrategy`].
        shard_degree (`int`, *optional*): As in [`LayerStrategy`]; None means R / tensor.
    """

    tensor: int = 1
    sharding: str = "zero3"
    shard_degree: int | None = None

    def __post_init__(self):
        check_int("tensor", self.tensor, high=MAX_RANKS)
        _check_sharding(self.sharding, self.shard_degree)

    def data_degree(self, ranks: int) -> int:
        """Returns R / tensor for R = `ranks`."""
        self.check_ranks(ranks)
        return ranks // self.tensor

    def resolved_shard_degree(self, ranks: int) -> int:
        """Returns `shard_degree` if given, 1 under `"replicate"`, else R / tensor for R = `ranks`."""
        self.check_ranks(ranks)
        return _resolved_shard_degree(self, ranks)

    def check_ranks(self, ranks: int) -> None:
        """Raises `ValueError` with the nearest degree that works, if the degrees do not fit R = `ranks`."""
        if ranks % self.tensor:
            fitting = nearest(self.tensor, divisors(ranks))
            fix = f"tensor={fitting}"
            if self.shard_degree is not None and (ranks // fitting) % self.shard_degree:
                fix += f", shard_degree={nearest(self.shard_degree, divisors(ranks // fitting))}"
            raise ValueError(f"tensor={self.tensor} does not divide the {ranks} ranks of its stage: use {fix}")
        if self.shard_degree is not None and (ranks // self.tensor) % self.shard_degree:
            fitting = nearest(self.shard_degree, divisors(ranks // self.tensor))
            raise ValueError(f"{_shard_problem(self, ranks)}: use shard_degree={fitting}")


def _resolved_shard_degree(strategy: LayerStrategy | VocabularyStrategy, ranks: int) -> int:
    if strategy.shard_degree is not None:
        return strategy.shard_degree
    return 1 if strategy.sharding == "replicate" else ranks // strategy.tensor


def _shard_problem(strategy: LayerStrategy | VocabularyStrategy, ranks: int) -> str:
    return (
        f"shard_degree={strategy.shard_degree} does not divide the {ranks // strategy.tensor} ranks that can share a "
        f"replica ({ranks} ranks / tensor={strategy.tensor})"
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Names the number formats of a plan. A plan without them takes those of the training arguments.

    Args:
        compute (`str`, defaults to `"fp32"`): Format of matrix products and activations: fp32, bf16, fp16, or fp8 for
            products of layers in float8 and all else in bf16.
        master (`str`, defaults to `"fp32"`): Format of the stored weights and optimizer state: fp32 or bf16.
        reduce (`str`, defaults to `"fp32"`): Format in which gradients are summed: fp32, bf16 or fp16.
    """

    compute: str = "fp32"
    master: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self):
        check_choice("compute", self.compute, COMPUTE_DTYPES)
        check_choice("master", self.master, MASTER_DTYPES)
        check_choice("reduce", self.reduce, DTYPES)

    @property
    def float8(self) -> bool:
        """Returns whether products of layers are in float8."""
        return self.compute == "fp8"

    @property
    def activations(self) -> str:
        """Returns the format of activations, and of weights while they are used."""
        return "bf16" if self.float8 else self.compute


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Names the ranks and the layers of one pipeline stage.

    Args:
        ranks (`tuple[int, ...]`): Global ranks, in the order over which degrees are laid out.
        layers (`tuple[int, int]`): Half-open range of global layer indices.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]

    def __post_init__(self):
        object.__setattr__(self, "ranks", _tuple("ranks", self.ranks))
        object.__setattr__(self, "layers", _tuple("layers", self.layers))
        if not self.ranks:
            raise ValueError("ranks is empty, and a stage needs a rank to run on: list at least one")
        seen = set()
        for rank in self.ranks:
            check_int("rank", rank, low=0, high=MAX_RANKS - 1)
            if rank in seen:
                raise ValueError(f"rank {rank} is listed twice in one stage, which can use it once: list it once")
            seen.add(rank)
        check_range("layers", self.layers)


@dataclass(frozen=True, kw_only=True)
class SequenceGroups:
    """Limits sequence groups that are chosen for each micro-batch, as in FlexSP (arXiv 2412.01523).

    Args:
        max_tokens_per_rank (`int`, *optional*): Most tokens of a micro-batch on a rank; None means as many as padded
            rows have.
        max_degree (`int`): Most ranks of a group.
        kinds (`tuple[str, ...]`, defaults to all three): Ways in which a group may compute attention: `"ring"`,
            `"gather"` and `"ulysses"`, see [`~galvatron_hf.plan.deal.Deal`].
    """

    max_tokens_per_rank: int | None
    max_degree: int
    kinds: tuple[str, ...] = SEQUENCE_KINDS

    def __post_init__(self):
        if self.max_tokens_per_rank is not None:
            check_int("max_tokens_per_rank", self.max_tokens_per_rank, high=MAX_TOKENS)
        check_int("max_degree", self.max_degree, high=MAX_RANKS)
        object.__setattr__(self, "kinds", _tuple("kinds", self.kinds))
        if not self.kinds:
            raise ValueError("kinds is empty, which allows no group: use ['ring', 'ulysses']")
        for position, kind in enumerate(self.kinds):
            check_choice("kind", kind, SEQUENCE_KINDS)
            if kind in self.kinds[:position]:
                raise ValueError(f"kind {kind!r} is listed twice in kinds: list it once")


def check_range(name: str, value: tuple) -> None:
    """Raises `ValueError` unless `value` is a half-open, non-empty range `(start, end)` of non-negative integers."""
    if len(value) != 2 or any(type(bound) is not int for bound in value):
        raise ValueError(f"{name} is {show(list(value))}, which is not two integers [start, end): write [0, 1]")
    start, end = value
    if start < 0 or end <= start:
        fixed = max(start, 0)
        raise ValueError(
            f"{name} is {show([start, end])}, which holds no layer, because ranges are half-open and start at 0: "
            f"use {show([fixed, fixed + 1])}"
        )


def _tuple(name: str, value: object) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {show(value)}, which is not a list: write [...]")
    return tuple(value)
