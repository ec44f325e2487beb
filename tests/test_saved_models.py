# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saved models and what is sent to the hub are those of one process."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, Trainer

from plans import light_plan, mixed_plans
from tiny_models import FAMILIES, word_tokenizer
from trainer_runs import Run, assert_equal_weights, on_ranks, run


MIXED = replace(mixed_plans()["mixed_a"], micro_batches=1)
FAMILY_NAMES, SLOW_NAMES = ("gpt2", "phi3"), ("llama", "llama_tied")
SHORT = dict(max_steps=1)
ALONE = dict(gradient_accumulation_steps=1)


@dataclass
class Hub:
    """Stands for the hub, and keeps the names of files that would be sent."""

    pushed: list[tuple[str, tuple[str, ...]]]

    def create_repo(self, name, **kwargs):
        return mock.Mock(repo_id=f"someone/{name}")

    def upload_folder(self, folder_path, path_in_repo="", ignore_patterns=(), **kwargs):
        names = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        sent = tuple(sorted(name for name in names if not ("checkpoint-" in name and ignore_patterns)))
        self.pushed.append((path_in_repo, sent))
        return mock.Mock(**{"done.return_value": True})


def push(folder: Path, plan, **more) -> list[tuple[str, tuple[str, ...]]]:
    hub = Hub([])
    options = dict(push_to_hub=True, hub_strategy="checkpoint", save_strategy="steps", save_steps=1, max_steps=1)
    more["options"] = options | more.pop("options", {})
    with mock.patch("transformers.trainer.hf_api", lambda: hub):
        run(folder, plan, processing_class=word_tokenizer(), then=lambda made: made.push_to_hub(), **more)
    return hub.pushed


def save(folder: Path):
    def then(made: Trainer) -> None:
        made.save_model(str(folder))

    return then


def saved_families(folder: Path, names: tuple[str, ...], plan="auto", **more) -> dict[str, Run]:
    """Trains each family and saves its model below the folder."""
    return {
        family: run(
            folder / family,
            plan,
            family=family,
            processing_class=word_tokenizer(),
            then=save(folder / family / "saved"),
            **more,
        )
        for family in names
    }


@pytest.fixture(scope="module", params=["fast", pytest.param("slow", marks=pytest.mark.slow)])
def saved(request, tmp_path_factory) -> tuple[Path, Path, dict[str, Run]]:
    """Returns the folders of plain Trainer and of four ranks, and the runs of a rank."""
    names = {"fast": FAMILY_NAMES, "slow": SLOW_NAMES}[request.param]
    plain, ranks = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("ranks")
    saved_families(plain, names, trainer_class=Trainer, options=SHORT | ALONE)
    return plain, ranks, on_ranks(lambda: saved_families(ranks, names, MIXED, options=SHORT))[0]


@pytest.mark.slow
def test_saved_model_opens_anywhere_with_the_trained_weights(saved):
    plain, ranks, runs = saved
    for family, seen in runs.items():
        model = AutoModelForCausalLM.from_pretrained(ranks / family / "saved")
        assert type(model) is type(FAMILIES[family].build())
        assert_equal_weights(dict(model.named_parameters()), seen.weights)
        folder, plain_folder = (root / family / "saved" for root in (ranks, plain))
        files = {path.name for path in plain_folder.iterdir()} | {"parallel_plan.json"}
        assert {path.name for path in folder.iterdir()} == files
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert json.loads((folder / name).read_text()) == json.loads((plain_folder / name).read_text()), name


def test_hub_gets_the_files_that_plain_trainer_sends(tmp_path):
    def without_plan(pushed):
        extra = {"parallel_plan.json", "training_run.json", "manifest.json"}
        return [(path, sorted(set(names) - extra)) for path, names in pushed]

    first, *others = on_ranks(lambda: push(tmp_path / "ranks", light_plan(2)), 2)
    pushed = without_plan(first)
    wanted = without_plan(push(tmp_path / "plain", "auto", trainer_class=Trainer, options=ALONE))
    states = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert len(pushed) == len(wanted) > 1
    for (path, names), (plain_path, plain_names) in zip(pushed, wanted, strict=True):
        own = [name for name in names if not name.startswith(("parallel_state", "scheduler.json", "rng_state_"))]
        assert (path, own) == (plain_path, [name for name in plain_names if name not in states])
    assert others == [[]]
