# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Takes the documents out of padded global batches, and packs them into micro-batches.
Each document keeps its tokens, targets and positions, so the sum of the losses is that of the padded batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from galvatron_hf.data.placement import Placement
from galvatron_hf.models.losses import IGNORED, NEXT_TOKEN
from galvatron_hf.parallel.activation.documents import PADDING, Documents


_PACKED = {"input_ids", "attention_mask", "position_ids", *NEXT_TOKEN.names}
# Bounds of documents for other kernels; position_ids contain the same.
BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
LONG_SEQUENCES = ("error", "truncate", "split")


class NotPackable(ValueError):
    """The rows of a batch cannot be packed without changing the result; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Holds the documents of a global batch, concatenated in the batch's order without padding.

    Attributes:
        input_ids, targets, position_ids (`torch.Tensor`): [T], int64, on the CPU; a target is the token to predict at
            a position, -100 for none.
        bounds (`np.ndarray`): [n + 1], offsets at which documents begin, and the end of the last.
        rows (`np.ndarray`): [n], the row of the global batch of each document.
        cut (`int`): number of documents that were too long.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    bounds: np.ndarray
    rows: np.ndarray
    cut: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of each document, [n]."""
        return np.diff(self.bounds)

    @classmethod
    def from_batches(cls, batches: Sequence[Mapping[str, Any]]) -> Sequences:
        """Returns the documents of all batches of a step in order, with consecutive rows. See [`unpad`]."""
        parts = [unpad(batch) for batch in batches]
        tokens = np.cumsum([0, *(part.bounds[-1] for part in parts[:-1])])
        rows = np.cumsum([0, *(len(batch["input_ids"]) for batch in batches[:-1])])
        ends = [part.bounds[1:] + start for part, start in zip(parts, tokens, strict=True)]
        return cls(
            input_ids=torch.cat([part.input_ids for part in parts]),
            targets=torch.cat([part.targets for part in parts]),
            position_ids=torch.cat([part.position_ids for part in parts]),
            bounds=np.concatenate([[0], *ends]),
            rows=np.concatenate([part.rows + start for part, start in zip(parts, rows, strict=True)]),
        )


def unpad(batch: Mapping[str, Any]) -> Sequences:
    """Returns the documents of a collated batch: [B, S] tensors `input_ids`, `labels` or `shift_labels`, and
    optionally `attention_mask` and `position_ids`. A row is one document, unless the batch has no attention mask and
    position ids start again inside the row. Such a row was packed already, and its documents are separated as in the
    Hugging Face models. Other inputs, masks with holes, and targets at masked positions raise [`NotPackable`].
    """
    known = _PACKED | BOUNDS if batch.get("position_ids") is not None else _PACKED
    others = [name for name, value in batch.items() if isinstance(value, torch.Tensor) and name not in known]
    if others:
        raise NotPackable(f"the batch has {others[0]!r}, which cannot be packed")
    ids = batch["input_ids"]
    if ids.ndim != 2:
        raise NotPackable(f"input_ids have the shape {tuple(ids.shape)} instead of [rows, positions]")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if real.shape != ids.shape:
        raise NotPackable(f"the attention_mask has the shape {tuple(real.shape)}, and input_ids {tuple(ids.shape)}")
    targets = _targets(batch)
    if bool((targets[~real] != IGNORED).any()):
        raise NotPackable("positions that the attention_mask hides have targets, as left padding gives them")
    begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((begins.sum(1) > 1).any()):
        raise NotPackable("the attention_mask has holes")
    columns = torch.arange(ids.shape[1]).expand(ids.shape)
    if positions is not None:
        if positions.ndim != 2:
            raise NotPackable(f"position_ids have the shape {tuple(positions.shape)} instead of [rows, positions]")
        positions = positions.expand(ids.shape)
        if mask is None:
            begins[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    else:
        positions = columns
    starts = torch.nonzero(begins[real]).flatten()
    rows = torch.arange(ids.shape[0])[:, None].expand(ids.shape)[begins]
    return Sequences(
        input_ids=ids[real],
        targets=targets[real],
        position_ids=positions[real],
        bounds=np.append(starts.numpy(), int(real.sum())),
        rows=rows.numpy(),
    )


def _targets(batch: Mapping[str, Any]) -> torch.Tensor:
    name = next((name for name in NEXT_TOKEN.names if batch.get(name) is not None), None)
    if name is None:
        raise NotPackable(f"the batch has no labels, only {sorted(batch)}")
    if batch[name].shape != batch["input_ids"].shape:
        raise NotPackable(f"{name} have the shape {tuple(batch[name].shape)}, and input_ids another")
    return NEXT_TOKEN.targets_of(batch)


class Pieces(NamedTuple):
    """Holds the kept pieces of documents, in order, as arrays [m]. They are the index of each piece's document, the
    piece's first token in that document, and its number of tokens.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def pieces(lengths: np.ndarray, longest: int, policy: str, rows: np.ndarray | None = None) -> Pieces:
    """Cuts documents into pieces of at most `longest` tokens, from their lengths alone.

    Args:
        lengths (`np.ndarray`): [n], tokens of each document, at least 1.
        longest (`int`): tokens that a document may have.
        policy (`str`): treatment of longer documents: "truncate" keeps the beginning, "split" makes a document of each
            piece, "error" raises ValueError.
        rows (`np.ndarray`, *optional*): [n], the row of the global batch of each document, for the error message; by
            default 0 to n - 1.
    """
    long = np.flatnonzero(lengths > longest)
    if policy == "error" and len(long):
        row = long[0] if rows is None else rows[long[0]]
        raise ValueError(
            f"Row {row} of the global batch has {lengths[long[0]]} tokens, above max_tokens_per_rank ({longest}); "
            "raise it, cut the rows, or set long_sequences to 'truncate' or 'split'."
        )
    counts = -(-lengths // longest) if policy == "split" else np.ones_like(lengths)
    documents = np.repeat(np.arange(len(lengths)), counts)
    starts = longest * (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts))
    return Pieces(documents, starts, np.minimum(lengths[documents] - starts, longest))


def limit_lengths(sequences: Sequences, longest: int, policy: str) -> Sequences:
    """Cuts documents into [`pieces`], with the same arguments and errors. Positions start again in each piece. The
    last token before a cut has no target.
    """
    lengths = sequences.lengths
    kept = pieces(lengths, longest, policy, sequences.rows)
    long = int((lengths > longest).sum())
    if not long:
        return sequences
    bounds = np.append(0, np.cumsum(kept.lengths))
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], kept.lengths)  # the position in its piece
    where = torch.from_numpy(np.repeat(sequences.bounds[kept.documents] + kept.starts, kept.lengths) + within)
    targets, positions = sequences.targets[where], sequences.position_ids[where]
    cut_off = kept.starts + kept.lengths < lengths[kept.documents]
    targets[torch.from_numpy(bounds[1:][cut_off] - 1)] = IGNORED
    later = torch.from_numpy(np.repeat(kept.starts > 0, kept.lengths))
    return Sequences(
        input_ids=sequences.input_ids[where],
        targets=targets,
        position_ids=torch.where(later, torch.from_numpy(within), positions),
        bounds=bounds,
        rows=sequences.rows[kept.documents],
        cut=long,
    )


def pack(sequences: Sequences, placement: Placement, multiple: int, pad_token_id: int) -> list[dict[str, Any]]:
    """Packs documents into the micro-batches of [`ParallelModel.forward_backward`]: `input_ids`, `position_ids`,
    `shift_labels` [1, T] and `documents`. Each pack of `placement`, an empty one too, is padded with `pad_token_id` to
    a positive multiple of `multiple` positions.
    """
    return [_micro_batch(sequences, packs, multiple, pad_token_id) for packs in placement.micro_batches]


def _micro_batch(
    sequences: Sequences, packs: Sequence[Sequence[int]], multiple: int, pad_token_id: int
) -> dict[str, Any]:
    tokens: list[np.ndarray] = []  # indices of each document's tokens; -1 for padding
    bounds, cuts, rows = [0], [0], []
    lengths = sequences.lengths
    for pack_ in packs:
        # Neighbouring documents of equal length share one call of the attention kernel.
        for index in sorted(pack_, key=lambda index: lengths[index]):
            start, stop = sequences.bounds[index : index + 2]
            tokens.append(np.arange(start, stop))
            bounds.append(bounds[-1] + int(stop - start))
            rows.append(int(sequences.rows[index]))
        length = bounds[-1] - cuts[-1]
        missing = -length % multiple if length else multiple
        if missing:
            tokens.append(np.full(missing, -1))
            bounds.append(bounds[-1] + missing)
            rows.append(PADDING)
        cuts.append(bounds[-1])
    where = torch.from_numpy(np.concatenate(tokens))
    padding = where < 0
    return {
        "input_ids": sequences.input_ids[where].masked_fill(padding, pad_token_id)[None],
        "position_ids": sequences.position_ids[where].masked_fill(padding, 0)[None],
        "shift_labels": sequences.targets[where].masked_fill(padding, IGNORED)[None],
        "documents": Documents(bounds=tuple(bounds), cuts=tuple(cuts), rows=tuple(rows)),
    }
