# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads Galvatron's profile files like its search engines; used by galvatron_formulas.py.

A folder holds, itself or in `model/` and `hardware/`:

- `computation_profiling_bf16_*.json`: forward ms per row, by rows ("bsz") of a batch. Engines fit
  `rows * ms = slope * rows + constant` by least squares (search_engine.py, `get_profiled_model_configs`, "batch").
- `memory_profiling_bf16_*.json`: MiB of a layer's fp32 parameters and of its activations per row, and those of
  embedding and head ("other"), by degree. Only the tables measured with sequence parallelism (`*_sp`) are read.
- `allreduce_bandwidth_*`, `p2p_bandwidth_*`: `1 / value` is ms per MiB (galvatron/utils/config_utils.py).
- `sp_time_*`: ms of all-reduces and all-to-alls by MiB. Half an all-reduce is taken for an all-gather
  (`remap_config`, config_utils.py); a measured size is looked up, another one read off a least-squares line.
- `overlap_coefficient.json`: how much slower compute and communication run beside each other.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np


MIB = 2**20
END_TABLES = {
    "whole": "other_memory_pp_off_sp",
    "first": "other_memory_pp_on_first_sp",
    "last": "other_memory_pp_on_last_sp",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """`slope * x + constant`."""

    slope: float
    constant: float

    def __call__(self, x: float) -> float:
        return self.slope * x + self.constant

    @classmethod
    def fit(cls, points: Mapping[float, float]) -> "Line":
        """Returns the least-squares line through {x: y}; Galvatron requires 8 points."""
        if len(points) < 8:
            raise ValueError(
                f"{len(points)} sizes were profiled, but Galvatron fits a line to no fewer than 8: profile 8"
            )
        slope, constant = np.polyfit(list(points), list(points.values()), 1)
        return cls(slope=float(slope), constant=float(constant))


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """
    Milliseconds of one collective by group size and message.

    Attributes:
        name (`str`): name of the collective, for errors.
        measured (`dict[int, dict[float, float]]`): {ranks: {MiB: ms}}.
    """

    name: str
    measured: dict[int, dict[float, float]]

    @cached_property
    def _lines(self) -> dict[int, Line]:
        return {ranks: Line.fit(times) for ranks, times in self.measured.items()}

    def ms(self, ranks: int, mib: float) -> float:
        """Returns the time measured for `mib`, or the line through all measured sizes; 0 for one rank."""
        if ranks == 1:
            return 0.0
        found = _known(self.measured, ranks, f"{self.name} time", "ranks")
        return found[mib] if mib in found else self._lines[ranks](mib)


@dataclass(frozen=True, kw_only=True)
class EndMemory:
    """MiB of embedding and head together, or of one of them: states with fp32 optimizer, activations per row."""

    states_mib: dict[int, float]
    activation_mib: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class GalvatronProfiles:
    """
    One model on one cluster.

    Attributes:
        world_size (`int`): number of devices.
        sequence_length, hidden_size (`int`): S and H.
        layer_forward, vocabulary_forward ([`Line`]): Forward ms of a layer, and of embedding + head, by rows.
        parameter_mib (`float`): A layer's parameters in fp32.
        activation_mib (`dict`): A layer's activations per row by degree, and under `"checkpoint"`.
        ends (`dict[str, EndMemory]`): `"whole"` (no pipeline), `"first"` and `"last"` stage.
        all_gather, all_to_all ([`MessageTimes`]): By MiB of the gathered tensor.
        bandwidth (`dict[tuple[int, bool], float]`): {(ranks, consecutive): MiB/ms} of all-reduces.
        p2p_bandwidth (`dict[int, float]`): {stages: MiB/ms}.
        overlap (`float`): Slow-down of compute and communication beside each other.
    """

    world_size: int
    sequence_length: int
    hidden_size: int
    layer_forward: Line
    vocabulary_forward: Line
    parameter_mib: float
    activation_mib: dict[int | str, float]
    ends: dict[str, EndMemory]
    all_gather: MessageTimes
    all_to_all: MessageTimes
    bandwidth: dict[tuple[int, bool], float]
    p2p_bandwidth: dict[int, float]
    overlap: float

    def ms_per_mib(self, ranks: int, consecutive: bool) -> float:
        """Returns the time of a MiB on the wire of an all-reduce; the caller counts 2(n - 1)/n of the tensor."""
        if ranks == 1:
            return 0.0
        kind = "consecutive" if consecutive else "strided"
        return 1 / _known(self.bandwidth, (ranks, consecutive), "all-reduce bandwidth", f"({kind})")

    def p2p_ms_per_mib(self, stages: int) -> float:
        """Returns the time of a MiB between stages."""
        return 1 / _known(self.p2p_bandwidth, stages, "p2p bandwidth", "stages")

    def layer_activation_mib(self, degree: int) -> float:
        """Returns a layer's activations per row without recompute."""
        return _known(self.activation_mib, degree, "layer activation", "tensor or ulysses ranks")

    def hidden_mib(self, rows: float) -> float:
        """Returns the MiB of the hidden states of `rows` whole sequences in 2 bytes."""
        return rows * self.sequence_length * self.hidden_size * 2 / MIB

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        nodes: int,
        devices_per_node: int,
        sequence_length: int | None = None,
        hidden_size: int = 4096,
    ) -> "GalvatronProfiles":
        """
        Reads a folder of Galvatron's files.

        Args:
            folder: folder of the files, or of `model/` and `hardware/` with them.
            nodes, devices_per_node (`int`): choose the hardware files.
            sequence_length (`int`, *optional*): needed if the memory file has several.
            hidden_size (`int`, defaults to 4096): not in Galvatron's profiles.

        Raises:
            `ValueError`: if a file or entry is missing.
        """
        folder = Path(folder)
        memory = _read(folder, "memory_profiling_bf16_*_all.json")
        length = _sequence_length(memory, sequence_length)
        layer = memory["layertype_0_sp"][length]
        compute = _read(folder, "computation_profiling_bf16_*_all.json")
        cluster = f"{nodes}nodes_{devices_per_node}gpus_per_node.json"
        times = _read(folder, f"sp_time_{cluster}")
        return cls(
            world_size=nodes * devices_per_node,
            sequence_length=int(length),
            hidden_size=hidden_size,
            layer_forward=_forward(compute, "layertype_0", length),
            vocabulary_forward=_forward(compute, "layertype_other", length),
            parameter_mib=layer["parameter_size"],
            activation_mib=_by_degree(layer["tp_activation_per_bsz_dict"]),
            ends={
                end: EndMemory(
                    states_mib=_by_degree(memory[table][length]["model_states"]),
                    activation_mib=_by_degree(memory[table][length]["activation"]),
                )
                for end, table in END_TABLES.items()
            },
            all_gather=_message_times("all-gather", times, "allreduce", 0.5),
            all_to_all=_message_times("all-to-all", times, "all2all", 1.0),
            bandwidth=_bandwidth(_read(folder, f"allreduce_bandwidth_{cluster}")),
            p2p_bandwidth=_p2p_bandwidth(_read(folder, f"p2p_bandwidth_{cluster}")),
            overlap=_read(folder, "overlap_coefficient.json")["overlap_coe"],
        )


def _known(table: Mapping, key: object, what: str, of: str):
    if key not in table:
        shown = key[0] if isinstance(key, tuple) else key
        raise ValueError(f"the profiles have no {what} for {shown} {of}: profile it or use a degree they have")
    return table[key]


def _read(folder: Path, pattern: str) -> dict:
    found = sorted(path for part in ("", "model", "hardware") for path in (folder / part).glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{folder} should hold one {pattern}, found {names}: pass the folder of one model's profiles")
    return json.loads(found[0].read_text())


def _sequence_length(memory: dict, wanted: int | None) -> str:
    if "layertype_0_sp" not in memory:
        raise ValueError(
            "the memory profile has no layertype_0_sp, the table with sequence parallelism, which is the one "
            "that Galvatron's engines need: profile with sequence_parallel"
        )
    found = list(memory["layertype_0_sp"])
    length = found[0] if wanted is None and len(found) == 1 else str(wanted)
    if length not in found:
        raise ValueError(
            f"sequence_length is {wanted}, but the memory profile has {', '.join(found)}: use one of these"
        )
    return length


def _forward(compute: dict, layer: str, length: str) -> Line:
    sizes = {re.fullmatch(rf"{layer}_bsz(\d+)_seq{length}", name): ms for name, ms in compute.items()}
    return Line.fit({int(match[1]): int(match[1]) * ms for match, ms in sizes.items() if match})


def _by_degree(table: dict[str, float]) -> dict[int | str, float]:
    return {int(name) if name.isdigit() else name: mib for name, mib in table.items()}


def _message_times(name: str, times: dict, collective: str, share: float) -> MessageTimes:
    measured: dict[int, dict[float, float]] = {}
    for key, ms in times.items():
        if match := re.fullmatch(rf"{collective}_size_(\d+)_(\d+)MB_time", key):
            measured.setdefault(int(match[1]), {})[float(match[2])] = ms * share
    return MessageTimes(name=name, measured=measured)


def _bandwidth(table: dict) -> dict[tuple[int, bool], float]:
    matches = {re.fullmatch(r"allreduce_size_(\d+)_consec_([01])", key): value for key, value in table.items()}
    return {(int(match[1]), match[2] == "1"): value for match, value in matches.items() if match}


def _p2p_bandwidth(table: dict) -> dict[int, float]:
    return {int(key.removeprefix("pp_size_")): value for key, value in table.items() if key.startswith("pp_size_")}
