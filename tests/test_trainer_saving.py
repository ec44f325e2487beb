# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saves in the background, saves that fail, and which checkpoint a run resumes from; flat and with stages."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from galvatron_hf import ParallelPlan
from galvatron_hf.checkpoint.folder import by_step, left_behind, problems
from galvatron_hf.checkpoint.manifest import FileEntry
from galvatron_hf.checkpoint.storage import StateWriter
from galvatron_hf.cli.main import main
from galvatron_hf.parallel.weights.export import export
from galvatron_hf.trainer.checkpoint.checkpoint_finder import CheckpointFinder
from galvatron_hf.trainer.checkpoint.checkpoint_writer import SaveError
from plans import light_plan, mixed_plans, pipeline_plans
from tiny_models import FAMILIES
from trainer_runs import Run, StopAt, assert_equal_weights, on_ranks, run


pytestmark = pytest.mark.slow

MIXED = replace(mixed_plans()["mixed_a"], micro_batches=2)
PLANS = {"light": light_plan(2, micro_batches=2), "flat": MIXED, "stages": pipeline_plans()["1f1b_mixed"]}
STEPS = dict(max_steps=4, logging_steps=1)
SAVING = STEPS | dict(save_strategy="steps", save_steps=1)
BACKGROUND = SAVING | dict(async_save=True, save_full_weights=False)


class FailOnce:
    """Makes one rank's file number `call` fail as a full disk does."""

    def __init__(self, rank: int, call: int):
        self.real, self.left = FileEntry.from_file, call if dist.get_rank() == rank else -1

    def __call__(self, path) -> FileEntry:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self.real(path)


def raised(work) -> str:
    try:
        work()
    except (SaveError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing(folder: Path, plan: ParallelPlan, policy: str, **options: Any) -> Run:
    """Trains while the last rank cannot write its second file; the result is the number of failed saves."""
    kept, FileEntry.from_file = FileEntry.from_file, FailOnce(rank=plan.world_size - 1, call=2)
    try:
        options = SAVING | dict(on_save_failure=policy, max_steps=3) | options
        return run(folder, plan, options=options, then=lambda made: made.failed_saves)
    finally:
        FileEntry.from_file = kept


class Gate(TrainerCallback):
    """Holds back a checkpoint's writer on this rank until training has gone on and the next step is over, if any."""

    def __init__(self, steps: int):
        self.steps, self.begun, self.ended, self.there = steps, 0, 0, []

    def on_step_end(self, args, state, control, **kwargs):
        self.ended += 1

    def on_save(self, args, state, control, **kwargs):
        self.there.append(os.path.exists(os.path.join(args.output_dir, f"checkpoint-{state.global_step}")))

    def wait(self) -> None:
        self.begun += 1  # the writer waits for that of the step before
        step, deadline = self.begun, time.monotonic() + 300.0
        while len(self.there) < step or self.ended < min(step + 1, self.steps):
            assert time.monotonic() < deadline, "training waits for the writer"
            time.sleep(0.01)


class Vanish(TrainerCallback):
    """Takes the output folder away in the middle of a run."""

    def on_step_end(self, args, state, control, **kwargs):
        dist.barrier()
        if state.global_step == 2 and dist.get_rank() == 0:
            shutil.rmtree(args.output_dir)
        dist.barrier()


@pytest.fixture(scope="module", params=PLANS)
def runs(request, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the folder and the results of all ranks under one plan, from one world."""
    plan, folder = PLANS[request.param], tmp_path_factory.mktemp(request.param)

    def slowly_in_background() -> Run:
        real, gate = StateWriter.write_data, Gate(steps=3)

        def late(self, *args):
            gate.wait()
            return real(self, *args)

        StateWriter.write_data = late
        try:
            callbacks = StopAt(3), gate
            return run(
                folder / "background", plan, options=BACKGROUND, callbacks=callbacks, then=lambda made: gate.there
            )
        finally:
            StateWriter.write_data = real

    def in_background(name: str, policy: str) -> Run:
        return failing(folder / name, plan, policy, async_save=True)

    def work() -> dict[str, Any]:
        seen: dict[str, Any] = {"whole": run(folder / "whole", plan, options=STEPS)}
        seen["background"] = slowly_in_background()
        newest = folder / "background" / "checkpoint-3"
        if dist.get_rank() == 0:
            shard = sorted(newest.glob("parallel_state/*.safetensors"))[1]
            os.truncate(shard, shard.stat().st_size - 1)
            (folder / "background" / "unfinished-checkpoint-4").mkdir()
        dist.barrier()
        seen["chosen"] = CheckpointFinder(dist.get_rank(), dist.get_world_size())._newest_complete(
            str(folder / "background")
        )
        seen["asked"] = raised(lambda: run(folder / "other", plan, options=STEPS, resume=newest))
        seen["none"] = raised(lambda: run(folder / "empty", plan, options=STEPS, resume=True))
        seen["resumed"] = run(folder / "background", plan, options=STEPS, resume=True)
        seen["folder"] = run(folder / "other", plan, options=STEPS, resume=folder / "background")
        seen["continued"] = failing(folder / "continued", plan, "continue")
        seen["continued in background"] = in_background("continued_background", "continue")
        seen["stopped"] = raised(lambda: failing(folder / "stopped", plan, "stop"))
        seen["stopped in background"] = raised(lambda: in_background("stopped_background", "stop"))
        vanished = SAVING | dict(max_steps=3)
        seen["vanished"] = run(folder / "vanished", plan, options=vanished, callbacks=(Vanish(),))
        small = SAVING | dict(max_steps=1, max_shard_size="30KB", save_total_limit=1)
        seen["small"] = run(folder / "small", plan, options=small, then=lambda made: made.save_model(folder / "model"))
        return seen

    return folder, on_ranks(work, plan.world_size)


def test_training_goes_on_while_a_checkpoint_is_written(runs):
    folder, (seen, *_) = runs
    assert seen["background"].result == [False] * 3
    assert len([log for log in seen["background"].logs if log.get("save_stall_seconds", -1) >= 0]) == 3
    for step in (1, 2):
        assert problems(folder / "background" / f"checkpoint-{step}") == []


def test_the_newest_complete_checkpoint_is_taken_and_the_others_named(runs):
    folder, of_ranks = runs
    for seen in of_ranks:
        path, skipped = seen["chosen"]
        assert path == str(folder / "background" / "checkpoint-2")
        assert len(skipped) == 2 and "unfinished-checkpoint-4: it was never completed" in skipped[0]
        assert "checkpoint-3: parallel_state/" in skipped[1] and "bytes instead of" in skipped[1]


def test_what_was_written_in_the_background_resumes_bit_for_bit(runs):
    for seen in runs[1]:
        for name in ("resumed", "folder"):
            assert seen[name].steps(after=2) == seen["whole"].steps(after=2) != []
            assert [log["step"] for log in seen[name].logs if "loss" in log] == [3, 4]
            assert_equal_weights(seen[name].weights, seen["whole"].weights)
            assert seen[name].random == seen["whole"].random


def test_a_damaged_checkpoint_that_is_asked_for_is_refused_with_another_one(runs):
    folder, of_ranks = runs
    for seen in of_ranks:
        assert seen["asked"].startswith(f"ValueError: {folder}/background/checkpoint-3 is damaged (parallel_state/")
        assert seen["asked"].endswith(f"resume from {folder}/background/checkpoint-2.")
        assert "has no complete checkpoint to resume from" in seen["none"]


def check_checkpoints(folder: Path, *wanted: str) -> None:
    """Finds these complete checkpoints in a folder and nothing that was left behind."""
    found = by_step(folder)
    assert [path.name for path in found] == list(wanted)
    assert [problems(path) for path in found] == [[]] * len(wanted) and left_behind(folder) == []


@pytest.mark.parametrize("kind", ["", " in background"])
def test_training_goes_on_without_a_checkpoint_where_it_is_to(runs, kind):
    folder, of_ranks = runs
    for seen in of_ranks:
        assert seen[f"continued{kind}"].result == 1
        assert seen[f"continued{kind}"].steps() == seen["continued"].steps()
    check_checkpoints(folder / ("continued_background" if kind else "continued"), "checkpoint-1", "checkpoint-3")


@pytest.mark.parametrize("kind", ["", " in background"])
def test_training_stops_on_every_rank_where_it_is_to(runs, kind):
    folder, of_ranks = runs
    for seen in of_ranks:
        message = seen[f"stopped{kind}"]
        assert message.startswith("SaveError: Writing ") and "No space" in message
        assert f"rank {len(of_ranks) - 1}: OSError" in message
    check_checkpoints(folder / ("stopped_background" if kind else "stopped"), "checkpoint-1")


def test_a_folder_that_vanished_is_made_again(runs):
    folder, (seen, *_) = runs
    assert len(seen["vanished"].steps()) == 3
    assert [path.name for path in by_step(folder / "vanished")] == ["checkpoint-2", "checkpoint-3"]


def test_files_of_weights_have_a_limit_and_open_anywhere(runs, tmp_path, capsys):
    folder, (seen, *_) = runs
    checkpoint = folder / "small" / "checkpoint-1"
    files = sorted(checkpoint.glob("model*.safetensors"))
    assert len(files) > 3
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 30_000
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "exported"), "--max-shard-size", "20KB"]) == 0
    for opened in (checkpoint, folder / "model", tmp_path / "exported"):
        weights = AutoModelForCausalLM.from_pretrained(opened).state_dict()
        assert_equal_weights({name: weights[name] for name in seen["small"].weights}, seen["small"].weights)


def check_exported(checkpoint: Path, trained: Run, exported: Path) -> None:
    """Exports weights in bf16 and compares them with those of a run."""
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    export(checkpoint, exported, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}
    wanted = {name: tensor.bfloat16() for name, tensor in trained.weights.items()}
    assert_equal_weights({name: model.state_dict()[name] for name in wanted}, wanted)


def test_weights_are_put_together_from_a_checkpoint_without_them(runs, tmp_path):
    folder, (seen, *_) = runs
    checkpoint = folder / "continued_background" / "checkpoint-3"
    check_exported(checkpoint, seen["continued in background"], tmp_path / "half")


def test_a_failed_save_in_the_background_of_four_ranks(tmp_path):
    folder = tmp_path / "continued"
    of_ranks = on_ranks(lambda: failing(folder, MIXED, "continue", async_save=True, save_full_weights=False))
    assert [seen.result for seen in of_ranks] == [1] * 4
    check_checkpoints(folder, "checkpoint-1", "checkpoint-3")
    check_exported(folder / "checkpoint-3", of_ranks[0], tmp_path / "half")


def test_the_commands_say_what_is_wrong(runs, tmp_path, capsys):
    folder, _ = runs
    assert main(["checkpoint", "verify", str(folder / "background")]) == 1
    printed = capsys.readouterr().out
    assert "checkpoint-2: complete" in printed and "checkpoint-3: parallel_state/" in printed
    assert main(["checkpoint", "inspect", str(folder / "background" / "checkpoint-2")]) == 0
    printed = capsys.readouterr().out
    model = FAMILIES["llama"].build()
    assert "step 2, written by" in printed and "optimizer.exp_avg_sq" in printed
    assert str(sum(parameter.numel() for parameter in model.parameters())) in printed
    for arguments in (
        ["inspect", str(tmp_path)],
        ["export", str(folder / "background" / "checkpoint-3"), str(tmp_path / "new")],
        ["export", str(folder / "background" / "checkpoint-2"), str(folder)],
    ):
        assert main(["checkpoint", *arguments]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
