# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares useful tokens/s on documents of very different lengths: plain Trainer in four modes, and GalvatronTrainer.

    PYTHONPATH=recipes OMP_NUM_THREADS=1 python benchmarks/long_tail.py --caps 4096 --dtypes fp32      as root

Documents are the modules of the standard library, cut at the cap in every mode, so that all modes learn the same. A
Llama (sdpa; by default 8M parameters in 8 layers of 256) trains on four ranks with half a core each (cpu_quota.py). A
step has two documents a rank, except for `trl`. Modes:

    padded     Trainer and DistributedDataParallel, batches padded to their longest document
    again      the same as padded; their ratio is the spread of any ratio (A/A)
    grouped    train_sampling_strategy="group_by_length"
    rebalance  train_sampling_strategy="batch_rebalance"
    trl        documents packed by TRL (best fit decreasing) into rows of the cap, one row a rank: TRL's collator joins
               all rows of a rank, and the mask grows with the square, so one row is the fastest
    ours       GalvatronTrainer, layers replicated

Modes in which a rank holds `--tokens` tokens in a micro-batch, by default a quarter of the cap, so that no rank holds
the longest documents (`--modes dynamic dynamic_again context2 context4 ulysses2 ulysses4 recompute`):

    dynamic    GalvatronTrainer, packing="dynamic": ranks share long documents, in groups chosen for each micro-batch
    contextN   packing="static", N ranks share a document in a ring
    splitN     the same, and all N ranks share each document, short ones too, as context parallelism elsewhere does
    ulyssesN   packing="static", N ranks exchange tokens of each document for heads
    recompute  packing="static", each rank has whole documents of up to the cap, and computes each layer again

Each mode is one training run in processes of its own, which are stopped while the others run. A round is a turn of
each mode: `--steps` steps of padded and again, at least `--fast_steps` of the others. (In 5 rounds of 5 steps, grouped
passes twice through 100 documents, from long to short.) Speed is the useful tokens of a turn / its wall time, until
the slowest rank is done; "all" is the speed over all turns. Padded, ours and the modes above draw the same global
batches, and their losses are compared. With `--mbit` two ranks each are on a host, and a link of so many megabits/s
joins the hosts (hosts.py).

The dense masks of padded rows are kept for the backward by each layer, rows * cap^2 * 4 bytes (2 in bf16). From the
cap `--recompute_from` on, every layer is recomputed in all modes, so that only one layer's mask is kept at a time.

Evidence tier: measured on devices emulated by CPU quotas (gloo).
"""

import argparse
import contextlib
import functools
import gc
import os
import signal
import statistics
import sys
import tempfile
import time

import datasets
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first backward imports it: once here, not in each rank
from cpu_quota import CpuQuota, QuotaError, cpu_quotas
from hosts import HostError, two_hosts
from interleaved_worlds import Ending, Turn, World
from long_tail_modes import MODES, SHARING, VOCABULARY, Corpus, Setting, build, load_corpora, make_trainer
from step_profile import StepProfile


STEPS = {2048: 3, 4096: 2}  # of a padded turn; longer caps take one
PADDED = ("padded", "again")


def compare(setting: Setting, groups: list[CpuQuota], options: argparse.Namespace) -> None:
    """Prints the table of one cap and dtype, and each round as it ends."""
    steps = turn_steps(setting.corpus.cap, options)
    worlds, turns = {}, {mode: [] for mode in options.modes}
    for mode in options.modes:
        last = options.warmup + options.rounds * steps[mode]
        make = functools.partial(make_trainer, mode, setting, last)
        worlds[mode] = World(make, groups, options.warmup, steps[mode])
    for number in range(options.rounds):
        begun = time.perf_counter()
        first = number % len(worlds)
        for mode in options.modes[first:] + options.modes[:first]:
            turns[mode].append(worlds[mode].turn())
        speeds = "  ".join(f"{mode} {mode_turns[-1].speed:.0f}" for mode, mode_turns in turns.items())
        print(f"  round {number + 1} of {time.perf_counter() - begun:.0f} s: {speeds}", flush=True)
    endings = {mode: world.finish() for mode, world in worlds.items()}
    print(speed_table(turns))
    print("\n".join(comparisons(turns, endings, options.warmup)), flush=True)


def turn_steps(cap: int, options: argparse.Namespace) -> dict[str, int]:
    """Returns the steps of a turn of each mode."""
    padded = options.steps or STEPS.get(cap, 1)
    return {mode: padded if mode in PADDED else max(padded, options.fast_steps) for mode in options.modes}


def speed_table(turns: dict[str, list[Turn]]) -> str:
    """Returns a table with a line for each mode."""
    total = {mode: overall(mode_turns) for mode, mode_turns in turns.items()}
    ours = "dynamic" if "dynamic" in turns else "ours"
    lines = [f"  mode           steps  tokens/s  [lowest, highest]     all  {ours} / it  it / padded"]
    for mode, mode_turns in turns.items():
        speeds = [turn.speed for turn in mode_turns]
        steps = sum(len(turn.tokens) for turn in mode_turns)
        lines.append(
            f"  {mode:13s}  {steps:5d}  {statistics.median(speeds):8.0f}  [{min(speeds):6.0f}, {max(speeds):7.0f}]"
            f"  {total[mode]:6.0f}  {quotient(total, ours, mode):>{len(ours) + 5}s}"
            f"  {quotient(total, mode, 'padded'):>11s}"
        )
    return "\n".join(lines)


def overall(turns: list[Turn]) -> float:
    """Returns the useful tokens/s over all turns."""
    return sum(sum(turn.tokens) for turn in turns) / sum(turn.seconds for turn in turns)


def quotient(total: dict[str, float], one: str, other: str) -> str:
    return f"{total[one] / total[other]:.2f}" if one in total and other in total else "-"


def comparisons(turns: dict[str, list[Turn]], endings: dict[str, Ending], warmup: int) -> list[str]:
    """Compares padded with itself, and with ours on the same global batches."""
    lines = []
    if "padded" in turns and "again" in turns:
        ratios = [again.speed / padded.speed for again, padded in zip(turns["again"], turns["padded"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
        lines.append(f"  A/A, again / padded by round: median {spread}")
    if "padded" in turns and "ours" in turns:
        lines += same_batches(turns["padded"], turns["ours"])
        lines += same_losses(endings["padded"].losses, endings["ours"].losses, warmup)
    for mode in turns:
        if "dynamic" in turns and mode in SHARING[1:]:
            ratios = [one.speed / it.speed for one, it in zip(turns["dynamic"], turns[mode], strict=True)]
            pairs = list(zip(endings["dynamic"].losses, endings[mode].losses, strict=False))
            largest = max(abs(one - other) / abs(one) for one, other in pairs)
            spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
            lines.append(f"  dynamic / {mode} by round: median {spread}; losses of {len(pairs)} steps: {largest:.1e}")
    return lines


def same_batches(padded: list[Turn], ours: list[Turn]) -> list[str]:
    """Compares the speed of the steps that both modes took."""
    tokens = [[count for turn in turns for count in turn.tokens] for turns in (padded, ours)]
    seconds = [[step for turn in turns for step in turn.step_seconds] for turns in (padded, ours)]
    common = min(map(len, tokens))
    if tokens[0][:common] != tokens[1][:common]:
        raise RuntimeError(f"Padded and ours trained on different numbers of tokens: {tokens}.")
    ratio = sum(seconds[0][:common]) / sum(seconds[1][:common])
    return [f"  ours / padded on the same {common} global batches: {ratio:.2f}"]


def same_losses(padded: list[float], ours: list[float], warmup: int) -> list[str]:
    """Compares the losses of the steps that both modes took, the warm-up included."""
    pairs = list(zip(padded, ours, strict=False))
    lines = [f"  step {step + 1:3d}  padded {one:.6f}  ours {other:.6f}" for step, (one, other) in enumerate(pairs)]
    largest = max(abs(one - other) / abs(one) for one, other in pairs)
    return [*lines, f"  largest relative difference of {len(pairs)} losses: {largest:.1e}"]


def profile_ours(setting: Setting, groups: list[CpuQuota], options: argparse.Namespace) -> None:
    """Prints a profile of rank 0 in a turn of ours, and the log of its last step."""
    steps = turn_steps(setting.corpus.cap, options)["ours"]
    make = functools.partial(make_trainer, "ours", setting, options.warmup + steps)
    world = World(make, groups, options.warmup, steps, StepProfile(VOCABULARY))
    turn = world.turn()
    ending = world.finish()
    print(
        f"  ours, rank 0, {steps} steps in {turn.seconds:.1f} s, {turn.speed:.0f} useful tokens/s under the profiler"
    )
    print(f"{ending.profile}\n  last step's log: {ending.logged}", flush=True)


def describe(corpus: Corpus, setting: Setting) -> str:
    lengths = corpus.documents["length"]
    mean = statistics.mean(lengths)
    return (
        f"\ncap {corpus.cap}, {'bf16' if setting.bf16 else 'fp32'}: {len(lengths)} documents of {mean:.0f} tokens on "
        f"average, {100 * sum(length == corpus.cap for length in lengths) / len(lengths):.0f}% at the cap; "
        f"{setting.ranks} x {setting.rows} in a step, {setting.layers} layers of {setting.hidden}"
        f"{', recomputed' if setting.recompute else ''}"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES + SHARING)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode")
    parser.add_argument("--steps", type=int, help="of a padded turn; by default 3 at 2K, 2 at 4K, else 1")
    parser.add_argument("--fast_steps", type=int, default=5, help="least of a turn of the other modes")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the first round")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="documents of a rank in a step")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--hidden", type=int, default=256, help="of the model, a multiple of 32")
    parser.add_argument("--recompute_from", type=int, default=8192, help="the cap from which layers are recomputed")
    parser.add_argument("--share", type=float, default=0.5, help="of a core, for each rank")
    parser.add_argument("--period_ms", type=float, default=10.0, help="in which each rank gets its share once")
    parser.add_argument(
        "--tokens", type=int, help="of a rank in the modes that share; by default a quarter of the cap"
    )
    parser.add_argument("--mbit", type=float, default=0.0, help="a second, between two hosts; 0: one host")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "galvatron-long-tail"))
    parser.add_argument("--profile", action="store_true", help="of ours alone: where its time goes")
    options = parser.parse_args()
    options.modes = ["ours"] if options.profile else options.modes
    return options


def main() -> None:
    options = parse_options()
    # A signal becomes an exception, after which the groups and their ranks are removed.
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    corpora = load_corpora(options.caps, options.cache)
    gc.freeze()  # a collection in a rank would write to every object, and so copy the memory that all share
    for corpus in corpora:
        for dtype in options.dtypes:
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                quotas = cpu_quotas("galvatron-long-tail", options.ranks, options.share, options.period_ms)
                groups = stack.enter_context(quotas)
                if options.mbit:
                    groups = stack.enter_context(two_hosts(groups, options.mbit))
                setting = Setting(
                    corpus=corpus,
                    bf16=dtype == "bf16",
                    ranks=options.ranks,
                    rows=options.rows,
                    recompute=corpus.cap >= options.recompute_from,
                    layers=options.layers,
                    hidden=options.hidden,
                    folder=folder,
                    tokens=options.tokens or corpus.cap // 4,
                )
                print(describe(corpus, setting), flush=True)
                (profile_ours if options.profile else compare)(setting, groups, options)
    parameters = build(setting).num_parameters() / 1e6
    print(f"\n{parameters:.1f}M parameters; tier: measured on devices emulated by CPU quotas")


if __name__ == "__main__":
    try:
        main()
    except (QuotaError, HostError) as error:
        sys.exit(str(error))
