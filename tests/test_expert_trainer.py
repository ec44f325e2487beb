# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer with experts, against plain Trainer: the routers' loss, predictions, subclasses, and how rows are
sent to the experts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import pytest

import oracle
from custom_losses import calls_super, ignores_the_count, mean_of_logits, sum_of_losses
from galvatron_hf.parallel.layers.experts import ParallelExperts
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.trainer import components, expert_dispatch
from galvatron_hf.trainer.expert_dispatch import DispatchTimes, ExpertDispatch, measured_imbalance
from plans import expert_plans
from ranks import run_ranks
from tiny_models import EXPERT_FAMILIES


PLANS, CLUSTERS = expert_plans(), ParallelExperts._clusters


def test_trainer_with_experts():
    """Losses, updates, evaluation and subclasses of Trainer, with the routers' loss that plain Trainer has."""
    evaluated = dict(eval_dataset=lambda: oracle.Rows(10, seed=2))
    evaluation = dict(eval_strategy="steps", eval_steps=2)
    oracle.check_cases(
        {
            "evaluated": oracle.Case(
                plan=PLANS["all_kinds"], family="qwen3_moe", options=evaluation, trainer=evaluated
            ),
        }
    )


@pytest.mark.slow
def test_more_plans_and_a_smoothed_loss_in_trainer():
    oracle.check_cases(
        {
            "pipeline": oracle.Case(plan=PLANS["1f1b"], family="mixtral"),
            "smoothed": oracle.Case(
                plan=PLANS["micro_batches"], family="mixtral", options=dict(label_smoothing_factor=0.2)
            ),
        }
    )


@pytest.mark.slow
def test_trainers_of_users_with_experts():
    once = dict(gradient_accumulation_steps=1, per_device_train_batch_size=2)
    case = oracle.Case(plan=PLANS["expert_2"], family="mixtral")
    oracle.check_cases(
        {
            "calls super": replace(case, override=calls_super, options=once),
            "its own model(...)": replace(case, override=ignores_the_count, options=once),
            "of logits": replace(case, override=mean_of_logits, options=once),
            "a function": replace(case, trainer=dict(compute_loss_func=lambda: sum_of_losses)),
        }
    )


def test_batches_of_a_step_one_by_one_have_no_loss_of_routers():
    case = oracle.Case(plan=PLANS["expert_2"], family="mixtral", override=ignores_the_count)

    def work() -> str:
        with pytest.raises(ValueError) as refused:
            oracle.run_case(case)
        return str(refused.value)

    sentences = set(run_ranks(work, 4))
    assert len(sentences) == 1 and "gradient_accumulation_steps=1" in sentences.pop()


def test_predictions_without_what_routers_put_out():
    """Those of plain Trainer with the same keys ignored; without them they are refused."""
    ignored = ["aux_loss", "router_logits"]
    evaluated = dict(eval_dataset=lambda: oracle.Rows(10, seed=2))
    case = oracle.Case(plan=PLANS["expert_2"], family="mixtral", train=None, trainer=evaluated)

    def predict(trainer) -> list:
        prediction = trainer.predict(trainer.eval_dataset, ignore_keys=ignored)
        return [prediction.predictions, prediction.metrics["test_loss"]]

    oracle.check_cases({"ignored": replace(case, after=predict)})

    def work() -> str:
        with pytest.raises(ValueError) as refused:
            oracle.run_case(replace(case, after=lambda trainer: trainer.predict(trainer.eval_dataset)))
        return str(refused.value)

    assert all("aux_loss" in text and "ignore_keys=" in text for text in run_ranks(work, 4))


@pytest.mark.slow
def test_trainer_sends_centroids_and_says_what_it_saved():
    options = dict(expert_dispatch="lsh", lsh_hashes=2, lsh_width=4, lsh_max_residual=2.0)
    case = oracle.Case(plan=PLANS["expert_4"], family="qwen3_moe", own_options=options, options=dict(max_steps=2))
    auto = replace(case, own_options=options | dict(expert_dispatch="auto"))

    def work() -> list:
        found, decided = oracle.run_case(case), oracle.run_case(auto)
        return [log for log in found.logs if "loss" in log], [log for log in decided.logs if "loss" in log]

    for logs, of_auto in run_ranks(work, 4):
        for log in logs:
            assert 0 < log["expert_rows_sent"] < 1 and log["expert_bytes_saved"] > 0
            assert 0 < log["expert_residual"] <= 2.0 and 0 < log["expert_cosine"] <= 1
        assert [log["loss"] for log in of_auto][0] != [log["loss"] for log in logs][0]  # its first step is plain


@pytest.mark.slow
def test_auto_measures_and_decides_and_leaves_the_logs_alone(monkeypatch):
    """Decides after steps 1 and 3 for what is said to be faster; counts clusters in no other step of plain rows."""
    monkeypatch.setattr(expert_dispatch, "AUTO_EVERY", 2)
    options = dict(expert_dispatch="auto", lsh_hashes=2, lsh_width=4)
    case = oracle.Case(plan=PLANS["expert_4"], family="qwen3_moe", own_options=options, options=dict(max_steps=4))

    def work(faster: str) -> tuple[list, list, list, list]:
        probed, told, measured = [], [], ExpertDispatch._measured
        ms = dict(plain_ms=1.0, lsh_ms=0.5) if faster == "lsh" else dict(plain_ms=0.5, lsh_ms=1.0)

        def decided(self, *args) -> DispatchTimes:
            assert measured(self, *args).plain_ms > 0
            return DispatchTimes(**ms)

        def noted(self, *args, **kwargs):
            probed.append(self.block.current.value.key[1])
            return CLUSTERS(self, *args, **kwargs)

        with (
            patch.object(ExpertDispatch, "_measured", decided),
            patch.object(ParallelExperts, "_clusters", noted),
            patch.object(components, "tell", lambda text, shown, result: told.append(text.split(":")[0])),
        ):
            outcome = oracle.run_case(replace(case, after=lambda trainer: [trainer.expert_imbalance[4]]))
        sent = [log.get("expert_rows_sent") for log in outcome.logs if "loss" in log]
        return sent, sorted(set(probed)), outcome.results["after"], told

    for faster, steps, way in (("lsh", [0, 1, 2, 3], "as centroids"), ("plain", [0, 2], "one by one")):
        decision, end = f"Rows travel to experts {way}", "Experts"
        for rank, (sent, probed, (imbalance,), told) in enumerate(run_ranks(work, 4, faster)):
            assert told == ([decision, decision, end] if rank == 0 else [])
            assert [one is not None for one in sent] == [faster == "lsh" and step > 0 for step in range(4)]
            assert probed == steps and 1.0 <= imbalance <= 4.0


def test_imbalance_is_that_of_forwards_not_of_their_sum():
    """Two ranks get all rows in turn: their sums are even, and each forward is as uneven as can be."""

    def work() -> dict[int, float]:
        parallel = parallelize(EXPERT_FAMILIES["mixtral"].build(), expert_plans()["expert_4"])
        for block in parallel.blocks:
            rank = block.experts.group.rank()
            block.experts._received.extend([64 * (rank == turn % 4) for turn in range(8)])
        return measured_imbalance(parallel)

    assert run_ranks(work, 4) == [{4: 4.0}] * 4


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(expert_dispatch="mean"), "expert_dispatch 'mean' is not one of plain, lsh, auto"),
        (dict(lsh_hashes=0), "lsh_.*hashes is 0"),
        (dict(lsh_max_residual=-1.0), "lsh_.*max_residual is -1.0"),
    ],
)
def test_a_dispatch_that_cannot_be_is_refused(options, sentence):
    case = oracle.Case(plan=PLANS["expert_4"], family="qwen3_moe", own_options=options)

    def work() -> str:
        with pytest.raises(ValueError) as refused:
            oracle.run_case(case)
        return str(refused.value)

    assert all(re.search(sentence, text) for text in run_ranks(work, 1))
