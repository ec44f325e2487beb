# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Writes Hugging Face safetensors one file at a time, so that no process holds the whole model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from galvatron_hf.utils.compat import unsaved_keys


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def meta_model(family: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model on the meta device, which has the names, shapes and ties of its weights."""
    with torch.device("meta"):
        model = family(config)
    model.tie_weights()
    return model.to(dtype)


def weights_in(folder: str | os.PathLike) -> list[Path]:
    """Returns the files of weights and their index that `save_pretrained` or [`write_pretrained`] has written."""
    return sorted(path for path in Path(folder).glob("model*.safetensors*") if _WEIGHTS.fullmatch(path.name))


def weight_files(model: PreTrainedModel, max_shard_size: int | str) -> dict[str, list[str]]:
    """Returns the names of the weights in each file of a model, which may be on the meta device. `max_shard_size` is
    the bytes of a file, such as "5GB"; a larger weight has a file of its own.
    """
    state = remove_tied_weights_from_state_dict(_saved(model), model)
    return _split(state, max_shard_size)


def write_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    gather: Callable[[list[str]], dict[str, torch.Tensor]],
    *,
    max_shard_size: int | str,
    writes: bool = True,
) -> None:
    """Writes weights like `save_pretrained`, with the weights of one file in memory at a time. A family whose files
    have other weights than the model (`WeightConverter` of transformers) is held whole.

    Args:
        model ([`PreTrainedModel`]): result of [`meta_model`].
        folder (`str` or `os.PathLike`): an existing folder without weights of an earlier save.
        gather (`Callable`): returns the weights of these names on a process that writes; all ranks call it in the same
            order.
        max_shard_size (`int` or `str`): bytes of a file.
        writes (`bool`): False on ranks that only take part in `gather`.

    Raises:
        OSError: if a file cannot be written; raised after the last `gather`, so that no other rank waits.
    """
    written: dict[str, tuple[int, int]] = {}
    places: dict[str, str] = {}
    failed: Exception | None = None
    for name, tensors in _files(model, gather, max_shard_size, writes):
        if not writes or failed is not None:
            continue
        try:
            _write_file(Path(folder) / name, tensors)
        except Exception as error:  # safetensors has exceptions of its own
            failed = error
        written |= {weight: (tensor.numel(), tensor.nbytes) for weight, tensor in tensors.items()}
        places |= dict.fromkeys(tensors, name)
    if failed is not None:
        raise OSError(f"The weights could not be written to {os.fspath(folder)}: {failed}") from failed
    if writes and len(set(places.values())) > 1:
        totals = {
            "total_parameters": sum(numbers for numbers, _ in written.values()),
            "total_size": sum(size for _, size in written.values()),
        }
        text = json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        (Path(folder) / SAFE_WEIGHTS_INDEX_NAME).write_text(text)


def _files(
    model: PreTrainedModel, gather: Callable, max_shard_size: int | str, writes: bool
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    files = weight_files(model, max_shard_size)
    if not _is_converted(model):
        for name, weights in files.items():
            yield name, gather(weights)
        return
    state = gather([weight for weights in files.values() for weight in weights])
    if writes:
        state = revert_weight_conversion(model, state)
        for name, weights in _split(state, max_shard_size).items():
            yield name, {weight: state[weight] for weight in weights}


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    ignored = unsaved_keys(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}


def _split(state: dict[str, torch.Tensor], max_shard_size: int | str) -> dict[str, list[str]]:
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=max_shard_size)
    return split.filename_to_tensors


def _is_converted(model: PreTrainedModel) -> bool:
    found = get_model_conversion_mapping(model, add_legacy=False)
    return any(not isinstance(conversion, PrefixChange) for conversion in found)
