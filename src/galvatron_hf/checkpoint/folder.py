# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Creates, completes, finds and deletes the folders of checkpoints. One process calls these functions, on a file
system that all ranks share. A checkpoint is written under another name, and renamed once it is complete. So a folder
`checkpoint-<step>` with a manifest is always complete, whichever process is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from galvatron_hf.plan.serialization import write_file


# Folder below a checkpoint of which every file is read.
STATE_FOLDER = "parallel_state"

_FINISHED = re.compile(r"checkpoint-(\d+)")
_UNFINISHED, _DELETED = "unfinished-", "deleted-"


def unfinished(checkpoint: str | os.PathLike) -> Path:
    """Returns the folder in which a checkpoint is written until it is complete, next to the checkpoint."""
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(_UNFINISHED + checkpoint.name)


def sync_folder(path: str | os.PathLike) -> None:
    """Makes the names in a folder survive a loss of power, if the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def start(checkpoint: str | os.PathLike) -> Path:
    """Creates an empty folder for a checkpoint, see [`commit`]."""
    folder = unfinished(checkpoint)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def commit(checkpoint: str | os.PathLike, manifest: Manifest, known: Mapping[str, FileEntry]) -> None:
    """Completes a checkpoint in [`unfinished`]: syncs its files, writes the manifest, and renames the folder. An
    existing checkpoint of this name is replaced. The manifest's `files` are filled in here. `known` has the files
    whose writer has synced them and computed their checksums.
    """
    checkpoint = Path(checkpoint)
    folder = unfinished(checkpoint)
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in known:
            _sync_file(path)
            files[name] = FileEntry.from_file(path)
    complete = Manifest(step=manifest.step, files=files, plan=manifest.plan, versions=manifest.versions)
    write_file(folder / MANIFEST_NAME, complete.to_json())
    sync_folder(folder)
    replaced = _set_aside(checkpoint) if checkpoint.exists() else None
    os.rename(folder, checkpoint)
    sync_folder(checkpoint.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def remove(checkpoint: str | os.PathLike) -> None:
    """Deletes a checkpoint; it is renamed first, so that a half deleted one is not taken for complete."""
    shutil.rmtree(_set_aside(Path(checkpoint)), ignore_errors=True)


def _set_aside(checkpoint: Path) -> Path:
    doomed = checkpoint.with_name(_DELETED + checkpoint.name)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    return doomed


def prune(output_dir: str | os.PathLike, limit: int | None, keep: Iterable[str | os.PathLike | None] = ()) -> None:
    """Deletes the oldest complete checkpoints above a limit, and unfinished folders of writers that died. Must not be
    called while a checkpoint is being written. The newest complete checkpoint stays. So do folders that are not known
    to be complete checkpoints, because they may be somebody else's.

    Args:
        limit (`int`, *optional*): number of checkpoints that stay; None or 0 for all.
        keep (`Iterable`): checkpoints that always stay, such as the best one; they count.
    """
    kept = {Path(path).resolve() for path in keep if path is not None}
    for path in [*left_behind(output_dir), *Path(output_dir).glob(f"{_DELETED}checkpoint-*")]:
        shutil.rmtree(path, ignore_errors=True)
    if not limit or limit < 0:
        return
    complete = [path for path in by_step(output_dir) if not list(structural_problems(path))]
    kept |= {path.resolve() for path in complete[-1:]}
    surplus = len(complete) - max(limit, len(kept & {path.resolve() for path in complete}))
    for path in complete:
        if surplus > 0 and path.resolve() not in kept:
            remove(path)
            surplus -= 1


def by_step(output_dir: str | os.PathLike) -> list[Path]:
    """Returns the folders named `checkpoint-<step>`, the oldest step first."""
    try:
        paths = list(Path(output_dir).iterdir())
    except OSError:
        return []
    found = [(int(match[1]), path) for path in paths if (match := _FINISHED.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def left_behind(output_dir: str | os.PathLike) -> list[Path]:
    """Returns the folders of checkpoints that were never completed."""
    return sorted(Path(output_dir).glob(f"{_UNFINISHED}checkpoint-*"))


def finish_renaming(output_dir: str | os.PathLike) -> None:
    """Renames unfinished checkpoints that are complete but for their name, unless the name is taken."""
    for path in left_behind(output_dir):
        checkpoint = path.with_name(path.name.removeprefix(_UNFINISHED))
        if not checkpoint.exists() and not list(structural_problems(path)):
            with contextlib.suppress(OSError):  # it then counts as incomplete
                os.rename(path, checkpoint)
                sync_folder(checkpoint.parent)


def structural_problems(checkpoint: str | os.PathLike) -> Iterator[str]:
    """Yields the reasons why a folder is not a complete checkpoint; reads the manifest, names and sizes."""
    try:
        manifest = Manifest.read(checkpoint)
    except ValueError as error:
        yield str(error)
        return
    yield from manifest.misplaced(checkpoint, whole=[STATE_FOLDER])


def problems(checkpoint: str | os.PathLike) -> list[str]:
    """Returns the problems of a checkpoint; reads all files."""
    found = list(structural_problems(checkpoint))
    return found or list(Manifest.read(checkpoint).changed(checkpoint))
