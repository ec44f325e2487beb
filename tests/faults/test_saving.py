# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ranks, disks and files that fail around a save: what has a checkpoint's name is whole, and the run goes on."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import Job

from faults import fail_at
from galvatron_hf.checkpoint.folder import by_step, left_behind, problems
from galvatron_hf.checkpoint.manifest import Manifest


PLANS = ["layers", "pipeline"]
LIMITED = dict(save_total_limit=1)
# From the kind of fault, on which rank and in which step, to the checkpoints that are there afterwards.
KILLED = {
    "kill_before_writing": (2, ["checkpoint-2"]),
    "kill_before_checksums": (1, ["checkpoint-2"]),
    "kill_before_manifest": (0, ["checkpoint-2"]),
    "kill_before_rename": (0, ["checkpoint-2"]),
    "kill_between_rename_and_prune": (0, ["checkpoint-2", "checkpoint-4"]),
    "kill_in_prune": (0, ["checkpoint-4"]),
}
FAST = [("pipeline_of_two", "kill_in_prune", False)]
# Every kind, saved at once and in the background, and under both plans: of two ranks, but for the first kind.
CASES = [
    (PLANS[(index + background) % 2] + ("_of_two" if index else ""), kind, background)
    for index, kind in enumerate(KILLED)
    for background in (False, True)
]
CASES = [case for case in CASES if case not in FAST]


def assert_whole(job: Job, names: list[str]) -> None:
    found = by_step(job.output_dir)
    assert [path.name for path in found] == names
    assert {path.name: problems(path) for path in found} == {name: [] for name in names}


@pytest.mark.parametrize(
    "plan, kind, background", FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_rank_killed_in_a_save_costs_that_save_at_most(tmp_path, plan, kind, background, uninterrupted):
    job = Job(folder=tmp_path, plan=plan, options=LIMITED | dict(async_save=background, ddp_timeout=120))
    rank, names = KILLED[kind]
    with pytest.raises(AssertionError, match=rf"Rank {rank} failed:\nThe process died with signal 9"):
        job.fork(fail_at(rank, 4, kind))
    assert_whole(job, names)
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)
    assert_whole(job, ["checkpoint-6"])
    assert left_behind(job.output_dir) == [] and not list(job.output_dir.glob("deleted-*"))


def spoil(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[random.Random(str(path)).randrange(len(content))] ^= 0x10
        path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_no_spoiled_file_is_loaded(tmp_path, plan, uninterrupted):
    """Cuts each file of the newest checkpoint, or changes one bit of it: the checkpoint before it is taken."""
    job = Job(folder=tmp_path, plan=plan)
    with pytest.raises(AssertionError, match="this rank fails"):
        job.fork(fail_at(1, 5, "raise_in_forward"))
    newest = job.output_dir / "checkpoint-4"
    for name in [*Manifest.read(newest).files, "manifest.json"]:
        for how in ("truncated", "flipped"):
            kept = (newest / name).read_bytes()
            spoil(newest / name, how)
            assert problems(newest) != [], (name, how)
            (newest / name).write_bytes(kept)
    assert problems(newest) == []
    spoil(sorted(newest.glob("parallel_state/*.safetensors"))[-1], "flipped")
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)


@pytest.mark.slow
def test_a_job_killed_ten_times_ends_on_the_same_curve(tmp_path, plan="pipeline"):
    options = dict(max_steps=24, save_steps=1, save_total_limit=2, async_save=True)
    whole = Job(folder=tmp_path / "whole", plan=plan, options=options | dict(save_strategy="no"))
    whole.fork()
    job, moments = Job(folder=tmp_path / "killed", plan=plan, options=options), random.Random(plan)
    reached = []
    for _ in range(10):
        # In some moment of a step, of a save, or of the way back into training.
        resume = True if by_step(job.output_dir) else None
        job.fork_and_kill(moments.randrange(5), moments.uniform(0.0, 0.5), resume=resume)
        found = by_step(job.output_dir)
        assert {path.name: problems(path) for path in found} == {path.name: [] for path in found}
        reached.append(max((int(path.name.rsplit("-")[-1]) for path in found), default=0))
    assert reached == sorted(reached) and len(set(reached)) > 3, reached
    job.fork(resume=True)
    assert job.logs() == whole.logs()
    assert len(whole.logs()) == 24


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Returns a folder on a file system with room for one checkpoint of the job and not for two."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here ({mounted.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_full_disk_stops_training_and_keeps_the_earlier_checkpoint(small_disk, plan, uninterrupted):
    job = Job(folder=small_disk.parent, plan=plan)
    with pytest.raises(AssertionError, match=r"SaveError: .*No space left on device"):
        job.fork()
    assert_whole(job, ["checkpoint-2"])
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)
    assert_whole(job, ["checkpoint-2", "checkpoint-4", "checkpoint-6"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_training_goes_on_without_room(small_disk, plan, background, uninterrupted):
    job = Job(folder=small_disk.parent, plan=plan, options=dict(on_save_failure="continue", async_save=background))
    job.fork()
    assert job.logs() == uninterrupted(plan)
    assert_whole(job, ["checkpoint-2"])
    assert left_behind(job.output_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_that_becomes_read_only(small_disk, policy, uninterrupted):
    job = Job(folder=small_disk.parent, plan="layers", options=dict(on_save_failure=policy))
    fault = fail_at(0, 3, "read_only_disk")
    if policy == "continue":
        job.fork(fault)
        assert job.logs() == uninterrupted("layers")
    else:
        with pytest.raises(AssertionError, match=r"SaveError: .*Read-only file system"):
            job.fork(fault)
    assert_whole(job, ["checkpoint-2"])
