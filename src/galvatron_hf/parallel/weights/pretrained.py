# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Builds a pretrained model without its weights: the part of `from_pretrained` before weights are read."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import resolve_revision

from galvatron_hf.checkpoint.hugging_face import keep_float32
from galvatron_hf.models.auto_classes import auto_model
from galvatron_hf.parallel.comm.objects import on_every_rank
from galvatron_hf.parallel.weights.safetensors import WeightFiles, find_files


# Options that choose the files of `from_pretrained`.
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Options that would place, split or replace weights, which the plan does.
_REFUSED = {
    "device_map": "says where weights go, which the plan does",
    "distributed_config": "says where weights go, which the plan does",
    "tp_plan": "says where weights go, which the plan does",
    "tp_size": "says where weights go, which the plan does",
    "quantization_config": "makes weights that cannot be sharded",
    "gguf_file": "makes weights that cannot be sharded",
    "state_dict": "holds the weights of a whole model",
}


def pretrained_on_meta(name: str | os.PathLike, **options: Any) -> tuple[PreTrainedModel, WeightFiles]:
    """Builds the causal language model of a folder or an id on the Hub on the meta device, and finds its weights.
    Collective: rank 0 resolves and downloads before the others.

    Args:
        options: as for `from_pretrained`: `dtype` ("auto" by default), `attn_implementation`, `revision`, `subfolder`,
            `variant`, `token`, `trust_remote_code`, `key_mapping`, fields of the configuration and so on.

    Returns:
        `tuple`: the model, in evaluation mode and with the folder's generation configuration, and the files to give to
            [`parallelize`].

    Raises:
        ValueError: if the model does not exist, is quantised or has no safetensors, or if an option is not supported.
    """
    name = os.fspath(name)
    return on_every_rank(lambda: _build(name, dict(options)), rank_0_first=True)


def _build(name: str, options: dict[str, Any]) -> tuple[PreTrainedModel, WeightFiles]:
    _check(name, options)
    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None) or "auto"
    attention = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    variant, key_mapping = options.pop("variant", None), options.pop("key_mapping", None)
    generation, trust = options.pop("generation_config", None), options.pop("trust_remote_code", None)
    for harmless in ("low_cpu_mem_usage", "use_safetensors"):
        options.pop(harmless, None)
    given, hub = options.pop("config", None), {key: options.pop(key) for key in _HUB_OPTIONS if key in options}
    where = {key: hub[key] for key in ("cache_dir", "local_files_only", "token") if key in hub}
    hub["revision"] = resolve_revision(name, hub.get("revision"), **where)
    if isinstance(given, PreTrainedConfig):
        config, unused = given, options
    else:
        source = given or name
        config, unused = AutoConfig.from_pretrained(
            source, return_unused_kwargs=True, trust_remote_code=trust, **hub, **options
        )
    if unused:
        raise ValueError(
            f"{sorted(unused)[0]} is neither an option of from_pretrained that works under a plan nor a field of "
            f"{type(config).__name__}; leave it out, or pass a loaded model."
        )
    _check_config(name, config)
    files = WeightFiles(name=name, files=find_files(name, variant, hub), key_mapping=key_mapping)
    dtype = _dtype(dtype, config, files)
    with torch.device("meta"):
        model = auto_model(config).from_config(config, dtype=dtype, trust_remote_code=trust, **attention)
    keep_float32(model, dtype)
    whole = dict.fromkeys(_HUB_OPTIONS) | {"force_download": False, "local_files_only": False, "subfolder": ""} | hub
    if model.can_generate():
        model.adjust_generation_fn(generation, True, None, name, trust_remote_code=trust, **whole)
    return model.eval(), files


def _check(name: str, options: dict[str, Any]) -> None:
    for option, reason in _REFUSED.items():
        if options.get(option) is not None:
            raise ValueError(
                f"{option} {reason}, so a model that is loaded under a plan cannot have it; leave it out."
            )
    if os.path.isdir(name):
        return
    if os.path.isfile(name) or os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(
            f"There is no folder {name}; give one that has config.json and safetensors, or an id on the Hub."
        )


def _check_config(name: str, config: PreTrainedConfig) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{name} is quantised, and quantised weights cannot be sharded; give the folder of the unquantised model."
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError(
            f"{name} keeps its weights in {config.transformers_weights!r} (transformers_weights in config.json), "
            "which is not supported; name the file model.safetensors."
        )


def _dtype(wanted: str | torch.dtype, config: PreTrainedConfig, files: WeightFiles) -> torch.dtype:
    if wanted == "auto":
        wanted = config.dtype or next(
            (stored.dtype for stored in files.stored().values() if stored.dtype and stored.dtype.is_floating_point),
            torch.float32,
        )
    dtype = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {wanted!r} cannot be trained under a plan; use 'float32', 'bfloat16' or 'auto'.")
    return dtype
