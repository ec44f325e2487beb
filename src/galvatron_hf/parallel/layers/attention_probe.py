# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out which tensors a family passes to its attention, by one run without weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from galvatron_hf.models.adapter import base_model
from galvatron_hf.models.attention_masks import masks_by_type, prepared_mask
from galvatron_hf.models.llama4 import counts_positions, cuts_chunks
from galvatron_hf.models.trial_run import forward_options
from galvatron_hf.parallel.layers.attention import POSITIONS, is_causal
from galvatron_hf.utils.compat import set_attention_implementation


_PROBE = "galvatron_probe"


class _Found(Exception):
    """Ends the probed forward. Its arguments are the names of the tensors that the attention got, whether it is
    causal, and its dropout.
    """


def attention_obstacle(
    family: type[PreTrainedModel], config: PreTrainedConfig, causal: bool, *, shared: bool = False
) -> str | None:
    """Says why attention by document cannot replace a family's attention, `causal` or not; None if it can. With
    `shared`, ranks share documents. `config` stays as it is.
    """
    config = copy.deepcopy(config)
    set_attention_implementation(config, _PROBE)
    try:
        with torch.device("meta"):
            model = family(config).train()
            ids = torch.zeros(1, 2, dtype=torch.long)
            masks = masks_by_type(config, prepared_mask("meta"))
            base = base_model(model)
            base(input_ids=ids, position_ids=ids, attention_mask=masks, **forward_options(type(base)))
    except _Found as found:
        names, is_causal, dropout = found.args
        attentions = [one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "config")]
        if any(counts_positions(one) or cuts_chunks(one) for one in attentions):
            return f"the attention of {family.__name__} counts the positions of a row from its first"
        if is_causal != causal:
            return f"the attention of {family.__name__} does not say whether it is causal"
        if names:
            return f"{family.__name__} gives its attention {names[0]!r}"
        return f"the attention of {family.__name__} has dropout {dropout}" if shared and dropout > 0.0 else None
    except Exception as error:  # a family may raise anything; its attention is unknown then
        return f"the attention of {family.__name__} could not be looked at ({type(error).__name__}: {error})"
    return f"the attention of {family.__name__} does not call the registered attention function"


def _probe(module: nn.Module, query, key, value, attention_mask, **given) -> None:
    names = [name for name, x in given.items() if isinstance(x, torch.Tensor) and name not in POSITIONS]
    raise _Found(names, is_causal(module, given), given.get("dropout") or 0.0)


AttentionInterface.register(_PROBE, _probe)
