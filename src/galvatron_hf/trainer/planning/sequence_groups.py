# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The decision to let data ranks share long documents, in groups that are chosen for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.cost import GroupCost, assumed_sharing
from galvatron_hf.data.group_placement import place_groups
from galvatron_hf.data.placement import place
from galvatron_hf.plan import ParallelPlan, SequenceGroups
from galvatron_hf.plan.deal import EXECUTIONS
from galvatron_hf.trainer.arguments import packing_mode, step_rows
from galvatron_hf.trainer.data.sequence_cost import estimated_cost


logger = logging.get_logger(__name__)

LEAST_GAIN = 1.1  # predicted time without groups / with them, from which "auto" makes groups
SAMPLED_STEPS = 4


def with_sequence_groups(
    plan: ParallelPlan,
    args: TrainingArguments,
    config: PreTrainedConfig,
    *,
    obstacle: Callable[[], str | None],
    lengths: Callable[[], np.ndarray],
    known: SequenceGroups | None = None,
) -> ParallelPlan:
    """Returns a plan under which ranks may share documents, if the arguments ask for that or it is predicted to pay. A
    plan that shares documents already stays as it is.

    Args:
        obstacle (`Callable`): returns why rows cannot be packed or documents not be shared, or None; for "auto".
        lengths (`Callable`): returns the tokens of the training set's rows, empty if they are not known.
        known ([`SequenceGroups`], *optional*): those of the search that found the plan.
    """
    mode = packing_mode(args)
    degree = plan.most_data_ranks
    if mode not in ("auto", "dynamic") or plan.shares_documents or degree == 1:
        return plan
    limit = getattr(args, "max_tokens_per_rank", None)
    if limit is None and mode == "dynamic" and known is not None:
        limit = known.max_tokens_per_rank
    grouped = replace(plan, sequence_groups=SequenceGroups(max_tokens_per_rank=limit, max_degree=degree))
    if mode == "dynamic":
        return grouped
    known = lengths()
    known = known[known > 0]
    if not len(known) or obstacle() is not None:
        return plan
    if limit is not None and known.max() > limit:
        return grouped if getattr(args, "long_sequences", "error") == "error" else plan
    gain = predicted_gain(known, plan, config, step_rows(args), limit)
    return grouped if gain >= LEAST_GAIN else plan


def predicted_gain(
    lengths: np.ndarray, plan: ParallelPlan, config: PreTrainedConfig, rows: int, max_tokens: int | None
) -> float:
    """Returns the time of steps in which every document has one rank over that of steps in which ranks share some, in
    multiplications of the model and an assumed cost of sharing: nothing is measured.
    """
    cost = estimated_cost(config, plan.num_layers).sequence
    groups = GroupCost(sequence=cost, sharing={EXECUTIONS[0]: assumed_sharing(cost)})
    ranks, stages = plan.most_data_ranks, len(plan.rank_groups)
    draw, without, with_groups = np.random.default_rng(0), 0.0, 0.0
    for _ in range(SAMPLED_STEPS):
        step = draw.choice(lengths, rows)
        options = dict(max_tokens=max_tokens, stages=stages)
        without += place(step, ranks, cost, **options).seconds(step, cost, stages=stages)
        with_groups += place_groups(step, ranks, groups, **options).seconds(step, groups, stages=stages)
    return without / with_groups
