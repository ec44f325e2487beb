# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer treats every element by itself, so that its step on shards is its step on the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


_SHAPE, _STEPS = (6, 8), 3


def check_elementwise(optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Tries an optimizer on a small matrix and on its pieces. ValueError if the pieces take other steps, or if it does
    not run.
    """
    name = optimizer_class.__name__
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(_STEPS + 1, *_SHAPE, generator=draw, dtype=torch.float64).unbind()
    try:
        whole = _steps(optimizer_class, options, start, gradients)
        pieces = [(slice(0, 2), slice(None)), (slice(2, None), slice(0, 3)), (slice(2, None), slice(3, None))]
        equal = all(
            torch.allclose(
                _steps(optimizer_class, options, start[piece], [one[piece] for one in gradients]),
                whole[piece],
                rtol=1e-6,
                atol=1e-9,
            )
            for piece in pieces
        )
    except Exception as error:
        raise ValueError(
            f"{name} cannot be tried on a small weight ({type(error).__name__}: {error}), so it is not known to treat "
            "every element by itself; use another optimizer, or override create_optimizer."
        ) from error
    if not equal:
        raise ValueError(
            f"{name} does not treat every element by itself, so it cannot step on shards; use one that does, such as "
            "torch.optim.AdamW."
        )


def _steps(optimizer_class, options: Mapping[str, Any], start: torch.Tensor, gradients) -> torch.Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = optimizer_class([weight], **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()
