# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The forward of a parallelised causal language model: a micro-batch in, the loss or the rank's own logits out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.parallel.block import CurrentMicroBatch
from galvatron_hf.parallel.layout import Layout, redistribute
from galvatron_hf.parallel.mesh import StageMesh
from galvatron_hf.parallel.micro_batch import (
    IGNORED,
    MicroBatch,
    add_positions,
    add_rows,
    shift_targets,
)
from galvatron_hf.parallel.models import DecoderAdapter
from galvatron_hf.parallel.random import random_stream
from galvatron_hf.parallel.vocabulary import HeadRequest, vocabulary_layout
from galvatron_hf.plan import ParallelPlan


@dataclass(kw_only=True)
class StreamPosition:
    """Where the random streams stand: they depend on nothing else, so a resumed run continues them."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0

    def key(self) -> tuple[int, int, int]:
        return self.seed, self.step, self.micro_batch


class CausalLMForward:
    """Takes the place of the `forward` of a [`PreTrainedModel`] whose layers have been parallelised.

    Every rank calls it with the same whole micro-batch. With labels the loss is the sum over the micro-batch's targets
    divided by `num_items_in_batch` (default: their number), the same on all ranks. Logits are those of the rank's own
    rows, which [`CausalLMForward.own_rows`] names.

    Args:
        model ([`PreTrainedModel`]): the model.
        plan ([`ParallelPlan`]): how it is parallelised.
        adapter ([`DecoderAdapter`]): its family.
        mesh ([`StageMesh`]): the ranks.
        current ([`CurrentMicroBatch`]): shared with the blocks.
        last_layout (`Layout`): in which the last layer leaves the hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: ParallelPlan,
        adapter: DecoderAdapter,
        mesh: StageMesh,
        current: CurrentMicroBatch,
        last_layout: Layout,
    ):
        self.model, self.plan, self.adapter, self.mesh = model, plan, adapter, mesh
        self.current, self.last_layout = current, last_layout
        self.position = StreamPosition()
        self.norm = model.base_model.get_submodule(adapter.final_norm)
        self.norm_forward = self.norm.forward
        self.norm.forward = self._leave_base_model
        self.model_ranks = max(layer.tensor * layer.ulysses * layer.context for layer in plan.layers)
        self.data_degree = max(layer.data_degree(mesh.size) for layer in plan.layers)
        self.sequence_degree = math.lcm(*(layer.sequence_degree for layer in plan.layers))

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        return_logits: bool | None = None,
        whole_loss: bool = True,
        **unused,
    ) -> CausalLMOutput:
        """Runs one micro-batch.

        Args:
            input_ids (`torch.Tensor`): [B, S], the whole micro-batch, the same on every rank.
            attention_mask (`torch.Tensor`, *optional*): [B, S], 1 for real tokens.
            position_ids (`torch.Tensor`, *optional*): [B, S].
            labels (`torch.Tensor`, *optional*): [B, S], -100 to ignore; shifted here.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): what the sum of losses is divided by.
            shift_labels (`torch.Tensor`, *optional*): [B, S], labels that are shifted already.
            label_smoothing (`float`): as in [`transformers.trainer_pt_utils.LabelSmoother`].
            return_logits (`bool`, *optional*): defaults to whether there are no labels.
            whole_loss (`bool`): False leaves the loss this rank's own part, which adds up over the ranks to the whole.

        Returns:
            [`CausalLMOutput`]: `loss` (fp32 scalar) and `logits` [own rows, S, V].

        Raises:
            ValueError: for inputs that no layout is known for.
        """
        _refuse_inputs(unused, attention_mask)
        targets = shift_labels if shift_labels is not None else (None if labels is None else shift_targets(labels))
        return_logits = targets is None if return_logits is None else return_logits
        batch = self._micro_batch(input_ids, attention_mask, position_ids, targets, return_logits)
        hidden = self._run_base_model(batch)
        rectangle = batch.head.rectangle(self.mesh.index, batch.rows, batch.length)
        own_targets = None
        if batch.targets is not None:
            rows = slice(rectangle.row_start, rectangle.row_stop)
            positions = slice(rectangle.position_start, rectangle.position_stop)
            own_targets = batch.targets[rows, positions].flatten()
        request = HeadRequest(targets=own_targets, logits=return_logits, label_smoothing=label_smoothing)
        loss, logits = self.model.get_output_embeddings()(hidden, request)
        if loss is not None:
            if num_items_in_batch is None:
                num_items_in_batch = (batch.targets != IGNORED).sum()
            loss = self._reported_loss(loss, num_items_in_batch, batch.head.replicas, whole_loss)
        if logits is not None:
            logits = logits[:, : batch.real_length]
        return CausalLMOutput(loss=loss, logits=logits)

    def own_rows(self, rows: int) -> slice:
        """The rows whose logits this rank gets, of a micro-batch of `rows` rows; added rows are not counted.

        Where there are fewer rows than ranks, the last ranks get none; their logits are of added rows.
        """
        padded, tensor = max(rows, self.mesh.size), self.plan.head.tensor
        group = vocabulary_layout(self.mesh.size, tensor, padded).rectangle(self.mesh.index, padded, 1)
        own = Layout(data=tensor).rectangle(self.mesh.index % tensor, group.shape[0], 1)
        start, stop = group.row_start + own.row_start, group.row_start + own.row_stop
        return slice(min(start, rows), min(stop, rows))

    def own_part(self, tensor: torch.Tensor, fill: int | None = None) -> torch.Tensor:
        """The rows of a whole micro-batch's tensor that belong to this rank's logits.

        Args:
            tensor (`torch.Tensor`): [B, S].
            fill (`int`, *optional*): what added rows hold; by default they repeat the last row.
        """
        tensor = add_rows(tensor, self.mesh.size, fill)
        return tensor[self.own_rows(tensor.shape[0])]

    def _micro_batch(self, input_ids, attention_mask, position_ids, targets, logits: bool) -> MicroBatch:
        real_rows, real_length = input_ids.shape
        rows = max(real_rows, self.mesh.size if logits else self.data_degree)
        embedding = vocabulary_layout(self.mesh.size, self.plan.embedding.tensor, rows)
        head = vocabulary_layout(self.mesh.size, self.plan.head.tensor, rows)
        multiple = math.lcm(self.sequence_degree, embedding.positions, head.positions)
        length = -(-real_length // multiple) * multiple
        if position_ids is not None and length > real_length:
            # Counting on keeps the added positions in the last document of a packed row, as far as there are such
            # positions: rotary embeddings may depend on the largest, and learned ones end somewhere.
            more = position_ids[:, -1:] + torch.arange(1, length - real_length + 1, device=position_ids.device)
            position_ids = torch.cat([position_ids, more.clamp(max=position_ids.max())], dim=1)
        pad = self.model.config.pad_token_id
        return MicroBatch(
            input_ids=add_rows(add_positions(input_ids, length, pad if pad is not None else 0), rows),
            attention_mask=add_rows(add_positions(attention_mask, length, 0), rows),
            position_ids=add_rows(position_ids, rows),
            targets=add_rows(add_positions(targets, length, IGNORED), rows, IGNORED),
            real_rows=real_rows,
            real_length=real_length,
            embedding=embedding,
            head=head,
            key=self.position.key(),
        )

    def _run_base_model(self, batch: MicroBatch) -> torch.Tensor:
        """The family's own base model on the embedding's part of the micro-batch.

        Returns:
            `torch.Tensor`: normed hidden states in the head's layout.
        """
        part = batch.embedding.rectangle(self.mesh.index, batch.rows, batch.length)
        positions = batch.positions()
        if self.adapter.positional:
            rows = slice(part.row_start, part.row_stop) if positions.shape[0] > 1 else slice(None)
            positions = positions[rows, part.position_start : part.position_stop]
        self.current.value = batch
        device = batch.input_ids.device
        stream = random_stream(device, *batch.key, -1, part.row_start, part.position_start)
        input_ids = batch.input_ids[part.row_start : part.row_stop, part.position_start : part.position_stop]
        try:
            with stream:
                self.model.base_model(
                    input_ids=input_ids,
                    # The blocks bring the masks of their own rows; a prepared mask keeps the family from making one.
                    attention_mask=self._prepared_mask(device),
                    position_ids=positions,
                    use_cache=False,
                )
        finally:
            self.current.value = None
        hidden = redistribute(
            batch.final_hidden.pop(),
            self.last_layout,
            batch.head,
            rows=batch.rows,
            length=batch.length,
            index=self.mesh.index,
            groups=self.mesh.groups,
        )
        return self.norm_forward(hidden)

    def _prepared_mask(self, device: torch.device):
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        types = getattr(self.current.config, "layer_types", None)
        return mask if types is None else dict.fromkeys(types, mask)

    def _leave_base_model(self, hidden: torch.Tensor) -> torch.Tensor:
        """Stands where the final norm stood: keeps the hidden states, and returns a shape for the family to handle."""
        batch = self.current.value
        batch.final_hidden.append(hidden)
        part = batch.embedding.rectangle(self.mesh.index, batch.rows, batch.length)
        return torch.empty(*part.shape, hidden.shape[-1], device="meta")

    def _reported_loss(
        self, total: torch.Tensor, num_items: torch.Tensor | int, replicas: int, whole: bool
    ) -> torch.Tensor:
        """This rank's part of the loss, or the sum of all parts, in value; the gradient of its own rows in both.

        Replicas hold the same rows, and each carries the full gradient of them, so only the value is divided. Without
        targets the value is not a number and the gradient is zero, as in the family's own loss.
        """
        items = torch.as_tensor(num_items, device=total.device)
        own = total / torch.where(items == 0, 1, items)
        value = total.detach() / items / replicas
        if whole:
            dist.all_reduce(value, group=self.mesh.groups.block(self.mesh.size))
        return own + (value - own.detach())


def _refuse_inputs(unused: dict, attention_mask: torch.Tensor | None) -> None:
    for name, value in unused.items():
        if isinstance(value, torch.Tensor) or name in ("past_key_values", "output_hidden_states", "output_attentions"):
            if value is None or value is False:
                continue
            raise ValueError(f"The input {name!r} has no layout under a parallel plan; leave it out of the batch.")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"An attention_mask of {attention_mask.ndim} dimensions cannot be split over ranks; pass one of [B, S]."
        )
