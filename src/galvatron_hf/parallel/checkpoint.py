# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""State in and out: distributed checkpoints that any plan can read, and whole weights in the family's own names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.models import FusedProjection


_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_NOT_STRICT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def save_state(parallel: ParallelModel, optimizer: torch.optim.Optimizer | None, folder: str | os.PathLike) -> None:
    """Writes the weights and the optimizer's state as a distributed checkpoint; collective.

    Args:
        parallel ([`ParallelModel`]): the model.
        optimizer (`torch.optim.Optimizer`, *optional*): its optimizer.
        folder (`str` or `os.PathLike`): created if needed.
    """
    dcp.save(_state(parallel, optimizer), checkpoint_id=os.fspath(folder))


def load_state(parallel: ParallelModel, optimizer: torch.optim.Optimizer | None, folder: str | os.PathLike) -> None:
    """Reads what [`save_state`] wrote, under whatever plan and world size it was; collective.

    Args:
        parallel ([`ParallelModel`]): the model, of the same family and size.
        optimizer (`torch.optim.Optimizer`, *optional*): with the same kind of state; None leaves optimizers alone.
        folder (`str` or `os.PathLike`): the checkpoint.
    """
    state = _state(parallel, optimizer)
    dcp.load(state, checkpoint_id=os.fspath(folder))
    set_model_state_dict(parallel.model, state["model"], options=StateDictOptions(strict=False))
    if optimizer is not None:
        set_optimizer_state_dict(parallel.model, optimizer, state["optimizer"], options=_NOT_STRICT)


def _state(parallel: ParallelModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    tied = set(parallel.tied_names())
    weights = get_model_state_dict(parallel.model)
    state: dict[str, Any] = {"model": {name: value for name, value in weights.items() if name not in tied}}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(parallel.model, optimizer, options=_OPTIONS)
    return state


def whole_weights(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """All weights in the family's own names and shapes, on the CPU of rank 0; empty on the other ranks. Collective."""
    weights = {}
    for name, tensor in _named_state(parallel.model):
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            weights[name] = whole.cpu().clone()
    return join_fused(parallel.model, weights) if weights else {}


def load_whole_weights(parallel: ParallelModel, weights: dict[str, torch.Tensor]) -> None:
    """Gives a parallelised model weights in the family's own names; every rank passes the same.

    Raises:
        ValueError: if a weight is missing, unknown, or has another shape.
    """
    weights = split_fused(parallel.model, weights)
    expected = dict(_named_state(parallel.model))
    tied = set(parallel.tied_names())
    missing = sorted(expected.keys() - weights.keys() - tied)
    unknown = sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"The weights do not fit {parallel.family.__name__}: missing {missing[:3]}, unknown {unknown[:3]}; "
            "load weights of the same configuration."
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            if name in weights and name not in tied:
                if weights[name].shape != tensor.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(weights[name].shape)}, not {tuple(tensor.shape)}; "
                        "load weights of the same configuration."
                    )
                _assign(tensor, weights[name])


def _assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    local = whole.to(tensor.device)
    # Mesh axes cut in the order in which FSDP2 and tensor parallelism did: tensor first, then shard.
    axes = list(enumerate(tensor.placements))
    for axis, placement in reversed(axes):
        if not placement.is_replicate():
            dim, size = placement.dim, tensor.device_mesh.size(axis)
            pieces = list(local.chunk(size, dim))
            pieces += [local.narrow(dim, 0, 0)] * (size - len(pieces))
            local = pieces[tensor.device_mesh.get_local_rank(axis)]
    tensor.to_local().copy_(local)


def read_whole_weights(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder of safetensors, in one file or several.

    Raises:
        ValueError: if the folder has none.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no model safetensors; give a folder that save_model or Trainer wrote.")
    weights = {}
    for file in files:
        weights |= load_file(file)
    return weights


def plain_model(
    parallel: ParallelModel, weights: dict[str, torch.Tensor], device: torch.device | None = None
) -> PreTrainedModel:
    """The family's own model with whole weights, in evaluation mode.

    Args:
        parallel ([`ParallelModel`]): the model.
        weights (`dict[str, torch.Tensor]`): what [`whole_weights`] returned on rank 0.
        device (`torch.device`, *optional*): defaults to that of the parallel model.
    """
    with no_init_weights():
        model = parallel.family(parallel.model.config)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if parallel.model.generation_config is not None:
        model.generation_config = parallel.model.generation_config
    return model.to(device or next(parallel.model.parameters()).device).eval()


def join_fused(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts the parts of fused projections together again: from this runtime's names to the family's."""
    joined = dict(weights)
    for prefix, module in _fused(model):
        parts = [name for name, _ in module.named_children()]
        for parameter in ("weight", "bias"):
            names = [f"{prefix}.{part}.{parameter}" for part in parts]
            if names[0] in joined:
                dim = _output_dim(module, parameter)
                joined[f"{prefix}.{parameter}"] = torch.cat([joined.pop(name) for name in names], dim=dim)
    return joined


def split_fused(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes fused projections apart: from the family's names to this runtime's."""
    split = dict(weights)
    for prefix, module in _fused(model):
        for parameter in ("weight", "bias"):
            whole = split.pop(f"{prefix}.{parameter}", None)
            if whole is None:
                continue
            dim = _output_dim(module, parameter)
            sizes = [getattr(part, parameter).shape[dim] for part in module.children()]
            for (part, _), piece in zip(module.named_children(), whole.split(sizes, dim), strict=True):
                split[f"{prefix}.{part}.{parameter}"] = piece
    return split


def _fused(model: nn.Module) -> Iterator[tuple[str, FusedProjection]]:
    for name, module in model.named_modules():
        if isinstance(module, FusedProjection):
            yield name, module


def _output_dim(module: FusedProjection, parameter: str) -> int:
    return 1 if parameter == "weight" and isinstance(next(module.children()), Conv1D) else 0


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and persistent buffers, as `state_dict` names them; tied weights under each of their names."""
    yield from model.state_dict(keep_vars=True).items()
