# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Manifests and folders: what is complete, what is damaged, what is deleted, and what hostile files can do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_hf.checkpoint import folder as folders
from galvatron_hf.checkpoint.folder import (
    STATE_FOLDER,
    by_step,
    commit,
    finish_renaming,
    left_behind,
    problems,
    prune,
    start,
    unfinished,
)
from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from galvatron_hf.plan import ParallelPlan
from plan_inputs import JSON_VALUES, QUICK


FILES = {
    "config.json": b"{}",
    "weights.safetensors": bytes(range(256)) * 40,
    f"{STATE_FOLDER}/shard.safetensors": b"x",
}


def write(checkpoint: Path, files: dict[str, bytes] = FILES) -> Path:
    """Writes a complete checkpoint of these files."""
    made = start(checkpoint)
    for name, content in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(content)
    step = int(checkpoint.name.rsplit("-")[-1])
    plan = json.loads(ParallelPlan.uniform(4, 2).to_json())
    commit(checkpoint, Manifest(step=step, files={}, plan=plan, versions={"torch": "2"}), {})
    return checkpoint


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_manifest_says_what_other_tools_say(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-7")
    manifest = Manifest.read(checkpoint)
    assert manifest.step == 7 and ParallelPlan.from_json(manifest.plan) == ParallelPlan.uniform(4, 2)
    assert set(manifest.files) == set(FILES)
    for name, entry in manifest.files.items():
        printed = subprocess.run(["sha256sum", checkpoint / name], capture_output=True, text=True, check=True).stdout
        assert (entry.size, entry.sha256) == (len(FILES[name]), printed.split()[0])
    assert problems(checkpoint) == [] and left_behind(tmp_path) == []


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_a_flipped_bit_is_found(tmp_path, position):
    checkpoint = write(tmp_path / "checkpoint-1")
    content = bytearray(FILES["weights.safetensors"])
    content[position] ^= 1
    (checkpoint / "weights.safetensors").write_bytes(content)
    (problem,) = problems(checkpoint)
    assert problem.startswith("weights.safetensors has the checksum " + hashlib.sha256(content).hexdigest()[:12])


def test_files_cut_short_missing_added_and_linked_are_found(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-1")
    weights, shard = checkpoint / "weights.safetensors", checkpoint / STATE_FOLDER / "shard.safetensors"
    os.truncate(weights, 100)
    assert problems(checkpoint) == ["weights.safetensors has 100 bytes instead of 10240"]
    weights.unlink()
    assert problems(checkpoint) == ["weights.safetensors is missing, or is not a plain file"]
    weights.symlink_to(write(tmp_path / "checkpoint-2") / "weights.safetensors")
    assert problems(checkpoint) == ["weights.safetensors is missing, or is not a plain file"]
    weights.unlink()
    weights.write_bytes(FILES["weights.safetensors"])
    (checkpoint / "notes.txt").write_text("beside what is loaded")
    assert problems(checkpoint) == []
    (shard.parent / "more.safetensors").write_bytes(b"would be loaded")
    assert problems(checkpoint) == [f"{STATE_FOLDER}/more.safetensors is not in the manifest"]
    (shard.parent / "more.safetensors").unlink()
    shard.parent.rename(tmp_path / "elsewhere")
    (checkpoint / STATE_FOLDER).symlink_to(tmp_path / "elsewhere")
    assert problems(checkpoint)[0] == f"{STATE_FOLDER}/shard.safetensors is missing, or is not a plain file"


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../checkpoint-2/a", "a/../../b", "a//b", "./a", "a\\b", "a\nb", "", "manifest.json", "a" * 2000],
)
def test_paths_that_escape_are_refused(tmp_path, name):
    checkpoint = write(tmp_path / "checkpoint-1")
    raw = json.loads((checkpoint / MANIFEST_NAME).read_text())
    raw["files"][name] = raw["files"]["config.json"]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(raw))
    (problem,) = problems(checkpoint)
    assert "is not a manifest" in problem and "\n" not in problem


@QUICK
@given(st.data())
def test_mutated_manifests_are_a_manifest_or_one_line(tmp_path_factory, data):
    """Replaces or removes a value of a manifest: it stays a manifest or is refused in one line."""
    checkpoint = tmp_path_factory.getbasetemp() / "fuzzed" / "checkpoint-1"
    if not checkpoint.exists():
        write(checkpoint)
    raw = json.loads(Manifest(step=1, files={"a": FileEntry(3, "0" * 64)}, plan={}, versions={"b": "1"}).to_json())
    node, key = raw, data.draw(st.sampled_from(sorted(raw)))
    while isinstance(node[key], dict) and node[key] and data.draw(st.booleans()):
        node, key = node[key], data.draw(st.sampled_from(sorted(node[key])))
    if data.draw(st.booleans()):
        node[key] = data.draw(JSON_VALUES)
    else:
        del node[key]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(raw))
    for problem in problems(checkpoint):
        assert "\n" not in problem and len(problem) < 600


def test_a_manifest_with_any_bit_changed_is_refused(tmp_path):
    """Changes each bit, also where the text stays JSON: another step or plan is as wrong as another file."""
    path = write(tmp_path / "checkpoint-1") / MANIFEST_NAME
    whole = path.read_bytes()
    assert problems(path.parent) == []
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            Manifest.read(path.parent)
        except ValueError:
            continue
        assert changed.split() == whole.split(), changed  # one white space for another


@QUICK
@given(st.binary(max_size=400))
def test_any_bytes_for_a_manifest_are_refused_in_one_line(tmp_path_factory, content):
    checkpoint = tmp_path_factory.getbasetemp() / "fuzzed" / "checkpoint-2"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / MANIFEST_NAME).write_bytes(content)
    (problem,) = problems(checkpoint)
    assert "\n" not in problem and len(problem) < 600


def test_a_manifest_of_another_version_or_too_large_is_refused(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-1")
    raw = json.loads((checkpoint / MANIFEST_NAME).read_text())
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(raw | {"version": 2}))
    assert "version is 2" in problems(checkpoint)[0]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(raw | {"plan": {"a": "b" * (17 * 2**20)}}))
    assert "above the limit" in problems(checkpoint)[0]


def test_whatever_commit_is_killed_in_a_named_checkpoint_is_whole(tmp_path, monkeypatch):
    """Fails at each call to the system in turn, over a checkpoint of the same name and an older one."""
    calls = ["fsync", "replace", "rename", "rmtree"]

    class Killed(BaseException):
        pass

    reached = 0
    for fault in range(100):
        run_dir = tmp_path / str(fault)
        older = write(run_dir / "checkpoint-1")
        replaced = write(run_dir / "checkpoint-2", FILES | {"config.json": b"old"})
        count = 0

        def counted(real, fault=fault):
            def call(*args, **kwargs):
                nonlocal count
                if count == fault:
                    raise Killed
                count += 1
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                owner = folders.shutil if name == "rmtree" else os
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                write(replaced, FILES | {"config.json": b"new"})
            except Killed:
                reached += 1
            else:
                break
        assert problems(older) == []
        assert not replaced.exists() or problems(replaced) == []
        finish_renaming(run_dir)
        assert problems(replaced) == []
    assert reached > 10
    assert (replaced / "config.json").read_bytes() == b"new" and left_behind(replaced.parent) == []


def test_an_unfinished_checkpoint_is_none_and_is_started_anew(tmp_path):
    (start(tmp_path / "checkpoint-1") / "half").write_bytes(b"x")
    assert by_step(tmp_path) == [] and left_behind(tmp_path) == [unfinished(tmp_path / "checkpoint-1")]
    assert set(Manifest.read(write(tmp_path / "checkpoint-1")).files) == set(FILES)


def test_pruning_keeps_the_newest_complete_ones_and_the_best(tmp_path):
    for step in (1, 2, 3, 10):
        write(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-11").mkdir()  # somebody else's, or damaged
    (tmp_path / "deleted-checkpoint-0").mkdir()
    start(tmp_path / "checkpoint-12")
    prune(tmp_path, 2, keep=[tmp_path / "checkpoint-1"])
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-10", "checkpoint-11"}
    prune(tmp_path, 1)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-11"}
    for limit in (None, 0, 1):
        prune(tmp_path, limit)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-11"}


def test_the_newest_complete_checkpoint_is_kept_where_newer_ones_are_damaged(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / "config.json").unlink()
    prune(tmp_path, 1)
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3"}


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    write(tmp_path / "checkpoint-1")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        write(tmp_path / "checkpoint-2")
    assert [path.name for path in by_step(tmp_path)] == ["checkpoint-1"] and problems(tmp_path / "checkpoint-1") == []
