# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer's training is plain Trainer's on the global batch, whatever the plan; see oracle.py."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import BatchEncoding, LlamaForCausalLM, Trainer

from custom_losses import (
    WeightedRows,
    calls_super,
    ignores_the_count,
    mean_of_logits,
    sum_of_losses,
    weighted_rows,
)
from equivalence import single_stage
from galvatron_hf import GalvatronMixin
from galvatron_hf.data.loader import equal_share, join_batches
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.trainer.data import global_batches
from galvatron_hf.trainer.data.global_batches import as_one_process
from oracle import Case, Outcome, Rows, Stream, check_cases, collate, run_case, run_oracle, with_options
from plan_inputs import drawn
from plans import light_plan, mixed_plans, uniform, uniform_plans
from ranks import run_ranks
from tiny_models import LAYERS


S, V = LayerStrategy, VocabularyStrategy
MIXED = mixed_plans()
REPLICATE = uniform(4, sharding="replicate", embedding=V(sharding="replicate"))
LIGHT, SPLIT = light_plan(), light_plan(micro_batches=2)
# The same on two ranks, for what is the same with more.
PAIR = light_plan(2)
TWO_AND_FOUR_RANKS = pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])

EVALUATED = dict(trainer=dict(eval_dataset=lambda: Rows(10, seed=2)))


def evaluating(every: int = 3, **options):
    return dict(eval_strategy="steps", eval_steps=every, **options)


ADAMW = dict(optim="adamw_torch", lr_scheduler_type="cosine", learning_rate=1e-2, weight_decay=0.5)
PLATEAU = dict(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs=dict(patience=0, factor=0.5))
ONCE = dict(gradient_accumulation_steps=1, per_device_train_batch_size=2)


# 27, 15 and 11 rows are ragged: the last step of an epoch has 3 of them, fewer than there are ranks.
def test_a_mixed_plan_and_every_option_train_as_one_process():
    check_cases(
        {
            "mixed_a": Case(plan=MIXED["mixed_a"], **EVALUATED, options=evaluating(max_steps=6)),
            "accumulating": Case(
                plan=SPLIT,
                train=lambda: Rows(15),
                options=dict(gradient_accumulation_steps=3, max_grad_norm=1e-2, max_steps=2),
            ),
            "plateau_unclipped": Case(
                plan=LIGHT,
                train=lambda: Rows(11),
                **EVALUATED,
                options=evaluating(1, max_grad_norm=0.0, max_steps=3, **PLATEAU, **ONCE),
            ),
        }
    )


@pytest.mark.slow
@pytest.mark.dtensor_search
def test_every_kind_of_plan_trains_as_one_process():
    """Trains each plan for six steps, of which the fifth begins an epoch."""
    cases = {
        "mixed_b": Case(plan=MIXED["mixed_b"], options=dict(max_grad_norm=0.0, num_train_epochs=2, **ONCE)),
        "mixed_c": Case(plan=MIXED["mixed_c"], options=dict(gradient_accumulation_steps=3, max_grad_norm=1e-2)),
        "auto": Case(plan="auto", options=ADAMW, updates=False),
        "replicate": Case(plan=REPLICATE, **EVALUATED, options=evaluating(1, **PLATEAU)),
        "gpt2": Case(plan=MIXED["mixed_a"], family="gpt2", options=dict(weight_decay=0.5)),
    }
    check_cases({name: with_options(case, max_steps=6) for name, case in cases.items()})


# On two ranks: 7 rows are a step of 4 and one of 3. On four: 11 rows are a step of 8 and one of 3.
@TWO_AND_FOUR_RANKS
def test_epochs_last_step_and_dropped_rows(world_size):
    split = light_plan(world_size, micro_batches=2)
    check_cases(
        {
            "epochs": Case(
                plan=split,
                train=lambda: Rows(2 * world_size + 3),
                options=dict(max_steps=-1, num_train_epochs=2.5, max_grad_norm=0.0),
            ),
            "fewer_rows_than_ranks": Case(plan=split, train=lambda: Rows(world_size // 2), options=dict(max_steps=2)),
            "drop_last": Case(
                plan=split,
                train=lambda: Rows(2 * world_size + 1),
                options=dict(
                    gradient_accumulation_steps=1, dataloader_drop_last=True, num_train_epochs=1, max_steps=-1
                ),
            ),
        },
        world_size,
    )


def with_text(count: int) -> datasets.Dataset:
    rows = [{name: value.tolist() for name, value in row.items()} for row in Rows(count)]
    return datasets.Dataset.from_list([row | {"text": "left out"} for row in rows])


def drop_tokens(rows):
    """Leaves out random tokens: only one reader's draws can be right for all ranks."""
    kept = [torch.rand(len(row["input_ids"])).argsort()[:-2].sort().values for row in rows]
    return collate([{k: v[index] for k, v in row.items()} for row, index in zip(rows, kept, strict=True)])


def with_one_row_of_positions(rows):
    batch = collate(rows)
    return {"position_ids": torch.arange(batch["input_ids"].shape[1])[None], **batch}


@pytest.mark.slow
@TWO_AND_FOUR_RANKS
def test_every_kind_of_data_gives_the_rows_of_one_process(world_size):
    plan, split = light_plan(world_size), light_plan(world_size, micro_batches=2)
    random = dict(trainer=dict(data_collator=lambda: drop_tokens))
    check_cases(
        {
            # Steps of 4, 4 and 3 rows (on four ranks of 8, 8 and 3), and one of the next epoch.
            "datasets_by_length": Case(
                plan=plan,
                train=lambda: with_text(4 * world_size + 3),
                options=dict(train_sampling_strategy="group_by_length", max_steps=4),
            ),
            # 2, 2 | 2, 1 (on four ranks 4, 4 | 4, 1): the data ends inside the second step of each pass.
            "iterable_batch_encoding": Case(
                plan=plan,
                train=lambda: Stream(3 * world_size + 1),
                trainer=dict(data_collator=lambda: lambda rows: BatchEncoding(collate(rows))),
                options=dict(max_steps=3),
            ),
            # 2, 2 | 2 (4, 4 | 4): here before it, so the gradients of each pass's last batch stay for the next step.
            "iterable_short": Case(
                plan=plan, train=lambda: Stream(3 * world_size), accumulates=True, options=dict(max_steps=3)
            ),
            "random_collator": Case(plan=plan, **random, options=dict(max_steps=3, **ONCE, **ADAMW), updates=False),
            "workers": Case(plan=plan, **random, options=dict(dataloader_num_workers=2, max_steps=3, **ONCE)),
            "one_row_of_positions": Case(
                plan=split,
                trainer=dict(data_collator=lambda: with_one_row_of_positions),
                options=dict(max_steps=2),
            ),
        },
        world_size,
    )


def failing_collator(rows):
    raise KeyError("no such column")


def test_a_failing_collator_ends_all_ranks_with_its_message():
    case = Case(plan=PAIR, trainer=dict(data_collator=lambda: failing_collator))

    def work() -> str:
        with pytest.raises((KeyError, RuntimeError)) as error:
            run_case(case)
        return f"{error.type.__name__}: {error.value}"

    first, *others = run_ranks(work, 2)
    assert first == "KeyError: 'no such column'"
    assert set(others) == {f"RuntimeError: Rank 0 could not read the next batch ({first}); see its traceback."}


OWN_LOSSES = {
    "compute_loss_func": Case(plan="auto", trainer=dict(compute_loss_func=lambda: sum_of_losses)),
    "calls_super": Case(plan="auto", override=calls_super),
    "smoothing": Case(plan="auto", options=dict(label_smoothing_factor=0.2)),
    "calls_super_smoothing": Case(plan="auto", override=calls_super, options=dict(label_smoothing_factor=0.2)),
    "ignores_the_count": Case(plan="auto", override=ignores_the_count),
    "mean_of_logits": Case(plan="auto", override=mean_of_logits),
    "weighted_rows": Case(plan="auto", override=weighted_rows, options=dict(remove_unused_columns=False)),
}


def check_own_losses(*names: str, world_size: int) -> None:
    """Trains with losses in two steps, of which the second is ragged, as is the last batch of the evaluation."""
    cases, count, evaluated = {}, 4 * world_size - world_size // 2, 2 * world_size + world_size // 2
    for name in names:
        case, rows = OWN_LOSSES[name], WeightedRows if name == "weighted_rows" else Rows
        case = replace(
            case,
            plan=light_plan(world_size),
            accumulates=True,
            train=lambda rows=rows: rows(count),
            trainer=case.trainer | dict(eval_dataset=lambda rows=rows: rows(evaluated, seed=2)),
        )
        cases[name] = with_options(case, **evaluating(2, max_steps=2))
    check_cases(cases, world_size)


@pytest.mark.slow
def test_losses_of_the_users_own():
    names = ("smoothing", "calls_super_smoothing", "ignores_the_count", "mean_of_logits", "weighted_rows")
    check_own_losses(*names, world_size=2)


@pytest.mark.slow
def test_losses_of_the_users_own_on_four_ranks():
    check_own_losses(*OWN_LOSSES, world_size=4)


@pytest.mark.slow
def test_a_loss_function_of_the_users_own_under_a_mixed_plan():
    own = EVALUATED["trainer"] | dict(compute_loss_func=lambda: sum_of_losses)
    check_cases({"mixed_a": Case(plan=MIXED["mixed_a"], trainer=own, options=evaluating(max_steps=3))})


# ---- What is counted, logged and seen ----


def saved_logits(trainer: Trainer) -> np.ndarray | None:
    """Returns the logits of the saved model, opened by plain transformers."""
    folder = os.path.join(trainer.args.output_dir, "final")
    trainer.save_model(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(Rows(3).rows[0][None]).logits.numpy()


@pytest.mark.slow
def test_events_counters_and_the_saved_model_are_those_of_one_process():
    """Compares with one process that accumulates. The second step of an epoch is ragged; one case has two epochs."""
    options = evaluating(2, logging_steps=2, eval_on_start=True, save_strategy="steps", save_steps=3)
    check_cases(
        {
            "all": Case(
                plan=LIGHT,
                accumulates=True,
                train=lambda: Rows(11),
                **EVALUATED,
                options=options | dict(include_num_input_tokens_seen="all", max_steps=4),
            ),
            "non_padding": Case(
                plan=MIXED["mixed_b"],
                accumulates=True,
                train=lambda: Rows(11),
                options=dict(include_num_input_tokens_seen="non_padding", max_steps=-1, num_train_epochs=1),
                after=saved_logits,
            ),
        }
    )


# ---- bf16: both are roundings of the same fp32 training, so both are measured against that ----


def distance(seen: Outcome, exact: Outcome) -> dict[str, float]:
    """Returns relative distances: of all gradients at step 1 together, and of the worst loss and evaluation loss."""
    names = exact.gradients
    error = sum(float((seen.gradients[name] - exact.gradients[name]).double().square().sum()) for name in names)
    scale = sum(float(exact.gradients[name].double().square().sum()) for name in names)
    losses = [[log[key] for log in run.logs for key in ("loss", "eval_loss") if key in log] for run in (seen, exact)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return {"gradients": (error / scale) ** 0.5, "losses": worst}


@pytest.mark.slow
def test_bf16_is_as_near_to_fp32_as_one_process_in_bf16():
    case = Case(plan=MIXED["mixed_a"], **EVALUATED, options=evaluating(2, max_steps=2))
    rounded = with_options(case, bf16=True)
    exact, oracle = run_oracle(case), distance(run_oracle(rounded), run_oracle(case))
    for seen in run_ranks(lambda: distance(run_case(rounded), exact), 4):
        # One part in 2**9 is lost at each of a few dozen operations in a row, at different ones in the two: autocast
        # rounds at matmuls, a plan's precision everywhere. fp32 would be 1e-6, a wrong scale 0.5 or more.
        assert 1e-3 < seen["gradients"] < 2 * oracle["gradients"] < 0.1
        assert seen["losses"] < max(2 * oracle["losses"], 2**-9)


# ---- Plans nobody thought of ----


def degrees(ranks: int) -> st.SearchStrategy[tuple[int, int]]:
    powers = [2**i for i in range(ranks.bit_length())]
    # Models have 8 heads and 2 key/value heads, which are copied where there are more ranks.
    return st.sampled_from([(t, u) for t in powers for u in powers if t * u <= min(ranks, 8)])


@st.composite
def strategies(draw, ranks: int) -> LayerStrategy:
    tensor, ulysses = draw(degrees(ranks))
    sharding = draw(st.sampled_from(["replicate", "zero2", "zero3"]))
    shards = ranks // tensor
    pieces = [d for d in range(1, shards + 1) if shards % d == 0]
    return S(
        tensor=tensor,
        ulysses=ulysses,
        megatron_sp=tensor > 1 and draw(st.booleans()),
        sharding=sharding,
        shard_degree=None if sharding == "replicate" else draw(st.sampled_from(pieces)),
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@st.composite
def random_plans(draw, ranks: int) -> ParallelPlan:
    layers = tuple(draw(strategies(ranks)) for _ in range(LAYERS))
    ends = [
        V(tensor=draw(degrees(ranks))[0], sharding=draw(st.sampled_from(["replicate", "zero2", "zero3"])))
        for _ in range(2)
    ]
    micro_batches = draw(st.integers(1, 3))
    order = draw(st.permutations(range(ranks)))
    return single_stage(
        layers, ranks, ranks=tuple(order), embedding=ends[0], head=ends[1], micro_batches=micro_batches
    )


def check_random(plans: list[ParallelPlan], ranks: int, **options) -> None:
    case = with_options(Case(plan="auto", **EVALUATED, options=evaluating()), **options)
    check_cases({plan.to_json(): replace(case, plan=plan) for plan in plans}, ranks)


@pytest.mark.slow
def test_random_plans():
    check_random(drawn(random_plans(4), 2), 4, max_steps=2, eval_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_random_plans(ranks):
    check_random(drawn(random_plans(ranks), 4), ranks, max_steps=6)


@pytest.mark.slow
def test_every_uniform_plan():
    """Trains under all plans of two ranks; test_parallelize.py has those of eight."""
    case = Case(plan="auto", **EVALUATED, options=evaluating(max_steps=6))
    check_cases({name: replace(case, plan=plan) for name, plan in uniform_plans(2).items()}, 2)


# ---- The comparison can fail ----


def loss_divided_by_ranks():
    whole = ParallelModel.forward_backward
    return mock.patch.object(
        ParallelModel,
        "forward_backward",
        lambda self, batch, items, **options: whole(self, batch, 2 * items, **options),
    )


def items_counted_per_rank():
    def count(self, batches, device):
        with as_one_process(self.args):
            shares = [equal_share(batch, 0, self.args.world_size) for batch in batches]
            return Trainer._get_num_items_in_batch(self, shares, device).clamp(min=1)

    return mock.patch.object(GalvatronMixin, "_get_num_items_in_batch", count)


def clipped_by_the_local_norm():
    def norm(self, *values):
        squares = [local_tensor(p.grad).double().square().sum() for p in self.model.parameters()]
        return torch.stack(squares).sum().sqrt().float(), torch.zeros(len(values), dtype=torch.float64)

    return mock.patch.object(ParallelModel, "sum_with_grad_norm", norm)


def a_row_twice():
    def join(batches, pad):
        joined = join_batches(batches, pad)
        return {name: torch.cat([value, value[:1]]) for name, value in joined.items()}

    return mock.patch.object(global_batches, "join_batches", join)


def gradients_summed_over_ranks():
    """Sums the gradients of gathered rows over the ranks: each rank computes the same loss."""

    def backward(ctx, grad):
        return 2 * grad[ctx.own], None, None

    return mock.patch.object(collectives._GatherRows, "backward", staticmethod(backward))


def test_faults_of_the_trainer_are_seen():
    one = Case(plan=PAIR, options=dict(max_steps=1))
    cases = {
        "divided": (replace(one, fault=loss_divided_by_ranks), "loss is"),
        "counted": (replace(one, fault=items_counted_per_rank), "loss is"),
        "clipped": (replace(one, fault=clipped_by_the_local_norm), "grad_norm is"),
        "twice": (replace(one, fault=a_row_twice), "loss is"),
        "summed": (
            replace(one, fault=gradients_summed_over_ranks, override=mean_of_logits, accumulates=True),
            "grad_norm is",
        ),
    }
    with pytest.raises(AssertionError) as error:
        check_cases({name: case for name, (case, _) in cases.items()}, world_size=2)
    for name, (_, quantity) in cases.items():
        assert f"{name}: rank 0: log[0].{quantity}" in str(error.value)
