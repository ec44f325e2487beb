# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Takes the documents out of padded global batches, and packs them into micro-batches.
Each document keeps its tokens, targets and positions, so the sum of the losses is that of the padded batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from galvatron_hf.data.placement import Placement, SharedSequence
from galvatron_hf.models.losses import IGNORED, LossKind
from galvatron_hf.models.packing import CAUSAL, Packing, Pairs
from galvatron_hf.plan.chunks import size_of
from galvatron_hf.plan.deal import Deal
from galvatron_hf.plan.dealing import deal_out, missing_tokens, parts_of_packs


_PACKED = {"input_ids", "attention_mask", "position_ids"}
# Bounds of documents for other kernels; position_ids contain the same.
BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
LONG_SEQUENCES = ("error", "truncate", "split")
PER_RANK = "max_tokens_per_rank"  # what a document may not exceed that one rank holds


class NotPackable(ValueError):
    """The rows of a batch cannot be packed without changing the result; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Holds the documents of a global batch, concatenated in the batch's order without padding.

    Attributes:
        input_ids, targets, position_ids (`torch.Tensor`): [T], int64, on the CPU; a target is the token to predict at
            a position, -100 for none.
        others (`dict[str, torch.Tensor]`): further numbers of the tokens, [T] each.
        bounds (`np.ndarray`): [n + 1], offsets at which documents begin, and the end of the last.
        rows, columns (`np.ndarray`): [n], the row of the global batch of each document, and where in it it begins.
        target ([`Sequences`], *optional*): the documents that a second stack reads beside these, one for each.
        cut (`int`): number of documents that were too long.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    bounds: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    target: Sequences | None = None
    cut: int = 0

    @property
    def own_lengths(self) -> np.ndarray:
        """Returns the tokens of each document, [n]."""
        return np.diff(self.bounds)

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of each document and its target, [n]."""
        return self.own_lengths if self.target is None else self.own_lengths + self.target.own_lengths

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @classmethod
    def from_batches(cls, batches: Sequence[Mapping[str, Any]], packing: Packing = CAUSAL) -> Sequences:
        """Returns the documents of all batches of a step in order, with consecutive rows. See [`unpad`]."""
        parts = [unpad(batch, packing) for batch in batches]
        if len({tuple(sorted(part.others)) for part in parts}) > 1:
            raise NotPackable("only some batches of the step have the inputs of tokens that others have")
        joined = cls._joined(parts, [len(batch["input_ids"]) for batch in batches])
        if parts[0].target is None:
            return joined
        targets = [part.target for part in parts]
        return replace(joined, target=cls._joined(targets, [len(target.rows) for target in targets]))

    @classmethod
    def _joined(cls, parts: Sequence[Sequences], counts: Sequence[int]) -> Sequences:
        """Joins the documents of batches with `counts` rows."""
        tokens = np.cumsum([0, *(part.bounds[-1] for part in parts[:-1])])
        rows = np.cumsum([0, *counts[:-1]])
        ends = [part.bounds[1:] + start for part, start in zip(parts, tokens, strict=True)]
        return cls(
            input_ids=torch.cat([part.input_ids for part in parts]),
            targets=torch.cat([part.targets for part in parts]),
            position_ids=torch.cat([part.position_ids for part in parts]),
            bounds=np.concatenate([[0], *ends]),
            rows=np.concatenate([part.rows + start for part, start in zip(parts, rows, strict=True)]),
            columns=np.concatenate([part.columns for part in parts]),
            others={name: torch.cat([part.others[name] for part in parts]) for name in parts[0].others},
        )


def unpad(batch: Mapping[str, Any], packing: Packing = CAUSAL) -> Sequences:
    """Returns the documents of a collated batch: [B, S] tensors `input_ids`, labels of the family's loss, and
    optionally `attention_mask`, `position_ids` and the others that `packing` names. A row is one document, unless the
    batch of a causal model has no attention mask and position ids start again inside the row. Such a row was packed
    already, and its documents are separated as in the Hugging Face models. Other inputs, masks with holes, and targets
    at masked positions raise [`NotPackable`].
    """
    if packing.pairs is not None:
        return _unpad_pairs(batch, packing.loss, packing.pairs)
    known = {*_PACKED, *packing.loss.names, *packing.others}
    _check_known(batch, known | (BOUNDS if batch.get("position_ids") is not None else set()))
    ids = batch["input_ids"]
    if ids.ndim != 2:
        raise NotPackable(f"input_ids have the shape {tuple(ids.shape)} instead of [rows, positions]")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if real.shape != ids.shape:
        raise NotPackable(f"the attention_mask has the shape {tuple(real.shape)}, and input_ids {tuple(ids.shape)}")
    targets = _targets(batch, packing)
    if bool((targets[~real] != IGNORED).any()):
        raise NotPackable("positions that the attention_mask hides have targets, as left padding gives them")
    begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((begins.sum(1) > 1).any()):
        raise NotPackable("the attention_mask has holes")
    if positions is not None:
        if positions.ndim != 2:
            raise NotPackable(f"position_ids have the shape {tuple(positions.shape)} instead of [rows, positions]")
        positions = positions.expand(ids.shape)
        if mask is None and packing.causal:
            begins[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    else:
        positions = _positions(ids, real, packing)
    starts = torch.nonzero(begins[real]).flatten()
    rows, columns = torch.nonzero(begins, as_tuple=True)
    return Sequences(
        input_ids=ids[real],
        targets=targets[real],
        position_ids=positions[real],
        bounds=np.append(starts.numpy(), int(real.sum())),
        rows=rows.numpy(),
        columns=columns.numpy(),
        others={
            name: _like_ids(name, batch[name], ids)[real] for name in packing.others if batch.get(name) is not None
        },
    )


def _check_known(batch: Mapping[str, Any], known: set[str]) -> None:
    others = [name for name, value in batch.items() if isinstance(value, torch.Tensor) and name not in known]
    if others:
        raise NotPackable(f"the batch has {others[0]!r}, which cannot be packed")


def _unpad_pairs(batch: Mapping[str, Any], loss: LossKind, pairs: Pairs) -> Sequences:
    """Returns the sources of a batch with their targets, which end with the last token that has a label."""
    _check_known(batch, {"input_ids", "attention_mask", pairs.ids, pairs.mask, *loss.names})
    batch = pairs.complete(batch)
    labels, ids = _targets(batch | {"input_ids": batch[pairs.ids]}, Packing(loss=loss)), batch[pairs.ids]
    columns = torch.arange(labels.shape[1])
    last = torch.where(labels == IGNORED, 0, columns).amax(1)
    inside = columns <= last[:, None]
    mask = batch.get(pairs.mask)
    if mask is not None and not bool(mask[inside].all()):
        raise NotPackable(f"the {pairs.mask} hides tokens before the last target")
    given = batch.get("attention_mask")
    if pairs.counts_columns and given is not None and not bool(given[:, 0].all()):
        raise NotPackable("sources are padded on the left, where this family counts positions")
    nothing = torch.full_like(batch["input_ids"], IGNORED)
    source = {"input_ids": batch["input_ids"], "attention_mask": given}
    found = unpad(source | {loss.names[0]: nothing}, Packing(loss=loss))
    if len(found.rows) != len(labels):
        raise NotPackable("a row has no token that its target could read")
    target = {"input_ids": ids, "attention_mask": inside, loss.names[0]: labels.masked_fill(~inside, IGNORED)}
    return replace(found, target=unpad(target, Packing(loss=loss)))


def _positions(ids: torch.Tensor, real: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns the position ids [B, S] that a family makes of rows without any."""
    if packing.uncounted is None:
        return packing.first_position + torch.arange(ids.shape[1]).expand(ids.shape)
    counted = ids != packing.uncounted
    if bool((real & ~counted).any()):
        raise NotPackable(f"a row has the token {packing.uncounted}, which this family counts no position for")
    return packing.first_position + counted.cumsum(1) - 1


def _targets(batch: Mapping[str, Any], packing: Packing) -> torch.Tensor:
    name = next((name for name in packing.loss.names if batch.get(name) is not None), None)
    if name is None:
        raise NotPackable(f"the batch has no labels, only {sorted(batch)}")
    _like_ids(name, batch[name], batch["input_ids"])
    return packing.loss.targets_of(batch)


def _like_ids(name: str, tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if tensor.shape != ids.shape:
        raise NotPackable(f"{name} have the shape {tuple(tensor.shape)}, and input_ids {tuple(ids.shape)}")
    return tensor


class Pieces(NamedTuple):
    """Holds the kept pieces of documents, in order, as arrays [m]. They are the index of each piece's document, the
    piece's first token in that document, and its number of tokens.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def pieces(
    lengths: np.ndarray,
    longest: int,
    policy: str,
    rows: np.ndarray | None = None,
    limit: str = PER_RANK,
) -> Pieces:
    """Cuts documents into pieces of at most `longest` tokens, from their lengths alone.

    Args:
        lengths (`np.ndarray`): [n], tokens of each document, at least 1.
        longest (`int`): tokens that a document may have.
        policy (`str`): treatment of longer documents: "truncate" keeps the beginning, "split" makes a document of each
            piece, "error" raises ValueError.
        rows (`np.ndarray`, *optional*): [n], the row of the global batch of each document, for the error message; by
            default 0 to n - 1.
        limit (`str`): the name of what `longest` follows from, for the error message.
    """
    long = np.flatnonzero(lengths > longest)
    if policy == "error" and len(long):
        row = long[0] if rows is None else rows[long[0]]
        shared = "" if limit != PER_RANK else ", or have ranks share documents by packing='dynamic'"
        raise ValueError(
            f"Row {row} of the global batch has {lengths[long[0]]} tokens, above {limit} ({longest}); raise it, cut "
            f"the rows, set long_sequences to 'truncate' or 'split'{shared}."
        )
    counts = -(-lengths // longest) if policy == "split" else np.ones_like(lengths)
    documents = np.repeat(np.arange(len(lengths)), counts)
    starts = longest * (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts))
    return Pieces(documents, starts, np.minimum(lengths[documents] - starts, longest))


def limit_lengths(
    sequences: Sequences,
    longest: int,
    policy: str,
    packing: Packing = CAUSAL,
    limit: str = PER_RANK,
) -> Sequences:
    """Cuts documents into [`pieces`], with the same arguments and errors. Positions start again in each piece. If
    targets are those of the next token, the last token before a cut has none.
    """
    lengths = sequences.lengths
    kept = pieces(lengths, longest, policy, sequences.rows, limit)
    long = int((lengths > longest).sum())
    if not long:
        return sequences
    if sequences.target is not None:
        raise ValueError(
            f"long_sequences={policy!r} cuts no pairs of documents, and row {sequences.rows[lengths.argmax()]} has "
            f"{lengths.max()} tokens, above {longest}; raise max_tokens_per_rank or cut the rows."
        )
    bounds = np.append(0, np.cumsum(kept.lengths))
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], kept.lengths)  # the position in its piece
    where = torch.from_numpy(np.repeat(sequences.bounds[kept.documents] + kept.starts, kept.lengths) + within)
    targets, positions = sequences.targets[where], sequences.position_ids[where]
    if packing.loss.looks_ahead:
        cut_off = kept.starts + kept.lengths < lengths[kept.documents]
        targets[torch.from_numpy(bounds[1:][cut_off] - 1)] = IGNORED
    later = torch.from_numpy(np.repeat(kept.starts > 0, kept.lengths))
    return Sequences(
        input_ids=sequences.input_ids[where],
        targets=targets,
        position_ids=torch.where(later, packing.first_position + torch.from_numpy(within), positions),
        bounds=bounds,
        rows=sequences.rows[kept.documents],
        columns=sequences.columns[kept.documents] + kept.starts,
        others={name: values[where] for name, values in sequences.others.items()},
        cut=long,
    )


def pack(
    sequences: Sequences, placement: Placement, multiple: int, pad_token_id: int, packing: Packing = CAUSAL
) -> list[dict[str, Any]]:
    """Packs documents into the micro-batches of [`ParallelModel.forward_backward`]: `input_ids`, `position_ids`,
    targets and the others [1, T], and `documents`. Each pack of `placement`, an empty one too, is padded with
    `pad_token_id` to a positive multiple of `multiple` positions.
    """
    parts = [
        _micro_batch(sequences, packs, placement.shared_in(index), multiple, pad_token_id, packing)
        for index, packs in enumerate(placement.micro_batches)
    ]
    for index, part in enumerate(parts if placement.others else ()):
        others = {
            context: _Row.of_packs(sequences, other.micro_batches[index], other.shared_in(index), multiple).documents
            for context, other in placement.others.items()
        }
        part["documents"] = replace(part["documents"], others=others)
    return parts


def _micro_batch(
    sequences: Sequences,
    packs: Sequence[Sequence[int]],
    shared: Sequence[SharedSequence],
    multiple: int,
    pad_token_id: int,
    packing: Packing,
) -> dict[str, Any]:
    # Neighbouring documents of equal length share one call of the attention kernel.
    keys = (
        [sequences.own_lengths] if sequences.target is None else [sequences.own_lengths, sequences.target.own_lengths]
    )
    packs = [sorted(pack_, key=lambda index: tuple(lengths[index] for lengths in keys)) for pack_ in packs]
    if packing.pairs is None:
        row = _Row.of_packs(sequences, packs, shared, multiple)
        return {
            "input_ids": row.packed(sequences.input_ids, pad_token_id),
            "position_ids": row.packed(sequences.position_ids, 0),
            packing.loss.names[0]: row.packed(sequences.targets, IGNORED),
            **{name: row.packed(values, 0) for name, values in sequences.others.items()},
            "documents": row.documents,
        }
    if shared:
        raise ValueError(
            f"Sequence {shared[0].sequence} is a pair of documents, which ranks cannot share; place it on one rank."
        )
    # Padding is a document too, which each source has with its target or neither.
    missing = [[missing_tokens(int(lengths[list(pack_)].sum()), multiple) for pack_ in packs] for lengths in keys]
    missing = [
        [own or (multiple if other else 0) for own, other in zip(*both, strict=True)]
        for both in (missing, missing[::-1])
    ]
    source = _Row.of_packs(sequences, packs, (), missing[0])
    target = _Row.of_packs(sequences.target, packs, (), missing[1])
    return {
        "input_ids": source.packed(sequences.input_ids, pad_token_id),
        packing.pairs.ids: target.packed(sequences.target.input_ids, pad_token_id),
        packing.loss.names[0]: target.packed(sequences.target.targets, IGNORED),
        "documents": {packing.pairs.source: source.documents, packing.pairs.target: target.documents},
    }


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Holds the order of the tokens of a packed row: `where` [T] are indices of tokens, -1 for padding."""

    where: torch.Tensor
    documents: Deal

    @classmethod
    def of_packs(
        cls,
        sequences: Sequences,
        packs: Sequence[Sequence[int]],
        shared: Sequence[SharedSequence],
        missing: Sequence[int] | int,
    ) -> _Row:
        """Returns the row of documents; `missing` is the padding of each pack, or a factor of a pack's tokens."""
        lengths = sequences.own_lengths.tolist()
        if isinstance(missing, int):
            tokens_of = [size_of((a, b) for _, a, b in part) for part in parts_of_packs(lengths, packs, shared)]
            missing = [missing_tokens(count, missing) for count in tokens_of]
        tokens: list[np.ndarray] = []
        for part, padding in zip(parts_of_packs(lengths, packs, shared), missing, strict=True):
            tokens += [sequences.bounds[index] + np.arange(start, stop) for index, start, stop in part]
            tokens.append(np.full(padding, -1))
        documents = deal_out(lengths, packs, shared, missing, sequences.rows.tolist())
        return cls(where=torch.from_numpy(np.concatenate(tokens)), documents=documents)

    def packed(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """Returns the values of tokens [tokens] in the order of the row, [1, T]."""
        return values[self.where].masked_fill(self.where < 0, fill)[None]
