# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What padding, grouping by length and packing make of a dataset, told by its lengths and the cost of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from galvatron_hf.data.cost import SequenceCost
from galvatron_hf.data.placement import place


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How sequences become the work of ranks.

    Args:
        batch_size (`int`): sequences of a global batch.
        ranks (`int`): data ranks.
        max_tokens (`int`, *optional*): of a rank in one micro-batch, padding included; enough for a rank's whole share
            of the longest sequences if absent.
        steps (`int`): global batches to look at.
        seed (`int`): of the sampler's order, and of which batches are looked at.

    Raises:
        ValueError: for numbers below 1, and where ranks would have unequally many sequences.
    """

    batch_size: int
    ranks: int
    max_tokens: int | None = None
    steps: int = 50
    seed: int = 42

    def __post_init__(self):
        for name in ("batch_size", "ranks", "max_tokens", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is less than 1: give a positive number.")
        if self.batch_size % self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of ranks={self.ranks}, by which padded rows are "
                f"shared out: give {-(-self.batch_size // self.ranks) * self.ranks}."
            )

    def token_limit(self, longest: int) -> int:
        """Tokens of a rank in one micro-batch, for sequences of at most `longest` tokens."""
        if self.max_tokens is None:
            return self.batch_size // self.ranks * longest
        if self.max_tokens < longest:
            raise ValueError(
                f"max_tokens={self.max_tokens} is less than the longest sequence, {longest} tokens: raise it, or cut "
                f"sequences with max_length={self.max_tokens}."
            )
        return self.max_tokens

    def padded_rows(self, longest: int) -> int:
        """Rows of a rank's micro-batch that fit at any length: what one would set `per_device_train_batch_size` to."""
        share = self.batch_size // self.ranks
        most = self.token_limit(longest) // longest
        return max(rows for rows in range(1, share + 1) if share % rows == 0 and rows <= most)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a mode does with the batches that were looked at.

    Ranks wait for each other at every micro-batch, as sharded weights make them.

    Args:
        mode (`str`): its name.
        micro_batches (`float`): of a step, on average.
        padding (`float`): share of the computed positions that hold no token.
        imbalance (`float`): time of the slowest ranks over that of the mean one.
        useful_tokens (`int`): of all steps and ranks, padding not counted.
        cost (`float`): of all steps, in the unit of the sequences' cost.
    """

    mode: str
    micro_batches: float
    padding: float
    imbalance: float
    useful_tokens: int
    cost: float

    @property
    def speed(self) -> float:
        """Useful tokens per unit of cost."""
        return self.useful_tokens / self.cost


# The computed positions of each sequence: of each micro-batch, of each rank.
Step = Sequence[Sequence[np.ndarray]]


def forecast_modes(lengths: np.ndarray, workload: Workload, cost: SequenceCost) -> list[Forecast]:
    """Looks at global batches of one epoch, as many as asked for or there are.

    Args:
        lengths (`np.ndarray`): [rows], tokens of each sequence, at least 1.
        workload (`Workload`): what is shared out, and among how many.
        cost (`SequenceCost`): of one sequence; a padded one costs as much as one of its padded length.

    Returns:
        `list[Forecast]`: padded in the sampler's order, grouped by length, packed. The first and the last have the
        same sequences.

    Raises:
        ValueError: for fewer sequences than a batch has, or a sequence over `max_tokens`.
    """
    batches = len(lengths) // workload.batch_size
    if not batches:
        raise ValueError(
            f"batch_size={workload.batch_size} is more than the {len(lengths)} sequences that there are: give a "
            "smaller one."
        )
    longest = int(lengths.max())
    limit, rows = workload.token_limit(longest), workload.padded_rows(longest)
    chosen = np.random.default_rng(workload.seed).permutation(batches)[: workload.steps]

    def drawn(order: Sequence[int]) -> list[np.ndarray]:
        return list(lengths[np.asarray(order)[: batches * workload.batch_size].reshape(batches, -1)[chosen]])

    sampled = drawn(_random_order(len(lengths), workload.seed))
    grouped = drawn(_grouped_order(lengths, workload))
    return [
        _forecast("padded", sampled, [_padded(batch, workload.ranks, rows) for batch in sampled], cost),
        _forecast("grouped", grouped, [_padded(batch, workload.ranks, rows) for batch in grouped], cost),
        _forecast("packed", sampled, [_packed(batch, workload.ranks, limit, cost) for batch in sampled], cost),
    ]


def _random_order(count: int, seed: int) -> list[int]:
    """Trainer's own order of the first epoch under `data_seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def _grouped_order(lengths: np.ndarray, workload: Workload) -> list[int]:
    """Trainer's order under `train_sampling_strategy="group_by_length"`: groups have the size of one rank's share."""
    generator = torch.Generator().manual_seed(workload.seed)
    share = workload.batch_size // workload.ranks
    return list(LengthGroupedSampler(share, lengths=lengths.tolist(), generator=generator))


def _padded(batch: np.ndarray, ranks: int, rows: int) -> Step:
    """A batch dealt out as plain Trainer does: the next rows to the next rank, each padded to the rank's longest."""
    dealt = batch.reshape(-1, ranks, rows)
    return np.broadcast_to(dealt.max(axis=-1, keepdims=True), dealt.shape)


def _packed(batch: np.ndarray, ranks: int, limit: int, cost: SequenceCost) -> Step:
    """A batch without padding, where the planner puts it."""
    placement = place(batch, ranks, cost, max_tokens=limit)
    return [[batch[np.asarray(own, dtype=np.int64)] for own in micro_batch] for micro_batch in placement.micro_batches]


def _forecast(mode: str, batches: list[np.ndarray], steps: list[Step], cost: SequenceCost) -> Forecast:
    computed = sum(int(positions.sum()) for step in steps for micro_batch in step for positions in micro_batch)
    costs = np.array(
        [[cost.of(own).sum() for own in micro_batch] for step in steps for micro_batch in step]
    )  # [micro-batches of all steps, ranks]
    slowest = costs.max(axis=1).sum()
    useful = int(sum(batch.sum() for batch in batches))
    return Forecast(
        mode=mode,
        micro_batches=len(costs) / len(steps),
        padding=1 - useful / computed,
        imbalance=float(slowest / costs.mean(axis=1).sum()),
        useful_tokens=useful,
        cost=float(slowest),
    )
