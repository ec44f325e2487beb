# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Generation with a parallelised model: on all ranks, or on rank 0 with the whole model."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device

from galvatron_hf.parallel.comm.objects import broadcast_object, gather_objects, on_every_rank
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.distributed_state import plain_model, whole_weights
from galvatron_hf.utils.compat import generation_options


# Options of `generate` with an entry for each row, if they are tensors.
_OF_ROWS = (
    *("inputs", "input_ids", "attention_mask", "position_ids", "token_type_ids", "decoder_input_ids"),
    "decoder_attention_mask",
)
# Options with objects that see the whole batch, or the whole model.
_OF_WHOLE_MODEL = ("logits_processor", "stopping_criteria", "custom_generate", "negative_prompt_ids")


def generate(parallel: ParallelModel, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Generates by the family's own `generate`; collective. Rank 0's arguments of
    [`~transformers.GenerationMixin.generate`] count, and every rank returns the same result. Ranks generate their own
    rows with the shards that they have if [`shared_obstacle`] is None. Otherwise rank 0 generates, and needs memory
    for the whole model in the plan's compute precision.
    """
    obstacle = broadcast_object(
        on_every_rank(lambda: shared_obstacle(parallel, *args, **kwargs) if dist.get_rank() == 0 else None)
    )
    if obstacle is None:
        return _generate_on_all(parallel, *broadcast_object((args, kwargs) if dist.get_rank() == 0 else None))
    return _generate_on_rank_0(parallel, *args, **kwargs)


def shared_obstacle(parallel: ParallelModel, *args: Any, **kwargs: Any) -> str | None:
    """Says why ranks cannot share a generation; None if they can. The arguments are those of `generate`."""
    if parallel.pipeline is not None:
        return "the plan has several stages"
    if any(layer.experts is not None for layer in parallel.resolved.layers):
        return "layers have experts"
    if parallel.resolved.stage_size % _ranks_of_rows(parallel):
        return "the tensor degrees of the layers have no common multiple that divides the ranks"
    if any(hasattr(block.original, "_torchdynamo_orig_callable") for block in parallel.blocks):
        return "layers are compiled for the shapes of training"
    config = generation_options(parallel.model, kwargs)
    if config.do_sample:
        return "tokens are drawn at random, as one process draws them"
    if config.return_dict_in_generate:
        return "more than tokens is returned"
    if config.max_time is not None:
        return "each rank's clock would end its rows"
    simple = (bool, int, float, str, list, type(None))
    for name, value in kwargs.items():
        of_rows = isinstance(value, torch.Tensor) and name in _OF_ROWS
        if name != "generation_config" and not of_rows and not isinstance(value, simple):
            return f"{name} is a {type(value).__name__}"
        if name in _OF_WHOLE_MODEL and value:
            return f"there is a {name}"
    if len(args) > 1 or not all(isinstance(arg, torch.Tensor) for arg in args) or _rows(args, kwargs) is None:
        return "there are no rows of tokens"
    return None


def _rows(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Returns the rows of the prompts."""
    found = [*args, *(kwargs[name] for name in _OF_ROWS if isinstance(kwargs.get(name), torch.Tensor))]
    counts = {len(tensor) for tensor in found if tensor.ndim}
    return counts.pop() if len(counts) == 1 else None


def _ranks_of_rows(parallel: ParallelModel) -> int:
    """Returns how many ranks generate the same rows: those that have parts of a layer, or of the vocabulary."""
    resolved = parallel.resolved
    layers = [layer.strategy.tensor for layer in resolved.layers]
    return math.lcm(*layers, resolved.embedding.strategy.tensor, resolved.head.strategy.tensor)


@torch.no_grad()
def _generate_on_all(parallel: ParallelModel, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Generates some rows on each rank, in steps that all ranks take together: a rank whose rows have ended goes on
    computing, because the others need its shards.
    """
    model, device = parallel.model, parallel.device
    args, kwargs = send_to_device((args, kwargs), device)
    rows, together = _rows(args, kwargs), _ranks_of_rows(parallel)
    group, groups = parallel.mesh.index // together, parallel.resolved.stage_size // together
    share = -(-rows // groups)
    # With fewer rows than groups some generate the last row too.
    own = torch.arange(group * share, (group + 1) * share, device=device).clamp(max=rows - 1)
    args = tuple(tensor[own] for tensor in args)
    kwargs |= {name: value[own] for name, value in kwargs.items() if name in _OF_ROWS and value is not None}
    options = {"use_cache": True, **kwargs, "synced_gpus": True}
    with _families_own_forward(parallel):
        stage = parallel.runner.stages[0]
        tokens = stage(None, None, lambda: type(model).generate(model, *args, **options))
    found = gather_objects((parallel.mesh.index, tokens.cpu()))
    of_groups = [tokens for index, tokens in sorted(found, key=lambda one: one[0]) if index % together == 0]
    copies = len(of_groups[0]) // share  # `num_return_sequences`
    pad, longest = _padding(parallel, kwargs), max(tokens.shape[1] for tokens in of_groups)
    joined = [torch.nn.functional.pad(one, (0, longest - one.shape[1]), value=pad) for one in of_groups]
    return torch.cat(joined)[: rows * copies].to(device)


def _padding(parallel: ParallelModel, kwargs: dict[str, Any]) -> int:
    """Returns the token that `generate` puts after a row's end."""
    config = generation_options(parallel.model, kwargs)
    end = config.eos_token_id
    first = end[0] if isinstance(end, (list, tuple)) else end
    return next((token for token in (config.pad_token_id, first) if token is not None), 0)


@contextlib.contextmanager
def _families_own_forward(parallel: ParallelModel) -> Iterator[None]:
    """Gives the model its family's own forward and evaluation mode while the body runs."""
    model = parallel.model
    training = [module for module in model.modules() if module.training]  # parts may be in evaluation mode
    replaced, current = model.forward, parallel.runner.current
    model.eval()
    model.forward = types.MethodType(parallel.family.forward, model)
    try:
        with parallel.units.several_forwards(), current.of_whole_rows():
            yield
    finally:
        model.forward = replaced
        for module in training:
            module.training = True


def _generate_on_rank_0(parallel: ParallelModel, *args: Any, **kwargs: Any) -> torch.Tensor:
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
