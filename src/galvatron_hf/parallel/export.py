# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint of any plan to a folder that `from_pretrained` opens, on one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from transformers import AutoConfig

from galvatron_hf.checkpoint.folder import STATE_FOLDER, problems
from galvatron_hf.checkpoint.hugging_face import meta_model, write_pretrained
from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, Manifest
from galvatron_hf.checkpoint.storage import StateReader
from galvatron_hf.parallel.fused import FusedNames
from galvatron_hf.parallel.models import adapter_for


# What a checkpoint has beside the model's own folder.
_NOT_EXPORTED = ("scheduler.json", "trainer_state.json", "training_args.bin", "parallel_plan.json", MANIFEST_NAME)


def export(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: str = "float32",
) -> None:
    """Writes configuration, tokenizer and whole weights of a checkpoint, holding one file's weights at a time.

    Args:
        checkpoint (`str` or `os.PathLike`): a complete checkpoint with a state, written under any plan.
        output (`str` or `os.PathLike`): a new or empty folder.
        max_shard_size (`int` or `str`): largest file.
        dtype (`str`): "float32", as the checkpoint has them, "bfloat16" or "float16".

    Raises:
        ValueError: if the checkpoint is damaged or has no state, or the folder is not empty.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    wrong = problems(checkpoint)
    if wrong:
        raise ValueError(f"{checkpoint} is damaged ({wrong[0]}): export another checkpoint")
    state = checkpoint / STATE_FOLDER
    if not state.is_dir():
        raise ValueError(f"{checkpoint} has whole weights alone, so there is nothing to put together: use it as it is")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder")
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    model = meta_model(_family(config.architectures), config, getattr(torch, dtype))
    fused = FusedNames.of(model, adapter_for(model))
    stored = StateReader(state).read_metadata().state_dict_metadata

    def gather(names: list[str]) -> dict[str, torch.Tensor]:
        parts = fused.part_names(names)
        tensors = {f"model.{part}": torch.empty(stored[f"model.{part}"].size) for part in parts}
        dcp.load(tensors, storage_reader=StateReader(state), no_dist=True)
        weights = fused.join({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        return {name: weights[name].to(model.dtype) for name in names}

    output.mkdir(parents=True, exist_ok=True)
    for name in Manifest.read(checkpoint).files:
        own = name not in _NOT_EXPORTED and not name.startswith("rng_state_") and ".safetensors" not in name
        if own and "/" not in name:
            shutil.copyfile(checkpoint / name, output / name)
    write_pretrained(model, output, gather, max_shard_size=max_shard_size)
    config.dtype = dtype
    config.save_pretrained(output)


def _family(architectures: list[str] | None) -> type[transformers.PreTrainedModel]:
    """The class that a configuration names; transformers' own classes alone, so that no file can name any code."""
    name = (architectures or [""])[0]
    family = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(family, type) or not issubclass(family, transformers.PreTrainedModel):
        raise ValueError(f"config.json names the architecture {name!r}, which transformers does not have: correct it")
    return family
