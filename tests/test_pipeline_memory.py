# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank holds between the actions of a pipeline's step equal the closed form, to the byte.

Counted is every storage that an operation of the step has made and that still lives, by what it is for: weights that
FSDP2 has gathered, gradients of weights, buffers of the last communication, and all else: saved activations, tensors
at the boundaries between stages, losses. Model inputs, which all micro-batches have from the beginning, are left out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.pipeline.runtime import SENDS_UNDER_WAY
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions, most_in_flight
from memory_formulas import (
    LayerShape,
    StageBytes,
    bytes_over_schedule,
    saved_activation_bytes,
    unit_bytes,
)
from plans import pipelined
from ranks import run_ranks
from test_memory import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, LAYER_WEIGHTS
from tiny_models import BATCHES, FAMILIES, VOCABULARY


SHAPE = LayerShape(hidden=HIDDEN, intermediate=INTERMEDIATE, heads=HEADS, key_value_heads=HEADS, head_dim=HEAD_DIM)
ROWS, LENGTH = 8, 8  # of the plain batch
RECOUNTS, RECOUNT_SECONDS = 1000, 0.01
# Shapes of a layer's weights with as many key/value heads as heads.
LAYER_SHAPES = [
    (HEADS * HEAD_DIM, HIDDEN) if name.endswith(("k_proj", "v_proj")) else shape
    for name, (shape, _) in LAYER_WEIGHTS.items()
]


class LiveStorages(TorchDispatchMode):
    """Remembers every storage that an operation returns, without keeping it alive.

    Args:
        older (`Iterable[torch.Tensor]`): tensors from before, whose storages operations may return too.
    """

    def __init__(self, older: Iterable[torch.Tensor]):
        super().__init__()
        self.older = {storage_of(tensor)._cdata for tensor in older}
        self.found: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = storage_of(tensor)
                known = self.found.get(storage._cdata)
                if storage._cdata not in self.older and (known is None or known.expired()):
                    self.found[storage._cdata] = StorageWeakRef(storage)
        return output

    def sizes(self) -> dict[int, int]:
        """Returns the bytes of the storages that live; FSDP2 frees some by making them empty."""
        live = {}
        for key, reference in self.found.items():
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                live[key] = storage.nbytes()
        return live


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Holds the bytes after an action."""

    action: Action
    activations: int
    gathered: int
    gradients: int
    buffers: int


def weight_storages(parallel: ParallelModel) -> tuple[set[int], set[int], set[int]]:
    """Returns the storages of gathered weights, of gradients, and of the last gather and reduction."""
    gathered: list[torch.Tensor] = []
    gradients = [parameter.grad for parameter in parallel.model.parameters()]
    buffers: list[torch.Tensor] = []
    for unit in parallel.units.sharded:
        for group in unit.module._get_fsdp_state()._fsdp_param_groups:
            gradients.append(group._partial_reduce_output)
            buffers += [state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states]
            last = group.comm_ctx.all_gather_state
            for result in (group._all_gather_result, None if last is None else last.all_gather_result):
                buffers += [] if result is None else [result.all_gather_output]
            for parameter in group.fsdp_params:
                gathered += parameter.all_gather_outputs
                gradients += [parameter.sharded_param.grad, parameter.unsharded_accumulated_grad]
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    gathered.append(whole)
                    gradients.append(whole.grad)
    for unit, _ in parallel.units.replicated:
        gradients += [weight.summed for weight in unit.weights]
    return tuple(
        {storage_of(tensor)._cdata for tensor in tensors if tensor is not None}
        for tensors in (gathered, gradients, buffers)
    )


def weights_at_rest(parallel: ParallelModel) -> Iterator[torch.Tensor]:
    yield from parallel.model.parameters()
    yield from parallel.model.buffers()
    for unit, _ in parallel.units.replicated:
        yield from (weight.sharded_param for weight in unit.weights)
    for unit in parallel.units.sharded:
        for group in unit.module._get_fsdp_state()._fsdp_param_groups:
            yield from (parameter.sharded_param for parameter in group.fsdp_params)


def measure(parallel: ParallelModel, batch: dict[str, torch.Tensor], wanted: list[int]) -> list[Held]:
    """Returns a step's bytes after each action of this rank.

    A thread of gloo may hold a tensor a moment longer than the communication lasts; more activations than `wanted`
    are therefore counted again until there are as many. That fails after 10 s on an idle machine, and later on a busy
    one: it is counted in rounds, in each of which the thread may run.
    """
    pipeline, live, held, before = parallel.pipeline, LiveStorages(weights_at_rest(parallel)), [], []

    def count(action: Action) -> Held:
        sizes = live.sizes()
        gathered, gradients, buffers = weight_storages(parallel)
        parts = dict(gathered=gathered, gradients=gradients - gathered, buffers=buffers - gradients - gathered)
        known = {name: sum(sizes.get(key, 0) for key in keys) for name, keys in parts.items()}
        rest = sum(sizes.values()) - sum(known.values()) - before[0]
        return Held(action=action, activations=rest, **known)

    def counted(original: Callable) -> Callable:
        def run(step, action: Action) -> None:
            if not before:
                before.append(sum(live.sizes().values()))
            original(step, action)
            now = count(action)
            for _ in range(RECOUNTS):
                if now.activations <= wanted[len(held)]:
                    break
                time.sleep(RECOUNT_SECONDS)
                now = count(action)
            held.append(now)

        return run

    transfers = ("_send_forward", "_send_backward", "_receive")
    for name in ("_forward", "_backward", "_backward_input", "_backward_weight", *transfers):
        setattr(pipeline, name, counted(getattr(pipeline, name)))
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # what only the collector would free is kept
    try:
        with live:
            parallel.forward_backward(batch)
    finally:
        if enabled:
            gc.enable()
    return held


def build(plan: ParallelPlan) -> ParallelModel:
    """Returns a model whose attention kernel repeats no heads, after a first step."""
    model = FAMILIES["llama"].build(num_key_value_heads=HEADS, num_hidden_layers=plan.num_layers)
    parallel = parallelize(model, plan)
    parallel.forward_backward(BATCHES["plain"]())
    parallel.model.zero_grad()
    return parallel


def expected_stage(plan: ParallelPlan, index: int) -> StageBytes:
    """Returns the bytes of one stage with even shares of rows, in fp32."""
    ranks, last = len(plan.stages[index].ranks), index == len(plan.stages) - 1
    rows = ROWS // plan.micro_batch_count
    layers = plan.layers[slice(*plan.stages[index].layers)]
    boundary = 4 * rows * LENGTH * HIDDEN // ranks
    saved = sum(saved_activation_bytes(SHAPE, layer, rows * LENGTH // layer.data_degree(ranks)) for layer in layers)
    saved += 2 * 4 * LENGTH * HEAD_DIM  # cosines and sines of the positions, which all layers share
    if any(layer.recompute == "full" for layer in layers):
        saved += 8 * LENGTH  # the positions themselves, for the replay
    received = 0 if index == 0 else boundary
    entered = received if layers[0].data_degree(ranks) == ranks else 0
    # Before the weights' backward there is the gradient of what each weight has made; the first stage splits nothing.
    made = sum(weight_gradient_bytes(rows * LENGTH // ranks) for _ in layers) if index > 0 else 0
    if not last:
        return StageBytes(
            saved=saved, received=received, entered=entered, result=boundary, returned=boundary, kept_for_weights=made
        )
    tokens = rows * LENGTH // ranks
    norm = 4 * (2 * tokens * HIDDEN + tokens)  # its input, normalised, and the reciprocal root of each token
    # The head keeps its input and computes gradients in the backward, where several micro-batches are in flight; else
    # it computes them in the forward pass: of its input, and of its weight.
    several = most_in_flight(order_of(plan, plan.stages[-1].ranks[0]), index) > 1 and plan.schedule != "zero_bubble"
    head = 4 * (tokens * HIDDEN + (0 if several else VOCABULARY * HIDDEN))
    # The loss is divided by a number of 8 bytes; its backward puts a gradient of 4 in its place.
    items, divided = 8, 4
    return StageBytes(
        saved=saved + norm + head + items,
        received=received,
        entered=entered,
        logged=4,
        kept_for_weights=made + 4 * tokens * HIDDEN - items + divided,
    )


def weight_gradient_bytes(tokens: int) -> int:
    """Returns the bytes of the outputs of a data-parallel layer's weights.

    They are queries, keys, values, four of H features and two of I.
    """
    return 4 * tokens * (3 * HEADS * HEAD_DIM + 4 * HIDDEN + 2 * INTERMEDIATE)


def expected_units(plan: ParallelPlan, index: int) -> Iterator:
    """Returns the bytes of one stage's units."""
    stage = plan.stages[index]
    ranks = len(stage.ranks)
    split = plan.schedule == "zero_bubble"
    for layer in plan.layers[slice(*stage.layers)]:
        yield unit_bytes(LAYER_SHAPES, layer.sharding, ranks, split_backward=split)
    if index == 0:
        yield unit_bytes([(VOCABULARY, HIDDEN)], plan.embedding.sharding, ranks, split_backward=split)
    if index == len(plan.stages) - 1:
        shapes = [(VOCABULARY, HIDDEN), (HIDDEN,)]
        yield unit_bytes(shapes, plan.head.sharding, ranks, split_backward=split)


def own_stages(plan: ParallelPlan, rank: int) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) if rank in stage.ranks]


def order_of(plan: ParallelPlan, rank: int) -> tuple[Action, ...]:
    shape = PipelineShape.from_plan(plan)
    return actions(shape, plan.micro_batch_count)[shape.pipeline_rank_of_stage[own_stages(plan, rank)[0]]]


def expected_activations(plan: ParallelPlan, rank: int) -> list[int]:
    own = {index: expected_stage(plan, index) for index in own_stages(plan, rank)}
    return list(bytes_over_schedule(order_of(plan, rank), own, SENDS_UNDER_WAY))


def check_activations(plan: ParallelPlan, rank: int, held: list[Held]) -> None:
    own = {index: expected_stage(plan, index) for index in own_stages(plan, rank)}
    assert [moment.action for moment in held] == list(order_of(plan, rank))
    wanted, found = expected_activations(plan, rank), [moment.activations for moment in held]
    differ = [
        (str(moment.action), *pair) for moment, *pair in zip(held, found, wanted, strict=True) if pair[0] != pair[1]
    ]
    assert not differ, (len(differ), differ[:4])
    if len(own) == 1:  # the peak in one line
        index, stage = own.popitem()
        flying = most_in_flight(order_of(plan, rank), index)
        activations = flying * (stage.saved + stage.result + stage.received - stage.entered)
        # Two posted receives of each kind, and the gradients on their way.
        buffers = stage.received * (SENDS_UNDER_WAY + 2) + 2 * stage.returned + plan.micro_batch_count * stage.logged
        buffers += flying * stage.kept_for_weights
        assert activations <= max(found) <= activations + buffers


def check_weights(plan: ParallelPlan, rank: int, held: list[Held]) -> None:
    """Checks weights while some micro-batches have been computed and some are to come."""
    for index in own_stages(plan, rank):
        units = list(expected_units(plan, index))
        assert len(own_stages(plan, rank)) == 1
        works = [moment.action.work for moment in held]
        backwards = {Work.BACKWARD, Work.BACKWARD_WEIGHT}
        first_forward = works.index(Work.FORWARD)
        ends = [place for place, work in enumerate(works) if work in backwards]
        for place, moment in enumerate(held):
            gathered = sum(unit.gathered for unit in units) if first_forward <= place < ends[-1] else 0
            assert moment.gathered == gathered, (moment.action, moment.gathered, gathered)
            if ends[0] <= place < ends[-1]:
                assert moment.gradients == sum(unit.gradients for unit in units), moment


def z(sharding: str, **fields) -> tuple[LayerStrategy, ...]:
    return (LayerStrategy(sharding=sharding, **fields),) * 4


TWO, FOUR = [(0, 1), (2, 3)], [(0,), (2,), (1,), (3,)]
V = VocabularyStrategy
PLANS = {
    "gpipe": pipelined(TWO, z("zero3"), "gpipe"),
    "1f1b": pipelined(TWO, z("zero3")),
    "1f1b_zero2": pipelined(TWO, z("zero2"), ends=V(sharding="zero2")),
    "1f1b_replicate": pipelined(TWO, z("replicate"), ends=V(sharding="replicate")),
    "1f1b_recompute": pipelined(TWO, z("zero3", recompute="full"), cuts=[1]),
    "1f1b_tensor": pipelined(TWO, z("zero3", tensor=2)),
    "interleaved": pipelined(TWO * 2, z("zero3"), "interleaved"),
    "gpipe_of_four": pipelined(FOUR, z("zero3"), "gpipe", micro_batches=8),
    "1f1b_of_four": pipelined(FOUR, z("zero2"), ends=V(sharding="zero2"), micro_batches=8),
    "interleaved_of_four": pipelined(FOUR * 2, z("zero3") * 2, "interleaved", micro_batches=8),
}
ZERO_BUBBLE = {
    "zero_bubble": pipelined(TWO, z("zero2"), "zero_bubble", ends=V(sharding="zero2")),
    "zero_bubble_of_four": pipelined(FOUR, z("replicate"), "zero_bubble", ends=V(sharding="replicate")),
}


def measured(plans: dict[str, ParallelPlan]) -> Iterable[tuple[int, str, list[Held]]]:
    def work():
        found, rank = {}, dist.get_rank()
        for name, plan in plans.items():
            found[name] = measure(build(plan), BATCHES["plain"](), expected_activations(plan, rank))
        return found

    for rank, found in enumerate(run_ranks(work, 4)):
        for name, held in found.items():
            yield rank, name, held


def slow_but_one(names: Iterable[str]) -> list:
    """Marks all plans slow but 1F1B's of four stages: of all schedules, its ranks differ most in what they hold."""
    slow = [name for name in names if name != "1f1b_of_four"]
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.fixture(scope="module")
def two_stages() -> list[tuple[int, str, list[Held]]]:
    return list(measured({name: plan for name, plan in (PLANS | ZERO_BUBBLE).items() if "of_four" not in name}))


@pytest.fixture(scope="module")
def four_stages() -> list[tuple[int, str, list[Held]]]:
    plans = (PLANS | ZERO_BUBBLE).items()
    return list(measured({name: plan for name, plan in plans if "of_four" in name and name != "1f1b_of_four"}))


@pytest.fixture(scope="module")
def four_1f1b_stages() -> list[tuple[int, str, list[Held]]]:
    return list(measured({"1f1b_of_four": PLANS["1f1b_of_four"]}))


@pytest.fixture
def held(request, plan: str) -> list[tuple[int, str, list[Held]]]:
    four = "four_1f1b_stages" if plan == "1f1b_of_four" else "four_stages"
    return request.getfixturevalue(four if "of_four" in plan else "two_stages")


@pytest.mark.parametrize("plan", slow_but_one([*PLANS, *ZERO_BUBBLE]))
def test_activations_over_the_schedule(held, plan):
    for rank, name, moments in held:
        if name == plan:
            check_activations((PLANS | ZERO_BUBBLE)[name], rank, moments)


ONE_STAGE_EACH = [name for name in PLANS if "interleaved" not in name and "tensor" not in name]


@pytest.mark.parametrize("plan", slow_but_one([*ONE_STAGE_EACH, *ZERO_BUBBLE]))
def test_weights_and_gradients_between_micro_batches(held, plan):
    """Checks, among others, that under zero3 none is gathered and gradients are shards."""
    for rank, name, moments in held:
        if name == plan:
            check_weights((PLANS | ZERO_BUBBLE)[name], rank, moments)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["gpipe", "1f1b", "1f1b_zero2"])
def test_buffers_of_communication_between_micro_batches(held, plan):
    """Checks what the reduction keeps: its last input, the embedding's whole gradient, or the final norm's.

    No weights that somebody has gathered wait for a use.
    """
    for rank, name, moments in held:
        if name == plan:
            works = [moment.action.work for moment in moments]
            between = moments[works.index(Work.BACKWARD) : -1]
            first = 0 in own_stages(PLANS[name], rank)
            last_reduced = 2 * 4 * -(-VOCABULARY // 2) * HIDDEN if first else 4 * HIDDEN
            inside = [moment for moment in between if moment.action.work is Work.BACKWARD][:-1]
            assert [moment.buffers for moment in inside] == [last_reduced] * len(inside), rank
