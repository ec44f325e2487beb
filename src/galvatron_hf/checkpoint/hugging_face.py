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
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from galvatron_hf.utils.compat import kept_in_float32, storage_key, unsaved_keys


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def meta_model(family: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model on the meta device, which has the names, shapes and ties of its weights."""
    with torch.device("meta"):
        model = family(config)
    model.tie_weights()
    model.to(dtype)
    keep_float32(model, dtype)
    return model


def keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the weights and buffers that `from_pretrained` keeps in fp32, such as a bias of a router's choices, this
    format in a model on the meta device that else has the format `dtype`.
    """
    kept = kept_in_float32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in kept:
            tensor.data = tensor.data.float()


def weights_in(folder: str | os.PathLike) -> list[Path]:
    """Returns the files of weights and their index that `save_pretrained` or [`write_pretrained`] has written."""
    return sorted(path for path in Path(folder).glob("model*.safetensors*") if _WEIGHTS.fullmatch(path.name))


def saved_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weights and buffers, by the model's own names, that `save_pretrained` writes: a tied weight once."""
    ignored = unsaved_keys(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    return remove_tied_weights_from_state_dict(state, model)


def write_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    gather: Callable[[list[str]], dict[str, torch.Tensor]],
    *,
    max_shard_size: int | str,
    writes: bool = True,
) -> None:
    """Writes weights like `save_pretrained`, with the weights of one file in memory at a time, and what it lacks of
    its last weight: the experts of a layer are one weight of the model, and one each in the files. A family that joins
    weights in its files (a `WeightConverter` of transformers that splits on loading) is held whole.

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
    total_size = 0
    places: dict[str, str] = {}
    failed: Exception | None = None
    for name, tensors in _files(model, gather, max_shard_size, writes):
        if not writes or failed is not None:
            continue
        try:
            _write_file(Path(folder) / name, tensors)
        except Exception as error:  # safetensors has exceptions of its own
            failed = error
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, name)
    if failed is not None:
        raise OSError(f"The weights could not be written to {os.fspath(folder)}: {failed}") from failed
    if writes and len(set(places.values())) > 1:
        totals = {"total_parameters": model.num_parameters(), "total_size": total_size}
        text = json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        (Path(folder) / SAFE_WEIGHTS_INDEX_NAME).write_text(text)


def _files(
    model: PreTrainedModel, gather: Callable, max_shard_size: int | str, writes: bool
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields the files' names and tensors; gathers each weight once, for the first file that has some of it."""
    state = saved_weights(model)
    origins, gathered, left = _origins(model, state), set(), {}
    for file, names in _split(revert_weight_conversion(model, state), max_shard_size).items():
        wanted = dict.fromkeys(weight for name in names for weight in origins[name])
        wanted = [weight for weight in wanted if weight not in gathered]
        gathered.update(wanted)
        weights = gather(wanted) if wanted else {}
        if writes:
            left |= revert_weight_conversion(model, weights)
            del weights
        yield file, {name: left.pop(name) for name in names} if writes else {}


def _origins(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Returns, for each tensor of the files, the weights that it is made of: one, or all if any is made of several.
    `state` is on the meta device.
    """
    wanted = revert_weight_conversion(model, state)
    found: dict[str, tuple[str, ...]] = {}
    for weight, tensor in state.items():
        try:
            made = revert_weight_conversion(model, {weight: tensor})
        except ValueError:  # a conversion that needs several weights
            made = {}
        if not made or any(name in found or name not in wanted for name in made):
            break
        if any(wanted[name].shape != part.shape for name, part in made.items()):
            break
        found |= dict.fromkeys(made, (weight,))
    return found if found.keys() == wanted.keys() else dict.fromkeys(wanted, tuple(state))


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _split(state: dict[str, torch.Tensor], max_shard_size: int | str) -> dict[str, list[str]]:
    """Returns the names in each file. `state` is on the meta device; tensors that share memory share a file, as
    those of `save_pretrained` do: the experts of a layer are views of one tensor.
    """
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=storage_key,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors
