# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the files that describe a model and its adapters, without importing PyTorch."""

from __future__ import annotations

import os
from pathlib import Path


def adapter_file(folder: str | os.PathLike) -> Path:
    """Returns the path of the file that describes a folder's adapters; raises `ValueError` if there is none."""
    path = Path(folder, "adapter_config.json")
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} has no adapter_config.json; give a folder that PEFT has written.")
    return path


def config_file(source: str | os.PathLike) -> Path | None:
    """Returns the path of a model's `config.json`, given that or its folder; None if there is none on this disk."""
    path = Path(source, "config.json") if os.path.isdir(source) else Path(source)
    return path if os.path.isfile(path) else None  # a path that is too long is no file either
