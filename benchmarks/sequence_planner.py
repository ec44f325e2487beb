# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares placements in which ranks share long documents with lower bounds and with other systems' rules.

    OMP_NUM_THREADS=1 python benchmarks/sequence_planner.py
    OMP_NUM_THREADS=1 python benchmarks/sequence_planner.py --lengths LENGTHS.txt --ranks 512 --batch-size 4096 --json

Batches are drawn from real token lengths. Costs are the published constants of FlexSP (arXiv 2412.01523) for a model
of 7 billion parameters on A100s with 40 GB: a document of s tokens on each of d ranks takes (a1 s**2 + a2 s) / d, and
4 * 2 * 32 * 4096 * 2 * s bytes / d at the bandwidth of d ranks. The bandwidth is published for 2, 4, 8 ... 64 ranks.
Between two of these it is interpolated linearly in its logarithm and that of d; above 64 it is that of 64. Besides, a
micro-batch takes b1. A rank holds C tokens: 30 GiB less 7.85 GiB * 16 / N of model states, at 4.48 MiB a token, and
rounded down to an even number. Where nothing is left, below 5 ranks, it is the C of 64 ranks. Documents above N * C
tokens are cut to N * C. `--longest` leaves out longer documents, as systems with a largest context do; `--scale`
multiplies all lengths, which stands for a corpus with a longer tail.

- gap: of the seconds of `place_groups` above the best of the lower bounds, and above the best without the bound that
  knows of tokens without use ("two bounds");
- ms_per_step: CPU time of `place_groups`;
- ratios: sums over batches of a baseline's seconds / those of `place_groups`:
  - homogeneous: one degree d for the step that divides N, documents by best-fit decreasing tokens into groups with
    room for C tokens a rank, the slowest groups in the same micro-batch; the best d;
  - hybrid: the hybrid context parallelism of Megatron-LM. A document has max(1, 2**ceil(log2(s / C))) ranks. The
    longest one that finds a place goes to the least loaded group of its size, unless free ranks start earlier, until
    all ranks are within 5%. The slowest group gives its last document back while this narrows the spread. The smallest
    groups are doubled onto empty ranks. A micro-batch that holds more than C tokens a rank runs in several passes, by
    first fit. Each pays b1, and ranks wait for each other;
  - hybrid_once: the same, but a micro-batch pays b1 once, however many tokens it holds, and ranks do not wait before
    its end. All others pay b1 at least once for N * C tokens, so this may be below 1. If each document paid b1, the
    ratio would be much higher;
  - hdp: ByteScale (arXiv 2502.21231). A document has ceil(s / C) ranks. Longest first, each goes to the ranks furthest
    behind that have room, in the fewest micro-batches that suffice;
  - truncated: `place`, on documents cut to C tokens. It drops tokens, `dropped` of all, and is not comparable.

Evidence tier: simulated (predicted with published constants); the milliseconds of planning are measured on the machine
that runs this.
"""

import argparse
import gc
import heapq
import json
import math
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from galvatron_hf.data.group_bound import lower_bounds
from galvatron_hf.data.group_placement import place_groups
from galvatron_hf.data.placement import place
from galvatron_hf.plan.chunks import largest_share


SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "wikipedia" / "token_lengths.txt"
OVERHEAD = 0.629  # seconds of a micro-batch, b1
SLACK = 0.05  # of hybrid context parallelism


@dataclass(frozen=True)
class FlexSPCost:
    """Gives the seconds of documents by FlexSP's published constants."""

    per_token_squared: float = 5.128e-9
    per_token: float = 0.184e-3
    bytes_per_token: int = 4 * 2 * 32 * 4096 * 2
    degrees: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    bandwidths: tuple[float, ...] = (119.5e9, 104.1e9, 96.5e9, 10.33e9, 5.94e9, 4.87e9)  # bytes a second

    def seconds(self, lengths, degree: int = 1) -> np.ndarray:
        """Returns the seconds of each document on each of `degree` ranks, [n]."""
        lengths = np.asarray(lengths, dtype=np.float64)
        work = self.per_token_squared * lengths**2 + self.per_token * lengths
        if degree > 1:
            bandwidth = np.exp(np.interp(np.log(degree), np.log(self.degrees), np.log(self.bandwidths)))
            work += self.bytes_per_token * lengths / bandwidth
        return work / degree


COST = FlexSPCost()


def capacity(ranks: int) -> int:
    """Returns the tokens that a rank holds."""
    left = 30 - 7.85 * 16 / ranks
    if left <= 0:
        left = 30 - 7.85 * 16 / 64
    return int(left * 1024 / 4.48) // 2 * 2


def homogeneous(lengths: np.ndarray, ranks: int, max_tokens: int) -> float:
    """Returns the seconds of the best single degree."""
    best = np.inf
    for degree in (number for number in range(1, ranks + 1) if ranks % number == 0):
        if largest_share(lengths, degree).max() > max_tokens:
            continue
        seconds, shares = COST.seconds(lengths, degree).tolist(), largest_share(lengths, degree).tolist()
        rooms: list[tuple[int, int]] = []
        loads: list[float] = []
        for document in np.argsort(-lengths, kind="stable").tolist():
            tokens = shares[document]
            index = bisect_left(rooms, (tokens, -1))
            if index == len(rooms):
                room, group = max_tokens, len(loads)
                loads.append(0.0)
            else:
                room, group = rooms.pop(index)
            insort(rooms, (room - tokens, group))
            loads[group] += seconds[document]
        peaks = sorted(loads, reverse=True)[:: ranks // degree]
        best = min(best, sum(peaks) + OVERHEAD * len(peaks))
    return best


@dataclass
class _Group:
    size: int
    documents: list[int]
    load: float


def hybrid(lengths: np.ndarray, ranks: int, max_tokens: int, *, once: bool = False) -> float:
    """Returns the seconds of Megatron-LM's hybrid context parallelism; micro-batches run `once` or in passes."""
    needed = [min(ranks, 2 ** max(0, math.ceil(math.log2(tokens / max_tokens)))) for tokens in lengths.tolist()]
    tables = {size: COST.seconds(lengths, size).tolist() for size in set(needed)}
    waiting: dict[int, list[tuple[int, int]]] = {}  # by size, heaps of (-tokens, document)
    for document, size in enumerate(needed):
        heapq.heappush(waiting.setdefault(size, []), (-int(lengths[document]), document))
    total = 0.0
    while any(waiting.values()):
        groups, free = _hybrid_groups(waiting, tables, ranks)
        if not free:
            _trim(groups, waiting, tables, lengths)
        while free:  # double the slowest of the smallest groups
            smallest = min(group.size for group in groups)
            if smallest > free:
                break
            group = max((group for group in groups if group.size == smallest), key=lambda group: group.load)
            free -= smallest
            group.size *= 2
            group.load = float(COST.seconds(lengths[group.documents], group.size).sum())
        if once:
            total += max(group.load for group in groups) + OVERHEAD
            continue
        passes = [_passes(lengths[group.documents], group.size, max_tokens) for group in groups]
        for loads in zip_longest(*passes, fillvalue=0.0):
            total += max(loads) + OVERHEAD
    return total


def _passes(lengths: np.ndarray, degree: int, max_tokens: int) -> list[float]:
    """Returns the seconds of each pass of a group of ranks that holds `max_tokens` a rank at a time, slowest first."""
    rooms: list[int] = []
    loads: list[float] = []
    seconds = COST.seconds(lengths, degree).tolist()
    for share, load in zip(largest_share(lengths, degree).tolist(), seconds, strict=True):
        index = next((index for index, room in enumerate(rooms) if room >= share), len(rooms))
        if index == len(rooms):
            rooms.append(max_tokens)
            loads.append(0.0)
        rooms[index] -= share
        loads[index] += load
    return sorted(loads, reverse=True)


def _hybrid_groups(
    waiting: dict[int, list[tuple[int, int]]], tables: dict[int, list[float]], ranks: int
) -> tuple[list[_Group], int]:
    """Returns the groups of one micro-batch and the number of ranks without one. Takes documents from `waiting`."""
    by_size: dict[int, list[tuple[float, int]]] = {}  # heaps of (load, group)
    groups: list[_Group] = []
    free, slowest, first = ranks, 0.0, None
    check = False
    while True:
        able = [(heap[0], size) for size, heap in waiting.items() if heap and (by_size.get(size) or free >= size)]
        if not able:
            return groups, free
        (_, document), size = min(able)
        heapq.heappop(waiting[size])
        heap = by_size.setdefault(size, [])
        if free >= size and (not heap or heap[0][0] > 0):
            free -= size
            index = len(groups)
            groups.append(_Group(size, [], 0.0))
            heapq.heappush(heap, (0.0, index))
        index = heap[0][1]
        group = groups[index]
        group.documents.append(document)
        group.load += tables[size][document]
        heapq.heapreplace(heap, (group.load, index))
        slowest = max(slowest, group.load)
        first = size if first is None else first
        check = check or size < first
        if check and not free and slowest - min(heap[0][0] for heap in by_size.values()) <= SLACK * slowest:
            return groups, free


def _trim(
    groups: list[_Group],
    waiting: dict[int, list[tuple[int, int]]],
    tables: dict[int, list[float]],
    lengths: np.ndarray,
) -> None:
    """Gives the slowest group's last document back to `waiting` while this narrows the spread."""
    while True:
        ordered = sorted(groups, key=lambda group: group.load)
        slow = ordered[-1]
        spread = slow.load - ordered[0].load
        if spread <= SLACK * slow.load or len(slow.documents) < 2:
            return
        document = slow.documents[-1]
        left = slow.load - tables[slow.size][document]
        loads = [group.load for group in groups if group is not slow] + [left]
        if max(loads) - min(loads) >= spread:
            return
        slow.documents.pop()
        slow.load = left
        heapq.heappush(waiting[slow.size], (-int(lengths[document]), document))


def hdp(lengths: np.ndarray, ranks: int, max_tokens: int) -> float:
    """Returns the seconds of ByteScale's rule."""
    needed = -(-lengths // max_tokens)
    needed += largest_share(lengths, needed) > max_tokens
    shares = largest_share(lengths, needed).tolist()
    seconds = np.empty(len(lengths))
    for degree in np.unique(needed).tolist():
        seconds[needed == degree] = COST.seconds(lengths[needed == degree], degree)
    order = np.argsort(-lengths, kind="stable").tolist()
    micro_batches = -(-int(lengths.sum()) // (ranks * max_tokens))
    while True:
        load, room = np.zeros((micro_batches, ranks)), np.full((micro_batches, ranks), max_tokens)
        for document in order:
            degree = int(needed[document])
            key = np.where(room >= shares[document], load, np.inf)
            if degree == 1:
                bin_ = int(key.argmin())
                rows, columns = np.array([bin_ // ranks]), np.array([bin_ % ranks])
            else:
                ordered = np.argsort(key, axis=1, kind="stable")[:, :degree]
                row = int(np.take_along_axis(key, ordered[:, -1:], axis=1).argmin())
                rows, columns = np.full(degree, row), ordered[row]
            if key[rows, columns].max() == np.inf:
                break
            load[rows, columns] += seconds[document]
            room[rows, columns] -= shares[document]
        else:
            return float((load.max(axis=1) + OVERHEAD).sum())
        micro_batches += 1


def truncated(lengths: np.ndarray, ranks: int, max_tokens: int) -> float:
    """Returns the seconds of `place` on documents cut to `max_tokens`."""
    cut = np.minimum(lengths, max_tokens)
    return place(cut, ranks, COST, max_tokens=max_tokens, overhead=OVERHEAD).seconds(cut, COST, overhead=OVERHEAD)


BASELINES = {
    "homogeneous": homogeneous,
    "hybrid": hybrid,
    "hybrid_once": partial(hybrid, once=True),
    "hdp": hdp,
    "truncated": truncated,
}


def measure(corpus: np.ndarray, ranks: int, batch_size: int, batches: int, seed: int) -> dict:
    """Returns the figures of one setting, by name."""
    random = np.random.default_rng(seed)
    max_tokens = capacity(ranks)
    ours, best, two, milliseconds, cut, dropped, tokens = [], [], [], [], 0, 0, 0
    others: dict[str, list[float]] = {name: [] for name in BASELINES}
    for _ in range(batches):
        drawn = random.choice(corpus, batch_size, replace=False)
        lengths = np.minimum(drawn, ranks * max_tokens)
        cut += int((drawn > lengths).sum())
        begun = time.process_time()
        placement = place_groups(lengths, ranks, COST, max_tokens=max_tokens, overhead=OVERHEAD)
        milliseconds.append(1e3 * (time.process_time() - begun))
        ours.append(placement.seconds(lengths, COST, overhead=OVERHEAD))
        bounds = lower_bounds(lengths, ranks, COST, max_tokens=max_tokens, overhead=OVERHEAD)
        best.append(ours[-1] / max(bounds) - 1)
        two.append(ours[-1] / max(bounds[:2]) - 1)
        for name, baseline in BASELINES.items():
            others[name].append(baseline(lengths, ranks, max_tokens))
        dropped += int((lengths - np.minimum(lengths, max_tokens)).sum())
        tokens += int(lengths.sum())
    return {
        "ranks": ranks,
        "batch_size": batch_size,
        "batches": batches,
        "seed": seed,
        "max_tokens": max_tokens,
        "truncated_documents": cut,
        "gap_mean": float(np.mean(best)),
        "gap_median": float(np.median(best)),
        "gap_max": float(np.max(best)),
        "gap_mean_two_bounds": float(np.mean(two)),
        "gap_median_two_bounds": float(np.median(two)),
        "ms_per_step": float(np.mean(milliseconds)),
        "seconds_per_step": float(np.mean(ours)),
        "ratios": {name: float(np.sum(seconds) / np.sum(ours)) for name, seconds in others.items()},
        "least_ratios": {name: float((np.array(seconds) / ours).min()) for name, seconds in others.items()},
        "dropped": dropped / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=SAMPLE, help="a file of token lengths, one a line")
    parser.add_argument("--ranks", type=int, default=64, help="number of data ranks, N")
    parser.add_argument("--batch-size", type=int, default=512, help="documents of a step")
    parser.add_argument("--batches", type=int, default=10, help="number of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--longest", type=int, help="tokens of the longest documents that are drawn, after --scale")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    corpus = np.maximum(np.rint(np.loadtxt(options.lengths) * options.scale), 1).astype(np.int64)
    corpus = corpus[corpus <= (options.longest or corpus.max())]
    if not 1 <= options.batch_size <= len(corpus):
        parser.error(f"--batch-size {options.batch_size}: the file has {len(corpus)} lengths; draw at most so many.")
    gc.freeze()  # a full collection of all that is imported here would take longer than a plan
    found = measure(corpus, options.ranks, options.batch_size, options.batches, options.seed)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{found['batches']} steps of {found['batch_size']} documents on {found['ranks']} ranks with "
        f"{found['max_tokens']} tokens each, {found['truncated_documents']} documents cut; simulated seconds"
    )
    for name in ("gap_mean", "gap_median", "gap_max", "gap_mean_two_bounds", "gap_median_two_bounds"):
        print(f"{name:22s} {100 * found[name]:8.2f} %")
    print(f"{'ms_per_step':22s} {found['ms_per_step']:8.1f} (CPU, measured)")
    for name, ratio in found["ratios"].items():
        note = f", without {100 * found['dropped']:.0f}% of the tokens" if name == "truncated" else ""
        print(f"{name:22s} {ratio:8.3f} x ours, least of a step {found['least_ratios'][name]:.3f}{note}")


if __name__ == "__main__":
    main()
