# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A process group without other ranks: results have the right shape and memory, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FakeProcessGroup:
    """Stands for a process group in profiling, where only its first rank exists. In an uneven all-to-all `received`
    times as much arrives as leaves.
    """

    ranks: int
    group_name: str = "fake"
    received: int = 1

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0

    # The functional collectives, with this rank's values instead of the other ranks'.

    def all_gather_into_tensor(self, x: Tensor, size: int, name: str) -> Tensor:
        return x.expand(size, *x.shape[1:])

    def all_reduce(self, x: Tensor, operation: str, name: str) -> Tensor:
        return x.clone()

    def reduce_scatter_tensor(self, x: Tensor, operation: str, size: int, name: str) -> Tensor:
        return x[:1].clone()

    def all_to_all_single(self, x: Tensor, received: Sequence[int], sent: Sequence[int], name: str) -> Tensor:
        return x.clone() if list(received) == list(sent) else x.new_zeros(sum(received))

    def wait_tensor(self, x: Tensor) -> Tensor:
        return x
