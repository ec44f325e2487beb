# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Keeps profiles between runs, and measures again if the circumstances have changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from galvatron_hf.parallel.comm.objects import from_rank_0, is_rank_0
from galvatron_hf.profiler.measure.hardware import (
    accuracy_text,
    default_device,
    machine,
    nodes_of,
    percent,
    profile_hardware,
)
from galvatron_hf.profiler.measure.model import circumstances, config_digest, profile_model
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


logger = logging.getLogger(__name__)

HARDWARE_FILE = "hardware.json"

Profile = TypeVar("Profile", HardwareProfile, ModelProfile)


def load_or_profile_hardware(folder: str | os.PathLike, **arguments: Any) -> HardwareProfile:
    """
    Reads `hardware.json` from a folder, or measures and writes it; collective like [`profile_hardware`].

    The file is used if these are unchanged: numbers of nodes and devices, hosts, devices, CPU limits, threads,
    backend, PyTorch, release of this package, way of measuring; and if it is accurate enough. Otherwise, and if the
    file is broken, a warning gives the reason and the machine is measured again.

    Args:
        folder (`str` or `os.PathLike`): Folder of rank 0, created if missing.
        **arguments: Arguments of [`profile_hardware`].
    """
    device = arguments.get("device")
    device = torch.device(device) if device is not None else default_device()
    nodes, devices_per_node = nodes_of(arguments.get("local_world_size"))
    return _load_or_make(
        Path(folder) / HARDWARE_FILE,
        HardwareProfile,
        machine(device)
        | accuracy_text(arguments.get("accuracy", WANTED_ERROR))
        | {"nodes x devices": f"{nodes} x {devices_per_node}"},
        lambda profile: profile.made | {"nodes x devices": f"{profile.nodes} x {profile.devices_per_node}"},
        lambda: profile_hardware(**arguments),
    )


def load_or_profile_model(
    folder: str | os.PathLike,
    model: PreTrainedModel,
    *,
    finish: Callable[[ModelProfile], ModelProfile] = lambda profile: profile,
    **arguments: Any,
) -> ModelProfile:
    """
    Reads the profile of a model from a folder, or measures and writes it; collective under a process group.

    The file is used if these are unchanged: configuration, number format, arguments, number of ranks, hosts, devices,
    CPU limits, threads, PyTorch, transformers, release of this package and way of measuring. It may be more accurate
    than asked for. Otherwise, and if the file is broken, a warning gives the reason and the model is measured again.

    Args:
        folder (`str` or `os.PathLike`): Folder of rank 0, created if missing.
        model ([`PreTrainedModel`]): The model.
        finish (`Callable`, *optional*): Completes a measured profile before it is kept, e.g. by calibration;
            collective.
        **arguments: Arguments of [`profile_model`].
    """
    return _load_or_make(
        Path(folder) / f"model-{config_digest(model)}.json",
        ModelProfile,
        circumstances(model, **arguments),
        lambda profile: profile.made,
        lambda: finish(profile_model(model, **arguments)),
    )


def _load_or_make(
    path: Path,
    kind: type[Profile],
    expected: Mapping[str, str],
    circumstances_of: Callable[[Profile], Mapping[str, str]],
    make: Callable[[], Profile],
) -> Profile:
    """Returns rank 0's stored profile if its circumstances are the expected ones, else makes and keeps one."""

    def usable() -> str | None:
        if not os.path.exists(path):  # also if the folder may not be entered
            return None
        try:
            profile = kind.from_json(path)
            found = circumstances_of(profile)
            different = [
                f"{name} {found.get(name, 'unknown')} and not {value}"
                for name, value in expected.items()
                if not _serves(name, found.get(name), value)
            ]
            if not different:
                return profile.to_json()
            reason = f"was made under other circumstances ({'; '.join(different)})"
        except ValueError as error:
            reason = f"cannot be used ({error})"
        logger.warning(f"The profile {path} {reason}: it is measured again.")
        return None

    text = from_rank_0(usable)
    if text is not None:
        return kind.from_json(text)
    profile = make()
    if is_rank_0():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.to_json(path)
        except OSError as error:
            logger.warning(f"The profile cannot be kept in {path} ({error}): the next run measures again.")
    return profile


def _serves(name: str, found: str | None, wanted: str) -> bool:
    """Returns whether a circumstance of a profile is the wanted one; a profile may be more accurate than asked for."""
    if name == "accuracy" and found is not None:
        return percent(found) <= percent(wanted)
    return found == wanted
