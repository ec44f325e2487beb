# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the profiles that counting makes, so that the next command about the same model need not trace it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.utils.versions import versions_of


MOST_KEPT = 200  # profiles; those that were not used for longest make room


def kept_trace(folder: Path, circumstances: Mapping[str, Any], make: Callable[[], ModelProfile]) -> ModelProfile:
    """Returns the profile that is kept in a folder for these circumstances, or makes and keeps one. Another release of
    PyTorch, transformers or PEFT, or other source files of this package, make a new one. A folder that cannot be
    written keeps nothing.

    Args:
        folder (`Path`): created if it is missing.
        circumstances (`Mapping`): all that `make` depends on, as JSON values.
        make (`Callable`): counts a model.
    """
    releases = versions_of(("torch", "transformers", "peft"))
    text = json.dumps([dict(circumstances), releases, _source_digest()], sort_keys=True, default=str)
    path = folder / f"trace-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(ValueError, OSError):
        profile = ModelProfile.from_json(path)
        path.touch()
        return profile
    profile = make()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        profile.to_json(path)
        kept = sorted(folder.glob("trace-*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in kept[MOST_KEPT:]:
            old.unlink()
    return profile


@functools.cache
def _source_digest() -> str:
    """Returns a digest of the source of this package."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
