# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of `galvatron search`, `estimate` and `explain`, read into profiles, a workload, a budget and a plan. No
GPU and no launcher is needed: presets or profiles stand for the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from galvatron_hf.interop.galvatron.hardware import read_galvatron_hardware
from galvatron_hf.interop.galvatron.model import read_galvatron_model
from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.plan.plan_words import WORDS, PlanWords
from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.validation import divisors
from galvatron_hf.planner.cost import rings
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, estimate_plan
from galvatron_hf.planner.report.alternatives import Alternative
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.hardware import MADE_OF, HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile, read_imbalance
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.utils.progress import at_work
from galvatron_hf.utils.units import GIB


_MOST_ROWS, _MOST_TOKENS = 1 << 20, 1 << 30
MEMORY_FRACTION = 0.92  # of a device that a plan may use
_EXAMPLES = {"--tokens": "1e12", "--price-per-hour": "2.5"}


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the model, the cluster and the workload."""
    add_model_arguments(parser)
    add_cluster_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="price of a device-hour, with --tokens")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the model, and the memory that it may use."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help="a folder with a config.json, such a file, or the id of a model on the Hub"
    )
    group.add_argument(
        "--adapter", metavar="DIR", help="a folder with PEFT's adapter_config.json: LoRA on the frozen --model"
    )
    group.add_argument(
        "--model-profile", metavar="FILE", help="the output of `galvatron profile-model`, instead of --model"
    )
    group.add_argument(
        "--compiled", action="store_true", help="price layers that torch.compile has fused; with --model only"
    )
    group.add_argument(
        "--memory-gib",
        type=float,
        metavar="X",
        help="memory that a plan may use on a device (default: --memory-fraction of the preset's or profile's)",
    )
    group.add_argument(
        "--memory-fraction",
        type=float,
        metavar="X",
        help=f"share of a device's memory that a plan may use (default: {MEMORY_FRACTION}, as in training)",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--cluster", metavar="NAME", help="a preset of devices, such as h100; none need be present")
    group.add_argument(
        "--hardware-profile", metavar="FILE", help="the output of `galvatron profile-hardware`, instead of --cluster"
    )
    group.add_argument(
        "--galvatron-profiles",
        metavar="DIR",
        help="a folder of Galvatron's profiles, with model/ and hardware/, measured under Megatron-SP",
    )
    group.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="devices in all, instead of --nodes: one machine if they fit in it, else as many as they fill",
    )
    group.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1, or the profile's)")
    group.add_argument(
        "--devices-per-node", type=int, metavar="N", help="devices of a machine (default: 8, or the profile's)"
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the workload, and of the output."""
    group = parser.add_argument_group("workload")
    group.add_argument("--global-batch", type=int, required=True, metavar="N", help="rows of an optimizer step")
    group.add_argument(
        "--seq-length", type=int, required=True, metavar="N", help="tokens of a row, or positions of an image"
    )
    group.add_argument(
        "--dataset",
        metavar="NAME",
        help="rows as long as those of this dataset, cut to --seq-length: a folder, a file or an id on the Hub, as "
        "`galvatron data` takes it (default: all rows have --seq-length)",
    )
    group.add_argument(
        "--dataset-column",
        metavar="NAME",
        help="the column of --dataset with token ids, or with text if there is a --tokenizer",
    )
    group.add_argument("--tokenizer", metavar="NAME", help="a tokenizer for a --dataset of text")
    group.add_argument(
        "--target-length",
        type=int,
        metavar="N",
        help="tokens of a row in the decoder of a --model with an encoder too (default: those of --seq-length)",
    )
    group.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="number format of compute (default: bf16, or the model profile's)"
    )
    group.add_argument(
        "--reduce-dtype",
        choices=("bf16", "fp32"),
        help="number format of gradient sums (default: fp32, or bf16 with --galvatron-profiles)",
    )
    group.add_argument(
        "--expert-imbalance",
        nargs="+",
        metavar="DEGREE=X",
        help="most rows at a rank over their mean, by expert degree, as a training run has measured: 4=1.3 8=1.6",
    )
    group.add_argument("--tokens", type=float, metavar="N", help="also say what a run of N tokens takes, such as 1e12")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a plan."""
    parser.add_argument(
        "--plan",
        required=True,
        metavar="PLAN",
        help=f"the file of a plan of this project or of Galvatron, or a plan in words: {WORDS}; such as tp4+pp2+zero2",
    )


def add_rounds_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that limits interleaved pipelines."""
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="maximum of virtual stages on each pipeline rank (default: 4, or 1 with --galvatron-profiles, because "
        "Galvatron's plans are not interleaved)",
    )


def read_case(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile, Workload, int]:
    """Returns the hardware profile, the model profile, the workload and the bytes of a device. A missing, wrong or
    repeated argument raises a ValueError of one sentence.
    """
    for name in ("global_batch", "seq_length", "target_length", "gpus", "nodes", "devices_per_node"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} counts from 1: give more.")
    if given.global_batch > _MOST_ROWS:
        raise ValueError(f"--global-batch {given.global_batch} is above {_MOST_ROWS}: give the rows of one step.")
    if given.seq_length > _MOST_TOKENS:
        raise ValueError(f"--seq-length {given.seq_length} is above {_MOST_TOKENS}: give the tokens of one row.")
    if given.memory_gib is not None and not 1 / GIB <= given.memory_gib < 2**20:
        raise ValueError(f"--memory-gib {given.memory_gib} is not the memory of a device: give GiB, such as 80.")
    for name, value in (("--tokens", given.tokens), ("--price-per-hour", given.price_per_hour)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value:g} is not a number above 0: give such as {_EXAMPLES[name]}.")
    if given.price_per_hour is not None and given.tokens is None:
        raise ValueError("--price-per-hour is for a run of so many tokens: give --tokens too.")
    if given.compiled and given.model is None:
        raise ValueError("--compiled is for a model that is traced, and a profile was measured: give --model.")
    if given.memory_fraction is not None and not 0 < given.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction {given.memory_fraction:g} is not a share: give one above 0, up to 1.")
    if given.memory_fraction is not None and given.memory_gib is not None:
        raise ValueError("--memory-gib and --memory-fraction exclude each other: give one of them.")
    lengths = _lengths(given)
    hardware, model = _galvatron(given) if given.galvatron_profiles is not None else _profiles(given)
    if given.expert_imbalance is not None:
        model = _with_imbalance(model, given.expert_imbalance)
    if given.reduce_dtype == "bf16" and model.dtype != "bf16":
        raise ValueError(f"--reduce-dtype is bf16, but layers compute in {model.dtype}: leave it out, or use bf16.")
    reduce_dtype = given.reduce_dtype or ("bf16" if given.galvatron_profiles is not None else "fp32")
    workload = Workload(
        rows=given.global_batch,
        length=given.seq_length,
        precision=Precision(compute=model.dtype, reduce=reduce_dtype if model.dtype == "bf16" else "fp32"),
        packed=True,
    )
    if lengths is not None:
        workload = replace(
            workload,
            length=int(lengths.max()),
            mean_length=round(float(lengths.mean())),
            mean_square=float(np.square(lengths, dtype=np.float64).mean()),
        )
    if model.images and given.seq_length != model.max_length:
        raise ValueError(
            f"--seq-length {given.seq_length} is not the {model.max_length} positions of an image of {model.name}: "
            f"give {model.max_length}."
        )
    if model.max_length is not None and given.seq_length > model.max_length:
        raise ValueError(
            f"--seq-length {given.seq_length} is above the {model.max_length} positions of {model.name}: give fewer."
        )
    if given.memory_gib is not None:
        return hardware, model, workload, int(given.memory_gib * GIB)
    fraction = MEMORY_FRACTION if given.memory_fraction is None else given.memory_fraction
    return hardware, model, workload, max(1, int(fraction * hardware.memory_bytes))


def _lengths(given: argparse.Namespace) -> np.ndarray | None:
    """Returns the tokens of the dataset's rows, cut to --seq-length; None without a dataset."""
    if given.dataset is None:
        for name in ("dataset_column", "tokenizer"):
            if getattr(given, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for a --dataset: give one, or leave it out.")
        return None
    from galvatron_hf.data.named_dataset import named_lengths  # it imports datasets

    every = named_lengths(given.dataset, column=given.dataset_column, tokenizer=given.tokenizer)
    lengths = np.minimum(every[every > 0], given.seq_length)
    if not len(lengths):
        raise ValueError(f"--dataset {given.dataset} has no row with a token: give another dataset or column.")
    return lengths


def _with_imbalance(model: ModelProfile, given: list[str]) -> ModelProfile:
    """Returns the profile with the imbalance of experts that arguments such as "4=1.3" give."""
    pairs = [one.partition("=") for one in given]
    try:
        found = {int(degree): float(ratio) for degree, _, ratio in pairs}
    except ValueError:
        raise ValueError(f"--expert-imbalance {' '.join(given)} is not DEGREE=X: give such as 4=1.3.") from None
    return replace(model, expert_imbalance=read_imbalance(found))


def virtual_stages_of(given: argparse.Namespace) -> int:
    """Returns the most interleaved stages of a pipeline on a device."""
    if given.rounds is None:
        return 1 if given.galvatron_profiles is not None else Limits.virtual_stages
    if given.rounds < 1:
        raise ValueError(f"--rounds {given.rounds} is not a number of stages: give 1 or more.")
    return given.rounds


def _galvatron(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile]:
    if given.memory_gib is None:
        raise ValueError("Galvatron's profiles do not contain a device's memory: give --memory-gib.")
    for flag in ("model", "cluster", "model_profile", "hardware_profile"):
        if getattr(given, flag) is not None:
            name = flag.replace("_", "-")
            raise ValueError(f"--galvatron-profiles and --{name} exclude each other: give one of them.")
    folder = given.galvatron_profiles
    links = os.path.join(folder, "hardware")
    where = links if os.path.isdir(links) else folder
    hardware = read_galvatron_hardware(where, *_cluster_of(given), int(given.memory_gib * GIB))
    model = read_galvatron_model(folder, length=given.seq_length)
    _check_same(given, dtype=model.dtype)
    return hardware, model


def _profiles(given: argparse.Namespace) -> tuple[HardwareProfile, ModelProfile]:
    if (given.cluster is None) == (given.hardware_profile is None):
        raise ValueError("No cluster is given: use one of --cluster, --hardware-profile, --galvatron-profiles.")
    if (given.model is None) == (given.model_profile is None):
        raise ValueError("No model is given: use one of --model, --model-profile, --galvatron-profiles.")
    if given.target_length is not None and given.model is None:
        raise ValueError("--target-length is for a model that is traced, and a profile has its own: give --model.")
    if given.adapter is not None and given.model is None:
        raise ValueError("--adapter adapts a model that is traced, and a profile has its own: give --model.")
    if given.cluster is not None:
        hardware = hardware_preset(given.cluster, *_cluster_of(given))
    else:
        hardware = HardwareProfile.from_json(given.hardware_profile)
        size = dict(gpus=hardware.world_size, nodes=hardware.nodes, devices_per_node=hardware.devices_per_node)
        _check_same(given, **size)
    if given.model_profile is not None:
        model = ModelProfile.from_json(given.model_profile)
        _check_same(given, dtype=model.dtype)
        _check_same_devices(hardware, model)
        return hardware, model
    from galvatron_hf.profiler.trace.tracing import profile_from_config  # it imports torch

    degrees = dict(max_degree=min(hardware.world_size, 64 if hardware.world_size <= 64 else 16))
    with at_work("tracing the model"):
        return hardware, profile_from_config(
            given.model,
            hardware,
            given.dtype or "bf16",
            adapter=given.adapter,
            length=given.seq_length,
            target_length=given.target_length,
            packed=False,
            compiled=given.compiled,
            **degrees,
        )


def _cluster_of(given: argparse.Namespace) -> tuple[int, int]:
    if given.gpus is None:
        return given.nodes or 1, given.devices_per_node or 8
    if given.nodes is not None:
        raise ValueError("--gpus counts the devices of all machines: leave --nodes out.")
    if given.gpus <= (given.devices_per_node or 8):
        return 1, given.gpus
    nodes, rest = divmod(given.gpus, given.devices_per_node or 8)
    if rest:
        raise ValueError(
            f"--gpus {given.gpus} does not fill machines of {given.devices_per_node or 8} devices: give "
            f"{given.gpus - rest}, or --devices-per-node."
        )
    return nodes, given.devices_per_node or 8


def _check_same(given: argparse.Namespace, **profiled: int | str) -> None:
    """Raises ValueError if an argument contradicts a profile."""
    for name, value in profiled.items():
        asked = getattr(given, name)
        if asked not in (None, value):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is {asked}, but the profile has {value}: leave {flag} out, or profile that.")


def _check_same_devices(hardware: HardwareProfile, model: ModelProfile) -> None:
    """Raises ValueError if the profiles are of different devices. A measured profile is not compared with a preset,
    because they name devices differently.
    """
    for key in MADE_OF:
        links, layers = hardware.made.get(key), model.made.get(key)
        if None not in (links, layers) and links != layers:
            raise ValueError(f"The model profile is of {layers}, the hardware profile of {links}: profile one device.")


def read_plan(
    given: argparse.Namespace, hardware: HardwareProfile, model: ModelProfile, workload: Workload, budget: int
) -> ParallelPlan:
    """Reads a plan of this project or of Galvatron, or makes a plan in words. If its words do not say how many
    micro-batches it has, it has the number with which it is fastest, of those that divide the rows and fit.
    """
    words = None if os.path.isfile(given.plan) else PlanWords.from_text(given.plan)
    if words is None:
        raw = read_object(given.plan)
        return read_galvatron_plan(raw, hardware.world_size) if "pp_deg" in raw else ParallelPlan.from_json(raw)
    plan = words.plan(hardware.world_size, model.stack_sizes)
    if words.micro_batches is not None or workload.rows == 1:
        return plan
    found = []
    for count in divisors(workload.rows):
        with contextlib.suppress(ValueError):  # such as fewer micro-batches than stages
            found.append(estimate_plan(hardware, model, workload, replace(plan, micro_batches=count)))
    fitting = [one for one in found if max(one.memory_bytes) <= budget]
    if fitting:
        return min(fitting, key=lambda one: one.step_ms).plan
    return min(found, key=lambda one: max(one.memory_bytes)).plan if found else plan


def warn_of_precision(plan: ParallelPlan, workload: Workload) -> None:
    """Warns on standard error if the plan has other number formats than the prediction."""
    if plan.precision not in (None, workload.precision):
        own, priced_in = (json.dumps(asdict(precision)) for precision in (plan.precision, workload.precision))
        print(f"The plan's precision is {own}; the prediction is for {priced_in}.", file=sys.stderr)


def priced(estimate: Estimate) -> dict[str, Any]:
    """Returns a plan with its predicted time and memory, for JSON."""
    return {
        "samples_per_second": estimate.samples_per_second,
        "step_ms": estimate.step_ms,
        "memory_bytes": list(estimate.memory_bytes),
        "plan": json.loads(estimate.plan.to_json()),
    }


def priced_all(others: list[Alternative]) -> dict[str, Any]:
    """Returns the best plan of each alternative as JSON values, or the memory it would need."""
    return {
        other.name: priced(other.best) if other.best else {"least_memory_bytes": other.least_memory_bytes}
        for other in others
    }


def assumptions(hardware: HardwareProfile, model: ModelProfile, plan: ParallelPlan) -> dict[str, str]:
    """Returns the source of each assumed figure in the prediction of a plan."""
    of_plan = rings.ASSUMED if any(layer.context > 1 for layer in plan.layers) else {}
    return {**hardware.assumed, **model.assumed, **of_plan}
