# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Describes the work of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_hf.plan import Precision


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describes the global batch of a step.

    Args:
        rows (`int`): Rows of the global batch.
        length (`int`): Tokens of the longest row, for which memory is needed.
        precision ([`Precision`]): Number formats.
        mean_length (`int`, *optional*): Mean tokens of a row, which determine time; `length` if absent.
        mean_square (`float`, *optional*): Mean of the squared tokens of a row; `mean_length` squared if absent.
        packed (`bool`): Whether rows are documents of packed rows, which ranks can share.
    """

    rows: int
    length: int
    precision: Precision
    mean_length: int | None = None
    mean_square: float | None = None
    packed: bool = False

    @property
    def computed_length(self) -> int:
        """Returns the tokens of a row to which the time of most layers is proportional."""
        return self.length if self.mean_length is None else self.mean_length

    @property
    def computed_square(self) -> float:
        """Returns the squared tokens of a row to which the time of attention is proportional."""
        return self.computed_length**2 if self.mean_square is None else self.mean_square
