# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares placements with lower bounds of any placement, and times the planning.

    OMP_NUM_THREADS=1 python benchmarks/placement.py
    OMP_NUM_THREADS=1 python benchmarks/placement.py --lengths LENGTHS.txt --batches 20

Batches are drawn from real token lengths, truncated to a cap. A cell is the worst over the batches of `seconds / bound
- 1` in percent:

- "simple": the bound max(total / N, longest); with a pipeline (max(total / vN, longest) + overhead)(p - 1 + v) for the
  best v;
- "tight": also, of the kN + 1 longest sequences some k + 1 share a rank; and without a pipeline, no two sequences over
  max_tokens / 2 share a bin, and the memory that is left next to them holds less work than they are. If sequences of
  about max_tokens / 2 are the longest, this bound is a few percent too low.

Work is predicted seconds; attention is half the cost of a sequence of 10,000 tokens.

Evidence tier: predicted; the milliseconds of planning are measured on the machine that runs this.
"""

import argparse
import gc
import time
from pathlib import Path

import numpy as np

from galvatron_hf.data.cost import SequenceCost
from galvatron_hf.data.placement import Placement, in_order, place


SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "wikipedia" / "token_lengths.txt"
COST = SequenceCost(per_token=1e-6, per_token_squared=1e-10, per_sequence=1e-5)
OVERHEAD = 1e-3
STEPS = [(8, 64), (8, 256), (8, 512), (64, 512), (64, 2048), (64, 4096)]
CAPS = (2048, 4096, 8192, 16384, 32768)


def pigeonhole_bound(costs: np.ndarray, bins: int) -> float:
    """Returns a bound: of the k * bins + 1 most costly sequences some k + 1 share a bin. `costs` falls."""
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    k = np.arange(1, (len(costs) - 1) // bins + 1)
    return float((sums[k * bins + 1] - sums[k * (bins - 1)]).max(initial=0.0))


def memory_bound(lengths: np.ndarray, costs: np.ndarray, ranks: int, max_tokens: int) -> float:
    """Returns a bound from sequences that cannot share a bin.

    The slowest k micro-batches take at least the 1st, (N + 1)th, (2N + 1)th ... longest of these sequences, and hold
    at most the k * N * max_tokens most costly tokens; the rest is divided by N ranks.
    """
    alone = costs[lengths > max_tokens // 2][::ranks]
    slowest = np.concatenate([[0.0], np.cumsum(alone)])
    # The dearest tokens first; a sequence's cost spread over its tokens, the last one cut.
    order = np.argsort(-costs / lengths, kind="stable")
    tokens = np.concatenate([[0], np.cumsum(lengths[order])])
    work = np.concatenate([[0.0], np.cumsum(costs[order])])
    held = np.interp(np.arange(len(slowest)) * ranks * max_tokens, tokens, work)
    return float((slowest + (costs.sum() - held) / ranks).max())


def bounds(lengths: np.ndarray, ranks: int, max_tokens: int, stages: int) -> tuple[float, float]:
    """Returns the simple and the tight bound in seconds."""
    lengths = np.sort(lengths)[::-1]
    costs = COST.seconds(lengths)
    if stages == 1:
        simple = max(costs.sum() / ranks, costs[0])
        best = max(simple, pigeonhole_bound(costs, ranks), memory_bound(lengths, costs, ranks, max_tokens))
        return simple, best
    fewest = max(stages, -(-int(lengths.sum()) // (ranks * max_tokens)))
    counts = range(fewest, max(fewest, len(lengths)) + 1)
    simple = [max(costs.sum() / ranks / count, costs[0]) for count in counts]
    tight = [max(bound, pigeonhole_bound(costs, ranks * count)) for bound, count in zip(simple, counts, strict=True)]
    step = [stages - 1 + count for count in counts]
    return tuple(min((b + OVERHEAD) * s for b, s in zip(values, step, strict=True)) for values in (simple, tight))


def measure(options: argparse.Namespace, corpus: np.ndarray, ranks: int, rows: int, cap: int, memory: int) -> str:
    """Returns one line of the table, with the result under a pipeline in brackets."""
    random = np.random.default_rng([ranks, rows, cap, memory])
    cells = []
    for stages in (1, options.stages):
        ratios, milliseconds = [], []
        for _ in range(options.batches):
            lengths = np.minimum(random.choice(corpus, rows), cap)
            arguments = {"max_tokens": memory * cap, "least_micro_batches": stages}
            overhead = OVERHEAD * (stages > 1)
            begun = time.perf_counter(), time.process_time()
            ours = place(lengths, ranks, COST, **arguments, stages=stages, overhead=overhead)
            milliseconds.append([1e3 * (time.perf_counter() - begun[0]), 1e3 * (time.process_time() - begun[1])])

            def seconds(placement: Placement) -> float:
                return placement.seconds(lengths, COST, stages=stages, overhead=overhead)

            simple, tight = bounds(lengths, ranks, memory * cap, stages)
            differencing = place(
                lengths, ranks, COST, **arguments, stages=stages, overhead=overhead, planner="karmarkar_karp"
            )
            in_turn = in_order(lengths, ranks, **arguments)
            ratios.append(
                [
                    seconds(ours) / simple,
                    seconds(ours) / tight,
                    seconds(differencing) / tight,
                    seconds(in_turn) / tight,
                ]
            )
        worst = 100 * (np.max(ratios, axis=0) - 1)
        wall, used = np.array(milliseconds).T
        cells.append(
            f"{worst[0]:6.2f} {worst[1]:6.2f} {worst[2]:6.2f} {worst[3]:7.1f} {np.median(wall):6.1f} {used.max():6.1f}"
        )
    return " | ".join(cells)


def compare_with_exact(options: argparse.Namespace, corpus: np.ndarray) -> None:
    """Compares the default with the exact solution of small batches."""
    random = np.random.default_rng(0)
    for stages in (1, options.stages):
        ratios = []
        for _ in range(options.batches):
            lengths = np.minimum(random.choice(corpus, 12), 4096)
            arguments = {"max_tokens": 6144, "stages": stages, "overhead": OVERHEAD * (stages > 1)}
            seconds = [
                place(lengths, 3, COST, **arguments, planner=planner).seconds(
                    lengths, COST, stages=stages, overhead=arguments["overhead"]
                )
                for planner in ("longest_first", "exact")
            ]
            ratios.append(seconds[0] / seconds[1])
        print(
            f"12 sequences, cap 4096, max_tokens 6144, 3 ranks, {stages} stage(s), {options.batches} batches: "
            f"default / exact worst {max(ratios):.4f}, mean {np.mean(ratios):.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=SAMPLE, help="a file of token lengths, one a line")
    parser.add_argument("--batches", type=int, default=10, help="of each line")
    parser.add_argument("--stages", type=int, default=4, help="of the right half")
    options = parser.parse_args()
    corpus = np.loadtxt(options.lengths, dtype=np.int64)
    gc.freeze()  # a full collection of all that is imported here would take longer than a plan
    columns = "simple  tight     KK in order     ms    CPU"
    print(f"{'':37s}| no pipeline: % above the bound, ms  | {options.stages} stages")
    print(f"ranks sequences  each   cap max_tokens| {columns} | {columns}")
    for ranks, rows in STEPS:
        for cap in CAPS:
            for memory in (1, 2, 4):
                line = measure(options, corpus, ranks, rows, cap, memory)
                print(f"{ranks:5d} {rows:9d} {rows // ranks:5d} {cap:5d} {memory * cap:10d}| {line}", flush=True)
    compare_with_exact(options, corpus)


if __name__ == "__main__":
    main()
