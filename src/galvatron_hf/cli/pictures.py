# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads what draws pictures, for the commands that draw."""

from __future__ import annotations

from types import ModuleType

from galvatron_hf.utils.drawing import drawing


def loaded(module: str) -> ModuleType:
    """Returns a module of `galvatron_hf.plots`; raises ValueError in one sentence if matplotlib is missing."""
    try:
        return drawing(module)
    except ImportError as error:
        raise ValueError(str(error)) from None
