# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Step 1 under every kind of plan: loss, every gradient, their norm, evaluation and logits are one process's."""

from __future__ import annotations

import traceback

import pytest

from equivalence import Reference, check_equivalence, reference
from galvatron_hf.plan import ParallelPlan
from plans import mixed_plans, uniform_plans, untied_plans
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES


def check_cases(world_size: int, cases: dict[str, tuple[Reference, ParallelPlan]]) -> None:
    """Runs many cases in one world of ranks; fails with all cases that are wrong."""

    def work() -> dict[str, str]:
        wrong = {}
        for name, (oracle, plan) in cases.items():
            try:
                check_equivalence(oracle, plan)
            except AssertionError as error:  # the ranks have done the same collectives: the next case can run
                wrong[name] = str(error) or traceback.format_exc()
            except Exception as error:
                raise RuntimeError(f"case {name!r}") from error
        return wrong

    wrong: dict[str, str] = {}
    for rank, found in enumerate(run_ranks(work, world_size, timeout=120.0)):
        for name, message in found.items():
            wrong.setdefault(name, f"rank {rank}: {message}")
    assert not wrong, "\n".join(f"{name}: {message}" for name, message in wrong.items())


def oracle_of(family: str, batch: str = "right", num_items: int | None = None) -> Reference:
    return reference(FAMILIES[family].build(), BATCHES[batch](), num_items)
