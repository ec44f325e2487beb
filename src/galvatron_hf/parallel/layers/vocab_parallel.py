# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Embedding and head, cut over the vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from galvatron_hf.models.adapter import LogitTransform
from galvatron_hf.models.parameter_specs import vocabulary_specs, whole_specs
from galvatron_hf.parallel.comm.collectives import copy_to_group, gather_positions
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, cut_parameter, local_parameters
from galvatron_hf.parallel.layers.vocab_parallel_loss import (
    ChunkLoss,
    gather_local_logits,
    linear_cross_entropy,
    loss_of_chunk,
    vocabulary_parallel_embedding,
    vocabulary_range,
)
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS


def parallel_embeddings(modules: Sequence[nn.Embedding], mesh: WeightMesh) -> None:
    """Cuts the weight that several embeddings share over the vocabulary."""
    first, *others = modules
    specs = vocabulary_specs(first, "embedding")
    views = [cut_parameter(first, spec, mesh) for spec in specs]
    _look_up_in_part(first, mesh, views)
    for module in others:
        for spec in specs:
            setattr(module, spec.name, getattr(first, spec.name))
        _look_up_in_part(module, mesh, [LocalParameter(module=module, name=spec.name) for spec in specs])


def _look_up_in_part(embedding: nn.Embedding, mesh: WeightMesh, views: list[LocalParameter]) -> None:
    """Makes the forward of a cut embedding look up this rank's rows and sum over the ranks."""
    start, stop = vocabulary_range(embedding.num_embeddings, mesh.tensor_degree, mesh.tensor_index)
    if embedding.padding_idx is not None:
        inside = start <= embedding.padding_idx < stop
        embedding.padding_idx = embedding.padding_idx - start if inside else None
    lookup, group = embedding.forward, mesh.tensor_group

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        with local_parameters(views):
            return vocabulary_parallel_embedding(lookup, input_ids, start, stop, group)

    embedding.forward = forward


def whole_module(module: nn.Module, mesh: WeightMesh, mesh_name: str) -> None:
    """Keeps the parameters of a module whole on every tensor rank of the embedding or the head."""
    views = [cut_parameter(module, spec, mesh) for spec in whole_specs(module, mesh_name)]
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_parameters(views):
            return original(*args, **kwargs)

    module.forward = forward


@dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """Says what the head computes.

    Attributes:
        targets (`torch.Tensor`, *optional*): [T], this rank's targets, -100 to ignore, whose loss is computed.
        logits (`bool`): whether full-vocabulary logits of this rank's own rows are computed.
        label_smoothing (`float`): as in [`transformers.trainer_pt_utils.LabelSmoother`].
    """

    targets: torch.Tensor | None = None
    logits: bool = False
    label_smoothing: float = 0.0


class Head:
    """Runs the language-model head on this rank's part of the vocabulary; takes the place of its module's forward. The
    head's weight is cut here unless it is `tied` to the embedding's and cut already. `recompute_logits_in_backward` is
    that of [`linear_cross_entropy`]. `logit_bias` returns a buffer [1, V] that is added to the logits.
    """

    def __init__(
        self,
        module: nn.Linear,
        mesh: WeightMesh,
        transform: LogitTransform,
        tied: bool,
        recompute_logits_in_backward: bool = False,
        logit_bias: Callable[[], torch.Tensor] | None = None,
    ):
        self.logit_bias = logit_bias
        self.module, self.mesh, self.transform = module, mesh, transform
        self.size = module.weight.shape[0]
        self.recompute_logits_in_backward = recompute_logits_in_backward
        self.start, _ = vocabulary_range(self.size, mesh.tensor_degree, mesh.tensor_index)
        self.group = mesh.tensor_group if mesh.tensor_degree > 1 else None
        self.views = []
        self.chunk_loss: ChunkLoss = loss_of_chunk
        if mesh.tensor_degree > 1:
            for spec in vocabulary_specs(module, "head"):
                cut_already = tied and spec.name == "weight"
                view = LocalParameter(module=module, name=spec.name)
                self.views.append(view if cut_already else cut_parameter(module, spec, mesh))
        module.forward = self

    def _bias(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Returns what is added to this rank's logits before their transform: the head's bias and the buffer."""
        if self.logit_bias is None:
            return self.module.bias
        added = self.logit_bias()[0, self.start : self.start + weight.shape[0]].to(weight.dtype)
        return added if self.module.bias is None else added + self.module.bias

    def compile(self, **options: Any) -> None:
        """Compiles the head's product and loss of a chunk by `torch.compile` with `options`: logits are then read and
        written in the compute format, and their statistics are computed while they are read.
        """
        self.chunk_loss = torch.compile(loss_of_chunk, **options)

    def __call__(self, hidden: torch.Tensor, request: HeadRequest | None = None):
        """Computes loss and logits of hidden states [B, S, H], which are equal on all tensor ranks. Without a request
        the family's own forward calls, which gets the module's output [B, S, V].

        Returns:
            `tuple`: the sum of the targets' losses (fp32 scalar, *optional*), and the logits [own rows, S, V] after
                the family's transform (*optional*).
        """
        if request is None:
            return self._output(hidden)
        with local_parameters(self.views) if self.views else contextlib.nullcontext():
            weight, bias = self.module.weight, self._bias(self.module.weight)
            loss = logits = None
            if request.targets is not None:
                loss = linear_cross_entropy(
                    hidden.flatten(0, 1),
                    weight,
                    bias,
                    request.targets,
                    start=self.start,
                    group=self.group,
                    vocab_size=self.size,
                    chunk_tokens=HEAD_CHUNK_TOKENS,
                    logit_scale=self.transform.scale,
                    softcap=self.transform.softcap,
                    label_smoothing=request.label_smoothing,
                    recompute_logits_in_backward=self.recompute_logits_in_backward,
                    chunk_loss=self.chunk_loss,
                )
            if request.logits:
                # Each rank's logits reach the hidden states through its own part of the vocabulary alone.
                part = F.linear(copy_to_group(hidden, self.group), weight, bias)
                logits = self.transform(gather_local_logits(part, self.group, vocab_size=self.size))
        return loss, logits

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output of the module, whose parts of the vocabulary all tensor ranks gather."""
        with local_parameters(self.views) if self.views else contextlib.nullcontext():
            part = F.linear(hidden, self.module.weight, self.module.bias)
        if self.group is None:
            return part
        largest = -(-self.size // self.mesh.tensor_degree)
        part = F.pad(part, (0, largest - part.shape[-1]))
        return gather_positions(part, self.group, dim=-1)[..., : self.size]
