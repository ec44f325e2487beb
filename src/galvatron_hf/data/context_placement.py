# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Places the sequences of a step where blocks of consecutive data ranks share them: static context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from galvatron_hf.data.cost import GroupCost
from galvatron_hf.data.placement import Placement, SharedSequence, place
from galvatron_hf.plan.chunks import largest_share


_MOST_TRIED = 32  # numbers of shared sequences of a block that are tried, besides all of them


def place_in_blocks(
    lengths: Sequence[int],
    ranks: int,
    context: int,
    cost: GroupCost,
    *,
    max_tokens: int | None,
    overhead: float = 0.0,
    stages: int = 1,
    allowed: Callable[[int], bool] | None = None,
) -> Placement:
    """Places every sequence once, in blocks of `context` ranks. All ranks of a block share a sequence, but for short
    ones that one rank has whole, where that takes the block no longer. The other arguments are those of
    [`~galvatron_hf.data.placement.place`]; a rank has at most `max_tokens` tokens in a micro-batch.

    Raises:
        ValueError: for a sequence that a block cannot hold, or a number of ranks that `context` does not divide.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if context < 1 or ranks % context:
        raise ValueError(f"context={context} does not divide the {ranks} data ranks; use a divisor of {ranks}.")
    # Tokens are counted as if all sequences were shared; then any of them may be.
    shares = largest_share(lengths, context)
    blocks = place(
        shares * context,
        ranks // context,
        _CostInBlock(cost=cost, context=context),
        max_tokens=None if max_tokens is None else max_tokens * context,
        overhead=overhead,
        stages=stages,
        allowed=allowed,
    )
    micro_batches, shared = [], []
    for of_blocks in blocks.micro_batches:
        whole: list[tuple[int, ...]] = []
        of_all: list[SharedSequence] = []
        for block, members in enumerate(of_blocks):
            alone, together = _share_out(np.array(members, dtype=np.int64), lengths, shares, context, cost, max_tokens)
            whole += alone
            own = tuple(range(block * context, (block + 1) * context))
            of_all += [SharedSequence(one, own, cost.execution(int(lengths[one]), context)) for one in together]
        micro_batches.append(tuple(whole))
        shared.append(tuple(of_all))
    return Placement(tuple(micro_batches), tuple(shared))


@dataclass(frozen=True, kw_only=True)
class _CostInBlock:
    """Gives the seconds of sequences in a block of ranks, by their tokens."""

    cost: GroupCost
    context: int

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        return np.minimum(self.cost.seconds(lengths, self.context), self.cost.seconds(lengths, 1) / self.context)


def _share_out(
    members: np.ndarray,
    lengths: np.ndarray,
    shares: np.ndarray,
    context: int,
    cost: GroupCost,
    max_tokens: int | None,
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Returns the sequences that each rank of a block has whole, and those that all share. The longest ones are
    shared; how many is tried, and the number with which the block is fastest is taken.
    """
    alone = cost.seconds(lengths[members], 1)
    order = np.argsort(-alone, kind="stable")
    members, alone, together = members[order], alone[order], cost.seconds(lengths[members[order]], context)
    tried = {*range(min(len(members), _MOST_TRIED) + 1), len(members)}
    ways = [_with_shared(members, lengths, shares, alone, together, context, max_tokens, count) for count in tried]
    _, whole, shared = min(ways, key=lambda way: way[0])
    return [tuple(sorted(each)) for each in whole], sorted(shared)


def _with_shared(
    members: np.ndarray,
    lengths: np.ndarray,
    shares: np.ndarray,
    alone: np.ndarray,
    together: np.ndarray,
    context: int,
    max_tokens: int | None,
    count: int,
) -> tuple[float, list[list[int]], list[int]]:
    """Returns the seconds of a block whose ranks share the first `count` sequences, what each rank has whole, and what
    they share. The other sequences go to the least loaded rank, or are shared too if that has no room.
    """
    loads, tokens = np.zeros(context), np.zeros(context, dtype=np.int64)
    later = int(shares[members].sum())  # tokens that each rank must keep free
    whole: list[list[int]] = [[] for _ in range(context)]
    shared: list[int] = []
    for index, sequence in enumerate(members.tolist()):
        later -= int(shares[sequence])
        rank = int(loads.argmin())
        room = max_tokens is None or tokens[rank] + lengths[sequence] + later <= max_tokens
        if index >= count and room:
            whole[rank].append(sequence)
            loads[rank] += alone[index]
            tokens[rank] += lengths[sequence]
        else:
            shared.append(sequence)
            loads += together[index]
            tokens += shares[sequence]
    return float(loads.max()), whole, shared


def in_smaller_blocks(
    placement: Placement, lengths: Sequence[int], ranks: int, context: int, smaller: int, cost: GroupCost
) -> Placement:
    """Places the sequences of each micro-batch and block anew, in blocks of `smaller` ranks, a divisor of `context`:
    for layers that share sequences among fewer ranks. Sequences stay in their micro-batch and in their block.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    micro_batches, shared = [], []
    for index, packs in enumerate(placement.micro_batches):
        whole: list[tuple[int, ...]] = []
        of_all: list[SharedSequence] = []
        for first in range(0, ranks, context):
            block = range(first, first + context)
            members = [one for rank in block for one in packs[rank]]
            members += [one.sequence for one in placement.shared_in(index) if one.ranks[0] in block]
            own = lengths[np.array(members, dtype=np.int64)]
            # One micro-batch: a second one would take longer than all sequences together.
            alone = float(cost.seconds(own, 1).sum()) + 1.0
            found = place_in_blocks(own, context, smaller, cost, max_tokens=None, overhead=alone)
            (of_ranks,) = found.micro_batches or (((),) * context,)
            whole += [tuple(sorted(members[one] for one in rank)) for rank in of_ranks]
            of_all += [
                SharedSequence(members[one.sequence], tuple(first + rank for rank in one.ranks), one.execution)
                for one in (found.shared_in(0) if found.micro_batches else ())
            ]
        micro_batches.append(tuple(whole))
        shared.append(tuple(of_all))
    return Placement(tuple(micro_batches), tuple(shared))
