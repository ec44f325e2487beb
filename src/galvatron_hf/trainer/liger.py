# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of Liger (arXiv 2410.10989) under a plan: norms, rotary embeddings and MLPs are Liger's, the loss is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, TrainingArguments, trainer
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from galvatron_hf.trainer.overrides import replaced


# Kernels that compute the loss, which the head of a plan does itself, on its part of the vocabulary.
OF_THE_LOSS = ("cross_entropy", "fused_linear_cross_entropy")


def refused_kernels(args: TrainingArguments) -> Iterator[str]:
    """Yields refusals of Liger's kernels that a plan cannot use, each a sentence."""
    if not args.use_liger_kernel:
        return
    if not is_liger_kernel_available():
        yield "use_liger_kernel=True needs the package liger-kernel, which is not installed; pip install liger-kernel."
    for name in OF_THE_LOSS:
        if (args.liger_kernel_config or {}).get(name):
            yield (
                f"liger_kernel_config has {name}=True, and the head of a plan computes the loss itself, without the "
                "whole logits; leave it out."
            )


def apply_kernels(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Replaces the forwards of a model's norms, rotary embeddings and MLPs, before a plan cuts their weights."""
    config: dict[str, Any] = {**(args.liger_kernel_config or {}), **dict.fromkeys(OF_THE_LOSS, False)}
    apply_liger_kernel(model, config)


@contextlib.contextmanager
def without_trainers_own() -> Iterator[None]:
    """Keeps Trainer from applying the kernels itself, the loss's too, while the body runs."""
    with replaced(trainer, apply_liger_kernel=lambda model, config: None):
        yield
