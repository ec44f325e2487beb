# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The collectives of one training step, in closed form: how many, of what kind, between how many ranks, of what size.

Convention: the bytes of a collective are those of this rank's input to it. A ring over n ranks puts
`(n - 1) * input` bytes of an all-gather, `(n - 1) / n * input` of a reduce-scatter and of an all-to-all (whose input
counts the part that a rank keeps, unless it says otherwise) and `2 * (n - 1) / n * input` of an all-reduce onto the
wire of each rank. Groups of one rank communicate nothing and are not counted.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from galvatron_hf.models.shape import ModelShape, WeightShape
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS, AttentionHeads, Grid, Layout, block_size, sent_tokens
from galvatron_hf.plan.supported import unsupported


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32, _FP64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class Collective:
    """
    Equal collectives of one rank.

    Args:
        source (`str`): What they are for, one of "weights" (gathers and gradient sums of sharded and replicated data
            parallelism), "tensor", "megatron_sp", "ulysses", "layout", "embedding", "head", "partial gradients" (of
            weights that tensor ranks hold whole and use in part), "loss" or "gradient norm".
        kind (`str`): One of `KINDS`.
        ranks (`int`): Ranks of the group.
        bytes (`int`): Of this rank's input to one of them.
        count (`int`): How many.
    """

    source: str
    kind: str
    ranks: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Traffic:
    """
    The collectives of one rank in one step.

    Args:
        collectives (`tuple[Collective, ...]`): No two of the same source, kind, ranks and bytes.
    """

    collectives: tuple[Collective, ...]

    def count(self, kind: str | None = None, source: str | None = None) -> int:
        """How many there are, of one kind and source or of all."""
        return sum(item.count for item in self._chosen(kind, source))

    def bytes(self, kind: str | None = None, source: str | None = None) -> int:
        """Bytes of this rank's inputs to them."""
        return sum(item.count * item.bytes for item in self._chosen(kind, source))

    def sources(self) -> list[str]:
        """What there are collectives for, in a fixed order."""
        return list(dict.fromkeys(item.source for item in self.collectives))

    def _chosen(self, kind: str | None, source: str | None) -> list[Collective]:
        return [item for item in self.collectives if kind in (None, item.kind) and source in (None, item.source)]


class _Tally:
    """Adds collectives up by what they are."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int, int]] = Counter()

    def add(self, source: str, kind: str, ranks: int, size: int, count: int = 1) -> None:
        if ranks > 1 and count > 0:
            self.counts[source, kind, ranks, size] += count

    def traffic(self) -> Traffic:
        return Traffic(
            tuple(
                Collective(source=source, kind=kind, ranks=ranks, bytes=size, count=count)
                for (source, kind, ranks, size), count in self.counts.items()
            )
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What the parts of the formula share. `element` and `reduced`: bytes of an activation's and a gradient's element.

    `rows` and `length` are those of one micro-batch with what is added to it.
    """

    plan: ParallelPlan
    model: ModelShape
    ranks: int
    index: int
    element: int
    reduced: int
    rows: int = 0
    length: int = 0

    @property
    def grid(self) -> Grid:
        return Grid(self.rows, self.length)

    def tokens(self, layout: Layout) -> int:
        """Returns rows times positions on the rank under a layout."""
        return self.grid.rectangle(layout, self.index).area


def step_traffic(plan: ParallelPlan, model: ModelShape, *, rows: int, length: int, rank_index: int = 0) -> Traffic:
    """
    The collectives of one rank from a global batch to the norm of its gradients.

    Args:
        plan ([`ParallelPlan`]): Of one stage. Without a precision of its own it is taken to be fp32.
        model ([`ModelShape`]): What is trained, all of it.
        rows (`int`): Rows of the global batch; micro-batches share them as evenly as they can.
        length (`int`): Positions of a row.
        rank_index (`int`, *optional*, defaults to 0): The rank's index in the stage's order. Ranks differ where rows
            do not divide evenly, where a layout changes, and in the vocabulary's last piece.

    Returns:
        [`Traffic`]: Exactly what is sent for the loss, the gradients and their norm; see `docs/communication.md`.

    Raises:
        `ValueError`: if the plan does not run in this release, or not on this model.
    """
    for sentence in unsupported(plan):
        raise ValueError(sentence)
    if len(plan.stages) > 1:
        raise ValueError(
            f"The plan has {len(plan.stages)} pipeline stages, whose traffic has no formula yet; give a plan of one "
            "stage, such as that of a stage's ranks and layers."
        )
    if plan.num_layers != len(model.layers):
        raise ValueError(
            f"The plan has {plan.num_layers} layers and the model has {len(model.layers)}; make a plan for "
            f"{len(model.layers)} layers."
        )
    precision = plan.precision or Precision()
    ranks = len(plan.stages[0].ranks)
    count = min(plan.micro_batches, rows)
    tally = _Tally()
    for part in range(count):
        real_rows = (part + 1) * rows // count - part * rows // count
        padded_rows, padded_length = padded(plan, ranks, real_rows, length)
        step = _Step(
            plan=plan,
            model=model,
            ranks=ranks,
            index=rank_index,
            element=_BYTES[precision.compute],
            reduced=_BYTES[precision.reduce],
            rows=padded_rows,
            length=padded_length,
        )
        _embedding(tally, step)
        for layer, strategy in enumerate(plan.layers):
            _tensor_regions(tally, step, strategy)
            _ulysses(tally, step, strategy)
            _partial_gradients(tally, step, strategy, model.layers[layer])
        _layout_changes(tally, step)
        _head(tally, step)
    _weights(tally, step, count)
    tally.add("loss", "all_reduce", ranks, _FP32)
    # Where every rank has all gradients, it knows their norm.
    strategies = (*plan.layers, plan.embedding, plan.head)
    if any(strategy.tensor > 1 or strategy.resolved_shard_degree(ranks) > 1 for strategy in strategies):
        tally.add("gradient norm", "all_reduce", ranks, _FP64)
    return tally.traffic()


def padded(plan: ParallelPlan, ranks: int, rows: int, length: int) -> tuple[int, int]:
    """Rows and positions of a micro-batch with those that are added, so that every layer's split has some for all."""
    rows = max(rows, max(strategy.data_degree(ranks) for strategy in plan.layers))
    ends = [Layout.from_vocabulary(end.tensor, ranks, rows).positions for end in (plan.embedding, plan.head)]
    multiple = math.lcm(*ends, *(strategy.sequence_degree for strategy in plan.layers))
    return rows, -(-length // multiple) * multiple


def _embedding(tally: _Tally, step: _Step) -> None:
    """A vocabulary that is split over tensor ranks: each looks up what it has, and the results are summed."""
    tensor = step.plan.embedding.tensor
    tokens = step.tokens(Layout.from_vocabulary(tensor, step.ranks, step.rows))
    tally.add("embedding", "all_reduce", tensor, tokens * step.model.hidden * step.element)


def _head(tally: _Tally, step: _Step) -> None:
    """Four fp32 statistics of each token are gathered chunk by chunk, and the hidden states' gradient is summed."""
    tensor = step.plan.head.tensor
    tokens = step.tokens(Layout.from_vocabulary(tensor, step.ranks, step.rows))
    whole, rest = divmod(tokens, HEAD_CHUNK_TOKENS)
    tally.add("head", "all_gather", tensor, 4 * _FP32 * HEAD_CHUNK_TOKENS, whole)
    tally.add("head", "all_gather", tensor, 4 * _FP32 * rest, min(rest, 1))
    tally.add("head", "all_reduce", tensor, tokens * step.model.hidden * step.element)


def _tensor_regions(tally: _Tally, step: _Step, strategy: LayerStrategy) -> None:
    """Each region is entered and left once forward and once backward; recompute does the forward ones again.

    Recompute stops at the last tensor that the backward pass needs, which is made before the last region is left.
    """
    tensor, regions = strategy.tensor, step.model.regions
    resent = strategy.recompute == "full"
    entered = regions * (1 + resent)
    left = regions * (1 + resent) - (resent and not step.model.saves_after_last_region)
    tokens = step.tokens(Layout.from_strategy(strategy, step.ranks))
    piece = tokens * step.model.hidden * step.element
    if strategy.megatron_sp:
        tally.add("megatron_sp", "all_gather", tensor, piece, entered + regions)
        tally.add("megatron_sp", "reduce_scatter", tensor, tensor * piece, left + regions)
    else:
        tally.add("tensor", "all_reduce", tensor, piece, left + regions)


def _ulysses(tally: _Tally, step: _Step, strategy: LayerStrategy) -> None:
    """Queries, keys and values go from positions to heads and the output goes back; backward does the reverse."""
    if strategy.ulysses == 1:
        return
    model = step.model
    layout = Layout.from_strategy(strategy, step.ranks)
    gathered = strategy.tensor if strategy.megatron_sp else 1
    tokens = gathered * step.tokens(layout)
    heads = AttentionHeads.from_degrees(
        query=model.heads, key_value=model.kv_heads, tensor=strategy.tensor, ulysses=strategy.ulysses
    )
    times = 3 if strategy.recompute == "full" else 2
    size = tokens * model.head_dim * step.element
    tally.add("ulysses", "all_to_all", strategy.ulysses, heads.query * size, 2 * times)
    tally.add("ulysses", "all_to_all", strategy.ulysses, heads.sent_key_value * size, 2 * times)


def _partial_gradients(tally: _Tally, step: _Step, strategy: LayerStrategy, weights: tuple[WeightShape, ...]) -> None:
    """In fp32, weight by weight."""
    for weight in weights:
        if weight.sums_gradient(strategy.tensor, strategy.megatron_sp):
            tally.add("partial gradients", "all_reduce", strategy.tensor, math.prod(weight.shape) * _FP32)


def _layout_changes(tally: _Tally, step: _Step) -> None:
    """Hidden states on their way forward, their gradients on the way back."""
    layouts = [
        Layout.from_vocabulary(step.plan.embedding.tensor, step.ranks, step.rows),
        *(Layout.from_strategy(strategy, step.ranks) for strategy in step.plan.layers),
        Layout.from_vocabulary(step.plan.head.tensor, step.ranks, step.rows),
    ]
    for before, after in itertools.pairwise(layouts):
        for pair in ((before, after), (after, before)):
            tokens = sent_tokens(*pair, step.grid)[step.index]
            tally.add("layout", "all_to_all", block_size(*pair), tokens * step.model.hidden * step.element)


def _weights(tally: _Tally, step: _Step, micro_batches: int) -> None:
    """What sharded and replicated data parallelism send, unit by unit: each layer, embedding, head and final norm."""
    plan, model = step.plan, step.model
    for strategy, weights in zip(plan.layers, model.layers, strict=True):
        # zero3 frees a layer after its forward and gathers it again for its backward
        _unit(tally, step, strategy, weights, micro_batches, gathers=2)
    if model.tied:
        _unit(tally, step, plan.head, (*model.embedding, *model.final_norm, *model.head), micro_batches)
        return
    # An embedding's backward needs no weights, and the head and the norm begin theirs right after their forward.
    _unit(tally, step, plan.embedding, model.embedding, micro_batches)
    _unit(tally, step, plan.head, model.head, micro_batches)
    _unit(tally, step, plan.head, model.final_norm, micro_batches)


def _unit(
    tally: _Tally,
    step: _Step,
    strategy: LayerStrategy | VocabularyStrategy,
    weights: tuple[WeightShape, ...],
    micro_batches: int,
    gathers: int = 1,
) -> None:
    """Weights that are gathered and reduced together; `gathers` of them in a micro-batch under zero3."""
    shards = strategy.resolved_shard_degree(step.ranks)
    copies = step.ranks // strategy.tensor // shards
    position = step.index % strategy.tensor
    elements = sum(weight.shard_elements(strategy.tensor, position, shards) for weight in weights)
    times = {"zero3": gathers * micro_batches, "zero2": 1, "replicate": 0}[strategy.sharding]
    tally.add("weights", "all_gather", shards, elements * step.element, times)
    reduces = 1 if strategy.sharding == "replicate" else micro_batches
    tally.add("weights", "reduce_scatter", shards, shards * elements * step.reduced, reduces)
    # Copies wait for the last micro-batch: what is summed within a copy until then adds up where it is.
    tally.add("weights", "all_reduce", copies, elements * step.reduced)
