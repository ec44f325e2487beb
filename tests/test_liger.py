# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Liger's kernels under a plan. Those of the package need a GPU; a stand-in's compute something else than the model's
own modules, so that results show where they run.
"""

from __future__ import annotations

import sys
from types import MethodType, ModuleType
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import liger as of_transformers

from galvatron_hf.trainer import liger
from galvatron_hf.trainer.argument_refusals import check_arguments
from oracle import Case, check_cases
from plans import pipeline_plans, uniform
from tiny_models import FAMILIES
from trainer_runs import arguments, on_ranks, trainer


GIVEN: list[dict[str, bool]] = []


def _norm(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return 1.5 * module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def _apply(model: nn.Module, **kernels: bool) -> None:
    GIVEN.append(kernels)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and kernels.get("rms_norm", True):
            module.__dict__["forward"] = MethodType(_norm, module)


@pytest.fixture
def package(monkeypatch):
    """Puts a stand-in in the place of the package."""
    made = ModuleType("liger_kernel.transformers")
    made._apply_liger_kernel_to_instance = _apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", made)
    for module in (of_transformers, liger):
        monkeypatch.setattr(module, "is_liger_kernel_available", lambda: True)


def _kernels_of_the_loss_are_left_out(made: Trainer) -> None:
    if hasattr(made, "parallel"):
        assert len(GIVEN) == 1 and GIVEN[0] == {"cross_entropy": False, "fused_linear_cross_entropy": False}
        assert made.args.use_liger_kernel  # as it was given


def test_kernels_run_under_plans_as_under_plain_trainer(package):
    def case(plan, **given) -> Case:
        return Case(plan=plan, options=dict(max_steps=2, use_liger_kernel=True, **given), fault=_fresh)

    cases = {
        "tensor": case(uniform(2, tensor=2, megatron_sp=True)),
        "not the norms": case(uniform(2), liger_kernel_config={"rms_norm": False}),
    }
    check_cases(cases, world_size=2)
    alone = case(uniform(2))
    check_cases({"given": Case(**vars(alone) | {"after": _kernels_of_the_loss_are_left_out})}, world_size=2)


class _Seen(TrainerCallback):
    """Notes what user code sees of the arguments."""

    def __init__(self):
        self.given: list[bool] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.given.append(args.use_liger_kernel)


def test_every_model_of_a_trainer_has_its_kernels_and_user_code_sees_the_argument(package, tmp_path):
    def work() -> tuple[list[dict], list[bool]]:
        GIVEN.clear()
        seen = _Seen()
        given = dict(model_init=lambda *unused: FAMILIES["llama"].build(), callbacks=[seen])
        made = trainer(tmp_path, uniform(1), options=dict(max_steps=1, use_liger_kernel=True), **given)
        for _ in range(3):
            made.create_accelerator_and_postprocess()  # as a study does before a trial
            made.train()
        return GIVEN, seen.given

    kernels, seen = on_ranks(work, 1)[0]
    assert kernels == [dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False)] * 3
    assert seen == [True] * 3


@pytest.mark.slow
def test_kernels_run_in_pipelines(package):
    options = dict(max_steps=2, use_liger_kernel=True)
    check_cases({"1f1b": Case(plan=pipeline_plans()["1f1b"], options=options)}, world_size=4)


def _fresh():
    GIVEN.clear()
    return mock.MagicMock()


@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_kernels_of_the_loss_are_refused_by_name(package, tmp_path, name):
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config={name: True})
    with pytest.raises(ValueError, match=f"liger_kernel_config has {name}=True.*leave it out"):
        check_arguments(args, uniform(1))


def test_without_the_package_it_is_named(tmp_path):
    with mock.patch.object(liger, "is_liger_kernel_available", lambda: False):
        args = arguments(tmp_path)
        args.use_liger_kernel = True
        assert ["pip install liger-kernel" in one for one in liger.refused_kernels(args)] == [True]
