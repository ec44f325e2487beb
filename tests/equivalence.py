# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the runtime's tests: one process, one plain Hugging Face model, one global batch.

[`reference`] computes it before the ranks start; [`check_equivalence`] runs on every rank and raises if a
parallelised model differs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from galvatron_hf.data.loader import fill_rows
from galvatron_hf.models.losses import logits_of
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy


RELATIVE = 1e-5
FLOOR = 1e-7  # of the global norm: GPT-2's key biases have gradients that are zero but for rounding


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Holds the results of one process.

    Attributes:
        model (`PreTrainedModel`): the model, untouched but for its gradients.
        batch (`dict`): the global batch, as the parallel model gets it.
        num_items (`int`, *optional*): given number of targets.
        loss (`float`): the training loss.
        eval_loss (`float`): the loss in evaluation mode.
        grad_norm (`float`): the 2-norm of all gradients.
        gradients (`dict`): by parameter name.
        logits (`torch.Tensor`): [B, S, V] in evaluation mode.
    """

    model: PreTrainedModel
    batch: dict[str, torch.Tensor]
    num_items: int | None
    loss: float
    eval_loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor


def reference(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], num_items: int | None = None) -> Reference:
    """Runs the plain model once on the whole batch, with Hugging Face's own loss."""
    # With a cache, Hugging Face takes packed rows for one document; its Trainer switches it off.
    inputs: dict[str, Any] = dict(batch, use_cache=False)
    # Hugging Face computes a loss only if labels are there, and then prefers the shifted.
    if "labels" not in inputs and "shift_labels" in inputs:
        inputs["labels"] = inputs["shift_labels"]
    if num_items is not None:
        inputs["num_items_in_batch"] = num_items
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
    model.train()
    model.zero_grad()
    return Reference(
        model=model,
        batch=dict(batch),
        num_items=num_items,
        loss=float(loss.detach()),
        eval_loss=float(output.loss),
        grad_norm=total_norm(gradients),
        gradients=gradients,
        logits=logits_of(output),
    )


def single_stage(
    layers: tuple[LayerStrategy, ...],
    world_size: int,
    *,
    ranks: tuple[int, ...] | None = None,
    embedding: VocabularyStrategy | None = None,
    head: VocabularyStrategy | None = None,
    **options: Any,
) -> ParallelPlan:
    """Returns a plan of one stage; `ranks` permutes it."""
    plan = dict(world_size=world_size, stacks={"decoder": len(layers)}, layers=layers, **options)
    if ranks is not None:
        plan["stages"] = (Stage(ranks=ranks, layers=(0, len(layers))),)
    return ParallelPlan(embedding=embedding or VocabularyStrategy(), head=head or VocabularyStrategy(), **plan)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Holds the results of a parallelised model on one rank; see [`Reference`].

    Attributes:
        clipped_norm (`float`): the norm that is left after clipping to half the oracle's.
        evaluation ([`Evaluation`], *optional*): the results in evaluation mode.
    """

    loss: float
    grad_norm: float
    clipped_norm: float
    gradients: dict[str, torch.Tensor]
    evaluation: Evaluation | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds the results of a parallelised model in evaluation mode on one rank.

    Attributes:
        logits (`torch.Tensor`): those of this rank's `rows`.
        rows (`slice`): of the global batch.
    """

    loss: float
    logits: torch.Tensor
    rows: slice


def check_equivalence(
    oracle: Reference, plan: ParallelPlan, world: WorldMesh | None = None, *, evaluation: bool = True
) -> None:
    """Compares step 1 of a plan with one process; collective.

    Args:
        evaluation (`bool`): whether loss and logits in evaluation mode, a third of the CPU time, are compared too.

    Raises:
        AssertionError: naming the first quantity or parameter that differs, and by how much.
    """
    # All that is collective comes first, so that ranks that disagree still do the same.
    compare(observe(parallelize(copy.deepcopy(oracle.model), plan, world), oracle, evaluation=evaluation), oracle)


def observe(parallel: ParallelModel, oracle: Reference, *, evaluation: bool = True) -> Observed:
    """Returns one training step's gradients, then perhaps loss and logits in evaluation mode; collective."""
    model = parallel.model
    loss = parallel.forward_backward(oracle.batch, oracle.num_items)
    gradients, grad_norm = whole_gradients(model, oracle.model), parallel.grad_norm()
    before = [local(gradient_of(parameter)).clone() for parameter in model.parameters()]
    parallel.clip_grad_norm_(oracle.grad_norm / 2)
    after = [local(gradient_of(parameter)) for parameter in model.parameters()]
    clipped_norm = total_norm(gradients) * clipping_scale(before, after, oracle.grad_norm / 2 / total_norm(gradients))
    model.zero_grad()
    return Observed(
        loss=float(loss),
        grad_norm=float(grad_norm),
        clipped_norm=clipped_norm,
        gradients=gradients,
        evaluation=_evaluate(parallel, oracle) if evaluation else None,
    )


def _evaluate(parallel: ParallelModel, oracle: Reference) -> Evaluation:
    """Computes loss and logits of the oracle's batch in evaluation mode; collective."""
    model = parallel.model
    model.eval()
    unlabelled = {name: x for name, x in oracle.batch.items() if not name.endswith(("labels", "_positions"))}
    output = parallel.evaluate(oracle.batch, num_items_in_batch=oracle.num_items)
    if parallel.pipeline is None:
        rows = slice(0, len(oracle.logits))
        with torch.no_grad():
            logits = logits_of(model(**unlabelled))
    else:
        share = -(-len(oracle.logits) // parallel.plan.world_size)
        logits = logits_of(parallel.evaluate(fill_rows(unlabelled, share * parallel.plan.world_size)))
        start = min(parallel.share_index * share, len(oracle.logits))
        rows = slice(start, min(start + share, len(oracle.logits)))
    assert logits_of(output) is None  # a loss alone never has them
    model.train()
    return Evaluation(loss=float(output.loss), logits=logits[: rows.stop - rows.start], rows=rows)


def compare(seen: Observed, oracle: Reference) -> None:
    """Raises `AssertionError` if a rank's observations are not the oracle's."""
    assert_near("loss", seen.loss, oracle.loss)
    assert_same_gradients(seen.gradients, oracle.gradients)
    assert_near("grad_norm", seen.grad_norm, oracle.grad_norm)
    assert_near("norm after clipping", seen.clipped_norm, oracle.grad_norm / 2)
    if seen.evaluation is not None:
        _compare_evaluation(seen.evaluation, oracle)


def _compare_evaluation(seen: Evaluation, oracle: Reference) -> None:
    assert_near("eval loss", seen.loss, oracle.eval_loss)
    wanted, scale = oracle.logits[seen.rows], float(oracle.logits.abs().max())
    assert seen.logits.shape == wanted.shape
    # A padding position may attend to nothing, and its logits then have no meaning.
    mask = "decoder_attention_mask" if oracle.model.config.is_encoder_decoder else "attention_mask"
    of_positions = wanted.ndim == 3 and mask in oracle.batch
    real = oracle.batch[mask][seen.rows].bool() if of_positions else torch.ones(wanted.shape[:1], dtype=torch.bool)
    error = float((seen.logits - wanted)[real].abs().max()) if len(wanted) else 0.0
    if not error <= RELATIVE * scale:
        raise AssertionError(f"the logits of rows {seen.rows} are off by {error / scale:.2e} of the largest")


def assert_near(name: str, got: float, wanted: float) -> None:
    if not abs(got - wanted) <= RELATIVE * abs(wanted):
        raise AssertionError(f"{name} is {got!r}, and {wanted!r} on one process")


def assert_same_gradients(
    seen: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], where: str = "", floor: float = FLOOR
) -> None:
    """Raises `AssertionError` with the first gradient that differs; bounds as in [`unequal_tensors`]."""
    found = unequal_tensors(f"{where} gradient".strip(), seen, wanted, floor=floor)
    if found:
        raise AssertionError(found[0])


def unequal_tensors(
    kind: str,
    seen: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    relative: float = RELATIVE,
    floor: float = FLOOR,
) -> list[str]:
    """Says which tensors differ, and by how much; empty if none does.

    An entry may differ by the larger of two bounds: `relative` times the largest entry of its tensor, and `floor`
    times the norm of all wanted tensors.

    Args:
        kind (`str`): the messages' word for such a tensor.
        seen, wanted (`Mapping[str, torch.Tensor]`): by parameter name.
    """
    if seen.keys() != wanted.keys():
        return [f"{kind}s of {sorted(seen)} instead of {sorted(wanted)}"]
    floor *= total_norm(wanted)
    found = []
    for name, tensor in wanted.items():
        error, scale = float((seen[name] - tensor).abs().max()), float(tensor.abs().max())
        if not error <= max(relative * scale, floor):
            found.append(f"the {kind} of {name} is off by {error / (scale or 1):.2e} of its largest entry")
    return found


def clipping_scale(before: list[torch.Tensor], after: list[torch.Tensor], wanted: float) -> float:
    """Returns the factor by which clipping scaled this rank's gradients: the factor farthest from `wanted`.

    The factor is NaN if the entries of one gradient were scaled by different factors.
    """
    scales = [wanted]
    for old, new in zip(before, after, strict=True):
        largest = old.abs().max() if old.numel() else 0.0
        scale = float((old.double() * new).sum() / old.double().square().sum()) if largest else wanted
        if not torch.allclose(new, scale * old, rtol=0, atol=float(1e-6 * largest)):
            return float("nan")
        scales.append(scale)
    return max(scales, key=lambda scale: abs(scale - wanted))


def total_norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt())


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the gradient of a parameter, zeros if the loss does not depend on it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor put together from its shards; collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_gradients(model: PreTrainedModel, plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns all gradients under the plain model's names; collective."""
    return _of_all_stages({name: whole(gradient_of(p)) for name, p in model.named_parameters()}, plain)


@torch.no_grad()
def whole_weights(model: PreTrainedModel, plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns all weights under the plain model's names; collective."""
    return _of_all_stages({name: whole(p.detach()) for name, p in model.named_parameters()}, plain)


def _of_all_stages(own: dict[str, torch.Tensor], plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Joins what the ranks of a pipeline have; the copies of a tied weight must be the same."""
    if not all(name in own or _parts_of(name, own) for name, _ in plain.named_parameters()):
        gathered: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        own = {}
        saved = {id(parameter): name for name, parameter in plain.named_parameters()}
        names = {name: saved[id(one)] for name, one in plain.named_parameters(remove_duplicate=False)}
        for name, tensor in (item for part in gathered for item in part.items()):
            name = names.get(name, name)
            torch.testing.assert_close(
                tensor, own.setdefault(name, tensor), rtol=0, atol=0, msg=f"copies of {name} differ"
            )
    return join_parts(own, plain)


def _parts_of(name: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    owner, parameter = name.rsplit(".", 1)
    return [key for key in tensors if key.startswith(f"{owner}.") and key.endswith(f".{parameter}")]


def join_parts(tensors: dict[str, torch.Tensor], plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Joins the parts of fused projections: `c_attn.query.weight` and so on are columns of `c_attn.weight`."""
    joined = {}
    for name, _ in plain.named_parameters():
        if name in tensors:
            joined[name] = tensors.pop(name)
            continue
        dim = -1 if isinstance(plain.get_submodule(name.rsplit(".", 1)[0]), Conv1D) else 0
        joined[name] = torch.cat([tensors.pop(part) for part in _parts_of(name, tensors)], dim)
    assert not tensors, f"parameters that the plain model does not have: {sorted(tensors)}"
    return joined
