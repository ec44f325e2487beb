# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one training under several plans inside the Trainer: which is taken, and that nothing else changes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from peft import LoraConfig
from transformers import LlamaConfig, TrainerCallback

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from galvatron_hf.planner import step_plan_search
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.planner.step_plan_search import StepPlanEstimate, held_bytes, search_step_plans
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.data import kept_rings
from galvatron_hf.trainer.data.pack_planner import PackPlanner
from galvatron_hf.trainer.data.step_packer import STEP_PLANS_FILE, StepPacker
from galvatron_hf.trainer.data.step_plans import StepPlans, require_one_layout
from galvatron_hf.trainer.planning import auto_planner
from oracle import Case, Rows, check_cases
from planner_cases import workload
from plans import pipelined, uniform
from tiny_models import FAMILIES
from trainer_runs import arguments, on_ranks, run, trainer


S, V = LayerStrategy, VocabularyStrategy
ZERO3, TENSOR = uniform(4), uniform(4, tensor=4, embedding=V(tensor=4))
REPLICATE = uniform(2, sharding="replicate", embedding=V(sharding="replicate"))
STAGES = pipelined([(0,), (1,)], (S(),) * 4, micro_batches=2)
DYNAMIC = dict(packing="dynamic", max_tokens_per_rank=256, per_step=True)


class Plans(TrainerCallback):
    """Raises an error at the end of training unless steps were computed under the optimizer's plan and others."""

    def __init__(self, *numbers: int):
        self.numbers, self.seen = numbers, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "padding_percent" in logs:
            found = [name for name in logs if name.startswith("steps_under_plan_")]
            self.seen.append(int(found[0].rsplit("_", 1)[1]) if found else 0)

    def on_train_end(self, args, state, control, **kwargs):
        if self.numbers and hasattr(args, "per_step") and set(self.seen) != set(self.numbers):
            raise RuntimeError(f"Steps were computed under the plans {self.seen}, not {self.numbers}.")


@contextlib.contextmanager
def in_turn(count: int, by_tokens: bool = False) -> Iterator[None]:
    """Has steps take plans in turn, however long they take; or has their tokens decide, also when a run resumes."""
    turns: dict[int, int] = {}

    def seconds(planner: PackPlanner, placement, lengths: np.ndarray) -> float:
        tokens = int(lengths.sum())
        turn = tokens if by_tokens else turns.setdefault(tokens, len(turns))
        return float(planner.number != turn % count) + (planner.recompute is not None)

    with mock.patch.object(PackPlanner, "_seconds", seconds):
        yield


def case(plan: ParallelPlan | str, *others: ParallelPlan, numbers: tuple[int, ...], **more) -> Case:
    own = DYNAMIC | more.pop("own_options", {}) | dict(step_plans=list(others))
    defaults = dict(
        train=lambda: Rows(47, shortest=1, longest=300),
        options=dict(max_steps=4),
        trainer=dict(callbacks=lambda: [Plans(*numbers)]),
        fault=lambda: in_turn(1 + len(others)),
    )
    return Case(plan=plan, own_options=own, **(defaults | more))


MIXED = single_stage((S(), S(tensor=2, sharding="zero2"), S(tensor=2, megatron_sp=True), S(shard_degree=2)), 4)
FOUR = {
    "tensor": case(ZERO3, TENSOR, numbers=(0, 1)),
    "mixed, stages": case(
        MIXED, pipelined([(0, 1), (2, 3)], (S(), S(context=2)) * 2), ZERO3, numbers=(0, 1, 2), family="qwen3"
    ),
    "static, evaluated": case(
        MIXED,
        TENSOR,
        numbers=(0, 1),
        own_options=dict(packing="static"),
        options=dict(max_steps=4, eval_strategy="steps", eval_steps=1, prediction_loss_only=True),
        trainer=dict(callbacks=lambda: [Plans(0, 1)], eval_dataset=lambda: Rows(9, seed=4)),
    ),
}
SHORTER = dict(train=lambda: Rows(47, shortest=1, longest=160))  # one rank of either plan holds the longest
TWO = {
    "replicate, stages": case(REPLICATE, STAGES, numbers=(0, 1), **SHORTER),
    "stages, replicate": case(STAGES, REPLICATE, numbers=(0, 1), own_options=dict(packing="static"), **SHORTER),
}


def test_steps_under_two_plans_on_two_ranks():
    check_cases(TWO, 2)


@pytest.mark.slow
def test_steps_under_several_plans_on_four_ranks():
    check_cases(FOUR)


@contextlib.contextmanager
def searched(*plans: ParallelPlan) -> Iterator[None]:
    """Has the search for some of the steps find plans, and steps take all plans in turn."""

    def found(result: SearchResult, lengths: np.ndarray) -> list[StepPlanEstimate]:
        assert lengths.max() > 1
        options = dict(own_ms=2.0, move_ms=0.5, longest=int(lengths.max()), share=0.75)
        return [StepPlanEstimate(estimate=replace(result.best, plan=plan), **options) for plan in plans]

    with mock.patch.object(auto_planner, "search_step_plans", found), in_turn(1 + len(plans)):
        yield


@pytest.mark.slow
def test_auto_has_the_plans_of_its_search(tmp_path):
    own = dict(packing="static", max_tokens_per_rank=256, profile_dir=str(tmp_path), profile_accuracy=1.0)
    one = case("auto", numbers=(0, 1), fault=lambda: searched(STAGES), own_options=own, **SHORTER)
    own = {name: value for name, value in one.own_options.items() if name != "step_plans"}
    check_cases({"auto": replace(one, own_options=own)}, 2)


@pytest.mark.slow
def test_a_resumed_run_has_the_plans_of_its_checkpoint(tmp_path):
    """Without a plan in its arguments, a run that resumes computes its steps under those of the checkpoint."""
    options = dict(packing="static", max_tokens_per_rank=256, per_step=True, lr_scheduler_type="constant")
    options |= dict(save_strategy="steps", save_steps=2, max_steps=6)
    step_plans = [str(tmp_path / "stages.json")]
    STAGES.to_json(step_plans[0])

    def work() -> tuple[dict, dict, list, list]:
        data, seen = dict(train_dataset=Rows(48, seed=3, shortest=1, longest=60)), (Plans(), Plans())
        with in_turn(2, by_tokens=True):
            whole = run(
                tmp_path / "whole",
                REPLICATE,
                options=options | dict(step_plans=step_plans),
                callbacks=[seen[0]],
                **data,
            )
            checkpoint = tmp_path / "whole" / "checkpoint-2"
            then = run(tmp_path / "then", options=options, resume=checkpoint, callbacks=[seen[1]], **data)
        saved = json.loads((checkpoint / STEP_PLANS_FILE).read_text())["plans"]
        return whole.weights, then.weights, saved, [one.seen for one in seen]

    whole, then, saved, (first, second) = on_ranks(work, 2)[0]
    assert [ParallelPlan.from_json(plan).stages for plan in saved] == [STAGES.stages]
    assert second == first[2:] and {*second} == {0, 1}
    for name, value in whole.items():
        assert (then[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


@pytest.mark.slow
def test_a_plan_that_takes_longer_is_not_taken(tmp_path):
    """Measured: moves alone take longer than a step of a few tokens."""

    def work() -> list[bool]:
        options = dict(packing="static", max_tokens_per_rank=32, per_step=True, max_steps=2, step_plans=[STAGES])
        with mock.patch("galvatron_hf.trainer.data.step_plans._most", side_effect=lambda value, device: value + 100.0):
            made = run(
                tmp_path / "run",
                REPLICATE,
                options=options,
                train_dataset=Rows(16),
                then=lambda one: one,
                callbacks=[Plans(0)],
            ).result
        costs = made._components.packer.plans.costs
        return [cost is None or cost.move_seconds > 100.0 for cost in costs]

    assert on_ranks(work, 2) == [[True]] * 2


def test_plans_that_cannot_be_used_are_refused(tmp_path):
    wrong = uniform(4)

    def refused(**options) -> str:
        with pytest.raises(ValueError) as error:
            made = trainer(tmp_path, REPLICATE, options=dict(packing="static", **options))
            made.train()
        first = str(error.value)
        if "made" in locals():  # nothing was changed: it says the same again
            with pytest.raises(ValueError) as error:
                made.train()
            assert str(error.value) == first
        return first

    def work() -> list[str]:
        return [
            refused(step_plans=[STAGES]),
            refused(step_plans=[str(tmp_path / "none.json")], per_step=True),
            refused(step_plans=[wrong], per_step=True),
            refused(step_plans=[STAGES], per_step=True, expert_dispatch="lsh"),
            refused(step_plans=[replace(STAGES, precision=Precision(compute="bf16"))], per_step=True),
            refused(step_plans="stages.json", per_step=True),
        ]

    found = on_ranks(work, 2)[0]
    for message, words in zip(
        found,
        ("per_step=True", "step_plans[0]=", "world_size=4", "expert_dispatch", "precision", "a list"),
        strict=True,
    ):
        assert words in message and message.count(". ") == 0, message


def test_arguments_with_plans_can_be_written(tmp_path):
    args = arguments(tmp_path, step_plans=[STAGES, "plan.json"], per_step=True)
    written = json.loads(args.to_json_string())["step_plans"]
    assert ParallelPlan.from_json(written[0]) == STAGES and written[1] == "plan.json"


def test_what_has_the_layout_of_one_plan_alone_is_refused():
    """Also where the plans come from a checkpoint or a search, and no argument says so."""
    model = FAMILIES["llama"].build()
    require_one_layout(SimpleNamespace(expert_dispatch="plain"), model)
    with pytest.raises(ValueError, match="expert_dispatch='lsh' is chosen for the experts of one plan"):
        require_one_layout(SimpleNamespace(expert_dispatch="lsh"), model)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has adapters, which have the layout of one plan alone"):
        require_one_layout(SimpleNamespace(), model)


def test_a_resumed_run_does_not_refuse_what_another_plan_may_hold():
    """Before the other plans are measured, nobody knows the longest row that a step can have."""
    packer = StepPacker.__new__(StepPacker)
    packer.rules, packer.cost = SimpleNamespace(only_pads=lambda: True), object()
    packer.args = SimpleNamespace(per_step=True, long_sequences="error")
    packer._known_lengths = lambda: np.array([900])
    packer.planner = lambda: SimpleNamespace(bound_of_documents=222, limit="max_tokens_per_rank", degree=1)
    packer.plans = StepPlans(owner=None, others=[object()])
    packer._check_lengths()
    packer.plans.costs = [None]
    with pytest.raises(ValueError, match="Row 0 of the dataset has 900 tokens"):
        packer._check_lengths()


def test_rings_are_kept_beside_the_weights_of_the_plan():
    with (
        mock.patch.object(kept_rings, "kept_bytes", return_value=100),
        mock.patch.object(kept_rings, "_free_bytes", return_value=150.0),
    ):
        parallel = SimpleNamespace(device=None)
        assert kept_rings.keeps_rings(parallel, None, None, held=50)
        assert not kept_rings.keeps_rings(parallel, None, None, held=51)


def small_search(rows: int = 16, length: int = 4096) -> SearchResult:
    """Returns the result of a search that has found ZeRO-3 on four devices."""
    hardware = hardware_preset("a100-80g", nodes=1, devices_per_node=4)
    config = FAMILIES["llama"].build().config
    model = profile_from_config(config, hardware, "fp32", length=32, max_degree=4)
    limits = Limits(uniform=True, pipeline=(1,), tensor=1, sequence=("none",))
    result = search_plan(hardware, model, workload(rows, length=length, packed=True), limits=limits)
    return replace(result, best=replace(result.best, plan=ParallelPlan.uniform(4, 4)))


def finds(plan: ParallelPlan, seen: list[Workload]):
    """Returns a search that finds a plan at no cost, and notes for which steps."""
    small = small_search()

    def search(hardware, model, work, **options) -> SearchResult:
        seen.append(work)
        return replace(small, best=replace(small.best, plan=plan, step_ms=1e-6))

    return search


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, count",
    [
        (ParallelPlan.uniform(4, 4, pipeline=2, micro_batches=4), 1),  # its layers are those of the optimizer's plan
        (ParallelPlan.uniform(4, 4, tensor=4), 1),  # found for light and for heavy steps
        (replace(ParallelPlan.uniform(4, 4), meta={"predicted": {}}), 0),  # the optimizer's
    ],
    ids=["stages", "tensor", "same"],
)
def test_each_other_plan_is_found_once(plan, count):
    lengths, seen = np.array([100] * 95 + [4096] * 5), []
    with (
        mock.patch.object(step_plan_search, "search_plan", finds(plan, seen)),
        mock.patch.object(step_plan_search, "move_ms", return_value=0.0),
    ):
        assert len(search_step_plans(small_search(), lengths)) == count
    assert len(seen) == 2 and seen[0].mean_square < seen[1].mean_square


@pytest.mark.slow
def test_memory_is_for_the_mean_row_at_least():
    lengths, seen = np.array([100] * 90 + [20_000] * 10), []
    with (
        mock.patch.object(step_plan_search, "search_plan", finds(TENSOR, seen)),
        mock.patch.object(step_plan_search, "move_ms", return_value=0.0),
    ):
        search_step_plans(small_search(rows=2, length=1000), lengths)
    assert seen[1].mean_length > 1000 and all(work.length >= work.mean_length for work in seen)


def llama_8b(hardware: HardwareProfile, length: int) -> ModelProfile:
    """Counts Llama-3.1-8B: https://huggingface.co/meta-llama/Llama-3.1-8B, config.json."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    return profile_from_config(config, hardware, "bf16", length=length, max_degree=8)


def lengths_of_two_kinds(long: int) -> np.ndarray:
    """Returns rows that are short but for one in a thousand."""
    return np.array([512] * 999 + [long])


@pytest.mark.slow
def test_light_steps_get_a_plan_that_the_longest_row_forbids():
    """An 8B model on eight GPUs: rows of 128K need Ulysses or context, rows of 512 do not."""
    hardware = hardware_preset("h100", nodes=1, devices_per_node=8)
    model = llama_8b(hardware, 131072)
    lengths = lengths_of_two_kinds(131072)
    mean = dict(mean_length=round(lengths.mean()), mean_square=(lengths**2.0).mean())
    work = replace(workload(64, length=131072, packed=True), precision=Precision(compute="bf16"), **mean)
    result = search_plan(hardware, model, work, limits=Limits(uniform=True, pipeline=(1,)))
    own = result.best.plan
    assert max(layer.sequence_degree * layer.context * layer.tensor for layer in own.layers) > 1
    found = search_step_plans(result, lengths)
    assert found and all(one.gain >= 1.02 for one in found)
    light = found[0]
    assert light.longest == 512 and light.share == 0.75
    assert max(light.estimate.memory_bytes) + held_bytes(result, own) <= result.memory_bytes
    assert light.own_ms > light.estimate.step_ms + light.move_ms


@pytest.mark.slow
def test_equal_rows_get_no_other_plan():
    hardware = hardware_preset("h100", nodes=1, devices_per_node=8)
    work = replace(workload(64, length=4096, packed=True), precision=Precision(compute="bf16"))
    limits = Limits(uniform=True, pipeline=(1,))
    result = search_plan(hardware, llama_8b(hardware, 4096), work, limits=limits)
    assert search_step_plans(result, np.full(1000, 4096)) == []
