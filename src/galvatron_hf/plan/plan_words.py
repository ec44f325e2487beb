# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads plans of a few words, such as `zero3`, `tp8` or `tp4+sp+pp2+zero2`: one strategy for all layers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from galvatron_hf.plan.plan import ParallelPlan
from galvatron_hf.plan.strategies import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.validation import show


_SHARDINGS = {"ddp": "replicate", "zero2": "zero2", "zero3": "zero3"}
_DEGREES = {"tp": "tensor", "ulysses": "ulysses", "cp": "context", "ep": "expert"}
_WORD = re.compile(rf"({'|'.join(_SHARDINGS)}|sp|recompute)|({'|'.join(_DEGREES)}|pp|mb)(\d{{1,7}})")
WORDS = ", ".join([*_SHARDINGS, *(f"{word}N" for word in (*_DEGREES, "pp", "mb")), "sp (with tpN)", "recompute"])


@dataclass(frozen=True, kw_only=True)
class PlanWords:
    """Describes a plan whose layers all have one strategy. The ranks that no degree uses hold copies of the weights,
    or shards of them under `zero2` and `zero3`.

    Attributes:
        pipeline (`int`): stages.
        micro_batches (`int`, *optional*): micro-batches of a step; None leaves them to what the plan is for.
        strategy (`Mapping`): fields of [`LayerStrategy`] that differ from the defaults.
    """

    pipeline: int
    micro_batches: int | None
    strategy: Mapping[str, Any]

    @classmethod
    def from_text(cls, text: str | os.PathLike) -> PlanWords | None:
        """Returns the plan of words; None if the text is something else, such as a path or JSON. Raises `ValueError`
        for words that exclude each other.
        """
        words = os.fspath(text).strip().lower().split("+")
        matches = [_WORD.fullmatch(word.strip()) for word in words]
        if None in matches:
            return None
        found: dict[str, Any] = {}
        for flag, degree, number in (match.groups() for match in matches):
            name = "sharding" if flag in _SHARDINGS else flag or _DEGREES.get(degree, degree)
            if name in found:
                raise ValueError(f"the plan {show(str(text))} says {name} twice: say it once")
            found[name] = _SHARDINGS.get(flag, flag) if flag else int(number)
        if "sp" in found and found.get("tensor", 1) == 1:
            raise ValueError(f"the plan {show(str(text))} has sp, which is for tensor-parallel ranks: add such as tp4")
        pipeline, micro_batches = found.pop("pp", 1), found.pop("mb", None)
        strategy = {"sharding": "replicate"} | found
        if strategy.pop("sp", None):
            strategy["megatron_sp"] = True
        if strategy.pop("recompute", None):
            strategy["recompute"] = "full"
        return cls(pipeline=pipeline, micro_batches=micro_batches, strategy=strategy)

    def plan(self, world_size: int, stacks: Mapping[str, int], micro_batches: int | None = None) -> ParallelPlan:
        """Returns the plan on so many ranks for a model with these layers; `micro_batches` applies if the words do not
        say how many. Raises `ValueError` if there is no such plan.
        """
        count = micro_batches if self.micro_batches is None else self.micro_batches
        return ParallelPlan.uniform(
            world_size, dict(stacks), pipeline=self.pipeline, micro_batches=count, **self.strategy
        )


def check_is_plan(source: str | os.PathLike) -> None:
    """Raises `ValueError` for a text that is neither JSON, nor a file, nor a plan in words."""
    text = os.fspath(source)
    if not text.lstrip().startswith("{") and not os.path.isfile(text) and PlanWords.from_text(text) is None:
        raise ValueError(f"{show(text)} is no file, and not made of {WORDS}, joined by +: correct it")


def words_of(plan: ParallelPlan) -> str:
    """Returns a plan in one line: the stages and micro-batches, then each strategy with the number of layers that have
    it. Ends are left out, and shards on fewer ranks than all are written such as `zero3/8`.
    """
    counts: dict[LayerStrategy, int] = {}
    for layer in plan.layers:
        counts[layer] = counts.get(layer, 0) + 1
    alone = len(counts) == 1
    layers = [layer_words(layer) if alone else f"{count} x {layer_words(layer)}" for layer, count in counts.items()]
    ranks, rounds = len(plan.rank_groups), len(plan.stages) // len(plan.rank_groups)
    pipeline = [] if ranks == 1 else [f"pp{ranks}" + (f" of {rounds} stages" if rounds > 1 else "")]
    return ", ".join([*pipeline, f"mb{plan.micro_batch_count}", *layers])


def layer_words(layer: LayerStrategy) -> str:
    """Returns the strategy of a layer in words, such as `tp2+sp+zero3`."""
    degrees = [f"{word}{getattr(layer, name)}" for word, name in _DEGREES.items() if getattr(layer, name) > 1]
    return "+".join([*degrees, *["sp"] * layer.megatron_sp, _sharding_words(layer)]) + (
        "+recompute" if layer.recompute == "full" else ""
    )


def end_words(end: VocabularyStrategy) -> str:
    """Returns the strategy of the embedding or the head in words, such as `tp2+zero3`."""
    return (f"tp{end.tensor}+" if end.tensor > 1 else "") + _sharding_words(end)


def _sharding_words(strategy: LayerStrategy | VocabularyStrategy) -> str:
    sharding = next(word for word, name in _SHARDINGS.items() if name == strategy.sharding)
    return sharding if strategy.shard_degree is None else f"{sharding}/{strategy.shard_degree}"
