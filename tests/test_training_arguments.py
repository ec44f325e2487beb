# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Every field of TrainingArguments has its row: honoured, without effect, or refused. What is honoured gives the logs,
metrics and checkpoints of plain Trainer on one process, before and after it resumes.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.utils import ParallelismConfig
from transformers import Trainer, TrainingArguments

from galvatron_hf.trainer.argument_refusals import check_arguments
from galvatron_hf.trainer.argument_table import ARGUMENTS, as_markdown, unknown_arguments
from oracle import OF_PACE, Rows, collate
from plans import light_plan, uniform
from trainer_runs import arguments, on_ranks, run


RANKS = 2
BF16 = 5e-2  # plain Trainer's autocast keeps more operations in fp32
RECOMPUTED = dict(activation_checkpointing=True)

# A value that is not the default; a function is called with the number of processes. Some need other arguments beside.
VALUES: dict[str, Any] = dict(
    output_dir="another",
    per_device_train_batch_size=lambda processes: 6 // processes,
    num_train_epochs=2.0,
    max_steps=5,
    learning_rate=3e-3,
    lr_scheduler_type="polynomial",
    lr_scheduler_kwargs=dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}),
    warmup_steps=3,
    optim="adagrad",
    optim_args=dict(optim="sgd", optim_args="momentum=0.5", learning_rate=0.05),
    weight_decay=0.0,
    adam_beta1=0.5,
    adam_beta2=0.9,
    adam_epsilon=1e-2,
    optim_target_modules=[".*"],
    gradient_accumulation_steps=4,
    average_tokens_across_devices=False,
    max_grad_norm=0.1,
    label_smoothing_factor=0.2,
    bf16=True,
    tf32=False,
    activation_checkpointing=True,
    activation_checkpointing_kwargs=RECOMPUTED | dict(activation_checkpointing_kwargs={"use_reentrant": False}),
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs=RECOMPUTED | dict(gradient_checkpointing_kwargs={"use_reentrant": False}),
    use_cache=True,
    torch_empty_cache_steps=1,
    logging_strategy="epoch",
    logging_steps=3,
    logging_first_step=dict(logging_steps=3, logging_first_step=True),
    log_on_each_node=False,
    logging_nan_inf_filter=False,
    include_num_input_tokens_seen="non_padding",
    log_level="error",
    log_level_replica="error",
    disable_tqdm=False,
    run_name="a run",
    project="a project",
    eval_strategy="epoch",
    eval_steps=1,
    eval_delay=3,
    per_device_eval_batch_size=lambda processes: 4 // processes,
    prediction_loss_only=True,
    eval_on_start=True,
    eval_do_concat_batches=False,
    eval_use_gather_object=True,
    eval_accumulation_steps=1,
    include_for_metrics=["inputs", "loss"],
    batch_eval_metrics=True,
    save_only_model=True,
    save_strategy="epoch",
    save_steps=1,
    save_on_each_node=True,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model=dict(load_best_model_at_end=True, metric_for_best_model="eval_right"),
    greater_is_better=dict(load_best_model_at_end=True, metric_for_best_model="eval_right", greater_is_better=False),
    ignore_data_skip=True,
    restore_callback_states_from_checkpoint=True,
    full_determinism=True,
    seed=11,
    data_seed=3,
    accelerator_config={"use_seedable_sampler": False, "non_blocking": True, "even_batches": False},
    dataloader_drop_last=True,
    dataloader_num_workers=2,
    dataloader_pin_memory=False,
    dataloader_persistent_workers=dict(dataloader_num_workers=1, dataloader_persistent_workers=True),
    dataloader_prefetch_factor=dict(dataloader_num_workers=1, dataloader_prefetch_factor=3),
    dataloader_multiprocessing_context=dict(dataloader_num_workers=1, dataloader_multiprocessing_context="fork"),
    dataloader_in_order=dict(dataloader_num_workers=2, dataloader_in_order=True),
    remove_unused_columns=False,
    label_names=["labels", "attention_mask"],
    train_sampling_strategy="group_by_length",
    length_column_name=dict(train_sampling_strategy="group_by_length", length_column_name="count"),
    ddp_find_unused_parameters=True,
    ddp_bucket_cap_mb=1,
    ddp_broadcast_buffers=True,
    ddp_static_graph=True,
    ddp_backend=lambda processes: "gloo" if processes > 1 else None,
    ddp_timeout=900,
    fsdp_config={},
    skip_memory_metrics=False,
    do_train=True,
    do_eval=True,
    do_predict=True,
    resume_from_checkpoint="nowhere",
    local_rank=0,
)
ELSEWHERE = {
    "use_cpu": "every run here is on the CPU",
    "debug": "'underflow_overflow' is refused, the other value needs a TPU: test_trainer_refusals.py",
    "neftune_noise_alpha": "its noise differs from one process's: test_trainer_features.py",
    "report_to": "needs a service",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "test_liger.py"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "test_compile.py"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "needs a service"),
    **{name: "needs the hub: test_trainer_saving.py" for name in ARGUMENTS if name.startswith(("hub_", "push_"))},
}
REFUSED: dict[str, Any] = dict(
    fp16=True,
    bf16_full_eval=True,
    fp16_full_eval=True,
    auto_find_batch_size=True,
    enable_jit_checkpoint=True,
    parallelism_config=ParallelismConfig(tp_size=2),
    fsdp=True,
    deepspeed={"zero_optimization": {}},
)
# Arguments that are given together. Each of the first changes the numbers of training, so that one that is ignored is
# seen; none of the others changes a number.
NUMBERS = (
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)
NO_NUMBERS = [
    *(name for name, row in ARGUMENTS.items() if row.kind == "no effect" and name in VALUES),
    *("tf32", "torch_empty_cache_steps", "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm"),
    *("run_name", "project", "dataloader_pin_memory", "ddp_backend", "ddp_timeout", "skip_memory_metrics"),
]
_TIMES = "runtime|per_second|mem_|_time$|total_flos|^save|^placement|^planner|^padding|^useful|^predicted"
_NOT_COMPARED = re.compile("|".join((_TIMES, *OF_PACE)))


def test_every_argument_has_its_row():
    names = {one.name for one in dataclasses.fields(TrainingArguments)}
    assert names == ARGUMENTS.keys(), "this version of transformers has other arguments: give each a row"
    kinds = {kind: {name for name, row in ARGUMENTS.items() if row.kind == kind} for kind in ("honoured", "no effect")}
    assert kinds["honoured"] | kinds["no effect"] == VALUES.keys() | ELSEWHERE.keys()
    assert names - kinds["honoured"] - kinds["no effect"] == REFUSED.keys()
    assert {row.kind for row in ARGUMENTS.values()} == {"honoured", "no effect", "refused"}
    assert all(row.how for row in ARGUMENTS.values() if row.kind != "honoured")


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).parents[1] / "docs" / "reference" / "arguments.md").read_text()
    assert as_markdown() in text


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments_are_named(name, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, REFUSED[name])
    with pytest.raises(ValueError, match=name) as error:
        check_arguments(args, None)
    assert "\n" not in str(error.value)


def test_an_argument_without_a_row_is_refused_unless_it_has_its_default(monkeypatch, tmp_path):
    args = arguments(tmp_path)
    monkeypatch.delitem(ARGUMENTS, "eval_delay")
    assert not list(unknown_arguments(args))
    args.eval_delay = 5
    with pytest.raises(ValueError, match="eval_delay=5 is an argument.*not known.*leave it at 0"):
        check_arguments(args, None)


class Counts:
    """Computes the share of tokens that are predicted right, and says what it was given."""

    def __init__(self):
        self.right = self.all = 0

    def __call__(self, found, compute_result: bool = True) -> dict[str, float]:
        logits, labels = found.predictions, found.label_ids
        arrays = len(labels) if isinstance(labels, tuple) else 1
        labels = labels[0] if isinstance(labels, tuple) else labels
        batches = zip(logits, labels, strict=True) if isinstance(logits, list) else [(logits, labels)]
        for scores, wanted in batches:
            wanted = np.asarray(wanted[0] if isinstance(wanted, tuple) else wanted)[:, 1:]
            scores, kept = np.asarray(scores)[:, :-1], wanted != -100
            self.right += int((scores.argmax(-1) == wanted)[kept].sum())
            self.all += int(kept.sum())
        if not compute_result:
            return {}
        result = {"right": self.right / self.all, "label_arrays": arrays}
        for name in ("inputs", "losses"):
            if getattr(found, name, None) is not None:
                result[name] = float(np.asarray(getattr(found, name), dtype=float).sum())
        self.right = self.all = 0
        return result


class WithCounts(Rows):
    """Has a column of lengths beside the tokens."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return row | {"count": len(row["input_ids"])}


def values_of(name: str, folder: Path, processes: int) -> dict[str, Any]:
    """Returns the value of an argument, with those of the others that it needs."""
    if name == "output_dir":
        return {name: str(folder / "another")}
    value = VALUES[name](processes) if callable(VALUES[name]) else VALUES[name]
    return value if isinstance(value, dict) and name in value else {name: value}


def seen(folder: Path, names: tuple[str, ...], processes: int, **more) -> dict[str, Any]:
    """Trains four steps with arguments, and again from the second; returns logs, metrics and checkpoints."""
    options = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    for name in names:
        options |= values_of(name, folder, processes)
    if names == ("num_train_epochs",):
        options["max_steps"] = -1
    plan = uniform(RANKS, recompute="full") if "checkpointing" in names[0] else light_plan(RANKS)
    own = dict(options=options, eval_dataset=Rows(7, seed=2), compute_metrics=Counts())
    if names == ("length_column_name",):
        own["data_collator"] = lambda rows: collated_without(rows, "count")
        own["train_dataset"] = WithCounts(27)
    then = lambda made: made.evaluate(Rows(5, seed=3)) | {"steps": made.state.max_steps}  # noqa: E731
    first = run(folder, plan, then=then, **own, **more)
    where = Path(options.get("output_dir", folder))
    saved = sorted(path.name for path in where.glob("checkpoint-*"))
    second = run(folder, plan, resume=where / saved[0], then=then, **own, **more)
    values = dict(first=first.logs, then=[first.result], second=second.logs, after=[second.result])
    return {"saved": saved} | {key: [_kept(log) for log in logs] for key, logs in values.items()}


def collated_without(rows: list[dict[str, Any]], column: str) -> dict[str, Any]:
    return collate([{key: value for key, value in row.items() if key != column} for row in rows])


def _kept(log: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in log.items() if not _NOT_COMPARED.search(key)}


def differences(found: dict[str, Any], wanted: dict[str, Any], rel: float) -> list[str]:
    """Returns how two results differ, in a line each."""
    lines = [] if found["saved"] == wanted["saved"] else [f"saved {found['saved']}, not {wanted['saved']}"]
    for part in ("first", "then", "second", "after"):
        if len(found[part]) != len(wanted[part]):
            lines.append(f"{part}: {len(found[part])} logs, not {len(wanted[part])}")
        for own, other in zip(found[part], wanted[part], strict=False):
            if own != pytest.approx(other, rel=rel, abs=1e-6):
                lines.append(f"{part}: {own} is not {other}")
                break
    return lines


def check(cases: list[tuple[str, ...]], folder: Path) -> None:
    """Compares runs with plain Trainer's; each case holds the arguments of one."""
    named = {", ".join(names): names for names in cases}
    folders = {name: str(index) for index, name in enumerate(named)}
    wanted = {
        name: seen(folder / "plain" / folders[name], names, 1, trainer_class=Trainer) for name, names in named.items()
    }

    def work() -> dict[str, list[str]]:
        wrong = {}
        for name, names in named.items():
            try:
                found = seen(folder / "plan" / folders[name], names, RANKS)
            except Exception as error:
                wrong[name] = [f"{type(error).__name__}: {error}"]
                continue
            if lines := differences(found, wanted[name], rel=BF16 if name == "bf16" else 1e-5):
                wrong[name] = lines
        return wrong

    first, _ = on_ranks(work, RANKS)
    assert first == {}, "\n".join(f"{name}: {line}" for name, lines in first.items() for line in lines)


FAST = ("gradient_accumulation_steps", "label_smoothing_factor", "include_for_metrics", "dataloader_drop_last")
ALONE = [name for name in VALUES if name not in (*FAST, *NUMBERS, *NO_NUMBERS)]


@pytest.mark.slow
def test_arguments_that_change_most_are_honoured(tmp_path):
    check([(name,) for name in FAST], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_every_argument_is_honoured_or_has_no_effect(part, tmp_path):
    check([NUMBERS, tuple(NO_NUMBERS), *((name,) for name in ALONE)][part::3], tmp_path)
