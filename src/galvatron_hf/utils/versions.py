# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Versions of installed packages, found without importing any of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages by name; "unknown" for one that is not installed, or not as a package."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
