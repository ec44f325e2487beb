# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: its files with their sizes and checksums. It is written last: a folder that has one
was written completely. It is read first: a truncated or changed file is found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.validation import check_fields, check_int, show


MANIFEST_NAME = "manifest.json"
VERSION = 1
MAX_FILES = 100_000

_FIELDS = ("version", "step", "plan", "versions", "files", "sha256")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """Holds a file's size in bytes and its hexadecimal digest, as `sha256sum` prints it."""

    size: int
    sha256: str

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> FileEntry:
        """Reads a file and computes its entry."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(size=file.tell(), sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes the content of a complete checkpoint.

    Args:
        step (`int`): optimizer steps before the checkpoint.
        files (`Mapping[str, FileEntry]`): every file but the manifest, by its path below the checkpoint with slashes.
        plan (`dict`, *optional*): the plan under which it was written, as JSON.
        versions (`dict[str, str]`): versions of the libraries that wrote it.
    """

    step: int
    files: Mapping[str, FileEntry]
    plan: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | os.PathLike) -> Manifest:
        """Reads and checks the manifest of a checkpoint, not its files; refuses a folder without a valid manifest."""
        path = Path(folder) / MANIFEST_NAME
        raw = read_object(path, "manifest")
        try:
            return cls._from_json(raw)
        except ValueError as error:
            raise ValueError(f"{path} is not a manifest: {error}") from None

    @classmethod
    def _from_json(cls, raw: dict[str, Any]) -> Manifest:
        check_fields("the manifest", raw, _FIELDS, required=_FIELDS)
        if type(raw["version"]) is not int or raw["version"] != VERSION:
            raise ValueError(f"version is {show(raw['version'])}, and only {VERSION} is known: update galvatron-hf")
        check_int("step", raw["step"], low=0, high=2**62)
        for name, kind in (("files", dict), ("versions", dict), ("plan", (dict, type(None)))):
            if not isinstance(raw[name], kind):
                raise ValueError(f"{name} is {show(raw[name])}, which is not an object: use another checkpoint")
        if len(raw["files"]) > MAX_FILES:
            raise ValueError(f"files has {len(raw['files'])} entries, above {MAX_FILES}: use another checkpoint")
        files = {_checked_name(name): _entry(name, entry) for name, entry in raw["files"].items()}
        versions = {str(name): str(version) for name, version in raw["versions"].items()}
        manifest = cls(step=raw["step"], files=files, plan=raw["plan"], versions=versions)
        if raw["sha256"] != manifest.checksum():
            raise ValueError("it was changed after it was written (its own checksum differs): use another checkpoint")
        return manifest

    def checksum(self) -> str:
        """Returns the hexadecimal SHA-256 of the content, as JSON with sorted names and no spaces."""
        content = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the manifest as text, one file a line, with its own checksum last."""
        files = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps({'size': entry.size, 'sha256': entry.sha256})}"
            for name, entry in sorted(self.files.items())
        )
        head = {"version": VERSION, "step": self.step, "plan": self.plan, "versions": self.versions}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        return "{\n" + ",\n".join(lines) + f',\n  "files": {{\n{files}\n  }},\n  "sha256": "{self.checksum()}"\n}}\n'

    def misplaced(self, folder: str | os.PathLike, whole: Iterable[str] = ()) -> Iterator[str]:
        """Yields files that are missing, have another size, or are not in the manifest. The manifest must list all
        files of the folders `whole`, because all are read.
        """
        root = Path(folder)
        for name, entry in sorted(self.files.items()):
            status = _plain_file(root, name)
            if status is None:
                yield f"{name} is missing, or is not a plain file"
            elif status.st_size != entry.size:
                yield f"{name} has {status.st_size} bytes instead of {entry.size}"
        for part in whole:
            for path in sorted((root / part).rglob("*")):
                name = path.relative_to(root).as_posix()
                if name not in self.files and not (path.is_dir() and not path.is_symlink()):
                    yield f"{name} is not in the manifest"

    def changed(self, folder: str | os.PathLike, part: int = 0, parts: int = 1) -> Iterator[str]:
        """Yields files with another checksum; reads every `parts`-th file from number `part` on."""
        for name in sorted(self.files)[part::parts]:
            try:
                found = FileEntry.from_file(Path(folder) / name)
            except OSError as error:
                yield f"{name} cannot be read ({error.strerror})"
                continue
            if found != self.files[name]:
                yield f"{name} has the checksum {found.sha256[:12]}... instead of {self.files[name].sha256[:12]}..."


def _plain_file(root: Path, name: str) -> os.stat_result | None:
    """Returns the status of a regular file whose path has no links, else None."""
    path = root
    for part in PurePosixPath(name).parts[:-1]:
        path = path / part
        if path.is_symlink():
            return None
    try:
        status = os.lstat(root / name)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _checked_name(name: str) -> str:
    """Returns a path that stays below the checkpoint and has one spelling only; refuses any other."""
    path = PurePosixPath(name)
    escapes = path.is_absolute() or ".." in path.parts or not path.parts
    if escapes or str(path) != name or "\\" in name or not name.isprintable() or len(name) > 1024:
        raise ValueError(f"files names {show(name)}, which is not a plain path below it: use another checkpoint")
    if name == MANIFEST_NAME:
        raise ValueError("files names the manifest itself: use another checkpoint")
    return name


def _entry(name: str, raw: Any) -> FileEntry:
    if not isinstance(raw, dict):
        raise ValueError(f"the entry of {show(name)} is {show(raw)}, which is not an object: use another checkpoint")
    check_fields(f"the entry of {show(name)}", raw, ("size", "sha256"), required=("size", "sha256"))
    check_int(f"size of {show(name)}", raw["size"], low=0, high=2**62)
    if not isinstance(raw["sha256"], str) or not _SHA256.fullmatch(raw["sha256"]):
        raise ValueError(
            f"sha256 of {show(name)} is {show(raw['sha256'])}, which is not a SHA-256 digest: use another checkpoint"
        )
    return FileEntry(size=raw["size"], sha256=raw["sha256"])
