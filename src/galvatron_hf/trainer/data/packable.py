# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What can be packed without being told: collators that only pad, rotary embeddings that look at one row."""

from __future__ import annotations

from typing import Any

from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedConfig,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorForLanguageModeling, DataCollatorWithFlattening


_KNOWN_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
_KNOWN_NAMES = {("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")}
# Their rotary embeddings depend on the longest row of the whole batch.
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")


def only_pads(collator: Any) -> bool:
    """Whether a collator pads token rows and does nothing else."""
    if collator is default_data_collator:
        return True
    kind = type(collator)
    if kind is DataCollatorForLanguageModeling:
        return not collator.mlm
    return kind in _KNOWN_COLLATORS or (kind.__module__, kind.__name__) in _KNOWN_NAMES


def rope_of_the_batch(config: PreTrainedConfig) -> str | None:
    """The kind of rotary embeddings that depend on the longest row of the batch, if the model has such."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    return next((kind for kind in _ROPE_OF_THE_BATCH if kind in kinds), None)
