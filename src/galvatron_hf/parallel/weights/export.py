# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint of any plan to a folder that `from_pretrained` opens, on one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from galvatron_hf.checkpoint.folder import STATE_FOLDER, problems
from galvatron_hf.checkpoint.hugging_face import meta_model, saved_weights, write_pretrained
from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, Manifest
from galvatron_hf.checkpoint.storage import StateReader
from galvatron_hf.models.families import adapter_for, count_layers
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.weights.distributed_state import stored_tensors


# Files of a checkpoint that do not belong in the folder of a model.
_NOT_EXPORTED = ("scheduler.json", "trainer_state.json", "training_args.bin", "parallel_plan.json", MANIFEST_NAME)


def export(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: str = "float32",
) -> None:
    """Writes configuration, tokenizer and whole weights of a checkpoint, with the weights of one file in memory.

    Args:
        checkpoint (`str` or `os.PathLike`): a complete checkpoint with a state, written under any plan.
        output (`str` or `os.PathLike`): a new or empty folder.
        max_shard_size (`int` or `str`): bytes of the largest file.
        dtype (`str`): "float32" (as in the checkpoint), "bfloat16" or "float16".

    Raises:
        ValueError: if the checkpoint is damaged, has no state, or is of another model, or the folder is not empty.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    wrong = problems(checkpoint)
    if wrong:
        raise ValueError(f"{checkpoint} is damaged ({wrong[0]}): export another checkpoint")
    state = checkpoint / STATE_FOLDER
    if not state.is_dir():
        raise ValueError(f"{checkpoint} has only whole weights: use it as it is, without an export")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder")
    stored = stored_tensors(state)
    model = _model(checkpoint, getattr(torch, dtype), most_layers=len(stored))
    config, fused = model.config, FusedNames.from_model(model, adapter_for(model))
    _check_fit(checkpoint, model, fused, stored)
    formats = {name: tensor.dtype for name, tensor in saved_weights(model).items()}

    def gather(names: list[str]) -> dict[str, torch.Tensor]:
        parts = fused.part_names(names)
        tensors = {f"model.{part}": torch.empty(stored[f"model.{part}"].size) for part in parts}
        dcp.load(tensors, storage_reader=StateReader(state), no_dist=True)
        weights = fused.join({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        return {name: weights[name].to(formats[name]) for name in names}

    output.mkdir(parents=True, exist_ok=True)
    for name in Manifest.read(checkpoint).files:
        copied = name not in _NOT_EXPORTED and not name.startswith("rng_state_") and ".safetensors" not in name
        if copied and "/" not in name:
            shutil.copyfile(checkpoint / name, output / name)
    write_pretrained(model, output, gather, max_shard_size=max_shard_size)
    config.dtype = dtype
    config.save_pretrained(output)


def _model(checkpoint: Path, dtype: torch.dtype, most_layers: int) -> transformers.PreTrainedModel:
    """Returns the model of a checkpoint's configuration on the meta device. Refuses a configuration that is not valid,
    or has more layers than the checkpoint has tensors.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        layers = count_layers(config.get_text_config())
        if layers > most_layers:
            raise ValueError(f"{layers} layers for {most_layers} tensors")
        return meta_model(_family(config.architectures), config, dtype)
    except Exception as error:  # the configuration may have any content
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{checkpoint}/config.json makes no model ({reason}): correct it") from error


def _check_fit(
    checkpoint: Path,
    model: transformers.PreTrainedModel,
    fused: FusedNames,
    stored: Mapping[str, TensorStorageMetadata],
) -> None:
    parts = fused.split(model.state_dict())
    for name in fused.part_names(saved_weights(model)):
        there = tuple(stored[f"model.{name}"].size) if f"model.{name}" in stored else None
        if there != tuple(parts[name].shape):
            found = "does not have it" if there is None else f"has it with shape {there}"
            raise ValueError(
                f"config.json makes {name} of shape {tuple(parts[name].shape)}, and {checkpoint} {found}: correct it"
            )


def _family(architectures: list[str] | None) -> type[transformers.PreTrainedModel]:
    """Returns the class that a configuration names; only classes of transformers, so that a file cannot run code."""
    name = (architectures or [""])[0]
    family = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(family, type) or not issubclass(family, transformers.PreTrainedModel):
        raise ValueError(f"config.json names the architecture {name!r}, which transformers does not have: correct it")
    return family
