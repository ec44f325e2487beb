# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Options that a plan excludes are refused in one sentence, before any step, with the model untouched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import LongT5Config, LongT5ForConditionalGeneration, PreTrainedModel

from equivalence import single_stage
from galvatron_hf import GalvatronTrainer
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from oracle import Rows, collate
from plans import uniform
from tiny_models import FAMILIES
from trainer_runs import arguments, on_ranks


S, V = LayerStrategy, VocabularyStrategy
PLAN = uniform(2)
RECOMPUTED = uniform(2, recompute="full")


def attempt(
    folder,
    *,
    build: Callable[[], PreTrainedModel] = FAMILIES["llama"].build,
    change: Callable[[Any], None] = lambda args: None,
    environment: dict[str, str] | None = None,
    rows: Callable[[], Any] = lambda: Rows(8),
    trainer: Callable[[PreTrainedModel], dict[str, Any]] = lambda model: {},
    **options: Any,
) -> str:
    """Returns the refusal of a training run, and checks that the run left the model as it was."""
    model = build()
    weights, kinds = _snapshot(model), _kinds(model)
    with mock.patch.dict(os.environ, environment or {}):
        try:
            args = arguments(folder, **({"parallel_plan": PLAN} | options))
            change(args)
            made = GalvatronTrainer(
                model=model, args=args, train_dataset=rows(), data_collator=collate, **trainer(model)
            )
            made.train()
        except ValueError as error:
            message = str(error)
        else:
            return "it trained"
    if "labels" not in message:  # only a batch can tell
        assert _kinds(model) == kinds and all(
            torch.equal(a, b) for a, b in zip(_snapshot(model), weights, strict=True)
        )
    assert "\n" not in message
    return message


def _snapshot(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def _kinds(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()] + [type(parameter) for parameter in model.parameters()]


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda args: setattr(args, name, value)


def with_adapter(config: PeftConfig) -> PeftModel:
    return get_peft_model(FAMILIES["llama"].build(), config)


def quantised() -> PreTrainedModel:
    model = FAMILIES["llama"].build()
    model.is_quantized = True
    model.hf_quantizer = mock.Mock(is_trainable=True, is_qat_trainable=True)
    return model


def encoder_decoder() -> PreTrainedModel:
    config = LongT5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
    return LongT5ForConditionalGeneration(config)


def given_optimizers(model: PreTrainedModel) -> dict[str, Any]:
    return dict(optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))


TIED_UNEQUAL = single_stage((S(),) * 4, 2, embedding=V(tensor=2), head=V())
ENVIRONMENT = "accelerate's own sharding cannot go together with a parallel plan"

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fsdp": (dict(change=setting("fsdp", True)), ("fsdp cannot go together", "leave fsdp out")),
    "deepspeed": (
        dict(change=setting("deepspeed", {"zero_optimization": {}})),
        ("deepspeed cannot go", "leave it out"),
    ),
    "parallelism_config": (
        dict(change=setting("parallelism_config", ParallelismConfig(tp_size=2))),
        ("parallelism_config cannot go together", "leave it out"),
    ),
    "fsdp_environment": (dict(environment=dict(ACCELERATE_USE_FSDP="true")), ("ACCELERATE_USE_FSDP", ENVIRONMENT)),
    "deepspeed_environment": (
        # accelerate's own reading of it needs deepspeed, so it is set behind the arguments' back
        dict(change=lambda args: os.environ.update(ACCELERATE_USE_DEEPSPEED="true")),
        ("ACCELERATE_USE_DEEPSPEED", ENVIRONMENT),
    ),
    "megatron_environment": (
        dict(environment=dict(ACCELERATE_USE_MEGATRON_LM="1")),
        ("ACCELERATE_USE_MEGATRON_LM", ENVIRONMENT),
    ),
    "tensor_and_context_environment": (
        dict(
            environment=dict(ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_TP_SIZE="2"),
        ),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", ENVIRONMENT),
    ),
    "data_parallel": (dict(change=setting("_n_gpu", 2)), ("sees 2 GPUs", "DataParallel", "accelerate launch")),
    "auto_find_batch_size": (dict(auto_find_batch_size=True), ("auto_find_batch_size", "set it to False")),
    "fp16": (dict(change=setting("fp16", True)), ("fp16=True needs loss scaling", "use bf16=True")),
    "bf16_full_eval": (dict(bf16_full_eval=True), ("bf16_full_eval", "use bf16=True")),
    "torch_compile": (
        dict(torch_compile_mode="reduce-overhead"),
        ("'reduce-overhead' records CUDA graphs", "use mode 'default'"),
    ),
    "underflow_overflow": (dict(debug="underflow_overflow"), ("debug='underflow_overflow'", "leave it out")),
    "batch_rebalance": (
        dict(change=setting("train_sampling_strategy", "batch_rebalance")),
        ("'batch_rebalance'", "use 'random' or 'group_by_length'"),
    ),
    "liger": (dict(change=setting("use_liger_kernel", True)), ("use_liger_kernel=True", "pip install liger-kernel")),
    **{
        optimizer: (dict(optim=optimizer), (f"optim '{optimizer}'", "cannot step on shards", "use one of adamw_torch"))
        for optimizer in ("adafactor", "galore_adamw", "lomo", "adamw_bnb_8bit", "paged_lion_8bit", "adalomo")
    },
    "optimizers": (dict(trainer=given_optimizers), ("optimizers=...", "pass optimizer_cls_and_kwargs")),
    "precision": (
        dict(bf16=True, parallel_plan=single_stage((S(),) * 4, 2, precision=Precision(compute="fp32"))),
        ('computes in "fp32"', "bf16=True", "bf16=False"),
    ),
    "recompute": (
        dict(gradient_checkpointing=True),
        ("gradient_checkpointing=True", "layer 0", 'recompute "full" in every layer'),
    ),
    "world_size": (
        dict(parallel_plan=uniform(4)),
        ("world_size=4", "2 processes were started", "accelerate launch --num_processes 4", "torchrun"),
    ),
    "layers": (dict(parallel_plan=single_stage((S(),) * 3, 2)), ("3 layers", "has 4", "make a plan for 4 layers")),
    "stacks": (
        dict(parallel_plan=replace(PLAN, stacks={"encoder": 2, "decoder": 2})),
        ("{'encoder': 2, 'decoder': 2}", "has {'decoder': 4}", "give the plan the model's stacks"),
    ),
    "tied": (
        dict(build=FAMILIES["llama_tied"].build, parallel_plan=TIED_UNEQUAL),
        ("ties its embeddings", "give head the fields of embedding"),
    ),
    "heads": (
        dict(
            build=lambda: FAMILIES["llama"].build(num_attention_heads=1, num_key_value_heads=1),
            parallel_plan=uniform(2, tensor=2),
        ),
        ("Layer 0 has tensor 2", "1 attention heads", "use tensor 1"),
    ),
    "peft_type": (
        dict(build=lambda: with_adapter(IA3Config(target_modules=["k_proj"], feedforward_modules=[]))),
        ("of the type IA3", "plans cover LoRA alone", "use LoraConfig"),
    ),
    "peft_head": (
        dict(build=lambda: with_adapter(LoraConfig(target_modules=["lm_head"]))),
        ("lm_head has a LoRA adapter", "modules_to_save=['lm_head']"),
    ),
    "quantised": (dict(build=quantised), ("is quantised", "cannot be sharded", "load it in bf16 or fp32")),
    "encoder_decoder": (dict(build=encoder_decoder), ("is an encoder-decoder", "without an adapter")),
    "labels": (
        dict(rows=lambda: Rows(8, labels=False)),
        ("no labels", "DataCollatorForLanguageModeling"),
    ),
    "plan_file_missing": (dict(parallel_plan="no_such_plan.json"), ("no_such_plan.json",)),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("refusals")
    bad = folder / "bad.json"
    bad.write_text('{"version": 1, "world_size": 2')
    unknown = folder / "unknown.json"
    unknown.write_text(PLAN.to_json().replace('"version"', '"colour": "red", "version"'))
    files = {
        "plan_file_broken": dict(parallel_plan=str(bad)),
        "plan_file_unknown_field": dict(parallel_plan=str(unknown)),
    }

    def work() -> dict[str, str]:
        cases = {name: options for name, (options, _) in CASES.items()} | files
        found = {}
        for name, options in cases.items():
            with mock.patch.dict(os.environ):
                found[name] = attempt(folder / name, **options)
        found["control"] = attempt(folder / "control", max_steps=1)
        return found

    first, second = on_ranks(work, 2)
    assert first == second
    return first


def test_what_is_tested_trains_otherwise(refusals):
    assert refusals["control"] == "it trained"


@pytest.mark.parametrize("name", list(CASES))
def test_refused_by_name_with_reason_and_fix(refusals, name):
    for part in CASES[name][1]:
        assert part in refusals[name]


def test_bad_plan_files_are_refused_by_name(refusals):
    assert "bad.json" in refusals["plan_file_broken"]
    assert "colour" in refusals["plan_file_unknown_field"]


def test_plan_for_several_ranks_on_one_process(tmp_path):
    with pytest.raises(ValueError, match="1 process was started.*accelerate launch --num_processes 4"):
        GalvatronTrainer(model=FAMILIES["llama"].build(), args=arguments(tmp_path, parallel_plan=uniform(4)))
    assert not torch.distributed.is_initialized()


def test_one_process_without_a_plan_refuses_nothing(tmp_path):
    """Trains with arguments that plain Trainer allows."""
    with mock.patch.dict(os.environ):
        args = arguments(tmp_path, optim="adafactor", max_steps=1, auto_find_batch_size=True)
        made = GalvatronTrainer(
            model=FAMILIES["llama"].build(), args=args, train_dataset=Rows(8), data_collator=collate
        )
        made.train()
    assert made.state.global_step == 1


def test_plan_in_the_arguments_survives_their_json(tmp_path):
    args = arguments(tmp_path, parallel_plan=PLAN)
    assert ParallelPlan.from_json(args.to_dict()["parallel_plan"]) == PLAN
    args.to_json_string()
