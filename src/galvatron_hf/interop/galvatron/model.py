# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the model profiles of Galvatron.

The list states the meaning of each figure in Galvatron (PKU-DAIR/Hetu-Galvatron, `galvatron/core/cost_model`) and its
use here. A sample is one sequence.

- `layertype_0_bszB_seqS`, the forward of one layer, in ms for each sample of a batch of B. B samples take `m * B + c`;
  t tensor or Ulysses ranks take `m * B / t + c`. The times include attention over S positions.
- The backward is assumed to take twice the forward.
- `layertype_other_...`: embedding and head together. Each of them takes half of it.
- `parameter_size`, MiB in fp32: compared with the shapes of the model's published configuration.
- `tp_activation_per_bsz_dict`, MiB for each sample on one of t ranks: recorded under Megatron-SP, and used for as many
  Ulysses ranks too. Tensor parallelism without Megatron-SP, or with Ulysses, has no figure and is left out.
  `checkpoint` is the memory under recompute, divided by t.
- `other_memory_pp_on_first`, `..._last`: memory of the first and the last stage without their layers, by vocabulary
  degree. Only the activations are read; model states follow from the shapes. `other_memory_pp_off`, for one stage, is
  not used: its activations are about the sum of both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from galvatron_hf.models.shape import ModelShape, WeightShape
from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.validation import check_number, show
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile, TimeFit, Times
from galvatron_hf.profiler.profiles.model import ModelProfile


MIB = 1 << 20
BACKWARD = 2.0  # Galvatron's `bct_fct_coe`
LAYERS_DIFFER = 0.05  # a larger relative difference of a layer's size means another model

# The models' published configurations.
SHAPES = {
    "llama2-7b": dict(vocab=32000, hidden=4096, intermediate=11008, layers=32, heads=32),
    "llama2-13b": dict(vocab=32000, hidden=5120, intermediate=13824, layers=40, heads=40),
    "llama2-70b": dict(vocab=32000, hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8),
    "llama3-8b": dict(vocab=128256, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8),
    "llama3-70b": dict(vocab=128256, hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8),
    "mistral-7b": dict(vocab=32000, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8),
}


def read_galvatron_model(
    folder: str | os.PathLike, *, shape: ModelShape | None = None, length: int | None = None
) -> ModelProfile:
    """Reads the profile of one model.

    Args:
        folder (`str` or `os.PathLike`): contains one `computation_profiling_DTYPE_MODEL_all.json` and one
            `memory_profiling_...`, or a folder `model` with both.
        shape ([`ModelShape`], *optional*): shape of the model, by default that of the name in the files.
        length (`int`, *optional*): positions of a sample, by default the only length in the files.

    Raises:
        ValueError: in one sentence, if a file is missing, is not one of Galvatron's, or has another model's shapes.
    """
    computation, memory, dtype, name = _files(Path(folder))
    shape = shape or _published(name)
    times = _read(computation, "computation profile")
    length = length or _only_length(times, computation)
    layer, other = (_forward(times, kind, length, computation) for kind in ("0", "other"))
    figures = _read(memory, "memory profile")
    activation, recompute = _activation(figures, shape, length, memory)
    first, last = (_end_bytes(figures, where, length, memory) for where in ("first", "last"))
    half = TimeFit(per_token=other.per_token / 2, fixed=other.fixed / 2, error=other.error)
    degrees = sorted({tensor for tensor, _, _ in activation})
    kind = LayerProfile(
        weights=shape.layers[0],
        times={tensor: _times(layer, tensor) for tensor in degrees},
        saved_bytes=activation,
        recompute_bytes=recompute,
    )
    return ModelProfile(
        name=name,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kinds=(kind,),
        layers=(0,) * len(shape.layers),
        embedding=_end(shape.embedding, half, first),
        head=_end((*shape.final_norm, *shape.head), half, last),
        tied=shape.tied,
        assumed={
            "backward": "twice the forward (Galvatron's rule)",
            "tensor degrees": "1/t of the time per token and the whole fixed time (Galvatron's rule)",
            "embedding and head": "each half of their common time (Galvatron's rule)",
            "per_square": f"0: the time per token includes attention over {length} positions",
            "ulysses": "activations as recorded under Megatron-SP (Galvatron's rule)",
            "optimizer": "no time (Galvatron's rule)",
            "weights": f"the published configuration of {name}",
        },
        made={"source": f"Galvatron's profile of {name}", "longest document": f"{length} tokens"},
    )


def _files(folder: Path) -> tuple[Path, Path, str, str]:
    folder = folder / "model" if (folder / "model").is_dir() else folder
    found = sorted(folder.glob("computation_profiling_*_all.json"))
    if len(found) != 1:
        raise ValueError(
            f"{str(folder)!r} has {len(found)} files computation_profiling_*_all.json, and one is read: give a folder "
            "with the profile of one model."
        )
    named = re.fullmatch(r"computation_profiling_(bf16|fp32)_(.+)_all\.json", found[0].name)
    if named is None:
        raise ValueError(f"{found[0].name} names no number format: call it computation_profiling_bf16_MODEL_all.json.")
    memory = found[0].with_name(found[0].name.replace("computation_", "memory_", 1))
    return found[0], memory, named[1], named[2]


def _published(name: str) -> ModelShape:
    if name not in SHAPES:
        raise ValueError(
            f"Galvatron's files do not contain the shapes of {name!r}, and only those of {', '.join(SHAPES)} are "
            "known: pass shape=ModelShape.llama(...)."
        )
    return ModelShape.llama(**SHAPES[name])


def _read(path: Path, what: str) -> dict[str, Any]:
    return read_object(path, f"{what} of Galvatron")


def _only_length(times: Mapping[str, Any], path: Path) -> int:
    lengths = {int(found[1]) for key in times if (found := re.search(r"_seq(\d+)$", key))}
    if len(lengths) != 1:
        raise ValueError(f"{path.name} has times for the lengths {sorted(lengths)}: choose one of them as length=.")
    return lengths.pop()


def _forward(times: Mapping[str, Any], kind: str, length: int, path: Path) -> TimeFit:
    """Fits the forward times of batches to their tokens."""
    import scipy.optimize  # not at the top: the command line's --help reads no profile

    points = []
    for key, value in times.items():
        found = re.fullmatch(rf"layertype_{kind}_bsz(\d+)_seq{length}", key)
        if found:
            check_number(f"{path.name}: {key}", value, positive=True)
            points.append((int(found[1]), float(value)))
    if not points:
        raise ValueError(f"{path.name} has no layertype_{kind} of length {length}: profile it with Galvatron.")
    batch, each = np.array(sorted(points)).T
    total = batch * each
    columns = np.stack([batch, np.ones_like(batch)], axis=1) if len(points) > 1 else batch[:, None]
    found = [*scipy.optimize.nnls(columns, total)[0].tolist(), 0.0]  # least squares in ms, as Galvatron fits
    fitted = columns @ np.array(found[: columns.shape[1]])
    error = float(np.median(np.abs(fitted / total - 1)))
    return TimeFit(per_token=found[0] / length, fixed=found[1], error=error)


def _times(forward: TimeFit, tensor: int) -> Times:
    shared = TimeFit(per_token=forward.per_token / tensor, fixed=forward.fixed, error=forward.error)
    backward = TimeFit(per_token=BACKWARD * shared.per_token, fixed=BACKWARD * shared.fixed, error=shared.error)
    return Times(forward=shared, backward=backward)


def _activation(
    figures: Mapping[str, Any], shape: ModelShape, length: int, path: Path
) -> tuple[dict[tuple[int, bool, int], float], dict[tuple[int, bool, int], float]]:
    """Returns the saved bytes per token by strategy, without and with recompute."""
    entry = _at(figures, path, "layertype_0_sp", str(length))
    recorded = _number(entry, path, "parameter_size") * MIB
    expected = sum(4 * int(np.prod(weight.shape)) for weight in shape.layers[0])
    if abs(recorded / expected - 1) > LAYERS_DIFFER:
        raise ValueError(
            f"{path.name} has layers of {recorded / MIB:.0f} MiB, and those of the given shapes have "
            f"{expected / MIB:.0f}: pass the shape= of the model that was profiled."
        )
    by_degree = _at(entry, path, "tp_activation_per_bsz_dict")
    kept = _number(by_degree, path, "checkpoint") * MIB / length
    saved, recompute = {}, {}
    for degree, mib in _degrees({key: value for key, value in by_degree.items() if key != "checkpoint"}, path).items():
        for strategy in {(degree, degree > 1, 1), (1, False, degree)}:
            saved[strategy] = mib * MIB / length
            recompute[strategy] = kept / degree
    return saved, recompute


def _end_bytes(figures: Mapping[str, Any], where: str, length: int, path: Path) -> dict[int, float]:
    entry = _at(figures, path, f"other_memory_pp_on_{where}_sp", str(length), "activation")
    return {degree: mib * MIB / length for degree, mib in _degrees(entry, path).items()}


def _end(weights: tuple[WeightShape, ...], forward: TimeFit, saved: dict[int, float]) -> EndProfile:
    return EndProfile(weights=weights, times={degree: _times(forward, degree) for degree in saved}, saved_bytes=saved)


def _degrees(entry: Mapping[str, Any], path: Path) -> dict[int, float]:
    found = {}
    for key in entry:
        if not re.fullmatch(r"[1-9]\d{0,6}", key):
            raise ValueError(f"{path.name} has {show(key)} instead of a number of ranks: write one such as 2.")
        found[int(key)] = _number(entry, path, key)
    return dict(sorted(found.items()))


def _at(figures: Mapping[str, Any], path: Path, *names: str) -> Mapping[str, Any]:
    for name in names:
        if not isinstance(figures, Mapping) or not isinstance(figures.get(name), Mapping):
            raise ValueError(f"{path.name} has no {name!r}: give a memory profile that Galvatron made under SP.")
        figures = figures[name]
    return figures


def _number(entry: Mapping[str, Any], path: Path, name: str) -> float:
    check_number(f"{path.name}: {name}", entry.get(name))
    return float(entry[name])
