# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The planner of packs: places the documents of a step into micro-batches and packs, within a number of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.context_placement import in_smaller_blocks, place_in_blocks
from galvatron_hf.data.cost import GroupCost
from galvatron_hf.data.group_placement import GroupPlacement, place_groups
from galvatron_hf.data.near_ranks import on_nodes
from galvatron_hf.data.packing import PER_RANK
from galvatron_hf.data.partition_exact import TooLargeError
from galvatron_hf.data.placement import PLANNERS, Placement, SharedSequence, in_order, place
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import PipelineShape, can_order
from galvatron_hf.trainer.arguments import step_rows
from galvatron_hf.trainer.data.sequence_cost import StepCost, degree_of
from galvatron_hf.trainer.data.step_plans import PlanCost, StepPlans
from galvatron_hf.trainer.data.step_variants import StepVariant


logger = logging.get_logger(__name__)
EXACT_EFFORT = 50_000  # takes seconds at most: a step waits for a placement that is not ready


@dataclass(frozen=True, kw_only=True)
class PackPlanner:
    """Places the documents of a step. Its values depend on the plan and the arguments alone.

    Attributes:
        packs (`int`): packs of a micro-batch.
        multiple (`int`): the number of tokens of a pack is a multiple of it.
        bound (`int`, *optional*): most tokens of a pack, if the arguments give it; a multiple of `multiple`.
        rows_of_block (`int`): rows of a data-parallel rank in one of the plan's padded micro-batches.
        packs_of_block (`int`): packs that hold these rows together; more than one if context ranks share each row.
        longest_row (`int`): tokens of the training set's longest row; 0 if that is not known.
        planner (`str`): an algorithm of [`~data.placement.place`].
        groups ([`GroupCost`]): the cost of documents that data ranks share.
        degree (`int`): the most data ranks that may share a document.
        recompute (`str`, *optional*): of all layers, if it is not the plan's.
        share (`float`): tokens of a pack over those of one under the optimizer's plan.
        number (`int`): of the plan under which steps are computed, 0 for the optimizer's.
        move_seconds (`float`): for weights and gradients to move to another plan's layout and back.
        variants (`tuple[PackPlanner, ...]`): planners of other ways to compute a step, the fastest of which is taken.
    """

    plan: ParallelPlan
    packs: int
    multiple: int
    bound: int | None
    rows_of_block: int
    packs_of_block: int = 1
    longest_row: int
    cost: StepCost
    planner: str
    groups: GroupCost
    degree: int = 1
    recompute: str | None = None
    share: float = 1.0
    number: int = 0
    move_seconds: float = 0.0
    variants: tuple[PackPlanner, ...] = ()

    @classmethod
    def from_model(
        cls,
        parallel: ParallelModel,
        args: TrainingArguments,
        cost: StepCost,
        known: np.ndarray,
        plans: StepPlans | None = None,
    ) -> PackPlanner:
        """Makes the planner for a model under its plan, and perhaps others. `known` are the tokens of the training
        set's rows, empty if they are not known. A `max_tokens_per_rank` that packs cannot have raises ValueError.
        """
        rows = step_rows(args)
        degree = degree_of(parallel)
        block = 1 if parallel.plan.sequence_groups is not None else degree
        found = cls(
            plan=parallel.plan,
            packs=parallel.resolved.packs,
            multiple=pack_multiple(parallel, args),
            bound=_pack_bound(parallel, args),
            rows_of_block=-(-rows * block // (parallel.plan.micro_batch_count * parallel.resolved.packs)),
            packs_of_block=block,
            longest_row=int(known.max(initial=0)),
            cost=cost,
            planner=getattr(args, "placement_planner", PLANNERS[0]),
            groups=cost.of_groups(parallel),
            degree=degree,
        )
        variants = [found._of_variant(variant) for variant in cost.variants]
        for number, of_plan in enumerate((plans and plans.costs) or (), 1):
            if of_plan is not None:
                variants.append(found._of_plan(plans.model(number), args, number, of_plan))
        return replace(found, variants=tuple(variants))

    def _of_variant(self, variant: StepVariant) -> PackPlanner:
        cost = replace(self.cost, sequence=variant.sequence)
        groups = variant.of_groups(self.groups)
        return replace(self, cost=cost, groups=groups, recompute=variant.recompute, share=variant.capacity)

    def _of_plan(self, parallel: ParallelModel, args: TrainingArguments, number: int, found: PlanCost) -> PackPlanner:
        return replace(
            self,
            plan=parallel.plan,
            packs=parallel.resolved.packs,
            multiple=pack_multiple(parallel, args),
            cost=found.cost,
            groups=found.cost.of_groups(parallel),
            degree=degree_of(parallel),
            share=found.capacity,
            number=number,
            move_seconds=found.move_seconds,
        )

    def capacity(self, lengths: np.ndarray) -> int:
        """Returns the most tokens of a pack; by default those of padded micro-batches of the longest rows."""
        if self.bound is not None:
            most = self.bound
        else:
            longest, block = max(int(lengths.max(initial=0)), self.longest_row), self.packs_of_block
            # No shorter document has more tokens in a pack that shares it, two chunks in each pack.
            share = longest if block == 1 else 2 * -(-longest // (2 * block))
            most = -(-self.rows_of_block * share // self.multiple) * self.multiple
        return max(1, int(most * self.share) // self.multiple) * self.multiple

    @property
    def limit(self) -> str:
        """Names what a document may not exceed, for messages."""
        if self.degree == 1:
            return PER_RANK
        return f"what {self.degree} ranks of max_tokens_per_rank hold together"

    def longest_document(self, lengths: np.ndarray) -> int:
        """Returns the most tokens of a document: of a pack, or of as many packs as may share it."""
        return max(planner.longest_document_of_plan(lengths) for planner in (self, *self.variants))

    def longest_document_of_plan(self, lengths: np.ndarray) -> int:
        """Returns the most tokens of a document in a step that is computed as the plan says."""
        most = self.capacity(lengths)
        return most if self.degree == 1 else max(most, most // 2 * 2 * self.degree)  # chunks of even packs fit exactly

    @property
    def bound_of_documents(self) -> int | None:
        """Returns the most tokens of a document, if the arguments give it."""
        return None if self.bound is None else self.longest_document(np.zeros(0, dtype=np.int64))

    def place(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        """Places documents by cost, into a number of micro-batches that the plan's schedule can run, and chooses the
        fastest way to compute the step. A given `max_tokens` of a pack is for the plan's own way alone.
        """
        if not self.variants or max_tokens is not None:
            return self._place(lengths, max_tokens)
        fitting = [
            one for one in (self, *self.variants) if lengths.max(initial=0) <= one.longest_document_of_plan(lengths)
        ]
        found = [(one, one._place(lengths)) for one in fitting or [self]]
        return min(found, key=lambda pair: pair[0]._seconds(pair[1], lengths))[1]

    def _seconds(self, placement: Placement, lengths: np.ndarray) -> float:
        stages = len(self.plan.rank_groups)
        seconds = placement.seconds(lengths, self.groups, overhead=self.cost.overhead, stages=stages)
        return seconds + self.move_seconds

    def _place(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        return self._as_computed(self._found(lengths, max_tokens))

    def _as_computed(self, found: Placement) -> Placement:
        """Returns a placement that says how its step is computed."""
        return replace(found, recompute=self.recompute, plan=self.number)

    def _found(self, lengths: np.ndarray, max_tokens: int | None) -> Placement:
        shape = PipelineShape.from_plan(self.plan)
        options = dict(
            max_tokens=max_tokens or self.capacity(lengths),
            overhead=self.cost.overhead,
            stages=len(self.plan.rank_groups),
            allowed=lambda count: can_order(shape, count),
        )
        if self.plan.sequence_groups is not None:
            degrees = self.groups.degrees(self.degree)
            found = place_groups(lengths, self.packs, self.groups, candidates=degrees, **options)
            return self._of_groups(found, lengths)
        if self.degree > 1:
            return self._with_others(
                place_in_blocks(lengths, self.packs, self.degree, self.groups, **options), lengths
            )
        find = functools.partial(place, lengths, self.packs, self.cost.sequence, **options)
        try:
            return find(planner=self.planner, effort=EXACT_EFFORT)
        except TooLargeError:
            logger.warning_once(
                f"A step of {len(lengths)} documents is too large for placement_planner='exact': 'longest_first' "
                "places it, and others like it."
            )
            return find()

    def _with_others(self, found: Placement, lengths: np.ndarray) -> Placement:
        """Adds the placements for layers of other context degrees than those whose documents most packs share."""
        if len({layer.context for layer in self.plan.layers}) == 1:
            return found
        ranks = len(self.plan.stages[0].ranks)
        degrees = {layer.context: self.packs // layer.data_degree(ranks) for layer in self.plan.layers}
        others = {
            context: in_smaller_blocks(found, lengths, self.packs, self.degree, degree, self.groups)
            for context, degree in degrees.items()
            if degree != self.degree
        }
        return replace(found, others=others)

    def _of_groups(self, found: GroupPlacement, lengths: np.ndarray) -> Placement:
        """Returns a placement of groups with the execution of each shared document."""
        micro_batches, shared = [], []
        for pairs in found.micro_batches:
            if self.groups.node_ranks is not None:
                pairs = on_nodes(pairs, self.packs, self.groups.node_ranks)
            whole: list[list[int]] = [[] for _ in range(self.packs)]
            for document, ranks in pairs:
                if len(ranks) == 1:
                    whole[ranks[0]].append(document)
            micro_batches.append(tuple(tuple(sorted(pack)) for pack in whole))
            shared.append(
                tuple(
                    SharedSequence(document, ranks, self.groups.execution(int(lengths[document]), len(ranks)))
                    for document, ranks in pairs
                    if len(ranks) > 1
                )
            )
        return Placement(tuple(micro_batches), tuple(shared))

    def in_order(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        """Places documents in their order; those that a pack cannot hold come last, each in a micro-batch of its own
        and shared by as many packs as may be. Of several ways to compute the step the one that holds most is taken.
        """
        if max_tokens is not None or not self.variants:
            return self._in_order(lengths, max_tokens)
        ways, longest = (self, *self.variants), lengths.max(initial=0)
        fitting = [one for one in ways if longest <= one.longest_document_of_plan(lengths)]
        return max(fitting or ways, key=lambda one: one.capacity(lengths))._in_order(lengths)

    def _in_order(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        most = max_tokens or self.capacity(lengths)
        short, long = np.flatnonzero(lengths <= most), np.flatnonzero(lengths > most)
        if not len(long) or self.degree == 1:
            return self._as_computed(self._with_others(in_order(lengths, self.packs, max_tokens=most), lengths))
        found = in_order(lengths[short], self.packs, max_tokens=most) if len(short) else Placement(())
        micro_batches = [tuple(tuple(short[list(pack)].tolist()) for pack in packs) for packs in found.micro_batches]
        ranks = tuple(range(self.degree))
        shared: list[tuple[SharedSequence, ...]] = [()] * len(micro_batches)
        for document in long.tolist():
            micro_batches.append(((),) * self.packs)
            execution = self.groups.execution(int(lengths[document]), self.degree)
            shared.append((SharedSequence(document, ranks, execution),))
        return self._as_computed(self._with_others(Placement(tuple(micro_batches), tuple(shared)), lengths))

    def imbalance(self, placement: Placement, lengths: np.ndarray) -> float:
        """Returns the predicted time of the slowest rank over the mean of all ranks."""
        way = placement.recompute, placement.plan
        planner = next((one for one in self.variants if (one.recompute, one.number) == way), self)
        return placement.imbalance(lengths, planner.groups, stages=len(planner.plan.rank_groups))


def pack_multiple(parallel: ParallelModel, args: TrainingArguments) -> int:
    """Returns the factor of a pack's tokens: sequence ranks split packs evenly, and a GPU gets fewer shapes."""
    wanted = getattr(args, "pack_to_multiple_of", None)
    if wanted is None:
        wanted = 64 if args.device.type == "cuda" else 1
    return int(np.lcm(parallel.resolved.pack_multiple, wanted))


def _pack_bound(parallel: ParallelModel, args: TrainingArguments) -> int | None:
    """Returns the most tokens of a pack that the arguments give, a multiple of [`pack_multiple`], or None."""
    given, groups = getattr(args, "max_tokens_per_rank", None), parallel.plan.sequence_groups
    multiple = pack_multiple(parallel, args)
    if given is None and groups is not None and groups.max_tokens_per_rank is not None:
        return max(1, groups.max_tokens_per_rank // multiple) * multiple
    if given is None:
        return None
    if given % multiple:
        raise ValueError(
            f"max_tokens_per_rank={given} is not a multiple of {multiple}, as the tokens of a pack are under this "
            f"plan and pack_to_multiple_of; use {max(given // multiple, 1) * multiple}."
        )
    return given
