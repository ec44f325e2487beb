# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out which tensors a family passes to its attention, by one run without weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from galvatron_hf.models.adapter import base_model, masks_by_type
from galvatron_hf.parallel.layers.attention import POSITIONS
from galvatron_hf.utils.compat import set_attention_implementation


_PROBE = "galvatron_probe"


class _Found(Exception):
    """Ends the probed forward, with the names of the tensors that the attention got."""


def attention_obstacle(family: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Says why attention by document cannot replace a family's attention; None if it can. `config` stays as it is."""
    config = copy.deepcopy(config)
    set_attention_implementation(config, _PROBE)
    try:
        with torch.device("meta"):
            model = family(config).train()
            ids = torch.zeros(1, 2, dtype=torch.long)
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # prepared, so that the family makes none
            masks = masks_by_type(config, mask)
            base_model(model)(input_ids=ids, position_ids=ids, attention_mask=masks, use_cache=False)
    except _Found as found:
        (names,) = found.args
        return f"{family.__name__} gives its attention {names[0]!r}" if names else None
    except Exception as error:  # a family may raise anything; its attention is unknown then
        return f"the attention of {family.__name__} could not be looked at ({type(error).__name__}: {error})"
    return f"the attention of {family.__name__} does not call the registered attention function"


def _probe(module: nn.Module, query, key, value, attention_mask, **given) -> None:
    raise _Found([name for name, x in given.items() if isinstance(x, torch.Tensor) and name not in POSITIONS])


AttentionInterface.register(_PROBE, _probe)
