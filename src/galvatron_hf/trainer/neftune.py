# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""NEFTune's noise under a plan."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from galvatron_hf.parallel.model import ParallelModel


def add_embedding_noise(parallel: ParallelModel, alpha: float) -> RemovableHandle:
    """Adds noise to the embedding's output in training, as NEFTune does (arXiv 2310.05914). The noise is uniform in
    [-b, b] with b = alpha / sqrt(S * H). S is the number of real positions of the whole micro-batch, of which a rank
    holds a part; H is the hidden size. Ranks that hold the same part draw the same noise, because the embedding's
    random stream is keyed by the part. The returned handle removes the noise. Stacks with embeddings of their own get
    none: plain Trainer adds it to the output of `model.get_input_embeddings()`, which their families do not call.
    """
    has_own = any(stack.embedding is not None for stack in parallel.adapter.stacks)

    def add_noise(module: nn.Module, inputs: tuple[torch.Tensor, ...], hidden: torch.Tensor) -> torch.Tensor:
        if not module.training or has_own:
            return hidden
        bound = alpha / math.sqrt(parallel.runner.current.value.first.real_length * hidden.shape[-1])
        return hidden + torch.zeros_like(hidden).uniform_(-bound, bound)

    return parallel.adapter.embeddings(parallel.model)[0].register_forward_hook(add_noise)
