# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite on one rank: no rank takes the step, and the message says where they came from."""

import math
import re

import pytest
import torch
from job import Job, plans
from transformers import Trainer

from custom_losses import spoiled_by_a_row
from faults import fail_at
from galvatron_hf import GalvatronTrainer
from plans import pipelined
from trainer_runs import on_ranks, run


STEP, MICRO_BATCH = 3, 1
STOPPED = rf"Step {STEP} is not finite \(gradient norm (\S+), loss (\S+)\) and was not taken: (.*?)\. Training ends"

# The fault is in the second layer of the first rank in the second half of the ranks, in the second micro-batch.
# Without a pipeline it has rows 4 to 7 of eight; the second half of the ranks has rows 6 and 7. With a pipeline it has
# rows 2 and 3, both on each rank of the second stage.
RANK = {"layers": 2, "replicate": 2, "pipeline": 2, "layers_of_two": 1, "pipeline_of_two": 1}
LAYER = {"layers": 1, "replicate": 1, "pipeline": 2, "layers_of_two": 1, "pipeline_of_two": 2}
ROW = {"layers": 6, "replicate": 6, "pipeline": 2, "layers_of_two": 6, "pipeline_of_two": 2}
WHAT = {
    "nan_in_forward": "the output of layer {}",
    "nan_in_backward": "the gradient of the output of layer {}",
    "inf_in_backward": "the gradient of the output of layer {}",
}


def dataset_row(row: int) -> int:
    """Returns the dataset's row. Trainer draws an epoch's order of the 27 rows from its seed; a step takes eight."""
    order = torch.randperm(27, generator=torch.Generator().manual_seed(5)).tolist()
    return order[8 * (STEP - 1) + row]


def stopped(failure: BaseException, ranks: int) -> list[str]:
    """Returns gradient norm, loss and origin, which all ranks report alike."""
    reports = re.findall(STOPPED, str(failure))
    assert len(reports) == ranks
    assert len(set(reports)) == 1
    return list(reports[0])


FAST = [("layers_of_two", "nan_in_backward"), ("pipeline_of_two", "nan_in_backward")]
SLOW = [(plan, kind) for plan in ("layers", "replicate", "pipeline") for kind in WHAT]


@pytest.mark.slow
@pytest.mark.parametrize("plan, kind", FAST + [pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW])
def test_a_bad_number_on_one_rank_stops_all_before_the_step(tmp_path, plan, kind, uninterrupted):
    job = Job(folder=tmp_path, plan=plan)
    with pytest.raises(AssertionError) as failure:
        job.fork(fail_at(RANK[plan], STEP, kind, micro_batch=MICRO_BATCH))
    norm, loss, origin = stopped(failure.value, job.ranks)
    assert not math.isfinite(float(norm))
    assert math.isfinite(float(loss)) == (kind != "nan_in_forward")
    row, what = ROW[plan], WHAT[kind].format(LAYER[plan])
    place = f"rank {RANK[plan]}, micro-batch {MICRO_BATCH}, row {row} of the global batch: {what}"
    assert origin == f"{place} (dataset {dataset_row(row)})"
    assert job.checkpoints() == ["checkpoint-2"]
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)


@pytest.mark.parametrize("plan", ["layers_of_two", pytest.param("layers", marks=pytest.mark.slow)])
def test_a_bad_number_that_does_not_come_again_is_called_so(tmp_path, plan):
    job = Job(folder=tmp_path, plan=plan, options=dict(max_grad_norm=0.0))  # found without clipping too
    with pytest.raises(AssertionError) as failure:
        job.fork(fail_at(RANK[plan], STEP, "nan_once", micro_batch=MICRO_BATCH))
    assert "cannot be reproduced" in stopped(failure.value, job.ranks)[2]


class WithoutStepThree(Trainer):
    """Leaves a step out, and is plain Trainer otherwise."""

    def _get_grad_norm(self, model, grad_norm=None):
        left_out = self.state.global_step == STEP - 1
        if left_out:
            model.zero_grad()
        self.optimizer._is_overflow = left_out
        return super()._get_grad_norm(model, grad_norm=grad_norm)


@pytest.mark.parametrize(
    "plan", ["layers_of_two", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("layers", "pipeline"))]
)
def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path, plan):
    job = Job(folder=tmp_path, plan=plan, options=dict(nonfinite_policy="skip", save_strategy="no"))
    job.fork(fail_at(RANK[plan], STEP, "nan_in_forward", micro_batch=MICRO_BATCH))
    plain = run(
        tmp_path / "plain", options=dict(gradient_accumulation_steps=1, max_steps=6), trainer_class=WithoutStepThree
    )
    losses, rates = job.logs(), job.logs("learning_rate")
    assert math.isnan(losses.pop(STEP))  # logging_nan_inf_filter would have made it 0
    for step, (loss, _, rate) in enumerate(plain.steps(), 1):
        assert rates[step] == pytest.approx(rate, rel=1e-12)
        assert step == STEP or losses[step] == pytest.approx(loss, rel=1e-5)
    assert rates[STEP + 1] == rates[STEP]
    assert job.logs("skipped_steps") == dict.fromkeys(range(STEP, 7), 1)


@pytest.mark.slow
def test_skipping_ends_when_every_step_is_bad(tmp_path):
    faults = [fail_at(2, step, "nan_in_backward") for step in range(1, 13)]
    options = dict(nonfinite_policy="skip", save_strategy="no", max_steps=12)
    with pytest.raises(AssertionError, match="Step 10 is not finite .* because 10 steps in a row were skipped"):
        Job(folder=tmp_path, plan="replicate", options=options).fork(*faults)


def bad_on_long_batches(outputs, labels, num_items_in_batch=None):
    """Returns the mean over targets; its gradient is not a number if a target's logit is above 2."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum")
    high = (logits.detach()[..., 0] > 2).any()
    return loss / num_items_in_batch + (torch.sqrt(logits.sum() * 0.0) * 0.0 if high else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["layers", "pipeline"])
def test_a_loss_of_ones_own_is_watched_too(tmp_path, plan):
    with pytest.raises(AssertionError, match=r"the gradient of the output of the head.*Training ends here"):
        on_ranks(lambda: run(tmp_path / "run", plans()[plan], compute_loss_func=bad_on_long_batches))


def test_a_loss_that_is_bad_by_itself_is_not_called_a_fault_of_the_hardware(tmp_path):
    """Spoils the loss and no gradient: plain Trainer would go on and log an average in its place."""

    def work() -> str:
        with pytest.raises(FloatingPointError) as error:
            run(tmp_path / "run", plans()["layers_of_two"], trainer_class=spoiled_by_a_row(GalvatronTrainer))
        return str(error.value)

    for message in on_ranks(work, 2):
        assert "Step 2 is not finite" in message and "the loss itself, while every gradient is finite" in message


def freeze_first_stage(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name or "layers.3" in name or "norm" in name or "head" in name)
    return model


@pytest.mark.slow
def test_a_frozen_stage_is_no_bad_number_and_hides_none(tmp_path):
    from tiny_models import FAMILIES

    plan = pipelined([(0, 1), (2, 3)], plans()["layers"].layers)

    def work():
        model = freeze_first_stage(FAMILIES["llama"].build())
        healthy = run(tmp_path / "healthy", plan, model=model)
        model = freeze_first_stage(FAMILIES["llama"].build())
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight[0, 0] = float("inf")
        try:
            run(tmp_path / "bad", plan, model=model)
        except FloatingPointError as error:
            return len(healthy.steps()), str(error)

    for steps, message in on_ranks(work):
        assert steps == 6
        assert re.search("Step 1 is not finite .* not taken: rank 2, .*layer 3.*; rank 3, .*layer 3", message)


def test_a_policy_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nonfinite_policy 'ignore' is not one of stop, skip"):
        run(tmp_path, plans()["layers"], options=dict(nonfinite_policy="ignore"))
