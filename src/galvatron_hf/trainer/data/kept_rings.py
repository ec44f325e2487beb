# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Whether layers that are computed again keep the output of attention in rings, so that nothing is sent again."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

from galvatron_hf.data.placement import Placement
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan.chunks import shared_tokens
from galvatron_hf.plan.schedule import PipelineShape, most_under_way


GPU_SHARE = 0.9  # of a GPU's memory that may be filled
CPU_SHARE = 0.5  # of the machine's memory that is free


def keeps_rings(parallel: ParallelModel, placement: Placement, lengths: np.ndarray, held: int = 0) -> bool:
    """Returns whether this rank has room for what a step would keep, beside `held` bytes that it will need."""
    needed = kept_bytes(parallel, placement, lengths)
    return 0 < needed <= _free_bytes(parallel.device) - held


def kept_bytes(parallel: ParallelModel, placement: Placement, lengths: np.ndarray) -> int:
    """Returns the most bytes that a rank keeps in a step: outputs and log-sum-exps of its tokens in rings, in all
    recomputed layers of its stages and all micro-batches under way; 0 if there are none.
    """
    config, count = parallel.config, len(placement.shared)
    known = [getattr(config, name, None) or 0 for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    head_dim = max(*known, config.hidden_size // config.num_attention_heads)
    under_way = most_under_way(PipelineShape.from_plan(parallel.plan), count) if count else 0
    element = 2 if parallel.resolved.precision.activations == "bf16" else 4
    per_token = 0
    for block in parallel.blocks:
        kind = block.resolved.strategy.recompute if placement.recompute is None else placement.recompute
        if kind == "full":
            per_token += block.resolved.heads.query // block.resolved.strategy.ulysses * (head_dim * element + 4)
    most = 0
    for sequences in placement.shared:
        tokens = np.zeros(parallel.resolved.packs, dtype=np.int64)
        for one in sequences:
            if one.execution == "ring":
                tokens[list(one.ranks)] += shared_tokens(int(lengths[one.sequence]), len(one.ranks))
        most = max(most, int(tokens.max()))
    return most * per_token * under_way


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return GPU_SHARE * total - torch.cuda.max_memory_allocated(device)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return CPU_SHARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
