# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The decision to pack: arguments, collators that only pad, rotary embeddings and attention that allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorForLanguageModeling, DataCollatorWithFlattening
from transformers.utils import logging

from galvatron_hf.data.packing import NotPackable
from galvatron_hf.parallel.comm.objects import is_rank_0
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.packing_obstacle import packing_obstacle


logger = logging.get_logger(__name__)

_KNOWN_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
_KNOWN_NAMES = {("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")}
ASKED = ("static", "dynamic")  # modes that pack or raise an error


@dataclass(kw_only=True)
class PackingRules:
    """Decides whether batches are packed.

    Args:
        mode (`Callable`): returns "auto", "static", "dynamic" or "none"; see [`GalvatronTrainingArguments`].
        only_pads (`Callable`): returns whether the collator only pads token rows.
        obstacle (`Callable`): returns why the Trainer's own methods and arguments forbid packing, or None.
    """

    parallel: ParallelModel
    mode: Callable[[], str]
    only_pads: Callable[[], bool]
    obstacle: Callable[[], str | None] = lambda: None
    _obstacle_of_model: list[str | None] = field(default_factory=list)

    def packs(self) -> bool:
        """Returns whether batches are packed, as far as that does not depend on the batches. If the arguments ask for
        packing and it is not possible, raises ValueError.
        """
        if self.mode() == "none":
            if self._shares:
                raise ValueError(
                    "packing='none' keeps rows whole, and the plan has ranks share documents (context or "
                    "sequence_groups); set packing='auto'."
                )
            return False
        obstacle, asked = self._obstacle(), self._is_asked_for()
        if obstacle is not None and (asked or self.only_pads()):
            self.pad_because(obstacle)
        return obstacle is None and (asked or self.only_pads())

    @property
    def _shares(self) -> bool:
        return self.parallel.plan.shares_documents

    def _is_asked_for(self) -> bool:
        """Returns whether batches must be packed, by the arguments or because the plan has ranks share documents."""
        return self.mode() in ASKED or self._shares

    def pad_because(self, reason: NotPackable | str) -> None:
        """Warns that batches are padded, or raises ValueError if the arguments or the plan ask for packing."""
        if self.mode() in ASKED:
            raise ValueError(f"packing={self.mode()!r} is not possible, because {reason}; set packing='none'.")
        if self._shares:
            raise ValueError(
                f"The plan has ranks share documents (context or sequence_groups), which is not possible, because "
                f"{reason}; use context=1 without sequence_groups."
            )
        if is_rank_0():
            logger.warning_once(f"Batches are padded and not packed, because {reason}.")

    def _obstacle(self) -> str | None:
        found = self.obstacle()
        if found is not None:
            return found
        if not self._obstacle_of_model:
            parallel = self.parallel
            causal = parallel.adapter.stacks[-1].causal
            self._obstacle_of_model.append(
                packing_obstacle(parallel.family, parallel.config, parallel.packing, causal=causal)
            )
        return self._obstacle_of_model[0]


def is_padding_collator(collator: Any) -> bool:
    """Returns whether a collator pads token rows and at most masks tokens of them."""
    if collator is default_data_collator:
        return True
    kind = type(collator)
    return kind in _KNOWN_COLLATORS or (kind.__module__, kind.__name__) in _KNOWN_NAMES
