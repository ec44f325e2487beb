# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Position embeddings that count positions themselves: a rank that has a piece of a sequence takes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch, TokenStream
from galvatron_hf.plan.layout import Rectangle


def count_from_own_position(
    module: nn.Module, current: CurrentMicroBatch, stack: str, rectangle_of: Callable[[], Rectangle]
) -> None:
    """Makes a module compute the position embeddings of whole sequences, and return those of this rank's positions.
    Its first argument is the shape [B, S] of tokens, the tokens, or another tensor [B, S].
    """
    original = module.forward

    def forward(first: Any, *others: Any, **options: Any) -> torch.Tensor:
        if current.whole_rows:
            return original(first, *others, **options)
        stream, own = current.value.streams[stack], rectangle_of()
        if stream.documents is not None:
            return _of_documents(original, (first, *others), options, stream, own)
        if own.shape[1] == stream.length:
            return original(first, *others, **options)
        options.pop("position_ids", None)
        whole = original(_of_whole(first, stream, own), *(_of_whole(one, stream, own) for one in others), **options)
        return whole[..., own.position_start : own.position_stop, :]

    module.forward = forward


def _of_documents(
    original: Callable, arguments: tuple, options: dict[str, Any], stream: TokenStream, own: Rectangle
) -> torch.Tensor:
    """Returns the position embeddings [1, own T, H] of documents, out of those of a row as long as the longest."""
    positions = stream.position_ids[0, own.position_start : own.position_stop]
    longest = stream.documents.longest
    options.pop("position_ids", None)
    whole = original(*(_of_row(one, longest) for one in arguments), **options)
    return whole.view(longest, whole.shape[-1])[positions][None]


def _of_row(argument: Any, length: int) -> Any:
    """Returns an argument for one row of some length; the values of tensors do not count."""
    if isinstance(argument, torch.Tensor) and argument.ndim > 1:
        return argument.new_zeros(()).expand(1, length, *argument.shape[2:])
    if isinstance(argument, tuple) and len(argument) > 1:
        return torch.Size((1, length, *argument[2:]))
    return argument


def _of_whole(argument: Any, stream: TokenStream, own: Rectangle) -> Any:
    """Returns an argument for whole sequences. Of tensors other than tokens only the shape counts."""
    if isinstance(argument, torch.Tensor) and argument.ndim > 1:
        if argument.ndim == 2 and not argument.is_floating_point():
            return stream.input_ids[own.row_start : own.row_stop]
        return argument.new_zeros(()).expand(argument.shape[0], stream.length, *argument.shape[2:])
    if isinstance(argument, tuple) and len(argument) > 1:
        return torch.Size((argument[0], stream.length, *argument[2:]))
    return argument
