# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the state of a model under any plan, and gathers whole weights under the family's names."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from galvatron_hf.checkpoint.manifest import FileEntry
from galvatron_hf.checkpoint.storage import MAX_FILE_BYTES, StateReader, StateWriter
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.models.lora import has_adapters, inner_model, is_added
from galvatron_hf.parallel.comm.dtensor import assign, full_tensor
from galvatron_hf.parallel.comm.objects import broadcast_object, gather_objects, on_every_rank
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.optimizer_state import NamedOptimizerState, numbers_from_json, options_from_json
from galvatron_hf.plan.serialization import read_object, write_file
from galvatron_hf.utils.compat import copy_generation_config


# Next to the distributed checkpoint, which holds only tensors: nothing is read by unpickling.
OPTIMIZER_FILE = "optimizer.json"


def save_state(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike,
    *,
    complete: Callable[[dict[str, FileEntry]], None] | None = None,
    background: dist.ProcessGroup | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Future | None:
    """Writes the weights and the optimizer's state as safetensors into `folder`, which is created if needed;
    collective. Each rank writes its own pieces.

    Args:
        complete (`Callable`, *optional*): called on rank 0 with the files by name, once all pieces are on disk.
        background (`ProcessGroup`, *optional*): a group of all ranks with a CPU backend, used for nothing else. The
            state is copied, and written while the caller continues; the returned `Future` gives the result.
        max_file_bytes (`int`): bytes of tensors in one file.

    Raises:
        ValueError: if the optimizer's state has values other than tensors and numbers.
        CheckpointException: on every rank, if writing failed on one.
    """
    tensors = _model_tensors(parallel)
    for name in [] if parallel.tied is None else parallel.tied.saved_elsewhere:
        tensors.pop(f"model.{name}", None)  # another stage saves it
    if optimizer is not None:
        state = NamedOptimizerState.from_optimizer(optimizer, parallel.parameter_names(), parallel.fused)
        state = _of_all_stages(parallel, state)
        tensors |= _optimizer_tensors(state)
    options = {"groups": state.options_json(), "numbers": state.numbers} if optimizer is not None else None
    writer = _OptionsAndState(folder, options, complete, max_file_bytes)
    if background is not None:
        return dcp.async_save(tensors, storage_writer=writer, process_group=background)
    dcp.save(tensors, storage_writer=writer)
    return None


class _OptionsAndState(StateWriter):
    """Writes the optimizer's options next to the tensors, before the checkpoint is complete."""

    def __init__(self, folder: str | os.PathLike, options: dict | None, complete: Callable | None, max_bytes: int):
        super().__init__(folder, complete, max_bytes)
        self._options = options

    def finish(self, metadata: Metadata, results: list) -> None:
        if self._options is not None:
            write_file(Path(self.path) / OPTIMIZER_FILE, json.dumps(self._options, indent=2))
        super().finish(metadata, results)


def load_state(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike,
    *,
    weights: bool = True,
) -> None:
    """Loads the files of [`save_state`], written under any plan and world size; collective. The optimizer must have
    the same kind of state. Every rank raises ValueError if the checkpoint is of another model or cannot be read.
    """
    tensors, state = on_every_rank(lambda: _to_load(parallel, optimizer is not None, folder, weights))
    _read(tensors, folder)
    if weights and parallel.tied is not None:
        parallel.tied.copy_weight()
    if optimizer is not None:
        on_every_rank(lambda: state.load_into(optimizer, parallel.parameter_names(), parallel.fused))


def _to_load(
    parallel: ParallelModel, with_optimizer: bool, folder: str | os.PathLike, weights: bool
) -> tuple[dict[str, torch.Tensor], NamedOptimizerState | None]:
    """Returns the local tensors to load from a checkpoint, and those among them that are the optimizer's."""
    stored = stored_tensors(folder)
    tensors = _model_tensors(parallel) if weights else {}
    for name, tensor in tensors.items():
        if name not in stored or stored[name].size != tensor.shape:
            there = f"has it with shape {tuple(stored[name].size)}" if name in stored else "does not have it"
            raise ValueError(
                f"{name.removeprefix('model.')} has shape {tuple(tensor.shape)}, and {os.fspath(folder)} {there}; "
                "load a checkpoint of the same configuration."
            )
    if not with_optimizer:
        return tensors, None
    parameters = {name: tensor for name, tensor in _named_state(parallel).items() if tensor.requires_grad}
    state = _read_options(folder)
    for kind, name in _optimizer_entries(stored):
        if name in parameters:
            empty = _empty_entry(parameters[name], stored[f"optimizer.{kind}.{name}"])
            state.tensors.setdefault(kind, {})[name] = empty
    return tensors | _optimizer_tensors(state), state


def load_plain_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, folder: str | os.PathLike
) -> None:
    """Loads [`save_state`]'s files into a plain model and its optimizer without a process group; see
    [`load_state`].
    """
    adapter, model = adapter_for(model), inner_model(model)
    fused = FusedNames.from_model(model, adapter)
    stored = stored_tensors(folder)
    parts = fused.split({name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()})
    wanted = parameter_names(model).values()
    if has_adapters(model):
        wanted = [name for name in wanted if is_added(name)]
    missing = [name for name in fused.part_names(wanted) if f"model.{name}" not in stored]
    if missing:
        raise ValueError(
            f"{os.fspath(folder)} does not have {missing[0]}; load a checkpoint of the same configuration."
        )
    tensors: dict[str, torch.Tensor] = {}
    for entry, meta in stored.items():
        if optimizer is None and not entry.startswith("model."):
            continue
        name = entry.removeprefix("model.") if entry.startswith("model.") else entry.split(".", 2)[-1]
        if name not in parts or (meta.size != parts[name].shape and meta.size.numel() != 1):
            there = tuple(parts[name].shape) if name in parts else "no such weight"
            raise ValueError(
                f"{os.fspath(folder)} has {entry} with shape {tuple(meta.size)}, and {type(model).__name__} has "
                f"{there}; load a checkpoint of the same configuration."
            )
        tensors[entry] = torch.empty(meta.size, dtype=meta.properties.dtype)
    _read(tensors, folder, no_dist=True)
    weights = {n.removeprefix("model."): tensor for n, tensor in tensors.items() if n.startswith("model.")}
    model.load_state_dict(fused.join(weights), strict=False)
    if optimizer is None:
        return
    state = _read_options(folder)
    for kind, name in _optimizer_entries(stored):
        state.tensors.setdefault(kind, {})[name] = tensors[f"optimizer.{kind}.{name}"]
    state.renamed(fused.join).load_into(optimizer, parameter_names(model), fused)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Returns the names of a plain model's parameters by the `id` of the parameter."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return names


def _model_tensors(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns each weight of this rank's stages once; a tied copy on another stage has the embedding's name. Of a
    model with adapters these are the weights that [`AdaptedModel`] names.
    """
    left_out, state = set(parallel.tied_names()), _named_state(parallel)
    if parallel.adapted is not None:
        left_out |= {name for name in state if parallel.fused.family_name(name) not in parallel.adapted.names}
    return {f"model.{name}": tensor.detach() for name, tensor in state.items() if name not in left_out}


def _of_all_stages(parallel: ParallelModel, state: NamedOptimizerState) -> NamedOptimizerState:
    """Returns this rank's tensors to save, with the options and numbers of all stages; collective."""
    if parallel.pipeline is None:
        return state
    tensors = {kind: dict(by_name) for kind, by_name in state.tensors.items()}
    for name in [] if parallel.tied is None else parallel.tied.saved_elsewhere:
        for by_name in tensors.values():
            by_name.pop(name, None)
    options, numbers = {}, {}
    for other_options, other_numbers in gather_objects((state.options, state.numbers)):
        options |= other_options
        for kind, by_name in other_numbers.items():
            numbers.setdefault(kind, {}).update(by_name)
    return NamedOptimizerState(tensors=tensors, numbers=numbers, options=options)


def _optimizer_tensors(state: NamedOptimizerState) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{kind}.{name}": tensor
        for kind, tensors in state.tensors.items()
        for name, tensor in tensors.items()
    }


def _optimizer_entries(stored: Mapping[str, TensorStorageMetadata]) -> Iterator[tuple[str, str]]:
    """Yields the kind and the weight's name of every optimizer tensor; the name of a kind has no dot."""
    for entry in stored:
        if entry.startswith("optimizer."):
            _, kind, name = entry.split(".", 2)
            yield kind, name


def stored_tensors(folder: str | os.PathLike) -> dict[str, TensorStorageMetadata]:
    """Returns the tensors in the files of [`save_state`] by name; reads and checks only the headers."""
    with _damage_told(folder):
        return dict(StateReader(folder).read_metadata().state_dict_metadata)


def _read(tensors: dict[str, torch.Tensor], folder: str | os.PathLike, no_dist: bool = False) -> None:
    with _damage_told(folder):
        dcp.load(tensors, storage_reader=StateReader(folder), no_dist=no_dist)


@contextlib.contextmanager
def _damage_told(folder: str | os.PathLike) -> Iterator[None]:
    """Turns any error of reading into a `ValueError` of one sentence."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        reasons = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        raise ValueError(
            f"{os.fspath(folder)} cannot be read ({'; '.join(reasons)}); use another checkpoint."
        ) from error
    except Exception as error:
        raise ValueError(f"{os.fspath(folder)} cannot be read ({error!r}); use another checkpoint.") from error


def _read_options(folder: str | os.PathLike) -> NamedOptimizerState:
    saved = read_object(Path(folder) / OPTIMIZER_FILE, "optimizer's state")
    return NamedOptimizerState(
        options=options_from_json(saved.get("groups")), numbers=numbers_from_json(saved.get("numbers"))
    )


def _empty_entry(parameter: torch.Tensor, stored: TensorStorageMetadata) -> torch.Tensor:
    """Returns an empty tensor for an entry: sharded like its weight if it has the weight's shape, else a scalar."""
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    if stored.size.numel() != 1:
        raise ValueError(
            f"The optimizer's state of a weight of shape {tuple(parameter.shape)} has shape {tuple(stored.size)}; "
            "load a checkpoint of the same configuration."
        )
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def shard_optimizer_state(parallel: ParallelModel, state: NamedOptimizerState) -> NamedOptimizerState:
    """Shards an optimizer state of whole tensors, equal on every rank, like this rank's weights; keeps scalars."""
    weights = _named_state(parallel)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for kind, by_name in state.tensors.items():
        for name, whole in by_name.items():
            if name not in weights:
                continue  # another stage's
            if whole.shape == weights[name].shape:
                shard = torch.zeros_like(weights[name], dtype=whole.dtype, requires_grad=False)
                assign(shard, whole)
                whole = shard
            tensors.setdefault(kind, {})[name] = whole
    return NamedOptimizerState(tensors=tensors, numbers=state.numbers, options=state.options)


class WholeWeights:
    """Gathers weights under the family's names and shapes, a few at a time; construction is collective."""

    def __init__(self, parallel: ParallelModel):
        self._fused, self._device = parallel.fused, parallel.device
        self._local = _named_state(parallel)
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in self._local.items()}
        # Weights that no stage of rank 0 has, with the rank that sends them.
        self._elsewhere: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        if parallel.pipeline is not None:
            gathered = gather_objects(described)
            for source in [ranks[0] for ranks in parallel.plan.rank_groups if 0 not in ranks]:
                for name, (shape, dtype) in gathered[source].items():
                    if name not in gathered[0]:
                        self._elsewhere[name] = source, shape, dtype

    def names(self) -> list[str]:
        """Returns the names of all weights; complete on rank 0 only."""
        return list(dict.fromkeys(self._fused.family_name(name) for name in [*self._local, *self._elsewhere]))

    def gather(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns these weights on the CPU of rank 0, and {} elsewhere; collective, with equal names on all ranks."""
        weights: dict[str, torch.Tensor] = {}
        for part in self._fused.part_names(names):
            whole = self._one(part)
            if whole is not None:
                weights[part] = whole.cpu()
        return self._fused.join(weights)

    def _one(self, name: str) -> torch.Tensor | None:
        keeps = dist.get_rank() == 0
        if name in self._local:
            whole = full_tensor(self._local[name].detach())
            if name in self._elsewhere and self._elsewhere[name][0] == dist.get_rank():
                _transfer(dist.isend, whole.contiguous(), 0)
            return whole.clone() if keeps else None
        if not keeps:
            return None
        source, shape, dtype = self._elsewhere[name]
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        _transfer(dist.irecv, whole, source)
        return whole


def _transfer(operation: Callable, tensor: torch.Tensor, peer: int) -> None:
    """Sends or receives a tensor in the default group; NCCL makes a communicator for each pair of a plain send."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()


def whole_weights(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns all weights under the family's names on the CPU of rank 0, and {} elsewhere; collective."""
    weights = WholeWeights(parallel)
    return weights.gather(broadcast_object(weights.names()))


def plain_model(
    parallel: ParallelModel, weights: dict[str, torch.Tensor], device: torch.device | None = None
) -> PreTrainedModel:
    """Returns the family's own model in evaluation mode; `weights` is the result of [`whole_weights`] on rank 0.
    `device` is by default that of the parallel model.
    """
    if parallel.adapted is not None:
        model = parallel.adapted.copy_with(weights)
    else:
        with no_init_weights():
            model = parallel.family(parallel.model.config)
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    copy_generation_config(parallel.model, inner_model(model))
    return model.to(device or next(parallel.model.parameters()).device).eval()


def _named_state(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns weights and persistent buffers of this rank's stages, named as in the whole model's `state_dict`. Tied
    weights appear under each of their names. A copy on a stage without the saved one has that one's name.
    """
    # After a forward without a backward some weights are still gathered, and cast to the compute dtype.
    parallel.units.reshard()
    state = dict(parallel.model.state_dict(keep_vars=True))
    for copies in () if parallel.tied is None else parallel.tied.weights:
        for name, module in zip(copies.names[1:], copies.modules[1:], strict=True):
            if module is not None and name in state and name != copies.names[0]:
                state.setdefault(copies.names[0], state.pop(name))
    return state
