# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`parallel_plan="auto"`: what it measures, what it picks, what it says of it afterwards."""

import contextlib
import functools
import io
import math
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
from galvatron_hf.profiler.measure.calibration import LEAST, MOST
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.auto_planner import profile_folder
from galvatron_hf.trainer.planning.step_meter import prediction
from tiny_models import FAMILIES
from trainer_runs import Rows, arguments, on_ranks, run, trainer


SHORT = dict(max_steps=4)  # an epoch; the first two steps are not timed


class OwnLoss(GalvatronTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def refuse(*args, **kwargs):
    raise AssertionError("it was measured already")


class Watched(GalvatronTrainer):
    """Records whether random streams go on after the search as if there had been none."""

    undrawn = False

    def plan_for(self, model):
        before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
        plan = super().plan_for(model)
        after = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
        self.undrawn = torch.equal(before[0], after[0]) and before[1:] == after[1:]
        return plan


def auto_run(folder: Path, profiles: dict) -> dict:
    """Trains twice under "auto"; the first run measures, the second reads what was measured."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        options = SHORT | profiles | dict(disable_tqdm=False)
        found = run(folder / "first", "auto", trainer_class=Watched, options=options, then=lambda made: made)
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
        undrawn=made.undrawn,
    )


def factors_of(folder: Path) -> dict[str, float]:
    """Returns the factors of the only model that was profiled into a folder."""
    [path] = folder.glob("model-*.json")
    return dict(ModelProfile.from_json(path).calibration_factors)


def constrained(folder: Path, profiles: dict) -> dict:
    """Searches the space that arguments and own methods leave, and one with a budget that nothing fits."""
    recompute = trainer(folder / "recompute", "auto", options=profiles | dict(gradient_checkpointing=True))
    own = trainer(folder / "own", "auto", trainer_class=OwnLoss)
    small = trainer(folder / "small", "auto", options=profiles | dict(memory_gib=1e-6))
    with pytest.raises(ValueError) as refused:
        small.train()
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
    )


class Fails(TrainerCallback):
    """Stops a run with an error after its first step."""

    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("enough")


def failed_then_trained(folder: Path, profiles: dict) -> tuple[int, int, int]:
    """Returns the steps timed in a run after a failed one, and the callbacks before both runs and after them."""
    made, fails = trainer(folder, "auto", options=SHORT | profiles), Fails()
    before = len(made.callback_handler.callbacks)
    made.add_callback(fails)
    with pytest.raises(RuntimeError, match="enough"):
        made.train()
    assert made.plan_outcome is None
    made.remove_callback(fails)
    made.train()
    return made.plan_outcome.steps, before, len(made.callback_handler.callbacks)


def on_every_rank(folder: Path) -> tuple[dict, dict, tuple]:
    """Measures once, in the first run; all others read the profiles."""
    profiles = dict(profile_dir=str(folder / "profiles"))
    first = auto_run(folder / "auto", profiles)
    return first, constrained(folder, profiles), failed_then_trained(folder / "failed", profiles)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    plain = run(folder / "plain", "auto", trainer_class=Trainer, options=SHORT | dict(gradient_accumulation_steps=1))
    return plain, on_ranks(functools.partial(on_every_rank, folder), request.param)


def test_auto_trains_as_one_process_under_the_plan_that_the_search_finds(ranks):
    plain, found = ranks
    for one, _, _ in found:
        assert np.allclose(one["found"].steps("loss"), plain.steps("loss"), rtol=1e-4)
        assert {**one["plan"].meta} == {**found[0][0]["plan"].meta}
        assert replace(one["plan"], meta={}) == replace(found[0][0]["best"], meta={})
        assert one["again"] == one["plan"] == one["written"]


def test_what_was_predicted_is_printed_with_what_was_measured(ranks):
    _, found = ranks
    first = found[0][0]
    noted = prediction(first["plan"])
    assert first["outcome"].predicted_ms == noted["step_ms"] > 0
    assert first["outcome"].measured_ms > 0 and first["outcome"].steps == 2
    assert all(size > 0 for size in first["outcome"].measured_bytes)
    assert "Predicted" in first["printed"] and "measured" in first["printed"]
    assert str(first["outcome"]) in first["printed"]
    assert first["printed"].count(f"{len(found)} ranks, 4 layers, ") == 1  # the table of the plan
    assert first["printed"].index("Stages: ") < first["printed"].index(f"{len(found)} ranks, ")
    assert found[1][0]["printed"] == ""


def test_arguments_and_own_methods_limit_the_search(ranks):
    for _, one, _ in ranks[1]:
        assert one["recompute"] == {"full"}
        assert one["stages"] == (1,)
        assert re.search(r"No plan fits 0\.0\d+ GiB a device: the least is 0\.\d+ GiB", one["refused"])


def test_without_a_training_set_nothing_is_searched(ranks):
    for _, one, _ in ranks[1]:
        assert one["evaluated"].layers == ParallelPlan.uniform(len(ranks[1]), 4).layers and not one["evaluated"].meta


def test_a_search_draws_nothing_from_the_random_streams_of_training(ranks):
    assert all(one["undrawn"] for one, _, _ in ranks[1])


def test_a_run_after_a_failed_one_is_measured(ranks):
    for _, _, (steps, before, after) in ranks[1]:
        assert steps == 2 and before == after


def test_one_process_without_a_plan_is_plain_trainer(tmp_path):
    made = trainer(tmp_path, "auto")
    made.train()
    assert made.parallel is None and made.plan_outcome is None


def test_whole_steps_have_stretched_the_profile(ranks, tmp_path):
    for one in (factors for found, _, _ in ranks[1] for factors in [found["calibration_factors"]]):
        assert set(one) == set(CALIBRATION_FACTORS)
        assert all(LEAST <= factor <= MOST for factor in one.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param("gpt2", marks=pytest.mark.slow), "llama", pytest.param("llama_tied", marks=pytest.mark.slow)],
)
def test_no_strategy_of_the_space_is_refused_by_the_runtime(family):
    """GPT-2 has tied ends, and biases, which tensor and sharding ranks cannot always share; Llama has neither."""
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
    for accuracy in (0, "5e-2", math.nan):
        with pytest.raises(ValueError, match=f"profile_accuracy {accuracy!r} is not a positive number"):
            trainer(tmp_path, ParallelPlan.uniform(1, 4), options=dict(profile_accuracy=accuracy))


# ---- Costs of rows of different lengths ----


def test_shorter_rows_take_less_time_and_the_longest_their_memory():
    hardware, model = counted()
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


@functools.cache
def counted() -> tuple[HardwareProfile, ModelProfile]:
    """Returns profiles of four CPU ranks and of the tiny Llama, whose times are counted."""
    hardware = hardware_preset("cpu", 1, 4)
    config = FAMILIES["llama"].build().config
    return hardware, profile_from_config(config, hardware, "fp32", length=32, max_degree=4)


def searched(name: str) -> ParallelPlan:
    """Returns the plan that a search finds for a tiny model on four ranks.

    The budget is a share of the memory that the plan without a budget takes.
    """
    limits, share = CASES[name]
    hardware, model = counted()
    work = Workload(rows=8, length=32, precision=Precision(compute="fp32"))
    best = search_plan(hardware, model, work, limits=limits).best
    if share is not None:
        least = search_plan(hardware, model, work, limits=limits, memory_bytes=1).least_memory_bytes
        budget = int(least + share * (max(best.memory_bytes) - least))
        best = search_plan(hardware, model, work, limits=limits, memory_bytes=budget).best
        assert max(best.memory_bytes) <= budget
    return best.plan_with_prediction(work)


# A pipeline, tensor parallelism, and sharding by a search for little memory.
FAST = ("deep", "tensor", "little memory")
OTHERS = tuple(name for name in CASES if name not in FAST)


@pytest.mark.slow
@pytest.mark.parametrize("names, steps", [(FAST, 4), (OTHERS, 6)], ids=["fast", "others"])
def test_searched_plans_train_as_one_process(tmp_path, names, steps):
    plans = {name: searched(name) for name in CASES}
    for plan in plans.values():
        require_runnable(plan, 4)
    assert len({replace(plan, meta={}).to_json() for plan in plans.values()}) >= 4
    trained = {name: plans[name] for name in names}
    options = dict(max_steps=steps, gradient_accumulation_steps=1)
    plain = run(tmp_path / "plain", "auto", trainer_class=Trainer, options=options)
    for found in on_ranks(functools.partial(train_under, trained, tmp_path, steps)):
        for one in found.values():
            assert np.allclose(one.steps("loss", "grad_norm"), plain.steps("loss", "grad_norm"), rtol=1e-4)


def train_under(plans: dict[str, ParallelPlan], folder: Path, steps: int) -> dict:
    return {name: run(folder / name, plan, options=dict(max_steps=steps)) for name, plan in plans.items()}
