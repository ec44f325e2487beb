# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the tensor-parallel plan that a family ships as styles of this runtime. What a region gets is whole on every
rank, and its gradient is summed over the ranks, so every part of a region may have the share of the rank's own heads
or channels as its gradient. A family's plan has other places for the same sums, or gathers what need not be whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedConfig

from galvatron_hf.models.adapter import Fused, Style


EXPERTS = "experts"  # the word for the module of all experts in the families' tensor-parallel plans
_PREFIX = "layers.*."

_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "replicated_with_grad_allreduce": Style.REPLICATED_PARTIAL_GRAD,
    # Its rotary half goes to every head: the family sums its gradient there, this runtime sums that of the weight.
    "mla_kv_a_proj": Style.REPLICATED_PARTIAL_GRAD,
}
# Column outputs that the family gathers, and row inputs that it splits again. What lies between them is a norm over
# all heads, which gets all features (below), or a product with gates, whose parts are cut alike.
_GATHERED = {"colwise_gather_output": Style.COLUMN, "rowwise_split_input": Style.ROW}
_BETWEEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
# Weights that a plan leaves out because the family sums gradients of activations: each is applied for own heads.
_INSIDE = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "act_fn")
# Norms of queries and keys, and the projection whose output they get.
_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj", "query_layernorm": "q_proj", "key_layernorm": "k_proj"}
# What modules of these names are in attention and MLPs of which the family's plan covers no module.
_USUAL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), Style.COLUMN),
    **dict.fromkeys(("o_proj", "down_proj"), Style.ROW),
}
_ATTENTION = "self_attn"
_MLPS = ("mlp", "mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp")


@dataclass(frozen=True, kw_only=True)
class TensorStyles:
    """Holds the styles of the modules of a layer, its fused projections, and why it cannot be cut, if so."""

    styles: Mapping[str, Style] = field(default_factory=dict)
    fused: Mapping[str, Fused] = field(default_factory=dict)
    unsupported: str | None = None


def read_styles(plan: Mapping[str, str], layers: Iterable[nn.Module], per_head: Iterable[str]) -> TensorStyles:
    """Returns the styles of a family's `base_model_tp_plan`, without those of experts, which `expert` spreads.
    `per_head` are names of parameters with one entry for each head, whatever the plan says.
    """
    modules = {name: module for layer in layers for name, module in layer.named_modules()}
    wanted = {name.removeprefix(_PREFIX): style for name, style in plan.items() if name.startswith(_PREFIX)}
    styles: dict[str, Style] = {}
    fused: dict[str, Fused] = {}
    for name, style in wanted.items():
        last = name.rpartition(".")[2]
        if EXPERTS in name.split(".") or style == "local_params" or last in per_head:
            continue
        if style in _GATHERED and last in _BETWEEN:
            styles[name] = _GATHERED[style]
            if last == "gate_up_proj":
                fused[name] = Fused(parts=("gate", "up"), sizes=_halves)
        elif style in _STYLES:
            styles[name] = _STYLES[style]
        else:
            return TensorStyles(unsupported=f"its {name} has the style {style!r}, which is not supported")
    if not any(name.startswith(f"{_ATTENTION}.") for name in styles):
        styles |= _usual_styles(modules, *((_ATTENTION,) if styles else (_ATTENTION, *_MLPS)))
    if not styles:
        return TensorStyles(unsupported="the tensor-parallel plan that its family ships covers no module but experts")
    return TensorStyles(styles=styles | _inside(modules, styles), fused=fused)


def _halves(config: PreTrainedConfig) -> tuple[int, ...]:
    return (config.intermediate_size,) * 2


def _usual_styles(modules: Mapping[str, nn.Module], *blocks: str) -> dict[str, Style]:
    found = {f"{block}.{name}": style for block in blocks for name, style in _USUAL.items()}
    return {name: style for name, style in found.items() if isinstance(modules.get(name), nn.Linear)}


def _inside(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, Style]:
    """Returns the styles of modules beside cut ones that a plan leaves out."""
    blocks, found = {name.rpartition(".")[0] for name in styles}, {}
    for block in blocks:
        for name in _INSIDE:
            inner = modules.get(f"{block}.{name}")
            if inner is not None and next(inner.parameters(), None) is not None:
                found[f"{block}.{name}"] = Style.REPLICATED_PARTIAL_GRAD
        for name, projection in _NORMS.items():
            norm, source = modules.get(f"{block}.{name}"), modules.get(f"{block}.{projection}")
            if norm is not None and isinstance(source, nn.Linear):
                sizes = [weight.numel() for weight in norm.parameters()]
                of_all = bool(sizes) and sizes[0] == source.out_features
                found[f"{block}.{name}"] = Style.ALL_FEATURES if of_all else Style.REPLICATED_PARTIAL_GRAD
    return found
