# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Says why the rows of a family cannot be packed."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.packing import Packing, rope_of_the_batch
from galvatron_hf.parallel.layers.attention_probe import attention_obstacle


def packing_obstacle(
    family: type[PreTrainedModel], config: PreTrainedConfig, packing: Packing, *, causal: bool
) -> str | None:
    """Says why rows of a family, whose attention is `causal` or not, cannot be documents of one packed row; None if
    they can. `config` stays as it is.
    """
    if packing.obstacle is not None:
        return f"{family.__name__} {packing.obstacle}"
    rope = rope_of_the_batch(config)
    if rope is not None:
        return f"{rope!r} rotary embeddings depend on the longest row of the batch"
    if packing.pairs is not None:
        return None  # the families with an adapter of both stacks have no such attention
    return attention_obstacle(family, config, causal)


def packing_obstacle_of(model: PreTrainedModel) -> str | None:
    """Says why rows of a model cannot be packed; None if they can."""
    adapter = adapter_for(model)
    causal = adapter.stacks[-1].causal
    return packing_obstacle(type(model), model.config, adapter.packing(model), causal=causal)
