# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The ends of the model: embedding and head cut over the vocabulary, and where their activations lie."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from galvatron_hf.models.adapter import LogitTransform
from galvatron_hf.parallel.comm.collectives import copy_to_group
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, local_parameters
from galvatron_hf.parallel.layers.vocab_parallel_loss import (
    gather_local_logits,
    linear_cross_entropy,
    vocabulary_parallel_embedding,
    vocabulary_range,
)
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS


def cut_vocabulary_weight(module: nn.Module, name: str, mesh: WeightMesh, cut: bool = True) -> None:
    """Makes a parameter whose first dimension is the vocabulary a DTensor over the tensor ranks (or whole on each)."""
    setattr(module, name, mesh.cut(getattr(module, name), 0 if cut else None))


def parallel_embedding(embedding: nn.Embedding, mesh: WeightMesh) -> None:
    """Cuts an embedding over the vocabulary; its forward looks up this rank's rows and sums over the ranks."""
    size = embedding.num_embeddings
    start, stop = vocabulary_range(size, mesh.tensor_degree, mesh.tensor_index)
    cut_vocabulary_weight(embedding, "weight", mesh)
    if embedding.padding_idx is not None:
        inside = start <= embedding.padding_idx < stop
        embedding.padding_idx = embedding.padding_idx - start if inside else None
    views = [LocalParameter(module=embedding, name="weight")]
    lookup, group = embedding.forward, mesh.tensor_group

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        with local_parameters(views):
            return vocabulary_parallel_embedding(lookup, input_ids, start, stop, group)

    embedding.forward = forward


def whole_module(module: nn.Module, mesh: WeightMesh) -> None:
    """Keeps a module beside the embedding or the head whole on every tensor rank."""
    names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
    for name in names:
        cut_vocabulary_weight(module, name, mesh, cut=False)
    views = [LocalParameter(module=module, name=name) for name in names]
    original = module.forward

    def forward(*args: torch.Tensor) -> torch.Tensor:
        with local_parameters(views):
            return original(*args)

    module.forward = forward


@dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """What is wanted of the head.

    Attributes:
        targets (`torch.Tensor`, *optional*): [T], this rank's targets, -100 to ignore: asks for their loss.
        logits (`bool`): asks for full-vocabulary logits of this rank's own rows.
        label_smoothing (`float`): as in [`transformers.trainer_pt_utils.LabelSmoother`].
    """

    targets: torch.Tensor | None = None
    logits: bool = False
    label_smoothing: float = 0.0


class Head:
    """The language-model head on this rank's part of the vocabulary; takes the place of its module's forward.

    Args:
        module (`nn.Linear`): the head; its weight is cut here unless it is tied and cut already.
        mesh ([`WeightMesh`]): where its weights live.
        transform ([`LogitTransform`]): what the family does to the logits.
        tied (`bool`): whether the weight is the embedding's.
        recompute_logits_in_backward (`bool`): as in [`linear_cross_entropy`].
    """

    def __init__(
        self,
        module: nn.Linear,
        mesh: WeightMesh,
        transform: LogitTransform,
        tied: bool,
        recompute_logits_in_backward: bool = False,
    ):
        self.module, self.mesh, self.transform = module, mesh, transform
        self.size = module.weight.shape[0]
        self.recompute_logits_in_backward = recompute_logits_in_backward
        self.start, _ = vocabulary_range(self.size, mesh.tensor_degree, mesh.tensor_index)
        self.group = mesh.tensor_group if mesh.tensor_degree > 1 else None
        self.views = []
        if mesh.tensor_degree > 1:
            names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
            for name in names:
                if not (tied and name == "weight"):
                    cut_vocabulary_weight(module, name, mesh)
            self.views = [LocalParameter(module=module, name=name) for name in names]
        module.forward = self

    def __call__(self, hidden: torch.Tensor, request: HeadRequest) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Loss and logits of hidden states [B, S, H], equal on all tensor ranks.

        Returns:
            `tuple`: the sum of the targets' losses (fp32 scalar, *optional*), and the logits
                [own rows, S, V] after the family's transform (*optional*).
        """
        with local_parameters(self.views) if self.views else contextlib.nullcontext():
            weight, bias = self.module.weight, self.module.bias
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
                )
            if request.logits:
                # Each rank's logits reach the hidden states through its own part of the vocabulary alone.
                part = F.linear(copy_to_group(hidden, self.group), weight, bias)
                logits = self.transform(gather_local_logits(part, self.group, vocab_size=self.size))
        return loss, logits
