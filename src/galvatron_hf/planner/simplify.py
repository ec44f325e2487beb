# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds a simpler plan that is predicted to take hardly longer than the fastest one.

A gain of a tenth of a percent is less than the cost model's error, and a plan with few strategies is easier to read,
change and trust. What is simple is an order, see [`complexity`]. The simplest of many plans is returned, which need
not be the simplest of all.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.planner.estimate import Estimate, Estimates
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.space import Limits, expert_degrees, pipeline_degrees


TOLERANCE = 0.01
MOST_PLANS = 2_000  # that are priced; each takes about a millisecond
SIMPLEST = (0, 1, 0, 1, 1, 0, 0, 1)  # the complexity of DDP, or of ZeRO over all ranks
# What plans do without that people write by hand, simple ones first: data parallelism whose shards are over all ranks;
# the same with experts on several ranks; any plan of one strategy without a pipeline; and a pipeline of data
# parallelism.
LEFT_OUT = (
    ("pipeline", "tensor", "ulysses", "context", "hybrid-sharding", "expert"),
    ("pipeline", "tensor", "ulysses", "context", "hybrid-sharding"),
    ("pipeline", "mixed-layers"),
    ("tensor", "ulysses", "context", "hybrid-sharding", "interleaved"),
)


def complexity(
    plan: ParallelPlan, devices_per_node: int, expert_degrees: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns what makes a plan hard to read or to trust, what matters most first: weights that are gathered from
    other nodes for each micro-batch of a pipeline; numbers of strategies that differ in more than recompute, of kinds
    of parallelism besides data parallelism, of all strategies, of runs of equal layers, of ends that differ from the
    layers beside them, of shards over a part of the ranks; and stages on each pipeline rank. `expert_degrees` of the
    layers are those of the plan, or of [`~planner.space.expert_degrees`], where dense layers are like the others.
    """
    layers, ranks = plan.layers, len(plan.stages[0].ranks)
    crosses = ranks > devices_per_node
    in_pipeline = len(plan.rank_groups) > 1 and plan.micro_batch_count > 1
    regathered = any(
        layer.sharding == "zero3" and (layer.shard_degree or ranks) * layer.tensor > devices_per_node
        for layer in set(layers)
    )
    degrees = expert_degrees or [layer.expert for layer in layers]
    strategies = [(replace(layer, expert=1), degree) for layer, degree in zip(layers, degrees, strict=True)]
    ends = sum(end != of_layer(layer) for end, layer in zip((plan.embedding, plan.head), (layers[0], layers[-1])))
    return (
        int(in_pipeline and crosses and regathered),
        len({(replace(layer, recompute="none"), degree) for layer, degree in strategies}),
        _kinds_of_parallelism(plan),
        len(set(strategies)),
        1 + sum(one != other for one, other in itertools.pairwise(strategies)),
        ends,
        sum(layer.shard_degree is not None for layer in set(layers)),
        len(plan.stages) // len(plan.rank_groups),
    )


def _kinds_of_parallelism(plan: ParallelPlan) -> int:
    """Returns how many of pipeline, tensor, Ulysses, context and expert parallelism a plan has."""
    degrees = ("tensor", "ulysses", "context", "expert")
    in_layers = sum(any(getattr(layer, degree) > 1 for layer in set(plan.layers)) for degree in degrees)
    return in_layers + (len(plan.rank_groups) > 1)


def of_layer(layer: LayerStrategy) -> VocabularyStrategy:
    """Returns the strategy of an end that goes with a layer's, as in `ParallelPlan.uniform`."""
    return VocabularyStrategy(tensor=layer.tensor, sharding=layer.sharding, shard_degree=layer.shard_degree)


def simplest(result: SearchResult, tolerance: float = TOLERANCE, stop: Callable[[], bool] = lambda: False) -> Estimate:
    """Returns the simplest plan that was found to take at most 1 + `tolerance` times as long as the fastest one, and
    that fits; of equally simple ones the fastest. Looked at are what was found on the way, the best plans of few kinds
    of parallelism or of one strategy, plans of one of the fastest plan's strategies that recompute as few layers as
    fit, and what changes of these lead to, until `stop` returns True or no plan is simpler than one that was found.
    Raises `ValueError` if nothing fits.
    """
    if result.best is None:
        raise ValueError(result.no_plan_message)
    longest, prices = (1 + tolerance) * result.best.step_ms, Prices(Estimates(result.costs))
    numbers, seen = itertools.count(), set()
    queue: list[tuple] = []
    found: list[tuple] = []

    def complexity_of(plan: ParallelPlan) -> tuple[int, ...]:
        return complexity(plan, result.hardware.devices_per_node, expert_degrees(plan, result.model))

    def add(plan: ParallelPlan | None, parts_before: tuple[int, ...]) -> None:
        """Keeps a plan. One that lacks memory recomputes more, if it is simpler than the plan from which it comes."""
        if plan is None or plan in seen or not result.limits.allows(plan, result.model):
            return
        seen.add(plan)
        one = prices.of(plan)
        if one is None or one.step_ms > longest:
            return
        parts = complexity_of(plan)
        if max(one.memory_bytes) <= result.memory_bytes:
            entry = parts, one.step_ms, next(numbers), one
            heapq.heappush(queue, entry)
            found.append(entry)
        elif parts < parts_before:
            add(with_recompute(plan, prices, result.memory_bytes), parts_before)

    of_best = complexity_of(result.best.plan)
    for one in (result.best, *result.runners_up):
        add(one.plan, of_best)
    if tolerance > 0:
        for plan in itertools.chain(_of_few_kinds(result, longest, stop), _of_one_strategy(result.best.plan)):
            add(plan, of_best)
            if found and min(found)[0] == SIMPLEST:
                break
    while tolerance > 0 and queue and prices.count < MOST_PLANS and not stop() and queue[0][0] > SIMPLEST:
        parts, *_, one = heapq.heappop(queue)
        for plan in _simpler(one.plan):
            add(plan, parts)
    return prices.estimates.with_peaks(min(found)[-1])


class Prices:
    """Prices plans, and counts them."""

    def __init__(self, estimates: Estimates):
        self.estimates, self.count = estimates, 0

    def of(self, plan: ParallelPlan) -> Estimate | None:
        """Returns the estimate of a plan, or None if it has no price."""
        self.count += 1
        try:
            return self.estimates.of(plan)
        except ValueError:
            return None


def _of_few_kinds(result: SearchResult, longest_ms: float, stop: Callable[[], bool]) -> Iterator[ParallelPlan]:
    """Yields the best plans that do without some kinds of parallelism or have one strategy, within a step's time."""
    case, searched = (result.hardware, result.model, result.workload), set()
    for limits in (*map(functools.partial(_without, result.limits), LEFT_OUT), _uniform_stages(result)):
        if stop() or limits in searched or not _narrower(limits, result.limits):
            continue
        searched.add(limits)
        options = dict(memory_bytes=result.memory_bytes, stop=stop, costs=result.costs, longest_ms=longest_ms)
        try:
            found = search_plan(*case, limits=limits, **options)
        except ValueError:  # no plan is within these limits
            continue
        yield from (one.plan for one in ([] if found.best is None else [found.best, *found.runners_up]))


def _without(limits: Limits, features: Sequence[str]) -> Limits:
    for feature in features:
        limits = limits.without(feature)
    return limits


def _uniform_stages(result: SearchResult) -> Limits:
    """Returns the limits of plans of one strategy with as many stages as the fastest plan or twice as many, and as
    many micro-batches or twice as many: in a large space, a search of all plans of one strategy takes as long as that
    of the fastest.
    """
    best, degrees = result.best.plan, pipeline_degrees(result.hardware.world_size, len(result.model.layers))
    stages = {len(best.rank_groups), 2 * len(best.rank_groups)} & set(result.limits.pipeline or degrees)
    counts = {best.micro_batch_count, min(result.workload.rows, 2 * best.micro_batch_count)}
    return replace(
        result.limits,
        uniform=True,
        pipeline=tuple(sorted(stages)),
        micro_batches=tuple(sorted(counts)),
        context=None if result.limits.context is None else (best.layers[0].context,),
    )


def _narrower(limits: Limits, others: Limits) -> bool:
    """Returns whether limits differ from others and allow no degree that those forbid."""
    asked = ((getattr(limits, name), getattr(others, name)) for name in ("pipeline", "context"))
    return limits != others and all(allowed is None or set(own) <= set(allowed) for own, allowed in asked)


def _of_one_strategy(best: ParallelPlan) -> Iterator[ParallelPlan | None]:
    """Yields plans with the stages of the fastest one in which all layers have one of its strategies."""
    for strategy in dict.fromkeys(replace(layer, recompute="none") for layer in best.layers):
        yield _changed(best, layers=(strategy,) * best.num_layers)


def with_recompute(plan: ParallelPlan, prices: Prices, memory_bytes: int) -> ParallelPlan | None:
    """Returns the plan with recompute of the last layers of each stage, as few as fit the memory of each pipeline
    rank, by bisection; None if no layer has to, or a plan has no price. If the memory is too small even so, all layers
    recompute.
    """
    ranks = len(plan.rank_groups)

    def recomputed(counts: Sequence[int]) -> ParallelPlan | None:
        again = set()
        for number, stage in enumerate(plan.stages):
            last = range(*stage.layers)
            again.update(last[len(last) - min(counts[number % ranks], len(last)) :])
        layers = (replace(layer, recompute="full") if at in again else layer for at, layer in enumerate(plan.layers))
        return _changed(plan, layers=tuple(layers))

    few, many = [0] * ranks, [max(len(range(*stage.layers)) for stage in plan.stages)] * ranks
    while few != many:
        middle = [(least + most) // 2 for least, most in zip(few, many, strict=True)]
        changed = recomputed(middle)
        one = prices.of(plan if changed is None else changed)
        if one is None:
            return None
        for rank, needed in enumerate(one.memory_bytes):
            if needed <= memory_bytes:
                many[rank] = middle[rank]
            elif few[rank] < many[rank]:
                few[rank] = middle[rank] + 1
    return recomputed(few)


def _simpler(plan: ParallelPlan) -> Iterator[ParallelPlan | None]:
    """Yields plans in which one strategy takes another's place, with its own recompute or the other's, a run of layers
    takes its neighbour's, ends those of the layers beside them, shards are over all ranks, or weights stay gathered;
    None for an impossible one.
    """
    layers, kinds = plan.layers, list(dict.fromkeys(plan.layers))
    for one, other in itertools.permutations(kinds, 2):
        for taken in {other, replace(other, recompute=one.recompute)}:
            yield _changed(plan, layers=tuple(taken if layer == one else layer for layer in layers))
    runs = [(key, len(list(group))) for key, group in itertools.groupby(layers)]
    bounds = [0, *itertools.accumulate(count for _, count in runs)]
    for index, beside in itertools.product(range(len(runs)), (-1, 1)):
        if 0 <= index + beside < len(runs):
            run = (runs[index + beside][0],) * runs[index][1]
            yield _changed(plan, layers=layers[: bounds[index]] + run + layers[bounds[index + 1] :])
    first, last = of_layer(layers[0]), of_layer(layers[-1])
    for embedding, head in ((first, plan.head), (plan.embedding, last), (first, last), (first, first)):
        yield _changed(plan, embedding=embedding, head=head)
    for one in kinds:
        others = [replace(one, shard_degree=None)] if one.shard_degree is not None else []
        if one.sharding == "zero3":
            others += [replace(one, sharding="zero2"), replace(one, sharding="replicate", shard_degree=None)]
        for other in others:
            yield _changed(plan, layers=tuple(other if layer == one else layer for layer in layers))


def _changed(plan: ParallelPlan, **changes) -> ParallelPlan | None:
    try:
        changed = replace(plan, **changes)
    except ValueError:
        return None
    return None if changed == plan else changed
