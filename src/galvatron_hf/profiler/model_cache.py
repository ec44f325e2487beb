# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model profiles kept between runs; one that was made under other circumstances is never used silently."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from galvatron_hf.parallel.rank_objects import gather_objects
from galvatron_hf.profiler.model import circumstances, config_digest, profile_model
from galvatron_hf.profiler.model_profile import ModelProfile


logger = logging.getLogger(__name__)


def load_or_profile_model(
    folder: str | os.PathLike,
    model: PreTrainedModel,
    *,
    finish: Callable[[ModelProfile], ModelProfile] = lambda profile: profile,
    **arguments: Any,
) -> ModelProfile:
    """
    Reads the profile of a model from a folder, or measures and writes it; collective under a process group.

    What was measured is read again only for the same configuration, number format and arguments, by as many ranks, on
    the same hosts and devices with the same CPU limits and threads, PyTorch, transformers and release of this package.
    Otherwise, and if the file is broken, a sentence in the log says why the model is measured anew.

    Args:
        folder (`str` or `os.PathLike`): Of rank 0, made if it is not there.
        model ([`PreTrainedModel`]): The model.
        finish (`Callable`, *optional*): What becomes of a profile that was measured before it is kept; collective.
        **arguments: Of [`profile_model`].
    """
    expected = circumstances(model, **arguments)
    path = Path(folder) / f"model-{config_digest(model)}.json"
    first = not dist.is_initialized() or dist.get_rank() == 0
    text = _usable(path, expected) if first else None
    text = gather_objects(text)[0] if dist.is_initialized() else text
    if text is not None:
        return ModelProfile.from_json(text)
    profile = finish(profile_model(model, **arguments))
    if first:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.to_json(path)
        except OSError as error:
            logger.warning(f"The model profile cannot be kept in {path} ({error}): the next run measures again.")
    return profile


def _usable(path: Path, expected: dict[str, str]) -> str | None:
    """The text of a profile made under the same circumstances; None, and a warning if there is a file, without one."""
    if not path.exists():
        return None
    try:
        profile = ModelProfile.from_json(path)
        found = {name: profile.made.get(name, "unknown") for name in expected}
        different = [
            f"{name} {found[name]} and not {expected[name]}" for name in expected if found[name] != expected[name]
        ]
        reason = f"was made under other circumstances ({'; '.join(different)})" if different else None
    except ValueError as error:
        reason = f"cannot be used ({error})"
    if reason is None:
        return profile.to_json()
    logger.warning(f"The model profile {path} {reason}: the model is measured anew.")
    return None
