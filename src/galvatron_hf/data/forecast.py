# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Predicts the padding, imbalance and throughput of padded, grouped and packed batches of a dataset, and of dynamic
groups of ranks that share long sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from galvatron_hf.data.cost import GroupCost, SequenceCost, assumed_sharing
from galvatron_hf.data.group_placement import place_groups
from galvatron_hf.data.placement import place


@dataclass(frozen=True, kw_only=True)
class DataWorkload:
    """Holds the settings of a forecast.

    Args:
        batch_size (`int`): sequences in a global batch, a multiple of `ranks`.
        ranks (`int`): number of data ranks.
        max_tokens (`int`, *optional*): tokens of a rank in one micro-batch, padding included. By default they suffice
            for a rank's share of a batch of the longest sequences.
        steps (`int`): number of global batches to predict.
        seed (`int`): seed of the sampler's order and of the choice of batches.
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
                raise ValueError(f"{name}={value} is less than 1: give 1 or more.")
        if self.batch_size % self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of ranks={self.ranks}, which share padded rows "
                f"equally: give {-(-self.batch_size // self.ranks) * self.ranks}."
            )

    def token_limit(self, longest: int) -> int:
        """Returns the tokens of a rank in one micro-batch, for sequences of at most `longest` tokens."""
        if self.max_tokens is None:
            return self.batch_size // self.ranks * longest
        together = self.max_tokens // 2 * 2 * self.ranks
        if max(self.max_tokens, together) < longest:
            raise ValueError(
                f"max_tokens={self.max_tokens} on each of {self.ranks} ranks is less than the longest sequence, "
                f"{longest} tokens: raise it, or cut sequences with max_length={together}."
            )
        return self.max_tokens

    def padded_rows(self, longest: int) -> int:
        """Returns the rows of a micro-batch that fit at any length, the value for `per_device_train_batch_size`."""
        share = self.batch_size // self.ranks
        most = max(1, self.token_limit(longest) // longest)
        return max(rows for rows in range(1, share + 1) if share % rows == 0 and rows <= most)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicts one way to batch. Ranks wait for each other at every micro-batch, as with sharded weights.

    Args:
        mode (`str`): "padded", "grouped", "packed" or "dynamic".
        micro_batches (`float`): mean number of micro-batches in a step.
        padding (`float`): share of the computed positions that are padding.
        imbalance (`float`): time of the slowest rank / mean time of the ranks.
        useful_tokens (`int`): tokens of all steps and ranks, without padding.
        cost (`float`): time of all steps, in the unit of the sequences' cost.
        shared_tokens (`float`): share of the tokens that are in sequences which several ranks share.
        largest_group (`int`): most ranks that share a sequence.
    """

    mode: str
    micro_batches: float
    padding: float
    imbalance: float
    useful_tokens: int
    cost: float
    shared_tokens: float = 0.0
    largest_group: int = 1

    @property
    def speed(self) -> float:
        """Returns the useful tokens per unit of time."""
        return self.useful_tokens / self.cost


# The computed positions of each sequence, [micro-batch][rank].
StepPositions = Sequence[Sequence[np.ndarray]]


def forecast_modes(lengths: np.ndarray, workload: DataWorkload, cost: SequenceCost) -> list[Forecast]:
    """Predicts padded (in the sampler's order), grouped (by length), packed and dynamic batches from global batches of
    one epoch. Padded, packed and dynamic batches have the same sequences. A padded sequence costs as much as one of
    its padded length. Sharing a sequence has the cost of [`~galvatron_hf.data.cost.assumed_sharing`]. If a rank cannot
    hold the longest sequence, dynamic batches alone are predicted. `lengths`: [rows], tokens of each sequence, at
    least 1.

    Raises:
        ValueError: if there are fewer sequences than `batch_size`, or a sequence is longer than all ranks hold.
    """
    sampled = drawn_batches(lengths, workload)
    grouped = _drawn(lengths, workload, _grouped_order(lengths, workload))
    longest = int(lengths.max())
    limit, rows = workload.token_limit(longest), workload.padded_rows(longest)
    dynamic = _dynamic(sampled, workload.ranks, limit, cost)
    if longest > limit:
        return [dynamic]
    return [
        _forecast("padded", sampled, [_padded(batch, workload.ranks, rows) for batch in sampled], cost),
        _forecast("grouped", grouped, [_padded(batch, workload.ranks, rows) for batch in grouped], cost),
        _forecast("packed", sampled, [_packed(batch, workload.ranks, limit, cost) for batch in sampled], cost),
        dynamic,
    ]


def drawn_batches(lengths: np.ndarray, workload: DataWorkload) -> list[np.ndarray]:
    """Returns the lengths [batch_size] of each of the forecast's global batches, in the sampler's order. Raises
    ValueError if there are fewer sequences than `batch_size`.
    """
    if len(lengths) < workload.batch_size:
        raise ValueError(
            f"batch_size={workload.batch_size} is more than the {len(lengths)} sequences that there are: give a "
            "smaller one."
        )
    return _drawn(lengths, workload, _random_order(len(lengths), workload.seed))


def padded_lengths(batch: np.ndarray, ranks: int, rows: int) -> np.ndarray:
    """Returns the computed positions [n] of the n sequences of a batch that is padded as plain Trainer does: `rows`
    consecutive rows of each rank are padded to the longest of them.
    """
    return _padded(batch, ranks, rows).reshape(-1)


def _drawn(lengths: np.ndarray, workload: DataWorkload, order: Sequence[int]) -> list[np.ndarray]:
    batches = len(lengths) // workload.batch_size
    chosen = np.random.default_rng(workload.seed).permutation(batches)[: workload.steps]
    return list(lengths[np.asarray(order)[: batches * workload.batch_size].reshape(batches, -1)[chosen]])


def _dynamic(batches: list[np.ndarray], ranks: int, limit: int, cost: SequenceCost) -> Forecast:
    groups = GroupCost(sequence=cost, sharing={"ring": assumed_sharing(cost)})
    slowest = mean = micro_batches = 0.0
    shared, largest = 0, 1
    for batch in batches:
        placement = place_groups(batch, ranks, groups, max_tokens=limit)
        loads = placement.loads(batch, groups)
        slowest, mean = slowest + loads.max(axis=1).sum(), mean + loads.mean(axis=1).sum()
        micro_batches += len(loads)
        for document, held in (pair for pairs in placement.micro_batches for pair in pairs if len(pair[1]) > 1):
            shared, largest = shared + int(batch[document]), max(largest, len(held))
    useful = int(sum(batch.sum() for batch in batches))
    return Forecast(
        mode="dynamic",
        micro_batches=micro_batches / len(batches),
        padding=0.0,
        imbalance=float(slowest / mean),
        useful_tokens=useful,
        cost=float(slowest),
        shared_tokens=shared / useful,
        largest_group=largest,
    )


def _random_order(count: int, seed: int) -> list[int]:
    """Returns Trainer's order of the first epoch under `data_seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def _grouped_order(lengths: np.ndarray, workload: DataWorkload) -> list[int]:
    """Returns Trainer's order under `train_sampling_strategy="group_by_length"`; a group is one rank's share."""
    generator = torch.Generator().manual_seed(workload.seed)
    share = workload.batch_size // workload.ranks
    return list(LengthGroupedSampler(share, lengths=lengths.tolist(), generator=generator))


def _padded(batch: np.ndarray, ranks: int, rows: int) -> StepPositions:
    """Shares out a batch like plain Trainer: consecutive rows to each rank, padded to the longest of them."""
    dealt = batch.reshape(-1, ranks, rows)
    return np.broadcast_to(dealt.max(axis=-1, keepdims=True), dealt.shape)


def _packed(batch: np.ndarray, ranks: int, limit: int, cost: SequenceCost) -> StepPositions:
    placement = place(batch, ranks, cost, max_tokens=limit)
    return [
        [batch[np.asarray(local, dtype=np.int64)] for local in micro_batch] for micro_batch in placement.micro_batches
    ]


def _forecast(mode: str, batches: list[np.ndarray], steps: list[StepPositions], cost: SequenceCost) -> Forecast:
    computed = sum(int(positions.sum()) for step in steps for micro_batch in step for positions in micro_batch)
    costs = np.array(
        [[cost.seconds(local).sum() for local in micro_batch] for step in steps for micro_batch in step]
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
