# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One training step of any model type under a plan of each kind on two ranks, against one process.

`docs/make_families.py` makes a page of the outcomes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

import galvatron_hf
from equivalence import FLOOR, RELATIVE, Reference, compare, observe, reference, single_stage, total_norm
from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.trial_run import image_shape
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.utils.compat import decoder_ids_of_labels
from plans import pipelined
from ranks import run_ranks
from tiny_configurations import CAUSAL_LM, LABELS, model_class, tiny_model
from tiny_models import BATCHES


RIGHT, REFUSED, WRONG, CRASHED = "right", "refused", "wrong", "crashed"
KINDS = ("data", "tensor", "ulysses", "pipeline", "expert")
PACKAGE = Path(galvatron_hf.__file__).parent
SECONDS = 60.0  # for the ranks of one model type; they need about 5

# Weights with which fp32 is near enough to fp64. With seed 0, the gradients of one process are off by 5e-6 of fp64's,
# and those of the tensor plan by 1e-5, because the MLP squares.
SEEDS = {"nemotron": 1}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Says what became of a plan.

    Attributes:
        kind (`str`): "right", "refused", "wrong" or "crashed".
        sentence (`str`): of the error, empty if right.
        error (`float`): the worst error of a gradient, see [`worst_error`].
    """

    kind: str
    sentence: str = ""
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Family:
    """Says what became of a model type.

    Attributes:
        model_type, model_class (`str`): its names in transformers.
        unbuilt (`str`): why there is no tiny model, or why one process cannot train it; empty if it can.
        plans (`dict[str, Outcome]`): by kind of plan; a type without experts has none for them.
    """

    model_type: str
    model_class: str
    unbuilt: str = ""
    plans: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def refusal(self) -> str:
        """Returns the sentence with which the type is refused whatever the plan; empty if some plan runs."""
        if self.unbuilt or any(outcome.kind != REFUSED for outcome in self.plans.values()):
            return ""
        return self.plans["data"].sentence

    @property
    def defects(self) -> dict[str, Outcome]:
        """Returns the plans that computed other numbers than one process, or that ended in an error of ours."""
        return {name: outcome for name, outcome in self.plans.items() if outcome.kind in (WRONG, CRASHED)}


def plans_of(model: PreTrainedModel, adapter: ModelAdapter) -> dict[str, ParallelPlan]:
    """Returns a plan of each kind on two ranks for a model."""
    S, counts, stacks = LayerStrategy, adapter.expert_counts(model), adapter.stack_sizes(model)
    two = VocabularyStrategy(tensor=2 if adapter.structure is None else 1)

    def layers(*strategies: LayerStrategy) -> tuple[LayerStrategy, ...]:
        of_layers = (strategies[index % len(strategies)] for index in range(len(counts)))
        return tuple(one if count else replace(one, expert=1) for one, count in zip(of_layers, counts, strict=True))

    data = layers(S(), S(sharding="zero2", recompute="full"), S(sharding="replicate"), S(recompute="full"))
    tensor = layers(S(tensor=2), S(tensor=2, megatron_sp=True, recompute="full"), S(tensor=2, megatron_sp=True))
    ulysses = layers(S(ulysses=2), S(ulysses=2, recompute="full"), S(ulysses=2, sharding="zero2"))
    plans = {
        "data": single_stage(data, 2),
        "tensor": single_stage(tensor, 2, embedding=two, head=two),
        "ulysses": single_stage(ulysses, 2),
        "pipeline": pipelined([(0,), (1,)], data, micro_batches=2),
    }
    if any(counts):
        expert = layers(S(expert=2), S(expert=2, recompute="full"), S(expert=2, sharding="zero2"))
        plans["expert"] = single_stage(expert, 2)
    return {name: replace(plan, stacks=stacks) for name, plan in plans.items()}


def batch_of(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    """Returns a padded batch with the labels of a task, or images or recordings with theirs."""
    if task == "image-classification":
        images = torch.randn(6, *image_shape(model), generator=torch.Generator().manual_seed(5))
        return {"pixel_values": images, "labels": torch.arange(6) % LABELS}
    if task == "audio-classification":
        return recordings()
    batch = BATCHES["right"]()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if task == "sequence-classification":
        batch["labels"] = torch.arange(len(ids)) % LABELS
    elif task == "token-classification":
        batch["labels"] = (ids % LABELS).masked_fill(mask == 0, -100)
    elif task == "question-answering":
        lengths = mask.sum(1)
        del batch["labels"]
        batch |= {"start_positions": torch.arange(len(ids)) % lengths, "end_positions": lengths - 1}
        batch["start_positions"][1] = ids.shape[1]  # an answer that was cut off
        batch["end_positions"][:2] = ids.shape[1]
    elif task == "seq2seq-lm":
        batch["labels"] = batch["labels"][:, :7].contiguous()
        batch["decoder_input_ids"] = decoder_ids_of_labels(model, batch["labels"])
    return batch


def recordings(rows: int = 6, samples: int = 2000) -> dict[str, torch.Tensor]:
    """Returns recordings of different lengths with labels."""
    values = torch.randn(rows, samples, generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(samples) < torch.tensor([samples - 200 * (row % 4) for row in range(rows)])[:, None]).long()
    return {"input_values": values * mask, "attention_mask": mask, "labels": torch.arange(rows) % LABELS}


def run_family(model_type: str, task: str = CAUSAL_LM) -> Family:
    """Tries a model type with the head of a task under each kind of plan."""
    try:
        family = Family(model_type=model_type, model_class=model_class(model_type, task).__name__)
    except Exception as error:  # a class whose dependencies are not installed
        return Family(model_type=model_type, model_class="", unbuilt=_first_line(error))
    try:
        model = tiny_model(model_type, seed=SEEDS.get(model_type, 0), task=task)
    except Exception as error:  # of transformers: any
        return replace(family, unbuilt=_first_line(error))
    try:
        adapter = adapter_for(model)
    except ValueError as error:
        return replace(family, plans={"data": Outcome(kind=REFUSED, sentence=str(error))})
    except Exception as error:
        return replace(family, plans={"data": Outcome(kind=CRASHED, sentence=_first_line(error))})
    try:
        oracle = reference(model, batch_of(model, task))
    except Exception as error:
        return replace(family, unbuilt=f"one process cannot train it: {_first_line(error)}")
    return replace(family, plans=_run_plans(oracle, plans_of(model, adapter)))


def _run_plans(oracle: Reference, plans: dict[str, ParallelPlan]) -> dict[str, Outcome]:
    """Runs plans one after the other on the same ranks, or on ranks of their own if that ends in an error."""
    try:
        of_ranks = run_ranks(_outcomes, 2, oracle, plans, timeout=SECONDS)
    except AssertionError as error:
        failure = str(error)
    else:
        return {name: max((one[name] for one in of_ranks), key=_badness) for name in plans}
    if len(plans) == 1:
        return dict.fromkeys(plans, _cause(failure))
    apart = [_run_plans(oracle, {name: plan}) for name, plan in plans.items()]
    return {name: outcome for one in apart for name, outcome in one.items()}


def _outcomes(oracle: Reference, plans: dict[str, ParallelPlan]) -> dict[str, Outcome]:
    """Returns the outcomes on one rank. Errors but refusals and wrong numbers are raised: other ranks may wait."""
    world, found = WorldMesh("cpu"), {}
    for name, plan in plans.items():
        try:
            parallel = parallelize(copy.deepcopy(oracle.model), plan, world)
        except ValueError as refusal:
            found[name] = Outcome(kind=REFUSED, sentence=str(refusal))
            continue
        seen = observe(parallel, oracle, evaluation=False)
        try:
            compare(seen, oracle)
        except AssertionError as difference:
            found[name] = Outcome(kind=WRONG, sentence=str(difference))
        else:
            found[name] = Outcome(kind=RIGHT, error=worst_error(seen.gradients, oracle.gradients))
    return found


def worst_error(seen: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest error of a gradient's entry, relative to the largest entry of its tensor, or to a hundredth
    of the norm of all gradients if that is more. The bound of the oracle is 1e-5.
    """
    floor = FLOOR / RELATIVE * total_norm(wanted)
    return max(
        float((seen[name] - tensor).abs().max()) / max(float(tensor.abs().max()), floor)
        for name, tensor in wanted.items()
    )


def _badness(outcome: Outcome) -> tuple[int, float]:
    return (RIGHT, REFUSED, WRONG, CRASHED).index(outcome.kind), outcome.error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")


def _cause(message: str) -> Outcome:
    """Returns what ended the first rank: a refusal that comes with the first batch, or an error of ours."""
    file, lines = "", message.splitlines()
    for line in lines:
        if line.startswith('  File "'):
            file = line.split('"')[1]
        elif re.match(r"[\w.]*(Error|Exception)\b", line):
            refused = line.startswith("ValueError: ") and Path(file).is_relative_to(PACKAGE)
            return (
                Outcome(kind=REFUSED, sentence=line.removeprefix("ValueError: "))
                if refused
                else Outcome(kind=CRASHED, sentence=line)
            )
    return Outcome(kind=CRASHED, sentence=lines[0])
