# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Generation with a parallelised model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device

from galvatron_hf.parallel.comm.objects import broadcast_object, on_every_rank
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.distributed_state import plain_model, whole_weights


def generate(parallel: ParallelModel, *args, **kwargs) -> torch.Tensor:
    """Generates on rank 0 with the family's own model, into which the weights are gathered; collective. Rank 0 needs
    memory for the whole model in the plan's compute precision. Rank 0's arguments of
    [`~transformers.GenerationMixin.generate`] count, and every rank returns rank 0's result.
    """
    weights = whole_weights(parallel)

    def on_rank_0() -> torch.Tensor | None:
        if dist.get_rank() > 0:
            return None
        precision = parallel.plan.precision
        plain = plain_model(parallel, weights)
        if precision is not None and precision.activations == "bf16":
            plain.bfloat16()
        with torch.no_grad():
            return send_to_device(plain.generate(*args, **{"use_cache": True, **kwargs}), "cpu")

    result = on_every_rank(on_rank_0)  # all ranks raise what rank 0 raises
    return send_to_device(broadcast_object(result), parallel.device)
