# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the time of searches, and compares their plans with Galvatron's plans and formulas.

    OMP_NUM_THREADS=1 python benchmarks/search.py [--json]

Case 1: Llama-2 7B on 8, 16 and 64 devices of 38 GiB, from Galvatron's published profiles. Our plan is compared with
each of Galvatron's plans for them, under our cost model and, if they cover our plan, under the formulas of Galvatron's
two engines (galvatron_formulas.py). Case 2: Llama-2 70B on 64 and 1,024 H100s, from data sheets. Memory is counted in
bytes, no strategy of the space is left out, and the result is the optimum. `branches` are the ways to cut a step,
`solved` those that a lower bound did not exclude, `states` the partial plans that were kept. Seconds are the median of
`--turns` searches, with the range.

Evidence tier: times of searches are measured, everything else is predicted.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from galvatron_formulas import score
from galvatron_profiles import GalvatronProfiles
from transformers import LlamaConfig

from galvatron_hf.interop.galvatron.hardware import read_galvatron_hardware
from galvatron_hf.interop.galvatron.model import read_galvatron_model
from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config


DATA = Path(__file__).parent.parent / "tests" / "data"
MEMORY_GIB = 38
GALVATRONS = Limits(virtual_stages=1)  # its plans have no interleaved stages, and its formulas no price for them
LLAMA_70B = dict(
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=4096,
)


def galvatron_case(nodes: int, turns: int) -> dict[str, Any]:
    """Searches Llama-2 7B on `nodes` x 8 devices."""
    profiles, rows, budget = DATA / "galvatron_profiles", 64 * nodes, MEMORY_GIB << 30
    hardware = read_galvatron_hardware(profiles / "hardware", nodes, 8, budget)
    model = read_galvatron_model(profiles)
    work = Workload(rows=rows, length=2048, precision=Precision(compute="bf16", reduce="bf16"))
    results = [search_plan(hardware, model, work, memory_bytes=budget, limits=GALVATRONS) for _ in range(turns)]
    theirs = GalvatronProfiles.from_folder(profiles, nodes, 8)
    plans = {"ours": results[0].best.plan}
    for path in sorted((DATA / "galvatron_plans").glob(f"*_{nodes}x8_*.json")):
        plans[path.stem] = read_galvatron_plan(path, 8 * nodes)
    rivals = []
    for name, plan in plans.items():
        estimate = estimate_plan(hardware, model, work, plan)
        rivals.append(
            {
                "plan": name,
                "samples_per_second": estimate.samples_per_second,
                "fits": max(estimate.memory_bytes) <= budget,
                "under": {engine: _under(theirs, plan, rows, engine) for engine in ("main", "240")},
            }
        )
    return described(f"llama2-7b, {8 * nodes} devices", results) | {"rivals": rivals}


def _under(profiles: GalvatronProfiles, plan: ParallelPlan, rows: int, engine: str) -> float | str:
    try:
        return score(profiles, plan, global_batch=rows, engine=engine).samples_per_second
    except ValueError as reason:
        return str(reason)


def large_case(nodes: int, turns: int) -> dict[str, Any]:
    """Searches Llama-2 70B on `nodes` x 8 H100s."""
    hardware = hardware_preset("h100", nodes, 8)
    model = profile_from_config(LlamaConfig(**LLAMA_70B), hardware, length=4096, packed=False, max_degree=16)
    work = Workload(rows=16 * nodes, length=4096, precision=Precision(compute="bf16"))
    results = [search_plan(hardware, model, work) for _ in range(turns)]
    return described(f"llama2-70b, {8 * nodes} devices", results)


def described(name: str, results: list[SearchResult]) -> dict[str, Any]:
    seconds, first = [result.seconds for result in results], results[0]
    return {
        "case": name,
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "branches": first.cuts,
        "solved": first.solved,
        "states": first.states,
        "memory_quantum_bytes": 1,
        "samples_per_second": first.best.samples_per_second,
        "pipeline": len(first.best.plan.rank_groups),
        "virtual_stages": len(first.best.plan.stages) // len(first.best.plan.rank_groups),
        "micro_batches": first.best.plan.micro_batch_count,
    }


def show(case: dict[str, Any]) -> None:
    low, high = case["seconds_range"]
    print(
        f"\n{case['case']}: {case['seconds']:.2f} s [{low:.2f}, {high:.2f}], {case['branches']} branches, "
        f"{case['solved']} solved, {case['states']} states, memory in bytes; {case['samples_per_second']:.2f} "
        f"samples/s, {case['pipeline']} stage(s), {case['micro_batches']} micro-batches"
    )
    for rival in case.get("rivals", []):
        under = "  ".join(
            f"{engine} {value:7.2f}" if isinstance(value, float) else f"{engine}: {value}"
            for engine, value in rival["under"].items()
        )
        fits = "" if rival["fits"] else "  (does not fit)"
        print(f"  {rival['plan']:42s} ours {rival['samples_per_second']:7.2f}  {under}{fits}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--turns", type=int, default=3, help="searches of each case")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 8], help="of Llama-2 7B, 8 devices each")
    parser.add_argument("--large_nodes", type=int, nargs="*", default=[8, 128], help="of Llama-2 70B")
    options = parser.parse_args()
    cases = [galvatron_case(nodes, options.turns) for nodes in options.nodes]
    cases += [large_case(nodes, options.turns) for nodes in options.large_nodes]
    if options.json:
        print(json.dumps({"cases": cases}, indent=2))
        return
    for case in cases:
        show(case)


if __name__ == "__main__":
    main()
