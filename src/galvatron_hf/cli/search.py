# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron search`, `estimate` and `explain`: the fastest plan for a model and a cluster, and the price of a plan.

None needs a GPU or a launcher: clusters that are not there are described by presets or profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from galvatron_hf.cli.files import output_file


if TYPE_CHECKING:
    from galvatron_hf.plan import ParallelPlan
    from galvatron_hf.planner.cost.cost_model import Workload
    from galvatron_hf.planner.report.alternatives import Alternative
    from galvatron_hf.planner.search import Estimate, SearchResult
    from galvatron_hf.profiler.profiles.hardware import HardwareProfile
    from galvatron_hf.profiler.profiles.model import ModelProfile

GIB = 1 << 30
_MOST_ROWS, _MOST_TOKENS = 1 << 20, 1 << 30


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the commands to a parser."""
    search = commands.add_parser(
        "search",
        help="find the fastest plan for a model on a cluster",
        description="Find the fastest plan for a model on a cluster, under the cost model. Nothing is measured and "
        "nothing is run: give a preset (--cluster) or profiles of what was measured.",
    )
    _add_case(search)
    search.add_argument("--output", type=output_file, metavar="FILE", help="write the plan here, as JSON")
    search.add_argument("--max-tensor", type=int, metavar="N", help="largest tensor degree (default: any)")
    search.add_argument("--pipeline", type=int, nargs="+", metavar="N", help="pipeline degrees to look at")
    search.add_argument("--micro-batches", type=int, nargs="+", metavar="N", help="numbers of them to look at")
    _add_rounds(search)
    search.add_argument("--no-recompute", action="store_true", help="keep all activations")
    search.add_argument("--compare", action="store_true", help="also find the best DDP, ZeRO-3 and Megatron plans")
    search.set_defaults(run=run_search)
    estimate = commands.add_parser(
        "estimate",
        help="predict time and memory of a plan",
        description="Predict time and memory of a plan under the cost model with which `galvatron search` searches.",
    )
    _add_case(estimate)
    estimate.add_argument("--plan", required=True, metavar="FILE", help="a plan of this project or of Galvatron")
    estimate.set_defaults(run=run_estimate)
    explain = commands.add_parser(
        "explain",
        help="show where a plan's time and memory go, and what would be faster",
        description="Show where a plan's predicted time and memory go, beside the fastest plan and well-known ones.",
    )
    _add_case(explain)
    explain.add_argument("--plan", required=True, metavar="FILE", help="a plan of this project or of Galvatron")
    _add_rounds(explain)
    explain.set_defaults(run=run_explain)


def _add_case(parser: argparse.ArgumentParser) -> None:
    profiles = parser.add_argument_group("what is known")
    profiles.add_argument("--model", metavar="PATH", help="a folder with a config.json, or such a file")
    profiles.add_argument("--cluster", metavar="NAME", help="devices that need not be there, such as h100")
    profiles.add_argument("--model-profile", metavar="FILE", help="of `galvatron profile-model`, instead of --model")
    profiles.add_argument(
        "--hardware-profile", metavar="FILE", help="of `galvatron profile-hardware`, instead of --cluster"
    )
    profiles.add_argument(
        "--galvatron-profiles", metavar="DIR", help="model/ and hardware/ as Galvatron writes them, under Megatron-SP"
    )
    profiles.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1, or the profile's)")
    profiles.add_argument("--devices-per-node", type=int, metavar="N", help="of each (default: 8, or the profile's)")
    profiles.add_argument("--memory-gib", type=float, metavar="X", help="of a device (default: what the device has)")
    work = parser.add_argument_group("what is computed")
    work.add_argument("--global-batch", type=int, required=True, metavar="N", help="rows of an optimizer step")
    work.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens of a row")
    work.add_argument("--dtype", choices=("bf16", "fp32"), help="of computing (default: bf16, or the model profile's)")
    work.add_argument(
        "--reduce-dtype", choices=("bf16", "fp32"), help="of summed gradients (default: fp32; bf16 as Galvatron does)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="most interleaved stages of a pipeline on a device (default: 4; 1, which are none, with "
        "--galvatron-profiles, because Galvatron has no such plans)",
    )


def run_search(given: argparse.Namespace) -> int:
    """Prints the plan that was found, and writes it if asked to."""
    from galvatron_hf.planner.report.alternatives import alternatives
    from galvatron_hf.planner.search import search_plan
    from galvatron_hf.planner.space import Limits

    hardware, model, workload, budget = read_case(given)
    limits = Limits(
        tensor=given.max_tensor,
        recompute=("none",) if given.no_recompute else ("none", "full"),
        pipeline=None if given.pipeline is None else tuple(given.pipeline),
        micro_batches=None if given.micro_batches is None else tuple(given.micro_batches),
        rounds=rounds_of(given),
    )
    result = search_plan(hardware, model, workload, memory_bytes=budget, limits=limits, progress=True)
    if result.best is None:
        raise ValueError(result.nothing_fits)
    if given.output is not None:
        result.best.noted(workload).to_json(given.output)
    if given.json:
        others = []
        if given.compare:
            others = alternatives(hardware, model, workload, memory_bytes=budget, rounds=limits.rounds, progress=True)
        found = priced(replace(result.best, plan=result.best.noted(workload))) | {
            "search_seconds": result.seconds,
            "memory_budget_bytes": budget,
            "memory_quantum_bytes": 1,
            "branches": result.branches,
            "branches_solved": result.solved,
            "states": result.states,
            "runners_up": [priced(estimate) for estimate in result.runners_up],
            "alternatives": _priced_all(others),
            "assumed": _assumed(hardware, model),
        }
        print(json.dumps(found, indent=2))
        return 0
    _show(result, given.compare, (hardware, model, workload))
    return 0


def run_estimate(given: argparse.Namespace) -> int:
    """Prints what a plan is predicted to cost."""
    from galvatron_hf.planner.report.explain import explain_plan
    from galvatron_hf.planner.report.report import Report

    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given.plan, hardware.world_size)
    _warn_of_precision(plan, workload)
    found = explain_plan(hardware, model, workload, plan)
    if given.json:
        said = {
            "search_seconds": 0.0,
            "memory_budget_bytes": budget,
            "step_ms_by_kind": found.step_ms(),
            "assumed": _assumed(hardware, model),
        }
        print(json.dumps(priced(replace(found.estimate, plan=plan)) | said, indent=2))
        return 0
    Console().print(Report(explanation=found, others=[], budget=budget))
    return 0


def run_explain(given: argparse.Namespace) -> int:
    """Prints the parts of a plan's price, and what other plans cost."""
    from galvatron_hf.planner.report.alternatives import Alternative, alternatives
    from galvatron_hf.planner.report.explain import explain_plan
    from galvatron_hf.planner.report.report import Report
    from galvatron_hf.planner.search import search_plan
    from galvatron_hf.planner.space import Limits

    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given.plan, hardware.world_size)
    _warn_of_precision(plan, workload)
    found = explain_plan(hardware, model, workload, plan)
    limits = Limits(rounds=rounds_of(given))
    result = search_plan(hardware, model, workload, memory_bytes=budget, limits=limits, progress=True)
    others = [
        Alternative(name="the fastest", best=result.best, least_memory_bytes=result.least_memory_bytes),
        *alternatives(hardware, model, workload, memory_bytes=budget, rounds=limits.rounds, progress=True),
    ]
    if given.json:
        said = {
            "memory_budget_bytes": budget,
            "step_ms_by_kind": found.step_ms(),
            "stages": [asdict(stage) for stage in found.stages],
            "alternatives": _priced_all(others),
            "assumed": _assumed(hardware, model),
        }
        print(json.dumps(priced(replace(found.estimate, plan=plan)) | said, indent=2))
        return 0
    Console().print(Report(explanation=found, others=others, budget=budget))
    return 0


def _priced_all(others: list[Alternative]) -> dict[str, Any]:
    return {
        other.name: priced(other.best) if other.best else {"least_memory_bytes": other.least_memory_bytes}
        for other in others
    }


def _assumed(hardware: HardwareProfile, model: ModelProfile) -> dict[str, str]:
    """What of a prediction was not measured, and where it is from."""
    return {**hardware.assumed, **model.assumed}


def priced(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON values."""
    return {
        "samples_per_second": estimate.samples_per_second,
        "step_ms": estimate.step_ms,
        "memory_bytes": list(estimate.memory_bytes),
        "plan": json.loads(estimate.plan.to_json()),
    }


def read_case(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile, Workload, int]:
    """Profiles, workload and the bytes of a device, as the flags say.

    Raises:
        ValueError: in one sentence, if the flags do not say all, or say it twice.
    """
    from galvatron_hf.plan import Precision
    from galvatron_hf.planner.cost.cost_model import Workload

    sizes = (given.global_batch, given.seq_length, given.nodes, given.devices_per_node)
    if min(size for size in sizes if size is not None) < 1:
        raise ValueError("--global-batch, --seq-length, --nodes and --devices-per-node count from 1: give more.")
    if given.global_batch > _MOST_ROWS:
        raise ValueError(f"--global-batch {given.global_batch} is above {_MOST_ROWS}: give the rows of one step.")
    if given.seq_length > _MOST_TOKENS:
        raise ValueError(f"--seq-length {given.seq_length} is above {_MOST_TOKENS}: give the tokens of one row.")
    if given.memory_gib is not None and not 1 / GIB <= given.memory_gib < 2**20:
        raise ValueError(f"--memory-gib {given.memory_gib} is no memory of a device: give GiB, such as 80.")
    hardware, model = _galvatron(given) if given.galvatron_profiles is not None else _profiles(given)
    if given.reduce_dtype == "bf16" and model.dtype != "bf16":
        raise ValueError(f"--reduce-dtype bf16, but layers compute in {model.dtype}: leave it out, or give bf16.")
    reduce_dtype = given.reduce_dtype or ("bf16" if given.galvatron_profiles is not None else "fp32")
    workload = Workload(
        rows=given.global_batch,
        length=given.seq_length,
        precision=Precision(compute=model.dtype, reduce=reduce_dtype if model.dtype == "bf16" else "fp32"),
    )
    if model.max_length is not None and given.seq_length > model.max_length:
        raise ValueError(
            f"--seq-length {given.seq_length} is above the {model.max_length} positions of {model.name}: give fewer."
        )
    budget = hardware.memory_bytes if given.memory_gib is None else int(given.memory_gib * GIB)
    return hardware, model, workload, budget


def rounds_of(given: argparse.Namespace) -> int:
    """Most interleaved stages of a pipeline on a device."""
    from galvatron_hf.planner.space import Limits

    if given.rounds is None:
        return 1 if given.galvatron_profiles is not None else Limits.rounds
    if given.rounds < 1:
        raise ValueError(f"--rounds {given.rounds} counts stages of a device: give 1 or more.")
    return given.rounds


def _galvatron(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile]:
    from galvatron_hf.interop.galvatron.hardware import read_galvatron_hardware
    from galvatron_hf.interop.galvatron.model import read_galvatron_model

    if given.memory_gib is None:
        raise ValueError("Galvatron's profiles do not tell a device's memory: give --memory-gib.")
    for flag in ("model", "cluster", "model_profile", "hardware_profile"):
        if getattr(given, flag) is not None:
            name = flag.replace("_", "-")
            raise ValueError(f"--galvatron-profiles and --{name} both say what is known: give one of them.")
    folder = given.galvatron_profiles
    links = os.path.join(folder, "hardware")
    where = links if os.path.isdir(links) else folder
    hardware = read_galvatron_hardware(where, *_cluster_of(given), int(given.memory_gib * GIB))
    model = read_galvatron_model(folder, length=given.seq_length)
    _check_same(given, dtype=model.dtype)
    return hardware, model


def _profiles(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile]:
    from galvatron_hf.profiler.profiles.hardware import HardwareProfile
    from galvatron_hf.profiler.profiles.model import ModelProfile
    from galvatron_hf.profiler.profiles.presets import hardware_preset
    from galvatron_hf.profiler.trace.tracing import profile_from_config
    from galvatron_hf.utils.progress import at_work

    if (given.cluster is None) == (given.hardware_profile is None):
        raise ValueError("The cluster is not known: give one of --cluster, --hardware-profile, --galvatron-profiles.")
    if (given.model is None) == (given.model_profile is None):
        raise ValueError("The model is not known: give one of --model, --model-profile, --galvatron-profiles.")
    if given.cluster is not None:
        hardware = hardware_preset(given.cluster, *_cluster_of(given))
    else:
        hardware = HardwareProfile.from_json(given.hardware_profile)
        _check_same(given, nodes=hardware.nodes, devices_per_node=hardware.devices_per_node)
    if given.model_profile is not None:
        model = ModelProfile.from_json(given.model_profile)
        _check_same(given, dtype=model.dtype)
        _check_same_devices(hardware, model)
        return hardware, model
    degrees = dict(max_degree=min(hardware.world_size, 64 if hardware.world_size <= 64 else 16))
    with at_work("tracing the model"):
        return hardware, profile_from_config(
            given.model, hardware, given.dtype or "bf16", length=given.seq_length, packed=False, **degrees
        )


def _cluster_of(given: argparse.Namespace) -> tuple[int, int]:
    """Nodes, and devices of each."""
    return given.nodes or 1, given.devices_per_node or 8


def _check_same(given: argparse.Namespace, **profiled: int | str) -> None:
    """Raises ValueError for a flag that says something else than a profile."""
    for name, value in profiled.items():
        asked = getattr(given, name)
        if asked not in (None, value):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {asked}, but the profile is of {value}: leave {flag} out, or profile that.")


def _check_same_devices(hardware: HardwareProfile, model: ModelProfile) -> None:
    """Raises ValueError where layers were timed, or counted, for other devices than the links.

    What was measured beside a data sheet tells nothing: they name devices in their own ways.
    """
    from galvatron_hf.profiler.profiles.hardware import DEVICES

    for key in DEVICES:
        links, layers = hardware.made.get(key), model.made.get(key)
        if None not in (links, layers) and links != layers:
            raise ValueError(f"The model profile is of {layers}, the hardware of {links}: profile both of one.")


def read_plan(path: str, world_size: int) -> ParallelPlan:
    """A plan of this project, or of Galvatron."""
    from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
    from galvatron_hf.plan import ParallelPlan
    from galvatron_hf.plan.serialization import read_object

    raw = read_object(path)
    return read_galvatron_plan(raw, world_size) if "pp_deg" in raw else ParallelPlan.from_json(raw)


def _warn_of_precision(plan: ParallelPlan, workload: Workload) -> None:
    """Says on standard error where the price is in other number formats than the plan's own."""
    if plan.precision not in (None, workload.precision):
        own, priced_in = (json.dumps(asdict(precision)) for precision in (plan.precision, workload.precision))
        print(f"The plan's precision is {own}; it is priced in {priced_in}.", file=sys.stderr)


def _show(result: SearchResult, compare: bool, case: tuple[HardwareProfile, ModelProfile, Workload]) -> None:
    console = Console()
    console.print(result.explain(compare=compare, progress=True))
    console.print(
        f"{result.branches} ways to cut the step, {result.solved} of them searched to the end with {result.states} "
        f"partial plans, memory counted in bytes, {result.seconds:.1f} s"
    )
    assumed = sorted({**case[0].assumed, **case[1].assumed})
    console.print(f"Predicted, not measured{'; assumed: ' + ', '.join(assumed) if assumed else ''}.")
