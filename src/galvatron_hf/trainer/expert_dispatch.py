# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How rows travel to experts of other ranks: one by one, or as centroids where that takes less time (LSH-MoE), and how
evenly they arrive. Centroids change what a model computes in training; evaluation always sends row by row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback, TrainingArguments

from galvatron_hf.parallel.comm.collectives import all_to_all_pieces
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.layers.experts import ParallelExperts
from galvatron_hf.parallel.layers.lsh import LshDispatch, buckets, centroids, clusters, expand, projections
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.profiler.measure.cpu_timing import DeviceClock


DISPATCHES = ("plain", "lsh", "auto")
AUTO_EVERY = 100  # steps after which "auto" measures and decides again
ROUNDS = 3  # of each measurement, of which the median counts


def dispatch_mode(args: TrainingArguments) -> str:
    """Returns `expert_dispatch` of the arguments, "plain" for plain `TrainingArguments`."""
    return getattr(args, "expert_dispatch", "plain")


def lsh_options(args: TrainingArguments) -> LshDispatch:
    """Returns the clustering that the arguments ask for; ValueError if a number is out of range."""
    return LshDispatch(
        hashes=getattr(args, "lsh_hashes", 8),
        width=getattr(args, "lsh_width", 32),
        seed=getattr(args, "lsh_seed", 0),
        max_residual=getattr(args, "lsh_max_residual", None),
    )


def dispatch_refusals(args: TrainingArguments) -> Iterator[str]:
    """Yields a sentence for each argument of the dispatch that is out of range."""
    if dispatch_mode(args) not in DISPATCHES:
        known = ", ".join(DISPATCHES)
        yield f"expert_dispatch {dispatch_mode(args)!r} is not one of {known}; use one of these."
    try:
        lsh_options(args)
    except ValueError as error:
        yield f"The lsh_ arguments do not fit: {error}."


@dataclass(frozen=True, kw_only=True)
class DispatchTimes:
    """Holds milliseconds of the messages and of the clusters of one layer, forward and backward: measured for random
    rows, with as many centroids for each row as the last steps had.
    """

    plain_ms: float
    lsh_ms: float

    @property
    def pays(self) -> bool:
        return self.lsh_ms < self.plain_ms


@dataclass(kw_only=True)
class ExpertDispatch(TrainerCallback):
    """Sets the dispatch of a model's layers with experts, and logs what it saves.

    Attributes:
        options ([`LshDispatch`]): which rows are alike.
        mode (`str`): "plain", "lsh" or "auto".
        tell (`Callable`): shows a line to the user; called on all ranks.
        times ([`DispatchTimes`], *optional*): of the last decision of "auto".
        imbalance (`Mapping[int, float]`): most rows at a rank over their mean in the last run, by expert degree; empty
            if no experts are spread over ranks.
    """

    parallel: ParallelModel
    options: LshDispatch
    mode: str
    tell: Callable[[str], object]
    times: DispatchTimes | None = None
    imbalance: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self):
        self._steps = 0  # of this run
        if self.mode == "lsh":
            self._use(self.options)

    @property
    def experts(self) -> list[ParallelExperts]:
        """Returns the experts of this rank's layers that are spread over several ranks."""
        found = [block.experts for block in self.parallel.blocks]
        return [one for one in found if one is not None and one.group is not None]

    def add_logs(self, logs: dict[str, float]) -> None:
        """Adds, for this rank since the last log, how many centroids were sent for each row, bytes that were not sent
        on the way to the experts, and how far rows are from their centroids.
        """
        if "loss" not in logs or self.mode == "plain":
            return
        taken = [experts.take_statistics() for experts in self.experts]
        rows = sum(one.pairs for one in taken)
        if rows:
            logs["expert_rows_sent"] = sum(one.centroids for one in taken) / rows
            logs["expert_bytes_saved"] = sum(one.plain_bytes - one.sent_bytes for one in taken)
            logs["expert_residual"] = sum(float(one.mean_residual) * one.pairs for one in taken if one.pairs) / rows
            logs["expert_cosine"] = sum(float(one.mean_cosine) * one.pairs for one in taken if one.pairs) / rows

    def on_train_begin(self, args, state, control, **kwargs):
        self._steps, self.imbalance = 0, {}

    def on_step_begin(self, args, state, control, **kwargs):
        """Has the clusters counted that there would be, in a step of plain rows after which "auto" decides."""
        if self._decides:
            self._probe(self.options)

    def on_step_end(self, args, state, control, **kwargs):
        """Decides under "auto" after the first step of a run, and then after every `AUTO_EVERY`; collective."""
        if self._decides:
            self.decide()
        self._steps += 1

    def measure_imbalance(self) -> None:
        """Measures how evenly rows arrived in a run that has ended, and says so; collective. It is no `on_train_end`:
        that of a trial that a hyperparameter search prunes is called on rank 0 alone.
        """
        self.imbalance = measured_imbalance(self.parallel)
        if self.imbalance:
            found = ", ".join(f"{ratio:.2f} at degree {degree}" for degree, ratio in self.imbalance.items())
            self.tell(f"Experts: most rows at a rank over their mean, measured: {found}.")

    @property
    def _decides(self) -> bool:
        """Tells whether "auto" decides after the present step."""
        return self.mode == "auto" and self._steps % AUTO_EVERY == 0

    def decide(self) -> None:
        """Measures what a layer's rows cost in both ways and takes the faster way on all ranks; collective."""
        self._probe(None)
        # The ranks of a message agree on its size; each stage measures its first layer with experts.
        found = [one for one in gather_objects(self._rows_and_rate()) if one is not None]
        if not found:
            return
        rows, rate = max(rows for rows, _ in found), statistics.fmean(rate for _, rate in found)
        own = [self._measured(experts, rows, rate) for experts in self.experts[:1]]
        ranks = [times for rank in gather_objects(own) for times in rank]
        self.times = DispatchTimes(
            plain_ms=max(times.plain_ms for times in ranks), lsh_ms=max(times.lsh_ms for times in ranks)
        )
        self._use(self.options if self.times.pays else None)
        way = "as centroids" if self.times.pays else "one by one"
        self.tell(
            f"Rows travel to experts {way}: {self.times.plain_ms:.2f} ms a layer one by one, "
            f"{self.times.lsh_ms:.2f} ms as centroids (messages and clusters, measured)."
        )

    def _use(self, options: LshDispatch | None) -> None:
        for experts in self.experts:
            experts.compression = options

    def _probe(self, options: LshDispatch | None) -> None:
        """Lets plain dispatch count the clusters that there would be."""
        for experts in self.experts:
            experts.probed = options

    def _rows_and_rate(self) -> tuple[int, float] | None:
        """Returns the rows of a layer's forward on this rank, and centroids for each, on average over its layers."""
        last = [experts.last for experts in self.experts]
        found = [(one.rows, float(one.clusters) / one.rows) for one in last if one.rows and one.clusters is not None]
        return (max(rows for rows, _ in found), statistics.fmean(rate for _, rate in found)) if found else None

    def _measured(self, experts: ParallelExperts, rows: int, rate: float) -> DispatchTimes:
        features, device = experts.features, self.parallel.device
        clock, dtype = DeviceClock(device), self.parallel.units.compute

        def message_ms(count: int) -> float:
            size, group = -(-count // experts.group.size()), experts.group
            pieces = torch.zeros(size * group.size() * features, dtype=dtype, device=device)
            counts = [size * features] * group.size()
            return _median_ms(clock, lambda: all_to_all_pieces(pieces, counts, counts, group))

        compact = max(1, round(rate * rows))
        clustering = _median_ms(clock, lambda: self._cluster(rows, features, experts.count, dtype, device))
        return DispatchTimes(
            plain_ms=4 * message_ms(rows),  # to the experts and back, in the forward and in the backward
            lsh_ms=4 * message_ms(compact) + clustering,
        )

    def _cluster(self, rows: int, features: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes clusters of random rows, and runs what comes with them forward and backward."""
        given = torch.randn(rows, features, dtype=dtype, device=device, requires_grad=True)
        owners = torch.arange(rows, device=device) * count // rows
        hashed = buckets(given, projections(self.options, features, 0, device))
        found = clusters(given, owners, hashed, self.options, count)
        means = centroids(given, found.of_row, rows)
        expand(means, given, means, found.of_row).sum().backward()


def _median_ms(clock: DeviceClock, run: Callable[[], object]) -> float:
    times = []
    for _ in range(1 + ROUNDS):
        began = clock.mark()
        run()
        ended = clock.mark()
        clock.now()
        times.append(clock.between(began, ended))
    return statistics.median(times[1:])  # the first one allocates


def measured_imbalance(parallel: ParallelModel) -> dict[int, float]:
    """Returns, by expert degree, the most rows that arrived at a rank in a forward over their mean, on average over
    layers and the last forwards of training; collective. Empty without experts on several ranks.
    """
    own = {}
    for block in parallel.blocks:
        if block.experts is not None and block.experts.group is not None:
            own[block.resolved.index] = block.resolved.strategy.expert, block.experts.take_received()
    layers: dict[int, list[tuple[int, list[int]]]] = {}
    for rank in gather_objects(own):
        for index, found in rank.items():
            layers.setdefault(index, []).append(found)
    ratios: dict[int, list[float]] = {}
    for found in layers.values():
        for counts in zip(*(received for _, received in found), strict=True):  # of all ranks in one forward
            if sum(counts):
                ratios.setdefault(found[0][0], []).append(max(counts) * len(counts) / sum(counts))
    return {degree: statistics.fmean(found) for degree, found in sorted(ratios.items())}
