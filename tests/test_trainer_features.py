# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Features around training work as on one process: searches, noise, callbacks, other Trainers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.distributed as dist
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

from equivalence import single_stage, whole_weights
from galvatron_hf import GalvatronMixin, GalvatronSeq2SeqTrainer, GalvatronSeq2SeqTrainingArguments
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from oracle import Rows, collate
from plans import light_plan, mixed_plans, uniform
from tiny_models import FAMILIES, word_tokenizer
from trainer_runs import Logs, Run, assert_same_steps, on_ranks, run, trainer


S, V = LayerStrategy, VocabularyStrategy
# Two ranks are enough for what only the Trainer decides.
PAIR, MIXED = light_plan(2), replace(mixed_plans()["mixed_a"], micro_batches=1)
SHORT = dict(max_steps=2)
SHORT_ALONE = SHORT | dict(gradient_accumulation_steps=1)


def build_llama() -> PreTrainedModel:
    return FAMILIES["llama"].build()


# --- searches


def search(folder: Path, plan, **more) -> tuple[Any, list[float]]:
    """Searches three rates, of which the second is pruned at its first evaluation."""
    made = trainer(
        folder,
        plan,
        model_init=build_llama,
        eval_dataset=Rows(4, seed=2),
        options=SHORT | dict(eval_strategy="steps", eval_steps=1) | more.pop("options", {}),
        **more,
    )
    groups = []
    made.add_callback(CountGroups(groups))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.0)},
        n_trials=3,
        sampler=optuna.samplers.GridSampler({"learning_rate": [0.001, 0.01, 0.1]}, seed=1),
        pruner=PruneSecond(),
    )
    return best, groups


class PruneSecond(optuna.pruners.BasePruner):
    def prune(self, study, trial) -> bool:
        return trial.number == 1


class CountGroups(TrainerCallback):
    def __init__(self, seen: list[int]):
        self.seen = seen

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0)


# --- noise


class EmbeddingNoise(TrainerCallback):
    """Records the noise on the embedding's output in each micro-batch of the first step."""

    def __init__(self):
        self.trainer, self.seen = None, []

    def on_step_begin(self, args, state, control, **kwargs):
        model = self.trainer.model
        embedding = model.get_input_embeddings()
        table = whole_weights(model, FAMILIES["llama"].build())["model.embed_tokens.weight"]

        def look(module, inputs, hidden):
            batch = self.trainer.parallel.runner.current.value
            self.seen.append((batch.first.real_length, (hidden - table[inputs[0]]).detach()))

        self.handle = embedding.register_forward_hook(look)

    def on_step_end(self, args, state, control, **kwargs):
        self.handle.remove()


def noisy(folder: Path) -> tuple[list, int]:
    """Returns noise and the number of hooks that are left.

    Each micro-batch is one row, whose positions two pairs of tensor ranks share.
    """
    plan = single_stage((S(tensor=4),) * 4, 4, embedding=V(tensor=2), head=V(tensor=2), micro_batches=8)
    callback = EmbeddingNoise()
    options = dict(max_steps=1, neftune_noise_alpha=5.0)
    made = trainer(folder, plan, callbacks=[callback], options=options)
    callback.trainer = made
    made.train()
    embedding = made.model.get_input_embeddings()
    left = [hook for hook in embedding._forward_hooks.values() if "neftune" in hook.__module__]
    return callback.seen, len(left) + hasattr(embedding, "neftune_noise_alpha")


# --- callbacks


class GenerateAndEvaluate(TrainerCallback):
    """Uses the Trainer after the first step, and keeps what a plain model of the same weights generates."""

    def __init__(self):
        self.trainer, self.seen = None, {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            return
        prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
        greedy = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
        self.seen["generated"] = self.trainer.generate(prompt, **greedy).tolist()
        self.seen["eval_loss"] = self.trainer.evaluate()["eval_loss"]
        plain = FAMILIES["llama"].build()
        plain.load_state_dict(whole_weights(self.trainer.model, plain))
        self.seen["wanted"] = plain.eval().generate(prompt, **greedy).tolist()


# --- other Trainers


class UsersTrainer(Trainer):
    """Has groups of weights and a log of its own, as somebody's own Trainer may."""

    def create_optimizer(self):
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for name, p in named if "layers" in name], "lr": 0.05},
            {"params": [p for name, p in named if "layers" not in name], "lr": 0.01},
        ]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)
        return self.optimizer

    def log(self, logs, *args, **kwargs):
        super().log(logs | {"own": 1.0}, *args, **kwargs)

    def generate(self, *args, **kwargs):
        self.model.eval()
        return self.model.generate(*args, **kwargs)


class UsersGalvatronTrainer(GalvatronMixin, UsersTrainer):
    pass


def with_callback(folder: Path, plan, **more) -> tuple[Run, dict]:
    callback, logs = GenerateAndEvaluate(), Logs()
    made = trainer(folder, plan, callbacks=[logs, callback], eval_dataset=Rows(4, seed=2), **more)
    callback.trainer = made
    made.train()
    return Run(logs=logs.all, weights={}, random=float(torch.rand(()))), callback.seen


def generating(folder: Path, trainer_class, arguments_class, **options) -> list:
    """Predicts from prompts alone, then from prompts with labels."""
    args = arguments_class(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=16,
        **options,
    )
    made = trainer_class(model=FAMILIES["llama"].build(), args=args, data_collator=collate)
    return [made.predict(Rows(7, seed=4, labels=labels)) for labels in (False, True)]


def repeated(folder: Path, plan, **more) -> list[tuple]:
    """Trains twice, with a fresh model each time and with the same one."""
    found = []
    for model in (dict(model_init=build_llama), {}):
        logs = Logs()
        made = trainer(folder, plan, callbacks=[logs], **model, **more)
        made.train()
        made.train()
        found.append([(log["loss"], log["grad_norm"]) for log in logs.all if "loss" in log])
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Any]:
    """Returns results of plain Trainers on one process."""
    folder = tmp_path_factory.mktemp("plain")
    more = dict(trainer_class=Trainer, options=SHORT_ALONE)
    return dict(
        repeated=repeated(folder / "repeated", "auto", **more),
        search=search(folder / "search", "auto", trainer_class=Trainer, options=dict(gradient_accumulation_steps=1)),
        user=with_callback(folder / "user", "auto", trainer_class=UsersTrainer, options=SHORT_ALONE),
        generating=generating(folder / "g", Seq2SeqTrainer, Seq2SeqTrainingArguments, per_device_eval_batch_size=4),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Returns results of four ranks, from one world."""
    folder = tmp_path_factory.mktemp("ranks")

    def work() -> dict[str, Any]:
        return dict(
            noise=noisy(folder / "noise"),
            user=with_callback(folder / "user", MIXED, trainer_class=UsersGalvatronTrainer, options=SHORT),
            generating=generating(
                folder / "generating",
                GalvatronSeq2SeqTrainer,
                GalvatronSeq2SeqTrainingArguments,
                per_device_eval_batch_size=1,
                parallel_plan=uniform(4, tensor=2),
            ),
        )

    return on_ranks(work)


def test_training_again_and_with_a_fresh_model(plain, tmp_path):
    for fresh, same in on_ranks(lambda: repeated(tmp_path, PAIR, options=SHORT), 2):
        assert fresh[:2] == fresh[2:]
        assert same[:2] != same[2:]
        for seen, wanted in zip((fresh, same), plain["repeated"], strict=True):
            assert len(wanted) == 4
            for own, other in zip(seen, wanted, strict=True):
                assert own == pytest.approx(other, rel=1e-5)


def test_hyperparameter_search_on_several_ranks(plain, tmp_path):
    wanted, _ = plain["search"]
    results = on_ranks(lambda: search(tmp_path, PAIR), 2)
    for best, groups in results:
        assert best.run_id == wanted.run_id and best.hyperparameters == wanted.hyperparameters
        assert best.objective == pytest.approx(wanted.objective, rel=1e-5)
        assert len(groups) == 3 and len(set(groups)) == 1, groups  # every trial uses the process groups of the first
    assert len({str(best) for best, _ in results}) == 1


@pytest.mark.slow
def test_embedding_noise_is_that_of_the_whole_sequence(ranks):
    results = [found["noise"] for found in ranks]
    hidden_size = 32
    for (seen, left), index in zip(results, range(4), strict=True):
        assert len(seen) == 8 and left == 0
        for micro_batch, (length, noise) in enumerate(seen):
            bound = 5.0 / math.sqrt(length * hidden_size)
            assert 0.9 * bound < float(noise.abs().max()) <= bound * (1 + 1e-3)
            assert abs(float(noise.mean())) < bound / 4
            replica, other = results[index ^ 1][0][micro_batch][1], results[index ^ 2][0][micro_batch][1]
            assert torch.equal(noise, replica)
            assert noise.shape != other.shape or not torch.equal(noise, other)
        assert not torch.equal(seen[0][1][:, 0], seen[1][1][:, 0])


@pytest.mark.slow
def test_recomputing_everywhere_is_a_constraint_for_the_automatic_plan(tmp_path):
    wanted = run(tmp_path / "plain", trainer_class=Trainer, options=SHORT_ALONE)

    def work() -> Run:
        options = SHORT | dict(gradient_checkpointing=True)
        plan = dict(then=lambda made: [layer.recompute for layer in made.parallel.plan.layers])
        return run(tmp_path / "recompute", options=options, **plan)

    for found in on_ranks(work):
        assert found.result == ["full"] * 4
        assert_same_steps(found, wanted)


@pytest.mark.slow
def test_mixin_on_somebodys_own_trainer_whose_callback_generates_and_evaluates(plain, ranks):
    whole, wanted = plain["user"]
    for found in ranks:
        seen_run, seen = found["user"]
        assert seen["generated"] == seen["wanted"] == wanted["generated"]
        assert seen["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
        assert_same_steps(seen_run, whole, names=("loss", "grad_norm", "learning_rate", "own"))
    assert ranks[0]["user"][0].random == whole.random  # rank 0 reads the data


@pytest.mark.slow
def test_predictions_are_generated(plain, ranks):
    for found in ranks:
        (seen, seen_labelled), (wanted, wanted_labelled) = found["generating"], plain["generating"]
        assert seen.predictions.dtype == wanted.predictions.dtype
        assert np.array_equal(seen.predictions, wanted.predictions)
        assert np.array_equal(seen_labelled.predictions, wanted_labelled.predictions)
        assert np.array_equal(seen_labelled.label_ids, wanted_labelled.label_ids)
        loss = wanted_labelled.metrics["test_loss"]
        assert seen_labelled.metrics["test_loss"] == pytest.approx(loss, rel=1e-5)
        assert seen.metrics.keys() == wanted.metrics.keys()


# --- TRL


def sft(trainer_class, folder: Path, plan=None, **options) -> list[tuple]:
    import datasets
    import trl

    args = trl.SFTConfig(
        **(
            dict(output_dir=str(folder), use_cpu=True, bf16=False, max_steps=2, logging_steps=1, learning_rate=1e-2)
            | dict(report_to=[], save_strategy="no", disable_tqdm=True, seed=5, max_length=None, adam_epsilon=1e-3)
            | dict(gradient_checkpointing=False, max_grad_norm=0.8)
            | options
        )
    )
    if plan is not None:
        args.parallel_plan = plan
    rows = Rows(16)
    data = datasets.Dataset.from_list([{"input_ids": rows[i]["input_ids"].tolist()} for i in range(16)])
    logs = Logs()
    made = trainer_class(
        model=FAMILIES["llama"].build(),
        args=args,
        train_dataset=data,
        processing_class=word_tokenizer(),
        callbacks=[logs],
    )
    made.train()
    return [(log["loss"], log["grad_norm"]) for log in logs.all if "loss" in log]


def test_trl_sft_trainer_under_a_plan(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")

    class GalvatronSFTTrainer(GalvatronMixin, trl.SFTTrainer):
        pass

    wanted = sft(trl.SFTTrainer, tmp_path / "plain", per_device_train_batch_size=8)

    def work():
        return sft(
            GalvatronSFTTrainer,
            tmp_path / "ranks",
            PAIR,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )

    for seen in on_ranks(work, 2):
        assert len(seen) == len(wanted) == 2
        for own, other in zip(seen, wanted, strict=True):
            assert own == pytest.approx(other, rel=1e-5)
