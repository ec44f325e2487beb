# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation through a pipeline: the loss on every rank, logits from the last stage to the ranks that own them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.models.losses import count_targets, without_labels
from galvatron_hf.parallel.activation.micro_batch import map_rows


if TYPE_CHECKING:
    from galvatron_hf.parallel.model import LossOf, ParallelModel


def evaluate_pipelined(
    parallel: ParallelModel, batch: Mapping[str, Any], options: dict[str, Any], loss_of: LossOf | None
) -> CausalLMOutput:
    """See [`ParallelModel.evaluate`].

    Raises:
        ValueError: if logits are wanted of rows that the ranks cannot share evenly.
    """
    labelled = batch.get("labels") is not None or batch.get("shift_labels") is not None
    wants_logits = options.get("return_logits")
    wants_logits = loss_of is not None or (not labelled if wants_logits is None else wants_logits)
    if labelled and options.get("num_items_in_batch") is None:
        options = options | {"num_items_in_batch": count_targets(batch)}
    rows, world_size = batch["input_ids"].shape[0], parallel.plan.world_size
    if wants_logits and rows % world_size:
        raise ValueError(
            f"Logits of {rows} rows are wanted of {world_size} ranks, which get equally many each; "
            f"fill the batch up to {-(-rows // world_size) * world_size} rows."
        )
    shares = world_size if wants_logits else 1
    options = options | {"return_logits": wants_logits, "whole_loss": False}
    parts = list(_micro_batches(batch, shares, parallel.plan.micro_batches))
    inputs = parts if loss_of is None else [without_labels(part) for part in parts]
    outputs = parallel.pipeline.evaluate([parallel.forward.micro_batch(**part, **options) for part in inputs])
    parallel.units.reshard()
    loss = logits = None
    if labelled:
        if loss_of is None:
            own = [output.loss for output in outputs]
        else:
            own = [loss_of(part, output) for part, output in zip(parts, outputs, strict=bool(outputs))]
        loss = torch.stack(own).sum() if own else torch.zeros((), device=parallel.device)
        dist.all_reduce(loss)
    if wants_logits:
        logits = _hand_out(parallel, [output.logits for output in outputs])
    return CausalLMOutput(loss=loss, logits=logits)


def _micro_batches(batch: Mapping[str, Any], shares: int, most: int) -> Iterator[dict[str, Any]]:
    """Micro-batches that have a part of every share of the rows, so that a share's logits come out in order."""
    rows = batch["input_ids"].shape[0]
    share = rows // shares
    count = min(most, share)
    for index in range(count):
        part = slice(index * share // count, (index + 1) * share // count)
        yield map_rows(batch, lambda value, part=part: value.unflatten(0, (shares, share))[:, part].flatten(0, 1))


def _hand_out(parallel: ParallelModel, logits: list[torch.Tensor]) -> torch.Tensor:
    """Each rank's share of the logits; the last stage keeps its own, and sends no rank another's."""
    pipeline = parallel.pipeline
    group, lists = pipeline.group, pipeline.shape.pipeline_ranks
    source = pipeline.shape.rank_group_of_stage[-1]
    pieces = None
    shape: list[Any] = [None]
    if pipeline.has_last:
        by_share = [part.unflatten(0, (lists, -1)) for part in logits]
        pieces = list(torch.cat(by_share, dim=1).contiguous().unbind(0))
        shape = [(tuple(pieces[0].shape), pieces[0].dtype)]
    dist.broadcast_object_list(shape, group=group, group_src=source, device=parallel.device)
    own = torch.empty(shape[0][0], dtype=shape[0][1], device=parallel.device)
    dist.scatter(own, pieces, group=group, group_src=source)
    return own
