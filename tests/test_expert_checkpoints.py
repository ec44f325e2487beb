# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models with experts: they resume under any expert degree, and their folders are transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from equivalence import whole, whole_weights
from galvatron_hf import parallelize
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.distributed_state import load_state, save_state
from galvatron_hf.parallel.weights.export import export
from galvatron_hf.parallel.weights.pretrained import pretrained_on_meta
from ranks import run_ranks
from test_expert_files import family_plans, unequal_buffers
from tiny_models import BATCHES, EXPERT_FAMILIES
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run


def optimizer_tensors(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = parallel.parameter_names()
    return {
        f"{names[id(parameter)]} {kind}": whole(value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for kind, value in optimizer.state[parameter].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_checkpoint_resumes_under_another_expert_degree(tmp_path, family):
    """Compares weights and AdamW's state bit for bit after one step under expert degree 2 and a load."""
    plain = EXPERT_FAMILIES[family].build()
    plans = family_plans(plain)
    batch = BATCHES["plain"]()

    def made(plan) -> tuple[ParallelModel, torch.optim.Optimizer]:
        parallel = parallelize(EXPERT_FAMILIES[family].build(seed=4), plan, world)
        return parallel, torch.optim.AdamW(parallel.model.parameters(), lr=1e-2)

    def work() -> dict[str, list[str]]:
        nonlocal world
        world = WorldMesh("cpu")
        model, files = pretrained_on_meta(tmp_path / "plain")
        first = parallelize(model, plans["expert_2"], world, weights=files)
        optimizer = torch.optim.AdamW(first.model.parameters(), lr=1e-2)
        first.forward_backward(batch)
        optimizer.step()
        save_state(first, optimizer, tmp_path / "state")
        weights, state = whole_weights(first.model, plain), optimizer_tensors(first, optimizer)
        wrong: dict[str, list[str]] = {}
        for name in ("expert_1", "expert_4", "shardings", "1f1b"):
            parallel, other = made(plans[name])
            load_state(parallel, other, tmp_path / "state")
            seen, seen_state = whole_weights(parallel.model, plain), optimizer_tensors(parallel, other)
            assert seen.keys() == weights.keys() and (seen_state.keys() == state.keys() or "1f1b" in name)
            wrong[name] = [key for key in seen if not torch.equal(seen[key], weights[key])]
            wrong[name] += [key for key, value in seen_state.items() if not torch.equal(value, state[key])]
            wrong[name] += unequal_buffers(parallel.model, plain)
        return wrong

    world: WorldMesh | None = None
    plain.save_pretrained(tmp_path / "plain")
    for wrong in run_ranks(work, 4):
        assert wrong == dict.fromkeys(("expert_1", "expert_4", "shardings", "1f1b"), [])


# ---- Training


def same_tensors(folder: Path, plain: Path) -> bool:
    """Returns whether two folders with one file of weights each have the same keys, formats and values."""
    seen, wanted = (load_file(path / "model.safetensors") for path in (folder, plain))
    same = all(seen[key].dtype == wanted[key].dtype and torch.equal(seen[key], wanted[key]) for key in wanted)
    return seen.keys() == wanted.keys() and same


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_training_saves_what_transformers_saves_and_resumes_under_other_degrees(tmp_path, family):
    build = EXPERT_FAMILIES[family].build
    plans, options = family_plans(build()), dict(max_steps=4)
    saving, checkpoint = options | dict(save_strategy="steps", save_steps=2), tmp_path / "whole" / "checkpoint-2"

    def work() -> dict[str, Run]:
        def saved(made: Trainer) -> None:
            made.save_model(str(tmp_path / "saved"))

        runs = {"whole": run(tmp_path / "whole", plans["expert_2"], model=build(), options=saving, then=saved)}
        for name in ("expert_4", "expert_1"):
            runs[name] = run(tmp_path / name, plans[name], model=build(seed=4), options=options, resume=checkpoint)
        return runs

    runs = on_ranks(work)[0]
    whole = runs.pop("whole")
    runs["one process"] = run(
        tmp_path / "one", model=build(seed=4), options=options | dict(gradient_accumulation_steps=1), resume=checkpoint
    )
    for resumed in runs.values():
        assert_same_steps(resumed, whole, after=2)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal_weights(dict(opened.named_parameters()), whole.weights)
    opened.save_pretrained(tmp_path / "plain")
    assert same_tensors(tmp_path / "saved", tmp_path / "plain")
    for name in ("float32", "bfloat16"):
        export(checkpoint, tmp_path / name, dtype=name)
        again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, name))
        again.save_pretrained(tmp_path / f"plain {name}")
        assert same_tensors(tmp_path / name, tmp_path / f"plain {name}")
