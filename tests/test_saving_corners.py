# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming where something is missing: the best checkpoint, whole weights, a file on one rank alone."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from galvatron_hf import ParallelPlan
from galvatron_hf.checkpoint import folder as checkpoint_folder
from galvatron_hf.checkpoint.folder import by_step, problems
from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from galvatron_hf.checkpoint.storage import StateWriter
from galvatron_hf.cli.main import main
from galvatron_hf.parallel.weights import distributed_state as parallel_checkpoint
from galvatron_hf.plan import LayerStrategy
from oracle import Rows
from plans import pipelined
from test_trainer_saving import FailOnce, raised
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


pytestmark = pytest.mark.slow

STAGES = pipelined([(0,), (1,)], (LayerStrategy(),) * 4)
FLAT = ParallelPlan.uniform(2, 4, sharding="zero2")
STEPS = dict(max_steps=3)
SAVING = STEPS | dict(save_strategy="steps", save_steps=1)
BEST = SAVING | dict(
    eval_strategy="steps",
    eval_steps=1,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    greater_is_better=True,  # the loss falls, so that the best model is the first
)


class FailAfter(TrainerCallback):
    """Raises on every rank in the step after one."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyError("all ranks")


def seconds_of_writers(made: Trainer) -> float:
    """Returns the seconds that writers in the background wait for each other."""
    backend = made._components.checkpointer._writer._group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the folder and the results of two ranks, from one world."""
    folder = tmp_path_factory.mktemp("corners")

    def with_one(owner, name: str, value, work: Callable[[], Any]) -> Any:
        kept = vars(owner)[name]
        setattr(owner, name, value)
        try:
            return work()
        finally:
            setattr(owner, name, kept)

    def failing(name: str, **options) -> Any:
        def after(made: Trainer) -> tuple:
            return made.failed_saves, made.state.best_model_checkpoint

        def fail() -> Any:
            return run(folder / name, FLAT, options=options, eval_dataset=Rows(4, seed=2), then=after)

        return with_one(FileEntry, "from_file", FailOnce(rank=1, call=1), fail)

    def beside_others() -> bool:
        if dist.get_rank() == 0:
            (folder / "model").mkdir()
            (folder / "model" / "model_of_mine.safetensors").write_text("kept")
        dist.barrier()
        trainer(folder / "saver", FLAT).save_model(str(folder / "model"))
        return (folder / "model" / "model_of_mine.safetensors").exists()

    def without_prune() -> Run:
        def refuse(path) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

        options = SAVING | dict(save_total_limit=1)
        return with_one(checkpoint_folder, "remove", refuse, lambda: run(folder / "kept", FLAT, options=options))

    def missing_on_the_last_stage() -> str:
        real = parallel_checkpoint.stored_tensors

        def without_head(path):
            hidden = "lm_head" if dist.get_rank() == 1 else "nothing"
            return {name: stored for name, stored in real(path).items() if hidden not in name}

        resume = folder / "sharded" / "checkpoint-2"
        return with_one(
            parallel_checkpoint,
            "stored_tensors",
            without_head,
            lambda: raised(lambda: run(folder / "other", STAGES, options=STEPS, resume=resume)),
        )

    def failing_while_one_is_written() -> list[str]:
        write_data = StateWriter.write_data

        def late(*args):
            time.sleep(1)
            return write_data(*args)

        def fail() -> None:
            run(folder / "fail", FLAT, options=SAVING | dict(async_save=True), callbacks=(FailAfter(1),))

        with pytest.raises(KeyError):
            with_one(StateWriter, "write_data", late, fail)
        return [path.name for path in by_step(folder / "fail")]

    def unseen_by_one() -> str:
        real = Manifest.read

        def read(path) -> Manifest:
            return real(path if dist.get_rank() == 0 else folder / "elsewhere")

        resume = folder / "sharded" / "checkpoint-2"
        return with_one(
            Manifest, "read", read, lambda: raised(lambda: run(folder / "other", "auto", options=STEPS, resume=resume))
        )

    def on_a_read_only_disk(policy: str) -> int:
        real = ParallelPlan.to_json

        def to_json(plan, path=None) -> str:
            if path is not None and dist.get_rank() == 0:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(plan)

        options = STEPS | dict(on_save_failure=policy)
        return with_one(
            ParallelPlan, "to_json", to_json, lambda: len(run(folder / "read", FLAT, options=options).steps())
        )

    def work() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        run(folder / "best", FLAT, options=BEST | dict(save_total_limit=1), eval_dataset=Rows(4, seed=2))
        seen["lost best"] = failing("lost_best", **BEST, on_save_failure="continue")
        seen["lost"] = raised(lambda: failing("gloo-connection", **SAVING))
        seen["beside"] = beside_others()
        options = SAVING | dict(save_full_weights=False, async_save=True, ddp_timeout=77)
        seen["sharded"] = run(folder / "sharded", STAGES, options=options, then=seconds_of_writers)
        seen["ended"] = run(folder / "sharded", STAGES, options=STEPS, resume=folder / "sharded" / "checkpoint-3")
        seen["kept"] = len(without_prune().steps())
        seen["failing"] = failing_while_one_is_written()
        seen["missing"], seen["unseen"] = missing_on_the_last_stage(), unseen_by_one()
        seen["read-only"] = on_a_read_only_disk("continue")
        seen["read-only, stop"] = raised(lambda: on_a_read_only_disk("stop"))
        return seen

    return folder, on_ranks(work, 2)


def test_a_limit_of_one_leaves_the_newest_checkpoint_beside_the_best(runs):
    found = by_step(runs[0] / "best")
    assert [path.name for path in found] == ["checkpoint-1", "checkpoint-3"]
    assert [problems(path) for path in found] == [[], []]


def test_training_ends_in_order_where_the_best_checkpoint_could_not_be_written(runs):
    for seen in runs[1]:
        assert seen["lost best"].result == (1, None)


def test_a_failed_save_is_not_taken_for_a_lost_rank(runs):
    for seen in runs[1]:
        assert seen["lost"].startswith("SaveError: Writing ") and "gloo-connection" in seen["lost"]


def test_files_that_are_not_of_a_model_stay_in_its_folder(runs):
    assert [seen["beside"] for seen in runs[1]] == [True, True]


def test_one_process_without_a_plan_resumes_where_there_are_no_whole_weights(runs, tmp_path):
    folder, (seen, *_) = runs
    options = STEPS | dict(gradient_accumulation_steps=1)
    resumed = run(tmp_path, options=options, resume=folder / "sharded" / "checkpoint-2")
    assert_same_steps(resumed, seen["sharded"], after=2)


def test_a_checkpoint_is_good_where_older_ones_cannot_be_deleted(runs):
    folder, (seen, *_) = runs
    assert seen["kept"] == 3
    assert [problems(path) for path in by_step(folder / "kept")] == [[], [], []]


def test_training_that_fails_leaves_no_writer_behind(runs):
    assert [seen["failing"] for seen in runs[1]] == [["checkpoint-1"]] * 2


def test_writers_wait_for_each_other_as_long_as_all_ranks_do(runs):
    """Compares with the job's timeout; groups of PyTorch on gloo have half an hour by default."""
    assert [seen["sharded"].result for seen in runs[1]] == [77.0, 77.0]


def test_a_run_that_had_ended_takes_no_step_more(runs):
    for seen in runs[1]:
        assert seen["ended"].steps() == []
        assert_equal_weights(seen["ended"].weights, seen["sharded"].weights)
        assert seen["ended"].random == seen["sharded"].random


def test_what_one_rank_cannot_load_is_an_error_on_all(runs):
    for seen in runs[1]:
        assert seen["missing"].startswith("ValueError: rank 1: lm_head.weight has shape (97, 32), and ")
        assert seen["unseen"].startswith("ValueError: rank 1: the manifest ")


def test_a_read_only_folder_ends_training_on_all_ranks_or_on_none(runs):
    for seen in runs[1]:
        assert seen["read-only"] == 3
        assert seen["read-only, stop"].startswith("SaveError: Writing the plan to ")


@pytest.mark.parametrize("option, value", [("on_save_failure", "go on"), ("max_shard_size", "5 heaps")])
def test_arguments_that_a_save_would_trip_over_are_refused_at_once(tmp_path, option, value):
    plan = replace(STAGES, world_size=1, stages=(replace(STAGES.stages[0], layers=(0, 4)),), schedule="1f1b")
    with pytest.raises(ValueError, match=f"{option} '{value}' is no"):
        trainer(tmp_path, plan, options={option: value})


def test_a_checkpoint_of_plain_trainer_may_have_logged_what_is_no_number(tmp_path):
    options = STEPS | dict(gradient_accumulation_steps=1, save_strategy="steps", save_steps=2)
    whole = run(tmp_path, options=options, trainer_class=Trainer)
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    values = json.loads(state.read_text())
    values["log_history"][0]["grad_norm"] = float("nan")
    state.write_text(json.dumps(values))
    assert_same_steps(run(tmp_path, options=options, resume=state.parent), whole, after=2)


HOSTILE = {
    "more layers": (dict(num_hidden_layers=5), "config.json makes model.layers.4.self_attn.q_proj.weight of shape"),
    "many layers": (dict(num_hidden_layers=10**9), "makes no model .*1000000000 layers for"),
    "wider": (dict(hidden_size=64), "config.json makes model.embed_tokens.weight of shape"),
    "no heads": (dict(num_attention_heads=0), "makes no model .*ZeroDivisionError"),
    "words": (dict(hidden_size="wide"), "makes no model .*hidden_size"),
}


def copy_of(checkpoint: Path, path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, path))


def renew_manifest(checkpoint: Path) -> None:
    """Writes a manifest with matching checksums, as an attacker can."""
    manifest = Manifest.read(checkpoint)
    files = {name: FileEntry.from_file(checkpoint / name) for name in manifest.files}
    (checkpoint / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json())


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_configuration_of_another_model_is_not_exported(runs, tmp_path, capsys, name):
    changes, message = HOSTILE[name]
    checkpoint = copy_of(runs[0] / "sharded" / "checkpoint-3", tmp_path / "checkpoint-3")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    renew_manifest(checkpoint)
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not (tmp_path / "out").exists()


def test_a_broken_header_is_told_in_one_line(runs, tmp_path, capsys):
    checkpoint = copy_of(runs[0] / "sharded" / "checkpoint-3", tmp_path / "checkpoint-3")
    shard = next(checkpoint.glob("parallel_state/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[12] ^= 0xFF
    shard.write_bytes(content)
    assert main(["checkpoint", "inspect", str(checkpoint)]) == 1
    assert "cannot be read" in capsys.readouterr().err
