# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The decision to pack: arguments, collators that only pad, rotary embeddings and attention that allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedConfig,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorForLanguageModeling, DataCollatorWithFlattening
from transformers.utils import logging

from galvatron_hf.data.packing import NotPackable
from galvatron_hf.parallel.layers.attention_probe import attention_obstacle
from galvatron_hf.parallel.model import ParallelModel


logger = logging.get_logger(__name__)

_KNOWN_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
_KNOWN_NAMES = {("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")}
# Rotary embeddings that depend on the longest row of the whole batch.
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")


@dataclass(kw_only=True)
class PackingRules:
    """Decides whether batches are packed.

    Args:
        mode (`Callable`): returns "auto", "static" or "none"; see [`GalvatronTrainingArguments`].
        only_pads (`Callable`): returns whether the collator only pads token rows.
        obstacle (`Callable`): returns why the Trainer's own methods and arguments forbid packing, or None.
    """

    parallel: ParallelModel
    mode: Callable[[], str]
    only_pads: Callable[[], bool]
    obstacle: Callable[[], str | None] = lambda: None
    _attention_obstacle: list[str | None] = field(default_factory=list)

    def packs(self) -> bool:
        """Returns whether batches are packed, as far as that does not depend on the batches. If the arguments ask for
        packing and it is not possible, raises ValueError.
        """
        if self.mode() == "none":
            return False
        obstacle = self._obstacle()
        if obstacle is not None and (self.mode() == "static" or self.only_pads()):
            self.pad_because(obstacle)
        return obstacle is None and (self.mode() == "static" or self.only_pads())

    def pad_because(self, reason: NotPackable | str) -> None:
        """Warns that batches are padded, or raises ValueError if the arguments ask for packing."""
        if self.mode() == "static":
            raise ValueError(f"packing='static' is not possible, because {reason}; set packing='none'.")
        logger.warning_once(f"Batches are padded and not packed, because {reason}.")

    def _obstacle(self) -> str | None:
        found = self.obstacle()
        if found is not None:
            return found
        if self.parallel.adapter.structure is not None:
            return f"{self.parallel.family.__name__} runs its layers by its own forward, which knows no documents"
        config = self.parallel.config
        if len(self.parallel.adapter.stacks) > 1:
            return f"{self.parallel.family.__name__} has two stacks, whose documents are not packed together yet"
        rope = rope_of_the_batch(config)
        if rope is not None:
            return f"{rope!r} rotary embeddings depend on the longest row of the batch"
        if not self._attention_obstacle:
            self._attention_obstacle.append(attention_obstacle(self.parallel.family, config))
        return self._attention_obstacle[0]


def is_padding_collator(collator: Any) -> bool:
    """Returns whether a collator pads token rows and does nothing else."""
    if collator is default_data_collator:
        return True
    kind = type(collator)
    if kind is DataCollatorForLanguageModeling:
        return not collator.mlm
    return kind in _KNOWN_COLLATORS or (kind.__module__, kind.__name__) in _KNOWN_NAMES


def rope_of_the_batch(config: PreTrainedConfig) -> str | None:
    """Returns the kind of rotary embeddings that depend on the longest row of a batch, or None."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    return next((kind for kind in _ROPE_OF_THE_BATCH if kind in kinds), None)
