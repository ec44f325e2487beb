# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of `galvatron search`, `estimate`, `explain` and `rent` into profiles, a workload and a budget.
No GPU and no launcher is needed: presets or profiles stand for the cluster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace

import numpy as np

from galvatron_hf.cli.case_arguments import MEMORY_FRACTION
from galvatron_hf.interop.galvatron.hardware import read_galvatron_hardware
from galvatron_hf.interop.galvatron.model import read_galvatron_model
from galvatron_hf.plan import Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.hardware import MADE_OF, HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile, read_imbalance
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.utils.cache_folder import cache_folder
from galvatron_hf.utils.progress import at_work
from galvatron_hf.utils.units import GIB


_MOST_ROWS, _MOST_TOKENS = 1 << 20, 1 << 30
_MOST_CONFIG_BYTES = 1 << 24
# Most tokens of a run, and highest price of a device-hour, with an example.
_OF_A_RUN = {"--tokens": (1e18, "1e12"), "--price-per-hour": (1e6, "2.5")}


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
        most, example = _OF_A_RUN[name]
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value:g} is not a number above 0: give such as {example}.")
        if value is not None and value > most:
            raise ValueError(f"{name} {value:g} is above {most:g}, which is that of no run: give such as {example}.")
    if given.price_per_hour is not None and given.tokens is None:
        raise ValueError("--price-per-hour is for a run of so many tokens: give --tokens too.")
    if given.packed is not None and given.model is None:
        flag = "--packed" if given.packed else "--no-packed"
        raise ValueError(f"{flag} is for a model that is traced, and a profile is of its own rows: give --model.")
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
        packed=given.packed is not False,
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
    profile = _traced(given, hardware)
    if given.packed and not profile.packed:
        raise ValueError(
            f"--packed is for models whose rows can be documents of one packed row, and those of {profile.name} "
            "cannot: leave it out."
        )
    return hardware, profile


def _traced(given: argparse.Namespace, hardware: HardwareProfile) -> ModelProfile:
    """Returns the profile of --model: one that an earlier command has kept, or the counts of a trace."""
    from galvatron_hf.profiler.trace.kept_traces import kept_trace
    from galvatron_hf.profiler.trace.model_files import adapter_file, config_file

    options = dict(
        dtype=given.dtype or "bf16",
        length=given.seq_length,
        target_length=given.target_length,
        packed=given.packed is not False,
        compiled=given.compiled,
        max_degree=min(hardware.world_size, 64 if hardware.world_size <= 64 else 16),
    )
    circumstances = dict(
        **options,
        name=given.model,
        adapter=given.adapter and adapter_file(given.adapter).read_text(),
        hardware=json.loads(hardware.to_json()),
    )

    file, source = config_file(given.model), given.model
    if file is None:
        from galvatron_hf.profiler.trace.tracing import read_config  # it imports torch

        source = read_config(given.model)
        circumstances["config"] = source.to_dict()
    else:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise ValueError(f"--model {given.model} is too large for a configuration: give a config.json.")
        circumstances["config"] = file.read_text(errors="replace")

    def traced() -> ModelProfile:
        from galvatron_hf.profiler.trace.tracing import profile_from_config

        return profile_from_config(source, hardware, adapter=given.adapter, **options)

    with at_work("tracing the model"):
        return kept_trace(cache_folder() / "traces", circumstances, traced)


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
