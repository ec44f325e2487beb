# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The documents of a packed row as attention takes them: with numbers that are copied to the device once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from galvatron_hf.plan.deal import PADDING, Deal, Share
from galvatron_hf.utils.device import to_device


# Lengths for which rows of documents are one batch of attention. cuDNN's kernel prepares a plan for each new shape, so
# only lengths that come again may get there.
ROW_MULTIPLE = 256


class DocumentBounds:
    """Holds the documents of a row as attention takes them.

    Attributes:
        offsets (`tuple[int, ...]`): where documents begin, and the end of the last: `0 = b_0 < ... < b_n`.
        lengths (`tuple[int, ...]`): of the documents.
        tokens, longest (`int`): the end of the last document, and the length of the longest.
        rows (`int`, *optional*): number of documents, if they are as long as each other and fit `ROW_MULTIPLE`.
    """

    def __init__(self, offsets: Iterable[int]):
        self.offsets = tuple(offsets)
        self.lengths = tuple(end - begin for begin, end in pairwise(self.offsets))
        if not self.lengths or self.offsets[0] != 0 or min(self.lengths) < 1:
            raise ValueError(
                f"Document bounds {list(self.offsets)} do not rise from 0; pass the offset where each document "
                "begins, and the number of tokens."
            )
        self.tokens, self.longest = self.offsets[-1], max(self.lengths)
        equal = self.longest == min(self.lengths) and self.longest % ROW_MULTIPLE == 0
        self.rows = len(self.lengths) if equal else None
        self._copy: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the offsets as int32 on a device; the copy is made once, and the host does not wait for it."""
        if self._copy is None or self._copy.device != device:
            self._copy = to_device(torch.tensor(self.offsets, dtype=torch.int32, device="cpu"), device)
        return self._copy


class HeldDocuments:
    """Holds the documents of one data rank of a layer, whole ones and its parts of shared ones.

    Attributes:
        share ([`Share`]): what the rank has.
        whole ([`DocumentBounds`], *optional*): its whole documents, in the share's order; None if it has none.
        longest (`int`): tokens of the longest document, all its pieces together.
        cache (`dict`): what attention has made of them.
    """

    def __init__(self, deal: Deal, share: Share):
        self.share = share
        self.whole = DocumentBounds(share.offsets) if share.whole_tokens else None
        shared = (*(one for ring in share.rings for one in ring.documents), *share.gathered, *share.exchanged)
        self.longest = max([0 if self.whole is None else self.whole.longest, *(one.length for one in shared)])
        self._copies: dict[str, torch.Tensor] = {}
        self.cache: dict[Any, Any] = {}

    def on(self, device: torch.device) -> None:
        """Copies what kernels read to a device."""
        if self.whole is not None:
            self.whole.on(device)
        if self.share.order is not None:
            self.order(device)

    def order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices that put the rank's tokens into the share's order, and those of the way back, [T]."""
        if "order" not in self._copies or self._copies["order"].device != device:
            order = torch.cat([torch.arange(*run, device="cpu") for run in self.share.order])
            self._copies["order"] = to_device(order, device)
            self._copies["inverse"] = to_device(torch.argsort(order), device)
        return self._copies["order"], self._copies["inverse"]


def held_documents(deal: Deal, data: int, index: int) -> DocumentBounds | HeldDocuments:
    """Returns the documents of data rank `index` of `data`: bounds alone if all are whole."""
    if (data, index) not in deal.cache:
        share = deal.share(data, index)
        deal.cache[data, index] = DocumentBounds(share.offsets) if share.is_whole else HeldDocuments(deal, share)
    return deal.cache[data, index]


def token_positions(deal: Deal) -> torch.Tensor:
    """Returns the position [1, positions] of each token of a row in its document, on the host."""
    starts, places, lengths = np.array([(one.start, one.at, one.length) for one in deal.pieces]).T
    return torch.from_numpy(np.arange(deal.tokens) + np.repeat(starts - places, lengths))[None]


def real_tokens(deal: Deal) -> torch.Tensor:
    """Returns 1.0 for each position of a document, 0.0 for padding: [positions] on the host."""
    real, lengths = np.array([(deal.rows[one.document] != PADDING, one.length) for one in deal.pieces]).T
    return torch.from_numpy(np.repeat(real, lengths).astype(np.float32))
