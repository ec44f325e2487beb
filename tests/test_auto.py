# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`parallel_plan="auto"`: what it measures, what it picks, what it says of it afterwards."""

import contextlib
import functools
import io
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import Trainer, TrainerCallback

from galvatron_hf import GalvatronTrainer, ParallelPlan
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import Precision
from galvatron_hf.plan.supported import require_runnable
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits, layer_strategies, vocabulary_strategies
from galvatron_hf.profiler.measure import calibration
from galvatron_hf.profiler.measure.calibration import LEAST, MOST, NOISE, SPREAD, fitted_factors
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.auto_planner import profile_folder
from galvatron_hf.trainer.planning.calibration import calibrated
from galvatron_hf.trainer.planning.step_meter import prediction
from tiny_models import FAMILIES
from trainer_runs import Rows, arguments, on_ranks, run, trainer


SHORT = dict(max_steps=4)  # the first two of them are not timed


class OwnLoss(GalvatronTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def refuse(*args, **kwargs):
    raise AssertionError("it was measured already")


def auto_run(folder: Path) -> dict:
    """Two runs under "auto", the second with what the first has measured."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        options = SHORT | dict(disable_tqdm=False, profile_dir=str(folder / "profiles"))
        found = run(folder / "first", "auto", options=options, then=lambda made: made)
    made = found.result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("galvatron_hf.profiler.cache.profile_hardware", refuse)
        patch.setattr("galvatron_hf.profiler.cache.profile_model", refuse)
        options["disable_tqdm"] = True
        again = run(folder / "second", "auto", options=options, then=lambda made: made.parallel.plan)
    return dict(
        found=replace(found, result=None),
        plan=made.parallel.plan,
        outcome=made.plan_outcome,
        printed=printed.getvalue(),
        again=again.result,
        written=ParallelPlan.from_json(folder / "first" / "parallel_plan.json"),
        calibration_factors=factors_of(profile_folder(made.args)),
        best=None if made.search_result is None else made.search_result.best.plan,
    )


def factors_of(folder: Path) -> dict[str, float]:
    """Returns the factors of the only model that was profiled into a folder."""
    [path] = folder.glob("model-*.json")
    return dict(ModelProfile.from_json(path).calibration_factors)


def constrained(folder: Path) -> dict:
    """Searches the space that arguments and own methods leave, and one with a budget that nothing fits."""
    recompute = trainer(folder / "recompute", "auto", options=dict(gradient_checkpointing=True))
    own = trainer(folder / "own", "auto", trainer_class=OwnLoss)
    small = trainer(folder / "small", "auto", options=dict(memory_gib=1e-6))
    with pytest.raises(ValueError) as refused:
        small.train()
    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    undrawn = trainer(folder / "undrawn", "auto", options=dict(profile_dir=str(folder / "measured_anew")))
    undrawn.plan_for(undrawn.model)
    after = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    evaluated = trainer(folder / "evaluated", "auto", train_dataset=None, eval_dataset=Rows(4))
    evaluated.evaluate()
    recomputed = {layer.recompute for layer in recompute.plan_for(recompute.model).layers}
    recompute.args.memory_gib = 1e-6
    with pytest.raises(ValueError, match="No plan fits"):
        recompute.plan_for(recompute.model)  # what was found for another budget does not stay
    return dict(
        recompute=recomputed,
        stages=own._planner.limits().pipeline,
        refused=str(refused.value),
        evaluated=evaluated.parallel.plan,
        undrawn=torch.equal(before[0], after[0]) and before[1:] == after[1:],
    )


class Fails(TrainerCallback):
    """Stops a run with an error behind its first step."""

    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("enough")


def failed_then_trained(folder: Path) -> tuple[int, int, int]:
    """Steps that were timed in a run behind one that failed; callbacks before both and behind them."""
    made, fails = trainer(folder, "auto", options=SHORT), Fails()
    before = len(made.callback_handler.callbacks)
    made.add_callback(fails)
    with pytest.raises(RuntimeError, match="enough"):
        made.train()
    assert made.plan_outcome is None
    made.remove_callback(fails)
    made.train()
    return made.plan_outcome.steps, before, len(made.callback_handler.callbacks)


def on_four(folder: Path) -> tuple[dict, dict, tuple]:
    return auto_run(folder / "auto"), constrained(folder), failed_then_trained(folder / "failed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    plain = run(folder / "plain", "auto", trainer_class=Trainer, options=SHORT | dict(gradient_accumulation_steps=1))
    return plain, on_ranks(functools.partial(on_four, folder))


def test_auto_trains_as_one_process_under_the_plan_that_the_search_finds(ranks):
    plain, found = ranks
    for one, _, _ in found:
        assert np.allclose(one["found"].steps("loss"), plain.steps("loss"), rtol=1e-4)
        assert {**one["plan"].meta} == {**found[0][0]["plan"].meta}
        assert replace(one["plan"], meta={}) == replace(found[0][0]["best"], meta={})
        assert one["again"] == one["plan"] == one["written"]


def test_what_was_predicted_is_printed_beside_what_was_measured(ranks):
    _, found = ranks
    first = found[0][0]
    noted = prediction(first["plan"])
    assert first["outcome"].predicted_ms == noted["step_ms"] > 0
    assert first["outcome"].measured_ms > 0 and first["outcome"].steps == 2
    assert all(size > 0 for size in first["outcome"].measured_bytes)
    assert "Predicted" in first["printed"] and "measured" in first["printed"]
    assert str(first["outcome"]) in first["printed"]
    assert found[1][0]["printed"] == ""


def test_arguments_and_own_methods_limit_the_search(ranks):
    for _, one, _ in ranks[1]:
        assert one["recompute"] == {"full"}
        assert one["stages"] == (1,)
        assert re.search(r"No plan fits 0\.0\d+ GiB a device: the least is 0\.\d+ GiB", one["refused"])


def test_without_a_training_set_nothing_is_searched(ranks):
    for _, one, _ in ranks[1]:
        assert one["evaluated"].layers == ParallelPlan.uniform(4, 4).layers and not one["evaluated"].meta


def test_a_search_draws_nothing_from_the_random_streams_of_training(ranks):
    assert all(one["undrawn"] for _, one, _ in ranks[1])


def test_a_run_behind_one_that_failed_is_measured(ranks):
    for _, _, (steps, before, behind) in ranks[1]:
        assert steps == 2 and before == behind


def test_one_process_without_a_plan_is_plain_trainer(tmp_path):
    made = trainer(tmp_path, "auto")
    made.train()
    assert made.parallel is None and made.plan_outcome is None


def test_whole_steps_have_stretched_the_profile(ranks, tmp_path):
    for one in (factors for found, _, _ in ranks[1] for factors in [found["calibration_factors"]]):
        assert set(one) == set(CALIBRATION_FACTORS)
        assert all(LEAST <= factor <= MOST for factor in one.values())


def test_factors_bring_the_parts_to_what_was_measured():
    """Fits factors to twelve plans: a part that no plan has, and a part near zero, keep the factor 1.

    Times that are sums of parts have their factors in closed form: a ridge regression toward 1, of the wait toward 0.
    """
    draw = np.random.default_rng(0)
    parts, counts = draw.uniform(0, 10, (12, len(CALIBRATION_FACTORS))), draw.integers(0, 8, 12)
    parts[:, 3], parts[:, 4] = 0.0, 1e-3
    truth, wait = np.array([1.1, 2.0, 3.0, 2.0, 4.0]), 0.75
    measured = 5 + parts @ truth + counts * wait
    found, waiting, off = fitted_factors(lambda factors, wait: 5 + parts @ factors + counts * wait, measured)
    columns = np.column_stack([parts, counts]) / measured[:, None] / NOISE
    wanted = (measured - 5 - parts.sum(axis=1)) / measured / NOISE
    prior = np.eye(len(CALIBRATION_FACTORS) + 1) / SPREAD**2
    closed = np.append(np.ones(len(CALIBRATION_FACTORS)), 0.0) + np.linalg.solve(
        columns.T @ columns + prior, columns.T @ wanted
    )
    assert np.allclose([*found, waiting], closed, rtol=2e-3)
    assert np.allclose(closed[:3], truth[:3], rtol=0.05) and closed[-1] == pytest.approx(wait, rel=0.05)
    assert np.allclose(found[3:], 1.0, atol=0.01)
    assert off < 0.005
    found, _, _ = fitted_factors(lambda factors, wait: parts @ factors, parts @ (100 * truth))
    assert np.allclose(found[:3], MOST, rtol=1e-3)
    _, waiting, _ = fitted_factors(lambda factors, wait: 10 + counts * wait, np.full(12, 9.0))
    assert waiting == pytest.approx(0.0, abs=0.01)  # nobody waits for less than nothing


def test_simple_plans_are_tried_until_their_steps_agree_and_one_of_them_at_least():
    """The median of all steps of a plan counts, not those of a slow pass."""
    cases = [(1e6, 10.0, 90.0, 12.0), (1e6, 10.0, 10.0), (0.0, 10.0)]
    disturbed, steady, hurried = on_ranks(lambda: [tried_plans(*case) for case in cases], 2)[0]
    tried, measured = disturbed
    once = len(tried) // 3
    assert once > 3 and tried == 3 * tried[:once] and len(set(tried)) == once
    assert measured == [12.0] * once
    assert steady == (2 * tried[:once], [10.0] * once)
    assert hurried == (tried[:1], [10.0])


def test_whole_steps_are_tried_with_the_layers_there_are_up_to_eight_or_until_steps_are_long_enough():
    cases = [(3, 1e6), (9, 1e6), (3, 0.0), (9, 0.0)]
    assert on_ranks(lambda: [layers_tried(*case) for case in cases], 2)[0] == [{3}, {8}, {3}, {4}]


def test_calibration_has_plans_with_many_exchanges_and_one_that_is_sharded_in_pairs(monkeypatch):
    """Checks plans that alone show the waits of two Ulysses ranks and the costs of copied shards."""
    small = FAMILIES["llama"].build()
    monkeypatch.setattr(calibration.dist, "get_world_size", lambda: 4)
    for rows, most in ((16, 8), (6, 6)):
        plans = calibration._plans(small, rows, Precision(compute="fp32"))
        assert max(plan.micro_batches for plan in plans) == most
        (exchanging,) = (plan for plan in plans if plan.layers[0].ulysses > 1 and len(plan.stages) > 1)
        assert exchanging.micro_batches == most
        (paired,) = (plan for plan in plans if plan.layers[0].shard_degree not in (None, 4))
        assert (paired.layers[0].sharding, paired.layers[0].shard_degree) == ("zero3", 2)


def layers_tried(count: int, step_ms: float) -> set[int]:
    """Layers of the models that calibration trains for a model of `count` layers and steps of `step_ms`."""
    seen = set()

    def steps_ms(steps, *unused):
        seen.add(steps.new_model().config.num_hidden_layers)
        return [10.0]

    model, hardware = FAMILIES["llama"].build(num_hidden_layers=count), hardware_preset("cpu", 1, 2)
    profile = profile_from_config(model.config, hardware, "fp32", length=32, max_degree=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_steps_ms", steps_ms)
        patch.setattr(calibration, "STEP_MS", step_ms)
        calibrated(profile, model, hardware, rows=4, length=32, device=torch.device("cpu"), seconds=0.0)
    return seen


def tried_plans(seconds: float, *passes: float) -> tuple[list[str], list[float]]:
    """The plans that calibration tries and what it finds if steps take so many ms in its passes."""
    tried, seen = [], []

    def steps_ms(steps, plan, *unused):
        tried.append(plan.to_json())
        return [passes[tried.count(tried[-1]) - 1]] * 4

    def fitted(predicted, measured):
        seen.extend(measured.tolist())
        return (1.0,) * len(CALIBRATION_FACTORS), 0.0, 0.0

    model, hardware = FAMILIES["llama"].build(), hardware_preset("cpu", 1, 2)
    profile = profile_from_config(model.config, hardware, "fp32", length=32, max_degree=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_steps_ms", steps_ms)
        patch.setattr(calibration, "fitted_factors", fitted)
        options = dict(rows=4, length=32, device=torch.device("cpu"), seconds=seconds)
        calibrated(profile, model, hardware, **options)
    return tried, seen


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama_tied"])
def test_no_strategy_of_the_space_is_refused_by_the_runtime(family):
    """GPT-2 has biases, which tensor and sharding ranks cannot always share."""
    model = FAMILIES[family].build()
    hardware = hardware_preset("cpu", 1, 8)
    profile = profile_from_config(model.config, hardware, "fp32", length=32, max_degree=8)
    adapter, tied = adapter_for(model), profile.tied
    for ranks in (2, 4, 8):
        layers = [strategy for strategy, _ in layer_strategies(ranks, profile, Limits())]
        ends = vocabulary_strategies(ranks, profile, Limits())
        pairs = [(layer, ends[index % len(ends)]) for index, layer in enumerate(layers)]
        pairs += [(layers[index % len(layers)], end) for index, end in enumerate(ends)]
        for layer, end in pairs:
            plan = ParallelPlan(world_size=ranks, stacks={"decoder": 4}, layers=(layer,) * 4, embedding=end, head=end)
            check_model(model, adapter, plan)
            assert not tied or plan.embedding == plan.head


# ---- Lengths ----


class Stream(TorchIterableDataset):
    def __iter__(self):
        yield from Rows(3)


@pytest.mark.parametrize(
    ("dataset", "lengths"),
    [
        (Dataset.from_dict({"input_ids": [[1] * 3, [1] * 5, []]}), [3, 5]),
        ([{"input_ids": [1] * 7}, {"input_ids": [1] * 2}], [7, 2]),
        (IterableDataset.from_generator(lambda: ({"input_ids": [1] * n} for n in (4, 6))), [4, 6]),
        (Stream(), []),
        ([{"text": "a"}], []),
    ],
    ids=["arrow", "list", "stream of datasets", "other stream", "no tokens"],
)
def test_lengths_are_read_where_they_can_be_and_change_no_random_stream(tmp_path, dataset, lengths):
    made = trainer(tmp_path, "auto", train_dataset=Rows(27))
    made.train_dataset = dataset
    before = torch.get_rng_state()
    assert sorted(made._planner.row_lengths().tolist()) == sorted(lengths)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_workload_is_the_global_batch(tmp_path):
    made = trainer(tmp_path, "auto", train_dataset=Dataset.from_dict({"input_ids": [[1] * 4, [1] * 8]}))
    packed = made._planner.workload(made.model)
    assert (packed.rows, packed.length, packed.precision) == (8, 8, Precision(compute="fp32"))
    made.args.packing = "none"
    padded = made._planner.workload(made.model)
    assert padded.length == 8 and padded.mean_length == 8  # of eight rows one is the longer one, nearly always


def test_profiles_have_a_place(tmp_path, monkeypatch):
    monkeypatch.delenv("GALVATRON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_folder(arguments(tmp_path)) == tmp_path / "galvatron-hf"
    assert profile_folder(arguments(tmp_path, profile_dir="here")) == Path("here")
    with pytest.raises(ValueError, match="memory_gib -1 is not a positive number of GiB"):
        trainer(tmp_path, ParallelPlan.uniform(1, 4), options=dict(memory_gib=-1))


# ---- OptionCosts of rows of different lengths ----


def test_shorter_rows_take_less_time_and_the_longest_their_memory():
    hardware = hardware_preset("cpu", 1, 4)
    model = profile_from_config(FAMILIES["llama"].build().config, hardware, "fp32", length=32, max_degree=4)
    whole = Workload(rows=8, length=32, precision=Precision(compute="fp32"))
    half = replace(whole, mean_length=16, mean_square=16.0**2)
    short = replace(whole, length=16)
    plan = ParallelPlan.uniform(4, 4, precision=Precision(compute="fp32"))
    costs = {
        name: estimate_plan(hardware, model, one, plan)
        for name, one in dict(whole=whole, half=half, short=short).items()
    }
    assert costs["half"].step_ms == costs["short"].step_ms < costs["whole"].step_ms
    assert costs["half"].memory_bytes == costs["whole"].memory_bytes
    squares = estimate_plan(hardware, model, replace(half, mean_square=2 * 16.0**2), plan)
    assert costs["half"].step_ms < squares.step_ms < costs["whole"].step_ms


# ---- Searched plans on real ranks ----

CASES = {
    "anything": (Limits(), None),
    "pipeline": (Limits(pipeline=(2,)), None),
    "deep": (Limits(pipeline=(4,), micro_batches=(4,)), None),
    "tensor": (Limits(sharding=("replicate",), sequence=("megatron",), pipeline=(1,)), 0.7),
    "little memory": (Limits(), 0.5),
}


def searched(name: str) -> ParallelPlan:
    """The plan that a search finds for a tiny model on four ranks; the budget is a share of what it takes without."""
    limits, share = CASES[name]
    hardware = hardware_preset("cpu", 1, 4)
    model = profile_from_config(FAMILIES["llama"].build().config, hardware, "fp32", length=32, max_degree=4)
    work = Workload(rows=8, length=32, precision=Precision(compute="fp32"))
    best = search_plan(hardware, model, work, limits=limits).best
    if share is not None:
        least = search_plan(hardware, model, work, limits=limits, memory_bytes=1).least_memory_bytes
        budget = int(least + share * (max(best.memory_bytes) - least))
        best = search_plan(hardware, model, work, limits=limits, memory_bytes=budget).best
        assert max(best.memory_bytes) <= budget
    return best.plan_with_prediction(work)


def test_searched_plans_train_as_one_process(tmp_path):
    plans = {name: searched(name) for name in CASES}
    for plan in plans.values():
        require_runnable(plan, 4)
    assert len({replace(plan, meta={}).to_json() for plan in plans.values()}) >= 4
    plain = run(tmp_path / "plain", "auto", trainer_class=Trainer, options=dict(gradient_accumulation_steps=1))
    for found in on_ranks(functools.partial(train_under, plans, tmp_path)):
        for one in found.values():
            assert np.allclose(one.steps("loss", "grad_norm"), plain.steps("loss", "grad_norm"), rtol=1e-4)


def train_under(plans: dict[str, ParallelPlan], folder: Path) -> dict:
    return {name: run(folder / name, plan) for name, plan in plans.items()}
