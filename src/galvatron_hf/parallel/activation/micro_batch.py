# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One micro-batch on the ranks of a stage: tokens are whole on each, hidden states follow layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask

from galvatron_hf.models.attention_masks import make_masks
from galvatron_hf.parallel.activation.documents import real_tokens
from galvatron_hf.parallel.router_loss import RouterStatistics
from galvatron_hf.plan.deal import Deal
from galvatron_hf.plan.layout import Grid, Layout, PackedRow, Rectangle
from galvatron_hf.plan.resolved import EndLayouts
from galvatron_hf.utils.compat import masks_of_rows
from galvatron_hf.utils.device import to_device


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Says what a forward pass computes.

    Attributes:
        num_items (`torch.Tensor` or `int`, *optional*): the divisor of the sum of losses.
        label_smoothing (`float`): as in [`transformers.trainer_pt_utils.LabelSmoother`].
        logits (`bool`): whether it returns full-vocabulary logits of the rank's own rows.
        whole_loss (`bool`): whether the loss is the sum over all ranks, not this rank's part.
        routers ([`RouterStatistics`], *optional*): the counts of the batch, if a loss balances its experts.
    """

    num_items: torch.Tensor | int | None = None
    label_smoothing: float = 0.0
    logits: bool = False
    whole_loss: bool = True
    routers: RouterStatistics | None = None


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Holds the tokens of one stack of layers, whole on every rank of the stage. Packed documents are one row without
    padding. Other streams are padded so that every rank has tokens in every layout. Added rows repeat the last one,
    added positions come after the real ones; neither has a target.

    Attributes:
        input_ids, attention_mask, position_ids (`torch.Tensor`): [B, S]; the mask is 1 for real tokens.
        real_rows, real_length (`int`): rows and positions that the caller gave.
        causal (`bool`): whether tokens attend to earlier ones alone.
        padded (`bool`, *optional*): whether the mask hides a position; None if only its values on the device say so.
        added_rows (`torch.Tensor`, *optional*): [real_rows], true for rows that no loss counts.
        documents ([`Deal`], *optional*): the documents of a packed row, which do not attend to each other.
        others (`dict[str, torch.Tensor]`): further inputs [B, ...] of the family's forward, by name.
        masks (`dict`): attention masks made so far.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    real_rows: int
    real_length: int
    causal: bool = True
    padded: bool | None = None
    added_rows: torch.Tensor | None = None
    documents: Deal | None = None
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    @property
    def grid(self) -> Grid | PackedRow:
        """Returns the shape [rows, positions], of which layouts are rectangles."""
        return Grid(self.rows, self.length) if self.documents is None else self.documents.grid

    def in_deal_of(self, context: int | None) -> TokenStream:
        """Returns the stream as layers of a context degree see it: its tokens in the order of their deal. It has the
        shape of ids, not their values. None is the deal of embedding and head.
        """
        if self.documents is None or context not in self.documents.others:
            return self
        if ("deal", context) not in self.masks:
            deal = self.documents.others[context]
            ids = self.input_ids.new_zeros(1, 1).expand(1, deal.tokens)
            self.masks["deal", context] = replace(
                self, input_ids=ids, position_ids=None, real_length=deal.tokens, documents=deal, others={}, masks={}
            )
        return self.masks["deal", context]

    def positions(self) -> torch.Tensor:
        """Returns position ids [1 or B, S] for all rows; added positions repeat the last real one."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.length, device=self.input_ids.device).clamp(max=self.real_length - 1)[None]

    @cached_property
    def real_tokens(self) -> torch.Tensor:
        """Returns 1.0 [B, S] for the tokens that count for a loss of all tokens, 0.0 for padding, for what was added
        to rows and for what fills packs.
        """
        if self.documents is not None:
            return to_device(real_tokens(self.documents)[None], self.input_ids.device)
        given = self.input_ids if self.attention_mask is None else self.attention_mask
        real = torch.zeros_like(given, dtype=torch.float32)
        inside = (slice(self.real_rows), slice(self.real_length))
        real[inside] = 1.0 if self.attention_mask is None else self.attention_mask[inside].to(torch.float32)
        if self.added_rows is not None:
            real[: self.real_rows].masked_fill_(self.added_rows[:, None], 0.0)
        return real

    def attention_masks(self, rectangle: Rectangle, config: PreTrainedConfig, dtype: torch.dtype):
        """Returns the family's own masks for the rows of a rectangle and all positions; None for packed documents. The
        attention implementation decides their form: a tensor, a `dict` by layer type, or None.
        """
        if self.documents is not None:
            return None
        rows = rectangle.row_start, rectangle.row_stop
        if rows not in self.masks:
            states, mask = self._shape_only(rows, self.length, dtype), _rows(self.attention_mask, *rows)
            positions = _rows(self.position_ids, *rows)
            self.masks[rows] = self._made(
                lambda: make_masks(config, causal=self.causal, states=states, mask=mask, position_ids=positions)
            )
        return self.masks[rows]

    def masks_for_readers(self, length: int, rectangle: Rectangle, config: PreTrainedConfig, dtype: torch.dtype):
        """Returns the mask with which `length` positions of another stack attend to all positions of this one, for the
        rows of a rectangle of the other's; None for packed documents.
        """
        if self.documents is not None:
            return None
        rows = rectangle.row_start, rectangle.row_stop
        if (rows, length) not in self.masks:
            given = dict(
                config=config,
                inputs_embeds=self._shape_only(rows, length, dtype),
                encoder_hidden_states=self._shape_only(rows, self.length, dtype),
                attention_mask=_rows(self.attention_mask, *rows),
            )
            self.masks[rows, length] = self._made(lambda: create_bidirectional_mask(**given))
        return self.masks[rows, length]

    def _made(self, make: Callable[[], Any]) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        with contextlib.nullcontext() if self.padded is None else masks_of_rows(padded=self.padded):
            masks = make()
        if isinstance(masks, dict):
            return {kind: self._hide_added_positions(mask) for kind, mask in masks.items()}
        return self._hide_added_positions(masks)

    def _shape_only(self, rows: tuple[int, int], length: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (rows[1] - rows[0], length, 1)
        return torch.empty((), dtype=dtype, device=self.input_ids.device).expand(shape)

    def _hide_added_positions(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Sets added positions of additive masks [B, 1, S, S] to minus infinity. The masks' lowest finite number hides
        nothing in a row that is hidden as a whole, such as the row of a left padding position. The attention of such a
        row is the mean over all positions, and its loss counts.
        """
        if self.length == self.real_length or mask is None or not mask.is_floating_point():
            return mask
        added = torch.arange(self.length, device=mask.device) >= self.real_length
        return mask.masked_fill(added, float("-inf"))


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Says where the head runs on the tokens of a packed row: in the padded rows that its documents come from.

    Attributes:
        deal ([`Deal`]): the padded rows of the whole batch, of which a micro-batch has some documents.
        layout ([`Layout`]): of the head's input.
    """

    deal: Deal
    layout: Layout

    @property
    def length(self) -> int:
        """Returns the positions of a padded row."""
        return self.deal.cuts[1]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Holds the inputs of one forward pass, whole on every rank of the stage.

    Attributes:
        streams (`Mapping[str, TokenStream]`): the tokens of each stack, in the order of the forward.
        targets (`torch.Tensor`, *optional*): [B, S] of the last stack; the token to predict at each position, -100 to
            ignore. Or those of rows, [B] or [B, C].
        ends ([`EndLayouts`]): the layouts of the embedding's output, of the head's input and between two stages.
        key (`tuple[int, ...]`): (seed, step, micro-batch), the beginning of every random stream's key.
        routings (`dict`): where choices of experts went, by layer, and whether shared experts ran meanwhile, for
            layers that are computed again.
        shared (`dict`): what several layers of the stage that runs now take: states in a layout, biases of scores.
        attended (`dict`): outputs of attention in rings, by layer, for layers that are computed again.
        read (`dict[str, torch.Tensor]`): the outputs [own rows, S, H] of stacks that others read, by the name under
            which the family returns them; set by the last stage in an evaluation that wants logits.
        head_rows ([`HeadRows`], *optional*): given if the last stage returns what the head would take, in these rows.
    """

    streams: Mapping[str, TokenStream]
    targets: torch.Tensor | None
    ends: EndLayouts
    key: tuple[int, ...]
    options: ForwardOptions
    routings: dict = field(default_factory=dict)
    attended: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    head_rows: HeadRows | None = None

    @property
    def first(self) -> TokenStream:
        return next(iter(self.streams.values()))

    @property
    def last(self) -> TokenStream:
        """Returns the stream of the stack that the head follows."""
        return next(reversed(self.streams.values()))

    @property
    def device(self) -> torch.device:
        return self.first.input_ids.device


class CurrentMicroBatch:
    """Holds the micro-batch that is computed now, in forward or recompute; one for each parallelised model. `location`
    names the part that computes, such as "layer 3", for reports of hanging ranks. While `whole_rows` is true there is
    none: the family's own forward runs on rows that no rank has pieces of, as in generation. While
    `keeps_rings` is true, layers that are computed again keep the output of attention in rings from the first time, so
    that keys and values do not go round again.
    """

    def __init__(self):
        self.keeps_rings = False
        self.value: MicroBatch | None = None
        self.location = "embedding"
        self.whole_rows = False

    @contextlib.contextmanager
    def active(self, batch: MicroBatch) -> Iterator[None]:
        outer, self.value = self.value, batch
        try:
            yield
        finally:
            self.value = outer

    @contextlib.contextmanager
    def of_whole_rows(self) -> Iterator[None]:
        """Lets the family's own forward run on whole rows while the body runs."""
        self.whole_rows = True
        try:
            yield
        finally:
            self.whole_rows = False


def mask_on_device(mask: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor | None, bool | None]:
    """Returns a mask [B, S] on a device, and whether it hides a position. The host reads a mask in its own memory,
    without waiting for the device; None if it lies elsewhere. A mask that hides nothing stays: without one, position
    ids that begin anew would mean packed documents.
    """
    if mask is None or mask.device.type != "cpu" or device.type == "cpu":
        return mask, None
    return to_device(mask, device), has_padding(mask)


def has_padding(mask: torch.Tensor) -> bool:
    """Returns whether a mask in the host's memory hides a position."""
    return not bool(mask.all())


def map_rows(batch: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Returns a batch with `change` applied to every tensor that has one row for each row of ids. Tensors with one row
    for all, as position ids and masks may have, and other values stay as they are.
    """
    rows = batch["input_ids"].shape[0]
    return {
        name: change(value) if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows else value
        for name, value in batch.items()
    }


def split_rows(batch: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yields `count` parts of a batch, whose numbers of rows differ by one at most."""
    rows = batch["input_ids"].shape[0]
    for index in range(count):
        part = slice(index * rows // count, (index + 1) * rows // count)
        yield map_rows(batch, lambda value, part=part: value[part])


def add_rows(tensor: torch.Tensor | None, rows: int, value: int | None = None) -> torch.Tensor | None:
    """Lengthens [B, ...] to `rows` rows with copies of the last one, or with `value`."""
    if tensor is None or tensor.shape[0] >= rows:
        return tensor
    extra = tensor[-1:].expand(rows - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, extra if value is None else torch.full_like(extra, value)])


def add_positions(tensor: torch.Tensor | None, length: int, value: int) -> torch.Tensor | None:
    """Lengthens [B, S] to `length` positions with `value`."""
    if tensor is None or tensor.shape[1] >= length:
        return tensor
    return F.pad(tensor, (0, length - tensor.shape[1]), value=value)


def _rows(tensor: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[start:stop]
