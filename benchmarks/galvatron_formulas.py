# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a plan under the cost models of Galvatron: step time, samples per second, memory of each stage.

    python benchmarks/galvatron_formulas.py --profiles tests/data/galvatron_profiles \
        --plan tests/data/galvatron_plans/main_1x8_38GB_bsz64_chunk8.json --nodes 1 --devices_per_node 8

An independent statement of the formulas by which the search engines of PKU-DAIR/Hetu-Galvatron score plans, to compare
our plans with theirs under their model. It shares nothing with the cost model of this package. Two engines:
`main` (commit cea12ff) and `240` (release 2.4.0). On the plans and profiles of tests/data they give the throughput
that the engines printed when they found them, to the last printed digit. How profiles are read: galvatron_profiles.py.

R ranks of a stage, t tensor or Ulysses degree, d = R / t data ranks, s ranks with the same piece of weights (d, but R
under Ulysses), m micro-batches, b = G / m / d rows of a rank, L layers, P MiB of a layer's parameters in fp32 (/ t
under tensor), M the hidden states of b rows in 2 bytes, o the slow-down of what overlaps, ms(s) per MiB of an
all-reduce of s ranks (strided ones if t > 1 is tensor). Files are of galvatron/core at cea12ff; 2.4.0 has the same in
search_engine/cost_model.py (TimeCostModel, OtherTimeCostModel, MemoryCostModel, pipeline_costmodel).

One layer and micro-batch: cost_model/components/layer_cost.py, TimeCostModelBase
    forward f = line(b / t), backward g = 2 f, 3 f under recompute
    exchange c = 6 (2.4.0: 4) all-gathers of M, or 4 all-to-alls of M; x 1.5 under recompute
    gradients D = 2 (s - 1) / s x P / 2 (2 bytes) x ms(s); 2.4.0 has d for s in the fraction
    time f + max(D, g) + (o - 1) min(D, g) + c, but f + g + c if d = 1; 2.4.0 overlaps half of g if 1 < t >= R // 2
    + D / 2, the one gather of a ZeRO-3 layer; with p stages + 2 p M / p2p bandwidth / L
    without gradient sync: the same, D = 0 in the overlap
Embedding and head on v ranks: cost_model/components/embedding_lmhead_cost.py, EmbeddingLMHeadTimeCostModel
    f = line(G / m / R), g = 2 f, half at either end of a pipeline; one all-gather of M at either end, none if Ulysses
    W = states / 4 / 2 x (s - 1) / s x ms(s); under ZeRO-3 W / 2 is hidden behind f and W / 2 behind g:
    W / 2 + (f o - W / 2) / o, at least W / 2
    Their gradient sync never counts: the engines pass the time without it on.
    2.4.0 does not halve W for 2 bytes, has the first stage's states at both ends, and M of the fewest rows of a rank.
Step: cost_model/cost_model_handler.py, pipeline_costmodel; A layers with sync, C layers without + embedding and head
    T = max(sum C + (m - 1) C_last, B + max(0, m + 1 - p) C_0) + max(0, max_i (A_i - C_0 - ... - C_i))
    B = the sum over 1/3 and 2/3 of max(min(p - 1, m - 1) C_0, C_1 + ... + C_last) times it
Memory in MiB: MemoryCostModelBase, EmbeddingLMHeadMemoryCostModel; search_engine/dynamic_programming.py
    layer: 4 P z + in flight x b x activations (under recompute those of "checkpoint" / t), rounded up
    z: zero2 7/8 x + 1/8, zero3 x with x = 1 / s + 0.003 if m = 1; else 6/8 x + 2/8 and 7/8 x + 1/8; one data rank 1
    in flight: p - i in stage i (gpipe: m), embedding p, head 1
    embedding, head: states x z + in flight x rows x activations + 1024 of context, rounded up
    all-gather buffer: the hidden states of G / m / R x (largest degree) rows, rounded down; main: only if a part is
    tensor-parallel; 2.4.0: + 8192 for all-to-all where Ulysses is used (from an older source; no printed figure tells)

If a plan of ours is outside of what Galvatron can express, galvatron_case.py extends the formulas naturally and lists
this in `Score.extensions`, or refuses the plan.
"""

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from galvatron_case import ENGINES, Case, Part, case_of, extensions_of
from galvatron_profiles import EndMemory, GalvatronProfiles

from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
from galvatron_hf.plan import ParallelPlan


CONTEXT_MIB = 1024.0
ALL_TO_ALL_MIB = 8192.0
BACKWARD = 2.0  # over forward


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """MiB of one stage; `counted` is the engine's sum with its roundings."""

    states: float
    activations: float
    vocabulary: float
    context: float
    buffer: float
    counted: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of an engine for a plan.

    Attributes:
        step_ms, samples_per_second (`float`): time and throughput of the whole plan.
        stage_ms (`tuple[float, ...]`): time of a micro-batch in each stage without gradient sync.
        memory (`tuple[StageMemory, ...]`): memory of each stage.
        extensions (`tuple[str, ...]`): features of the plan that Galvatron cannot express.
    """

    step_ms: float
    samples_per_second: float
    stage_ms: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    extensions: tuple[str, ...]

    def fits(self, memory_gib: int) -> bool:
        """Returns True if the engine accepts the plan for devices of `memory_gib`."""
        return max(stage.counted for stage in self.memory) <= usable_mib(memory_gib)


def usable_mib(memory_gib: int) -> int:
    """Returns the budget of a plan: above 20 GiB a fifth is kept for PyTorch's cache."""
    budget = memory_gib * 1024
    return budget - int(budget * 0.2) if memory_gib > 20 else budget


def score(
    profiles: GalvatronProfiles, plan: ParallelPlan, *, global_batch: int | None = None, engine: str = "main"
) -> Score:
    """
    Evaluates a plan under the cost model of one of Galvatron's engines.

    Args:
        profiles ([`GalvatronProfiles`]): profiles of the model and the cluster.
        plan ([`ParallelPlan`]): a plan of ours, or `read_galvatron_plan` of one of its files.
        global_batch (`int`, *optional*): rows of a step; by default that of Galvatron's file.
        engine (`str`, defaults to `"main"`): `"main"` or `"240"`.

    Raises:
        `ValueError`: if the engine's formulas do not cover such a plan.
    """
    case = case_of(profiles, plan, global_batch, engine)
    chained = [part for stage in case.stages for part in stage]
    known = {part: (layer_ms(case, part, True), layer_ms(case, part, False)) for part in set(chained)}
    synced = [sum(known[part][0] for part in stage) for stage in case.stages]
    computed = [sum(known[part][1] for part in stage) for stage in case.stages]
    computed = [layers + ends for layers, ends in zip(computed, vocabulary_ms(case))]
    step = pipeline_ms(synced, computed, case.micro_batches)
    return Score(
        step_ms=step,
        samples_per_second=1000 * case.global_batch / step,
        stage_ms=tuple(computed),
        memory=tuple(stage_memory(case, stage) for stage in range(case.pipeline)),
        extensions=tuple(extensions_of(plan)),
    )


def layer_ms(case: Case, part: Part, sync: bool) -> float:
    """Returns the time of one layer and micro-batch, with or without the reduction of gradients."""
    profiles = case.profiles
    rows = case.rows(part)
    forward = profiles.layer_forward(rows / part.degree)
    backward = forward * (BACKWARD + part.recompute)
    link = case.link_ms(part, part.sharing)
    reducing = part.sharing if case.main else part.data
    weights = profiles.parameter_mib / part.tensor / 2  # in 2 bytes
    reduce_ms = 2 * (reducing - 1) / reducing * weights * link if sync else 0.0
    result = forward + _exchange_ms(case, part, rows)
    if part.data == 1:
        result += backward
    elif case.main or part.degree == 1 or part.degree < part.ranks // 2:
        result += _overlapped_ms(profiles, reduce_ms, backward)
    else:
        result += backward / 2 + _overlapped_ms(profiles, reduce_ms, backward / 2)
    if part.sharding == "zero3":
        hybrid = part.shard_degree != part.sharing
        gathering = part.shard_degree if hybrid else reducing
        link = case.link_ms(part, part.shard_degree)
        result += (gathering - 1) / gathering * weights * link
    if case.pipeline > 1:
        sent = case.pipeline * 2 * profiles.hidden_mib(rows)
        result += sent * profiles.p2p_ms_per_mib(case.pipeline) / sum(map(len, case.stages))
    return result


def _exchange_ms(case: Case, part: Part, rows: int) -> float:
    """Returns the time of a layer's all-gathers and reduce-scatters of tensor ranks, or all-to-alls."""
    times = case.profiles.all_to_all if part.ulysses else case.profiles.all_gather
    count = 6 if case.main and not part.ulysses else 4
    return count * (1.5 if part.recompute else 1.0) * times.ms(part.degree, case.profiles.hidden_mib(rows))


def _overlapped_ms(profiles: GalvatronProfiles, reduce_ms: float, backward: float) -> float:
    """Returns the time of both together: slowed down until the shorter one is done, then the rest of the longer."""
    return max(reduce_ms, backward) + (profiles.overlap - 1) * min(reduce_ms, backward)


def vocabulary_ms(case: Case) -> list[float]:
    """Returns the time of embedding and head in each stage, without the reduction of gradients."""
    result = [0.0] * case.pipeline
    for stage, table, part in case.vocabulary:
        share = 1.0 if table == "whole" else 0.5
        rows = case.rows(part) if case.main else _fewest_rows(case)
        exchange = 0.0 if part.ulysses else case.profiles.all_gather.ms(part.degree, case.profiles.hidden_mib(rows))
        forward = case.profiles.vocabulary_forward(case.rows(part) / part.degree) * share
        gather = 0.0
        if part.sharding == "zero3":
            gather = _vocabulary_gather_ms(case, part, table)
        result[stage] += _exposed_ms(case, gather, forward) + _exposed_ms(case, gather, forward * BACKWARD)
        result[stage] += exchange * (2 if table == "whole" else 1)
    return result


def _vocabulary_gather_ms(case: Case, part: Part, table: str) -> float:
    if not case.main and table != "whole":
        table = "last" if part.ulysses else "first"
    states = _of_degree(case.profiles.ends[table].states_mib, part.tensor)
    weights = states / 4 / (2 if case.main else 1)
    return 0.5 * weights * (part.shard_degree - 1) / part.shard_degree * case.link_ms(part, part.shard_degree)


def _exposed_ms(case: Case, communication: float, compute: float) -> float:
    """Returns the time of communication at full speed that slowed-down compute does not hide."""
    overlap = case.profiles.overlap
    slowed = compute * overlap
    return communication + (slowed - communication) / overlap if slowed > communication else communication


def _fewest_rows(case: Case) -> int:
    """Returns 2.4.0's micro-batch size: rows of a rank at the least tensor degree that leaves whole rows."""
    least = next(n for n in itertools.count() if case.global_batch * 2**n % (case.micro_batches * case.ranks) == 0)
    return case.global_batch * 2**least // (case.micro_batches * case.ranks)


def pipeline_ms(synced: list[float], computed: list[float], micro_batches: int) -> float:
    """
    A step from a micro-batch's time in each stage.

    Args:
        synced (`list[float]`): time of the layers with the reduction of gradients.
        computed (`list[float]`): time of layers, embedding and head without reductions.
    """
    stages = len(computed)
    from_last = sum(computed) + computed[-1] * (micro_batches - 1)
    ahead = min(stages - 1, micro_batches - 1) * computed[0]
    bubble = sum(max(ahead * share, sum(computed[1:]) * share) for share in (1 / 3, 2 / 3))
    from_first = bubble + computed[0] * max(0, micro_batches + 1 - stages)
    left = max(reduced - done for reduced, done in zip(synced, itertools.accumulate(computed)))
    return max(from_last, from_first) + max(0.0, left)


def stage_memory(case: Case, stage: int) -> StageMemory:
    """Returns the peak memory of stage `stage`."""
    states = [_layer_states_mib(case, part) for part in case.stages[stage]]
    activations = [_layer_activation_mib(case, part, stage) for part in case.stages[stage]]
    vocabulary = _vocabulary_mib(case, stage)
    buffer = _buffer_mib(case)
    return StageMemory(
        states=sum(states),
        activations=sum(activations),
        vocabulary=vocabulary,
        context=CONTEXT_MIB,
        buffer=buffer,
        counted=sum(math.ceil(a + b) for a, b in zip(states, activations))
        + math.ceil(vocabulary + CONTEXT_MIB)
        + int(buffer),
    )


def state_share(case: Case, part: Part) -> float:
    """Returns the share of the states (bf16 and fp32 weights, gradients, two moments) on a rank."""
    piece = 1 / part.shard_degree + 0.003
    whole = {"zero2": 1, "zero3": 0}
    if part.sharding == "replicate":
        return 1.0
    # With several micro-batches gradients are kept whole until the last.
    eighths = whole[part.sharding] + (case.micro_batches > 1)
    return (8 - eighths) / 8 * piece + eighths / 8


def _layer_states_mib(case: Case, part: Part) -> float:
    return 4 * case.profiles.parameter_mib / part.tensor * state_share(case, part)


def _layer_activation_mib(case: Case, part: Part, stage: int) -> float:
    rows = case.rows(part) * _in_flight(case, stage)
    if not case.main and case.schedule == "gpipe" and case.pipeline > 1:
        rows = _fewest_rows(case)
    if part.recompute:
        return case.profiles.activation_mib["checkpoint"] * rows / part.degree
    return case.profiles.layer_activation_mib(part.degree) * rows


def _in_flight(case: Case, stage: int) -> int:
    """Returns the number of micro-batches whose activations a stage holds."""
    if case.schedule == "gpipe" and case.pipeline > 1:
        return case.micro_batches
    return min(case.pipeline - stage, case.micro_batches)


def _vocabulary_mib(case: Case, stage: int) -> float:
    gpipe, found = case.micro_batches if case.main else 1, 0.0
    for place, table, part in case.vocabulary:
        if place == stage:
            held = {"whole": 1, "first": case.pipeline, "last": 1}[table]
            held = gpipe if case.schedule == "gpipe" and case.pipeline > 1 else held
            found += _end_mib(case, part, case.profiles.ends[table], held)
    return found


def _end_mib(case: Case, part: Part, end: EndMemory, in_flight: int) -> float:
    states = _of_degree(end.states_mib, part.tensor) * state_share(case, part)
    return states + _of_degree(end.activation_mib, part.degree) * case.rows(part) * in_flight


def _buffer_mib(case: Case) -> float:
    """Returns the buffer of all-gathers of Megatron's sequence parallelism, and 2.4.0's reserve for all-to-alls."""
    parts = {*case.ends, *(part for stage in case.stages for part in stage)}
    largest = max(part.degree for part in parts)
    rows = case.global_batch / case.micro_batches / case.ranks * largest
    tensor = any(part.tensor > 1 for part in parts)
    ulysses = any(part.ulysses for part in parts)
    # A plan with neither is in both searches: main's has it without the buffer, 2.4.0's without the reserve.
    only_ulysses = ulysses and all(end.ulysses for end in case.ends) and not tensor
    buffer = tensor if case.main else not only_ulysses
    reserve = 0.0 if case.main or not ulysses else ALL_TO_ALL_MIB
    return case.profiles.hidden_mib(rows) * buffer + reserve


def _of_degree(table: dict[int, float], degree: int) -> float:
    if degree not in table:
        known = ", ".join(map(str, table))
        raise ValueError(f"the profiles have no embedding and head on {degree} ranks: use one of {known}")
    return table[degree]


def read_plan(path: Path, world_size: int) -> ParallelPlan:
    """Reads a plan file, ours or Galvatron's."""
    raw = json.loads(path.read_text())
    return read_galvatron_plan(raw, world_size) if "pp_deg" in raw else ParallelPlan.from_json(raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, required=True, help="folder of Galvatron's profiles")
    parser.add_argument("--plan", type=Path, required=True, help="plan file, ours or Galvatron's")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices_per_node", type=int, required=True)
    parser.add_argument("--global_batch", type=int, help="rows of a step; default: the plan file's global_bsz")
    parser.add_argument("--engine", choices=ENGINES, default="main", help="main: commit cea12ff, 240: release 2.4.0")
    parser.add_argument("--sequence_length", type=int, help="default: the only one that was profiled")
    parser.add_argument("--hidden_size", type=int, default=4096, help="default: 4096, that of Llama 7B")
    parser.add_argument("--memory_gib", type=int, help="memory of a device; says whether the engine would let it pass")
    args = parser.parse_args()
    try:
        profiles = GalvatronProfiles.from_folder(
            args.profiles, args.nodes, args.devices_per_node, args.sequence_length, args.hidden_size
        )
        plan = read_plan(args.plan, profiles.world_size)
        result = score(profiles, plan, global_batch=args.global_batch, engine=args.engine)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"step {result.step_ms:.2f} ms, {result.samples_per_second:.2f} samples/s (engine {args.engine})")
    print("stage  micro-batch ms  memory MiB = states + activations + vocabulary + context + buffer")
    for index, (ms, stage) in enumerate(zip(result.stage_ms, result.memory)):
        parts = (stage.states, stage.activations, stage.vocabulary, stage.context, stage.buffer)
        print(f"{index:5d}  {ms:14.2f}  {stage.counted:10d} = " + " + ".join(f"{mib:.0f}" for mib in parts))
    if args.memory_gib is not None:
        verdict = "fits" if result.fits(args.memory_gib) else "does not fit"
        print(f"{verdict} into the {usable_mib(args.memory_gib)} MiB that the engine uses of {args.memory_gib} GiB")
    for sentence in result.extensions:
        print(f"beyond Galvatron: {sentence}")


if __name__ == "__main__":
    main()
