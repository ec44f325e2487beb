# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The registered attention function: the layer's own kernel between the exchanges of its strategy."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from galvatron_hf.models.llama4 import counts_positions, cuts_chunks
from galvatron_hf.parallel.activation.documents import DocumentBounds, HeldDocuments
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch
from galvatron_hf.parallel.comm.collectives import exchange
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.comm.transfers import Transfers
from galvatron_hf.parallel.layers.shared_attention import attention_of_held
from galvatron_hf.parallel.layers.tensor_parallel import set_key_value_groups
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.plan.resolved import ResolvedLayer
from galvatron_hf.utils.compat import attention_implementation, set_attention_implementation, set_parameter_tensor


IMPLEMENTATION = "galvatron"

BIAS = "position_bias"
POSITIONS = ("position_ids", "cache_position")  # attention by document needs the bounds alone


@dataclass(frozen=True, kw_only=True)
class ParallelAttention:
    """Holds the strategy's part of one attention module, which has it as its attribute `parallel_attention`.

    Attributes:
        kernel (`Callable`): the attention function the model was configured with (sdpa, eager, flash_attention_2...).
        ulysses_group (`ProcessGroup`, *optional*): the `ulysses_degree` ranks that hold the position pieces of one
            sequence.
        key_value_copies (`int`): how often each key/value head is repeated before the exchange.
        dropout_stream (`Callable[[], ContextManager]`): the stream for attention dropout, one per shard of heads.
        document_bounds (`Callable[[], DocumentBounds | HeldDocuments | None]`): returns the bounds of packed
            documents, or what the rank has of them if ranks share some, None for rows that are not packed; called once
            for each call of the attention.
        transfers (`Callable[[], Transfers | None]`): returns the messages between ranks that may share documents.
        kept_rings (`Callable[[], dict | None]`): returns where outputs of rings are kept for a recompute, if they are.
        current ([`CurrentMicroBatch`], *optional*): says whether rows are whole, and nothing is exchanged.
        read_bounds (`Callable`, *optional*): returns the bounds of the documents of the stack whose output gives the
            keys, if that is another one; there is no bias of scores then.
        per_head (`tuple[str, ...]`): parameters of the module with one entry for each head of the tensor rank.
        first_head (`int`): the first of the tensor rank's heads.
        counts_from_row (`bool`): whether the module counts positions from the first of a row, so that documents may
            not be packed. It is found once: a compiled layer that looked would be compiled for each layer.
    """

    kernel: Callable
    ulysses_group: dist.ProcessGroup | None
    ulysses_degree: int
    key_value_copies: int
    dropout_stream: Callable[[], contextlib.AbstractContextManager]
    document_bounds: Callable[[], DocumentBounds | HeldDocuments | None]
    transfers: Callable[[], Transfers | None]
    kept_rings: Callable[[], dict | None]
    counts_from_row: bool
    per_head: tuple[str, ...] = ()
    read_bounds: Callable[[], DocumentBounds | None] | None = None
    current: CurrentMicroBatch | None = None
    first_head: int = 0

    @property
    def on_whole_rows(self) -> bool:
        return self.current is not None and self.current.whole_rows


def configured_kernel(module: nn.Module, implementation: str) -> Callable:
    """Returns the attention function with the name `implementation`; for `eager` that of the module's family."""
    eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)


def attach_attention(
    module: nn.Module,
    resolved: ResolvedLayer,
    mesh: StageMesh,
    dropout_stream: Callable[[], contextlib.AbstractContextManager],
    document_bounds: Callable[[], DocumentBounds | HeldDocuments | None],
    kept_rings: Callable[[], dict | None],
    per_head: tuple[str, ...] = (),
    read_bounds: Callable[[], DocumentBounds | None] | None = None,
    current: CurrentMicroBatch | None = None,
) -> None:
    """Makes an attention module call [`galvatron_attention`], which calls the module's configured kernel. The module
    is changed in place; `dropout_stream`, `document_bounds`, `kept_rings`, `per_head`, `read_bounds` and `current` are
    those of [`ParallelAttention`].
    """
    set_key_value_groups(module, resolved.heads.query, resolved.heads.sent_key_value)
    module.parallel_attention = ParallelAttention(
        kernel=configured_kernel(module, attention_implementation(module.config)),
        ulysses_group=mesh.group(resolved.ulysses),
        ulysses_degree=resolved.ulysses.size,
        key_value_copies=resolved.heads.copies,
        dropout_stream=dropout_stream,
        document_bounds=document_bounds,
        kept_rings=kept_rings,
        transfers=functools.cache(lambda: mesh.transfers(resolved.data_ranks)),
        counts_from_row=counts_positions(module) or cuts_chunks(module),
        per_head=tuple(name for name in per_head if name in dict(module.named_parameters(recurse=False))),
        read_bounds=read_bounds,
        current=current,
        first_head=mesh.index % resolved.strategy.tensor * resolved.heads.query,
    )
    module.config = copy.copy(module.config)
    set_attention_implementation(module.config, IMPLEMENTATION)


def galvatron_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention of one layer under its strategy. With Ulysses (arXiv 2309.14509) a rank has all its heads for
    one piece of the positions. It exchanges them for some heads over all positions, runs the kernel, and exchanges the
    output back. Packed documents never attend to each other.

    Args:
        module (`nn.Module`): the attention module, with `parallel_attention` attached.
        query (`torch.Tensor`): [B, heads, S or S/ulysses, D].
        key, value (`torch.Tensor`): [B, key/value heads, S or S/ulysses, D].
        attention_mask (`torch.Tensor`, *optional*): mask of the kernel's kind, for the rows of the query and all S
            positions.
        dropout (`float`): probability of dropping an attention weight.

    Returns:
        `tuple`: the output [B, S or S/ulysses, heads, D] and None (weights are never returned).

    Raises:
        ValueError: for packed documents in a family whose attention takes other options than windows and soft-caps.
    """
    parallel: ParallelAttention = module.parallel_attention
    group, degree = parallel.ulysses_group, parallel.ulysses_degree
    if parallel.read_bounds is not None:
        kwargs.pop(BIAS, None)
    if parallel.on_whole_rows:
        return _attend_on_whole_rows(module, query, key, value, attention_mask, dropout=dropout, **kwargs), None
    if degree > 1:
        if parallel.key_value_copies > 1:
            key, value = (states.repeat_interleave(parallel.key_value_copies, dim=1) for states in (key, value))
        query, key, value = exchange((query, key, value), 1, 2, group)
    attend = _attend if dropout == 0.0 else _attend_with_dropout
    if degree > 1 and parallel.per_head:
        with _own_heads(module, kwargs) as given:
            output = attend(module, query, key, value, attention_mask, dropout=dropout, **given)
    else:  # not in a context that does nothing: torch.compile cannot break a graph in it
        output = attend(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    if degree > 1:
        (output,) = exchange((output,), 1, 2, group)
        output = output.contiguous()  # some families view it
    return output, None


def _attend_on_whole_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> torch.Tensor:
    """Computes attention of the tensor rank's heads; the keys and values may be those of a cache. A bias of scores may
    be that of all heads.
    """
    parallel: ParallelAttention = module.parallel_attention
    bias, heads = kwargs.get(BIAS), query.shape[1]
    if bias is not None and bias.shape[1] not in (1, heads):
        kwargs[BIAS] = bias[:, parallel.first_head : parallel.first_head + heads]
    groups = vars(module).get("num_key_value_groups")
    set_key_value_groups(module, heads, key.shape[1])
    try:
        return parallel.kernel(module, query, key, value, attention_mask, **kwargs)[0]
    finally:
        if groups is not None:
            module.num_key_value_groups = groups


@contextlib.contextmanager
def _own_heads(module: nn.Module, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Has parameters with one entry for each head of the tensor rank show those of the heads that this rank computes
    while the body runs, in the module and in the options `given` to its attention function, which are returned. Their
    gradients are sums over Ulysses ranks, as those of all weights are.
    """
    parallel: ParallelAttention = module.parallel_attention
    whole = {name: getattr(module, name) for name in parallel.per_head}
    degree, index = parallel.ulysses_degree, parallel.ulysses_group.rank()
    own = {name: weight.chunk(degree)[index] for name, weight in whole.items()}
    for name, weight in own.items():
        set_parameter_tensor(module, name, weight)
    try:
        yield {
            option: next((own[name] for name, weight in whole.items() if weight is value), value)
            for option, value in given.items()
        }
    finally:
        for name, weight in whole.items():
            set_parameter_tensor(module, name, weight)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    **kwargs,
) -> torch.Tensor:
    """Computes attention of a rank's own heads over all positions, see [`galvatron_attention`]."""
    parallel: ParallelAttention = module.parallel_attention
    bounds = parallel.document_bounds()
    if bounds is None:
        return parallel.kernel(module, query, key, value, attention_mask, dropout=dropout, **kwargs)[0]
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} makes an attention mask of its own, which attention by document does not "
            "support; train with packing='none'."
        )
    options = _document_options(module, kwargs)
    if isinstance(bounds, HeldDocuments):
        options |= {"dropout": dropout, "kept": parallel.kept_rings()}
        return attention_of_held(query, key, value, bounds, parallel.transfers(), **options)
    if parallel.read_bounds is not None:
        options |= {"key_bounds": parallel.read_bounds(), "causal": False}
    return attention_by_document(query, key, value, bounds, dropout=dropout, **options)


@torch.compiler.disable(reason="a keyed random stream sets the state of a generator")
def _attend_with_dropout(module: nn.Module, *args: torch.Tensor | None, **kwargs) -> torch.Tensor:
    with module.parallel_attention.dropout_stream():
        return _attend(module, *args, **kwargs)


def is_causal(module: nn.Module, given: dict[str, Any]) -> bool:
    """Returns whether attention without a mask is causal, from the options `given` to its function or its module."""
    causal = given.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _document_options(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a family's attention as arguments of [`attention_by_document`]."""
    known = (*POSITIONS, BIAS)
    unknown = [name for name, value in given.items() if isinstance(value, torch.Tensor) and name not in known]
    if unknown:
        raise ValueError(
            f"{type(module).__name__} gives its attention {unknown[0]!r}, which attention by document does not "
            "support; train with packing='none'."
        )
    if module.parallel_attention.counts_from_row:
        raise ValueError(
            f"{type(module).__name__} counts the positions of a row from its first, which attention by document does "
            "not support; train with packing='none'."
        )
    return {
        "causal": is_causal(module, given),
        "scale": given.get("scaling"),
        "sliding_window": given.get("sliding_window"),
        "softcap": given.get("softcap"),
        "bias": given.get(BIAS),
    }


AttentionInterface.register(IMPLEMENTATION, galvatron_attention)
