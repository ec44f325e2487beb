# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks call together: calls that some ranks do not make, other batches or options, numbers of a part of a
weight; and what people are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.parallel.comm.meeting import Meetings
from galvatron_hf.trainer import mixin
from galvatron_hf.utils.progress import tell
from oracle import Rows
from plans import light_plan, pipelined, uniform, uniform_plans
from ranks import run_ranks
from test_users_trainers import losing
from trainer_runs import on_ranks, trainer


PAIR = light_plan(2)


# ---- Numbers of parts, and calls that some ranks do not make ----


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_number_of_a_part_of_a_weight_is_refused_and_one_of_the_whole_is_right(tmp_path):
    plain = trainer(tmp_path / "plain", trainer_class=Trainer).model.model.embed_tokens.weight.detach()

    def work() -> tuple[str, str, float]:
        made = trainer(tmp_path / "run", PAIR)
        made.ensure_parallel()
        weight = made.model.model.embed_tokens.weight.detach()
        return (
            error_of(lambda: weight.norm().item()),
            error_of(lambda: float(weight.sum())),
            weight.full_tensor().norm(),
        )

    for of_item, of_float, norm in run_ranks(work, 2):
        assert "full_tensor()" in of_item and "full_tensor()" in of_float
        assert float(norm) == pytest.approx(float(plain.norm()), rel=1e-6)


CALLS: dict[str, Callable[[Trainer], Any]] = {
    "train": lambda made: made.train(),
    "evaluate or predict": lambda made: made.evaluate(Rows(4)),
    "save_model": lambda made: made.save_model(),
    "generate": lambda made: made.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2),
    "model(...)": lambda made: made.model(input_ids=torch.tensor([[5, 6, 7]])),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_a_rank_does_not_make_names_it_after_the_timeout(call, tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1, ddp_timeout=2))
        made.ensure_parallel()
        return error_of(lambda: CALLS[call](made)) if made.args.process_index == 0 else ""

    message, _ = run_ranks(work, 2, timeout=60)
    assert message.startswith(f"RuntimeError: {call} was called on rank 0, and rank 1 did not call it within 2 s"), (
        message
    )
    assert "call it on every rank" in message


class _Repairing(GalvatronTrainer):
    """Replaces bad gradients by none, and says so by the norm that it returns."""

    def _clip_grad_norm(self, model):
        if self.state.global_step == 0:
            for weight in model.parameters():
                weight.grad.fill_(float("nan"))
        norm = super()._clip_grad_norm(model)
        if norm.isfinite():
            return norm
        for weight in model.parameters():
            weight.grad.zero_()
        return torch.zeros(())


def test_the_norm_that_a_clipping_of_ones_own_returns_is_the_one_that_is_checked(tmp_path):
    def work() -> list[float]:
        made = trainer(tmp_path, uniform(1), trainer_class=_Repairing, options=dict(max_steps=2))
        made.train()
        return [log["grad_norm"] for log in made.state.log_history if "grad_norm" in log]

    first, second = on_ranks(work, 1)[0]
    assert first == 0.0 and second > 0.0


def test_a_second_trainer_of_a_script_names_missing_ranks_too(tmp_path):
    def work() -> str:
        trainer(tmp_path, PAIR, options=dict(max_steps=1)).train()
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1, ddp_timeout=2))
        return error_of(made.train) if made.args.process_index == 0 else ""

    message, _ = run_ranks(work, 2, timeout=60)
    assert "train was called on rank 0, and rank 1 did not call it within 2 s" in message, message


def test_ranks_that_make_different_calls_are_told(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1))
        made.ensure_parallel()
        call = CALLS["save_model" if made.args.process_index == 0 else "evaluate or predict"]
        return error_of(lambda: call(made))

    first, second = run_ranks(work, 2, timeout=60)
    assert "Rank 0 called save_model, and rank 1 called evaluate or predict" in first
    assert "Rank 1 called evaluate or predict, and rank 0 called save_model" in second


def test_different_batches_of_the_ranks_are_refused(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        ids = torch.tensor([[5, 6, 7 + made.args.process_index]])
        return error_of(lambda: made.model(input_ids=ids))

    for message in run_ranks(work, 2):
        assert "called the model with different inputs" in message


@pytest.mark.parametrize("name", ["use_cache", "output_hidden_states", "past_key_values", "inputs_embeds"])
def test_what_has_no_layout_is_refused_by_name(name, tmp_path):
    value = torch.zeros(1, 3, 32) if name == "inputs_embeds" else True

    def work() -> str:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        return error_of(lambda: made.model(input_ids=torch.tensor([[5, 6, 7]]), **{name: value}))

    for message in run_ranks(work, 2):
        assert f"called with {name!r}" in message and "leave it out" in message


def penalizes_weights(model, inputs, items):
    outputs = model(**inputs)
    return outputs.loss + 1e-4 * sum((weight**2).sum() for weight in model.parameters()), outputs


@pytest.mark.parametrize("name", ["zero3", "replicate", "tensor", "pipeline"])
def test_a_loss_that_computes_with_weights_is_refused(name, tmp_path):
    plans = uniform_plans(2) | {"pipeline": pipelined([(0,), (1,)], uniform(2).layers, "1f1b", micro_batches=2)}

    def work() -> str:
        made = trainer(tmp_path, plans[name], trainer_class=losing(penalizes_weights)(GalvatronTrainer))
        return error_of(made.train)

    for message in run_ranks(work, 2):
        assert "ValueError" in message and "weight_decay" in message


@pytest.mark.parametrize("by_config", [True, False])
def test_a_tuple_is_returned_where_the_call_or_the_config_asks_for_it(by_config, tmp_path):
    def work() -> tuple[bool, bool]:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        batch = {name: torch.tensor([[5, 6, 7]]) for name in ("input_ids", "labels")}
        made.model.config.return_dict = not by_config
        outputs = made.model(**batch) if by_config else made.model(**batch, return_dict=False)
        named = made.model(**batch, return_dict=True)
        return isinstance(outputs, tuple), torch.equal(outputs[1], named.logits)

    assert run_ranks(work, 2) == [(True, True)] * 2


def test_a_message_that_names_no_rank_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(Meetings, "_missing", lambda self: [])
    with pytest.raises(AssertionError):
        test_a_call_that_a_rank_does_not_make_names_it_after_the_timeout("save_model", tmp_path)


# ---- What is said ----


def test_a_resumed_run_says_from_where_and_an_evaluation_counts_all_rows(tmp_path):
    options = dict(max_steps=2, save_strategy="steps", save_steps=1)

    def work() -> tuple[bool, float]:
        trainer(tmp_path, PAIR, options=options).train()
        made = trainer(tmp_path, PAIR, options=options)
        with mock.patch.object(mixin.logger, "warning") as warning:
            made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        told = mock.call(f"Training resumes from {tmp_path / 'checkpoint-1'}.") in warning.mock_calls
        metrics = made.evaluate(Rows(10))
        return told, metrics["eval_samples_per_second"] * metrics["eval_runtime"]

    (first, count), (second, other) = run_ranks(work, 2)
    assert first and not second
    assert [count, other] == pytest.approx([10, 10], abs=0.1)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_printed_or_logged(shown, capsys, caplog):
    tell("Measuring.", shown)
    tell("The plan.", shown, result=True)
    printed = capsys.readouterr()
    assert (printed.err, printed.out) == (("Measuring.\n", "The plan.\n") if shown else ("", ""))
    assert caplog.messages == ([] if shown else ["Measuring.", "The plan."])
