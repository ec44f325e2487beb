# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Position embeddings that count positions themselves: a rank that has a piece of a sequence takes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from galvatron_hf.parallel.activation.micro_batch import TokenStream
from galvatron_hf.plan.layout import Rectangle


if TYPE_CHECKING:
    from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch


def count_from_own_position(
    module: nn.Module, current: CurrentMicroBatch, stack: str, rectangle_of: Callable[[], Rectangle]
) -> None:
    """Makes a module compute the position embeddings of whole sequences, and return those of this rank's positions.
    Its first argument is the shape [B, S] of tokens, the tokens, or another tensor [B, S].
    """
    original = module.forward

    def forward(first: Any, *others: Any, **options: Any) -> torch.Tensor:
        stream, own = current.value.streams[stack], rectangle_of()
        if own.shape[1] == stream.length:
            return original(first, *others, **options)
        options.pop("position_ids", None)
        whole = original(_of_whole(first, stream, own), *(_of_whole(one, stream, own) for one in others), **options)
        return whole[..., own.position_start : own.position_stop, :]

    module.forward = forward


def _of_whole(argument: Any, stream: TokenStream, own: Rectangle) -> Any:
    """Returns an argument for whole sequences. Of tensors other than tokens only the shape counts."""
    if isinstance(argument, torch.Tensor) and argument.ndim > 1:
        if argument.ndim == 2 and not argument.is_floating_point():
            return stream.input_ids[own.row_start : own.row_stop]
        return argument.new_zeros(()).expand(argument.shape[0], stream.length, *argument.shape[2:])
    if isinstance(argument, tuple) and len(argument) > 1:
        return torch.Size((argument[0], stream.length, *argument[2:]))
    return argument
