# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The forward of a parallelised model: from a micro-batch to the loss, or the logits of the rank's own rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter
from galvatron_hf.models.losses import IGNORED, without_labels
from galvatron_hf.parallel.activation.documents import token_positions
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import (
    CurrentMicroBatch,
    ForwardOptions,
    HeadRows,
    MicroBatch,
    TokenStream,
    add_positions,
    add_rows,
    mask_on_device,
)
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.layers.vocab_parallel import HeadRequest
from galvatron_hf.parallel.router_loss import RouterStatistics
from galvatron_hf.parallel.stage_module import StageModule
from galvatron_hf.plan.deal import Deal
from galvatron_hf.plan.layout import Layout, Rectangle
from galvatron_hf.plan.resolved import ResolvedPlan
from galvatron_hf.utils.device import to_device


@dataclass(kw_only=True)
class StreamPosition:
    """Holds the keys of all random streams: a resumed run with the same keys continues the streams."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0

    def key(self) -> tuple[int, int, int]:
        return self.seed, self.step, self.micro_batch


class ModelRunner:
    """Runs a parallelised [`PreTrainedModel`]. Every rank calls it with the same whole micro-batch. With labels the
    loss is the sum over the micro-batch's targets divided by `num_items_in_batch` (default: their number), the same on
    all ranks. Logits are those of the rank's own rows, [`ModelRunner.local_rows`]. A pipeline calls
    [`ModelRunner.micro_batch`] and [`ModelRunner.run`] instead.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        resolved: ResolvedPlan,
        mesh: StageMesh,
        current: CurrentMicroBatch,
        stages: list[StageModule],
    ):
        self.model, self.resolved, self.mesh, self.current, self.stages = model, resolved, mesh, current, stages
        self.adapter, self.position = stages[0].adapter, StreamPosition()
        self.loss, self.router_loss = self.adapter.loss, self.adapter.router_loss(model)

    def __call__(self, input_ids: torch.Tensor, **inputs) -> ModelOutput:
        """Runs one micro-batch; arguments as for [`ModelRunner.micro_batch`]. Returns `loss` (fp32 scalar) and
        `logits` [own rows, S, V]. For plans of one stage; refuses inputs without a layout.
        """
        return self.run(self.stages[0], self.micro_batch(input_ids, **inputs))

    def micro_batch(
        self,
        input_ids: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        label_smoothing: float = 0.0,
        return_logits: bool | None = None,
        whole_loss: bool = True,
        documents: Deal | Mapping[str, Deal] | None = None,
        routers: RouterStatistics | None = None,
        added_rows: torch.Tensor | None = None,
        head_rows: HeadRows | None = None,
        **inputs,
    ) -> MicroBatch:
        """Makes the micro-batch of all ranks of all stages, padded to the rows and positions that layouts need.

        Args:
            input_ids (`torch.Tensor`): [B, S], the whole micro-batch, the same on every rank.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): the divisor of the sum of losses.
            label_smoothing (`float`): as in [`transformers.trainer_pt_utils.LabelSmoother`].
            return_logits (`bool`, *optional*): whether to compute logits; by default if there are no labels.
            whole_loss (`bool`): whether the loss is the sum over all ranks; False gives this rank's part of it.
            documents ([`Deal`] or a `Mapping`, *optional*): documents of one packed row [1, S], of each stack if
                there are several, in [`ResolvedPlan.packs`] packs, each of a multiple of
                [`ResolvedPlan.pack_multiple`] positions. A packed row gives no logits.
            routers ([`RouterStatistics`], *optional*): the counts of the batch that this is a part of, if a loss
                balances its experts.
            added_rows (`torch.Tensor`, *optional*): [B], true for rows that no loss counts.
            head_rows ([`HeadRows`], *optional*): padded rows in which [`ModelRunner.head`] will take the tokens of
                this packed row; there is no loss here then.
            inputs: tokens, masks and position ids [B, S] of the stacks, as their [`StackInputs`] name them. A mask is
                1 for real tokens; one in the host's memory is copied to a GPU, which transformers would wait for. And
                the labels [B, S] of the loss, for example `labels`, or `shift_labels` that are targets already.

        Raises:
            ValueError: for inputs without a layout.
        """
        inputs["input_ids"] = input_ids
        targets = self.loss.targets_of(inputs)
        inputs = without_labels(self.adapter.with_tokens_of_all(self.model, inputs), self.loss)
        of_stacks = {stack.name: self._inputs_of(stack, inputs) for stack in self.adapter.stacks}
        others = {name: inputs.pop(name) for name in self.adapter.other_inputs(inputs, input_ids.shape[0])}
        _refuse_inputs(inputs)
        options = ForwardOptions(
            num_items=num_items_in_batch,
            label_smoothing=label_smoothing,
            logits=targets is None if return_logits is None else return_logits,
            whole_loss=whole_loss,
            routers=routers,
        )
        if documents is not None:
            documents = documents if isinstance(documents, Mapping) else {self.adapter.stacks[0].name: documents}
            streams = {
                stack.name: self._packed(stack, documents[stack.name], options, others, **of_stacks[stack.name])
                for stack in self.adapter.stacks
            }
            _check_pairs(self.adapter, documents)
            ends = self.resolved.pack_end_layouts
        else:
            streams = {name: self._padded(added_rows, options, others, **given) for name, given in of_stacks.items()}
            rows, length = next(reversed(streams.values())).input_ids.shape
            if self.resolved.whole_rows:  # the head gets no added positions
                length = targets.shape[1] if targets is not None and targets.ndim > 1 else length
            if not self.loss.of_rows:
                targets = add_rows(add_positions(targets, length, IGNORED), rows, IGNORED)
            ends = self.resolved.end_layouts(rows)
        return MicroBatch(
            streams=streams,
            targets=targets,
            ends=ends,
            key=self.position.key(),
            options=options,
            head_rows=head_rows,
        )

    def _inputs_of(self, stack: StackAdapter, inputs: dict) -> dict:
        """Takes the inputs of one stack out of a batch."""
        names = dict(ids=stack.tokens.ids, mask=stack.tokens.mask, positions=stack.tokens.positions)
        found = {key: None if name is None else inputs.pop(name, None) for key, name in names.items()}
        return {**found, "causal": stack.causal}

    def _padded(
        self,
        added_rows: torch.Tensor | None,
        options: ForwardOptions,
        others: Mapping[str, torch.Tensor],
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        causal: bool,
    ) -> TokenStream:
        _refuse_mask(mask)
        real_rows, real_length = ids.shape
        rows, length = self.resolved.padded(real_rows, real_length, logits=options.logits)
        if positions is not None and length > real_length:
            # Counting on keeps the added positions in the last document of a row that the caller has packed. They stay
            # below the largest position: rotary embeddings may depend on it, and learned ones have a last.
            more = positions[:, -1:] + torch.arange(1, length - real_length + 1, device=positions.device)
            positions = torch.cat([positions, more.clamp(max=positions.max())], dim=1)
        pad = getattr(self.model.config, "pad_token_id", None)
        if mask is None and length > real_length and not causal:
            mask = torch.ones(real_rows, real_length, dtype=torch.long, device=ids.device)
        mask, padded = mask_on_device(mask, ids.device)
        return TokenStream(
            input_ids=add_rows(add_positions(ids, length, pad if pad is not None else 0), rows),
            attention_mask=add_rows(add_positions(mask, length, 0), rows),
            position_ids=add_rows(positions, rows),
            real_rows=real_rows,
            real_length=real_length,
            causal=causal,
            padded=None if padded is None else padded or (length > real_length and not causal),
            added_rows=added_rows,
            others={
                name: add_rows(add_positions(x, length, 0) if x.shape[1:] == (real_length,) else x, rows)
                for name, x in others.items()
            },
        )

    def _packed(
        self,
        stack: StackAdapter,
        documents: Deal,
        options: ForwardOptions,
        others: Mapping[str, torch.Tensor],
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        causal: bool,
    ) -> TokenStream:
        lengths = {stop - start for start, stop in pairwise(documents.cuts)}
        packs, multiple = self.resolved.packs, self.resolved.pack_multiple
        fits = len(documents.cuts) == packs + 1 and not any(length % multiple for length in lengths)
        if ids.shape != (1, documents.tokens) or not fits or 0 in lengths:
            raise ValueError(
                f"A packed row of shape {tuple(ids.shape)} with {len(documents.cuts) - 1} packs of "
                f"{sorted(lengths)[:4]} positions does not fit the plan; pack {packs} of a multiple of "
                f"{multiple} positions."
            )
        if positions is None and stack.tokens.positions is None:
            positions = to_device(token_positions(documents), ids.device)
        if mask is not None or positions is None or options.logits:
            raise ValueError(
                "A packed row has position_ids that begin anew with each document, no attention_mask, and gives a "
                "loss, no logits; pass the rows unpacked for anything else."
            )
        return TokenStream(
            input_ids=ids,
            attention_mask=None,
            position_ids=positions,
            real_rows=1,
            real_length=ids.shape[1],
            causal=causal,
            documents=documents,
            others=dict(others),
        )

    def router_statistics(self, device: torch.device, asked: bool | None = None) -> RouterStatistics | None:
        """Returns counts of a new batch, for [`ModelRunner.micro_batch`]; None if no loss balances experts. `asked` is
        `output_router_logits` of the call; by default the configuration says whether the family adds the loss.
        """
        asked = getattr(self.model.config, "output_router_logits", False) if asked is None else asked
        if not asked:
            return None
        if self.router_loss is None and hasattr(self.model, "router_aux_loss_coef"):
            raise ValueError(
                f"The model was called with output_router_logits=True, and {type(self.model).__name__} has a loss of "
                "its routers that no adapter covers; leave it out of the call."
            )
        return None if self.router_loss is None else RouterStatistics(self.router_loss, device)

    def run(
        self, stage: StageModule, batch: MicroBatch, received: LayerState | None = None
    ) -> LayerState | ModelOutput:
        """Runs one stage and returns the state for the next one, or at the last stage the loss and the logits; neither
        if the forward is for the counts of routers alone. If the micro-batch has [`HeadRows`], the last stage returns
        the head's input in them, [own rows, S, H], as `hidden_states`.
        """
        counts_only = batch.options.routers is not None and batch.options.routers.counts_only
        with self.current.active(batch):
            if not stage.is_last:
                return stage(received, None)
            if batch.head_rows is not None:
                return CausalLMOutput(hidden_states=stage(received, HeadRequest()))
            total, logits = stage(received, None if counts_only else self._request(batch))
        if counts_only:
            return self.loss.output(loss=None, logits=None)
        return self._output(batch, total, logits)

    def head(self, stage: StageModule, batch: MicroBatch, hidden: torch.Tensor) -> ModelOutput:
        """Runs the head of the last stage on its input in a batch of padded rows, [own rows, S, H]; returns loss and
        logits as [`ModelRunner.run`] does.
        """
        with self.current.active(batch):
            self.current.location = "head"
            head, request = self.adapter.head(self.model), self._request(batch)
            return self._output(batch, *stage(None, None, inside=lambda: head(hidden, request)))

    def _output(self, batch: MicroBatch, total: torch.Tensor | None, logits: torch.Tensor | None) -> ModelOutput:
        loss = None
        if total is not None:
            items = batch.options.num_items
            items = self.loss.count(self._real(batch)) if items is None else items
            loss = self._scaled_loss(total, items, batch.ends.head.replicas, batch.options.whole_loss)
        if logits is not None and not self.loss.of_rows and batch.last.real_length < batch.last.length:
            logits = logits[:, : batch.last.real_length].clone()  # a split backward detaches them, no view may be
        return self.loss.output(loss=loss, logits=logits, **batch.read)

    def _request(self, batch: MicroBatch) -> HeadRequest:
        targets = None
        if batch.targets is not None:
            own = batch.last.grid.rectangle(batch.ends.head, self.mesh.index)
            targets = self._own_targets(batch, own)
        return HeadRequest(targets=targets, logits=batch.options.logits, label_smoothing=batch.options.label_smoothing)

    def _real(self, batch: MicroBatch) -> torch.Tensor:
        """Returns the targets without those of rows that are only there to fill the batch."""
        added = batch.last.added_rows
        return batch.targets if added is None or not self.loss.of_rows else batch.targets[~added]

    def _own_targets(self, batch: MicroBatch, own: Rectangle) -> torch.Tensor:
        """Returns the targets of this rank's positions [T], or of its rows that are not there to fill the batch."""
        if not self.loss.of_rows:
            return batch.targets[own.row_start : own.row_stop, own.position_start : own.position_stop].flatten()
        real = batch.last.real_rows if batch.last.added_rows is None else int((~batch.last.added_rows).sum())
        return batch.targets[own.row_start : min(own.row_stop, real)]

    def local_rows(self, rows: int, index: int | None = None) -> slice:
        """Returns the rows whose logits this rank, or the rank `index` of its stage, gets of a micro-batch of `rows`
        rows, without padding. With fewer rows than ranks the last ranks get none: their logits are those of padding.
        """
        index = self.mesh.index if index is None else index
        padded, tensor = max(rows, self.mesh.size), self.resolved.head.strategy.tensor
        group = self.resolved.end_layouts(padded).head.rectangle(index, padded, 1)
        part = Layout(data=tensor).rectangle(index % tensor, group.shape[0], 1)
        start, stop = group.row_start + part.row_start, group.row_start + part.row_stop
        return slice(min(start, rows), min(stop, rows))

    def _scaled_loss(
        self, total: torch.Tensor, num_items: torch.Tensor | int, replicas: int, whole: bool
    ) -> torch.Tensor:
        """Returns a loss whose gradient is that of this rank's rows. Its value is this rank's part or, if `whole`, the
        sum of all ranks' parts.
        Replicas hold the same rows, and each has their full gradient: the value alone is divided by their number.
        Without targets the value is NaN and the gradient is zero, as in the family's own loss.
        """
        items = torch.as_tensor(num_items, device=total.device)
        local = (total / torch.where(items == 0, 1, items)).sum()
        value = (total.detach() / items / replicas).sum()
        if whole and self.mesh.size > 1:  # no group is the group of all stages
            dist.all_reduce(value, group=self.mesh.block(self.mesh.size))
        return local + (value - local.detach())


def _check_pairs(adapter: ModelAdapter, documents: Mapping[str, Deal]) -> None:
    """Refuses packs in which a stack that reads another has another number of documents than that one."""
    for stack in adapter.readers:
        own, read = (documents[name].pieces_of_packs() for name in (stack.name, stack.reads))
        if own != read:
            raise ValueError(
                f"Packs with {own} documents of the {stack.name} cannot read packs with {read} of the {stack.reads}; "
                "give each document its pair."
            )


def _refuse_inputs(unused: Mapping[str, Any]) -> None:
    for name, value in unused.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(
                f"The model was called with {name!r}, which has no layout under a parallel plan; leave it out of the "
                "call and of the batch."
            )


def _refuse_mask(mask: torch.Tensor | None) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"An attention_mask of {mask.ndim} dimensions cannot be split over ranks; pass one of [B, S]."
        )
