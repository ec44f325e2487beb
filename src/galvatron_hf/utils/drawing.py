# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads the modules of `galvatron_hf.plots` for methods of packages that the plots import."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def drawing(module: str) -> ModuleType:
    """Imports a module of `galvatron_hf.plots` by name, because that package imports the callers of this function.
    Raises ImportError in one sentence if matplotlib is missing.
    """
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            f"Pictures need matplotlib, which cannot be imported ({error}): run pip install -e '.[plots]' "
            "-c constraints.txt in the clone of the repository, or pip install matplotlib."
        ) from error
    return import_module(f"galvatron_hf.plots.{module}")
