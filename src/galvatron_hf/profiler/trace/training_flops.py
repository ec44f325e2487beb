# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs of training a model, for the share of a device's peak that a run reaches (MFU)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.shape import product_elements
from galvatron_hf.profiler.trace.counted_model import CountedModel
from galvatron_hf.profiler.trace.shapes import model_shape_from_model
from galvatron_hf.profiler.trace.small_models import image_positions, layer_kinds


_TRACED_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class TrainingFlops:
    """Holds FLOPs as PaLM counts them (arXiv 2204.02311, appendix B): without recompute and without regard to the
    causal mask.

    Attributes:
        per_token (`float`): 6 for each weight of a matrix product that a token meets.
        per_pair (`float`): 12 for each dimension of the heads of each layer, for a pair of tokens of one document.
    """

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> TrainingFlops | None:
        """Returns the FLOPs of a model with one stack of layers, which may be on the meta device; None for others."""
        adapter = adapter_for(model)
        if len(adapter.stacks) > 1 or image_positions(model) is not None:
            return None
        shape, kinds, counts = model_shape_from_model(model), layer_kinds(model), adapter.expert_counts(model)
        chosen = [1.0] * (max(kinds) + 1)
        if any(counts):
            top_k = CountedModel(model, torch.float32, _TRACED_TOKENS, packed=False).top_k()
            count_of = dict(zip(kinds, counts, strict=True))
            chosen = [top_k[kind] / count_of[kind] if count_of[kind] else 1.0 for kind in range(len(chosen))]
        elements = sum(
            product_elements(weights, chosen[kind]) for weights, kind in zip(shape.layers, kinds, strict=True)
        )
        head = product_elements(shape.embedding[:1] if shape.tied else shape.head)
        return cls(per_token=6.0 * (elements + head), per_pair=12.0 * shape.heads * shape.head_dim * len(shape.layers))

    def of_documents(self, lengths: np.ndarray) -> float:
        """Returns the FLOPs of a step on documents of so many tokens."""
        return self.per_token * float(lengths.sum()) + self.per_pair * float(
            np.square(lengths, dtype=np.float64).sum()
        )
