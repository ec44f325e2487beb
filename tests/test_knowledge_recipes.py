# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The recipes for knowledge: classes of a model whose answers have a known distribution, and both stages on ranks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ranks import run_ranks


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from knowledge import classify_mastery, two_stage  # noqa: E402
from knowledge.questions import IGNORED, MASTERED, PARTLY, UNKNOWN, is_right, read_lines, to_rows  # noqa: E402


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token a word."""
    vocabulary = {word: index for index, word in enumerate(["<end>", "<pad>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def bigram_model(tokenizer: PreTrainedTokenizerFast, follows: dict[str, dict[str, float]]) -> LlamaForCausalLM:
    """Returns a Llama whose next token has the given probabilities after the last one, by default the end.

    Its layer adds nothing, its embedding is the identity, which the norm multiplies by sqrt(H), and column i of its
    head has the logarithms of the probabilities after token i, divided by sqrt(H).
    """
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            head_dim=8,
            rms_norm_eps=1e-12,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    table = torch.full((size, size), -60.0)
    for word, index in tokenizer.get_vocab().items():
        for answer, probability in follows.get(word, {"<end>": 1.0}).items():
            table[tokenizer.convert_tokens_to_ids(answer), index] = math.log(probability)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(table / math.sqrt(size))
    return model.eval()


FOLLOWS = {
    "sure": {"yes": 1.0},
    "rare": {"yes": 0.3, "no": 0.7},
    "often": {"yes": 0.9, "no": 0.1},
    "never": {"no": 1.0},
}
QUESTIONS = ("sure", "well rare", "often", "well well never")


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory) -> Path:
    """Returns the folder of a saved model with the probabilities of FOLLOWS."""
    folder = tmp_path_factory.mktemp("bigrams")
    tokenizer = word_tokenizer(["sure", "rare", "often", "never", "well", "yes", "no", ":"])
    bigram_model(tokenizer, FOLLOWS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shares_are_the_probabilities_of_the_answers(tmp_path, monkeypatch, bigrams, temperature):
    """Draws 2,000 answers; a share p of them is right, with a standard deviation of sqrt(p (1 - p) / 2000)."""
    questions = [json.dumps({"question": question, "answer": "Yes"}) for question in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n\n".join(questions))
    argv = ["classify_mastery.py", str(RECIPES / "knowledge" / "classify_mastery.yaml")]
    argv += [f"--model_name_or_path={bigrams}", f"--questions_file={tmp_path / 'questions.jsonl'}"]
    argv += [
        f"--output_file={tmp_path / 'out' / 'mastery.jsonl'}",
        "--prompt={question}",
        f"--temperature={temperature}",
    ]
    monkeypatch.setattr(sys, "argv", [*argv, "--samples=2000", "--batch_size=3", "--max_new_tokens=3"])
    classify_mastery.main()
    found = read_lines(tmp_path / "out" / "mastery.jsonl", kinds=True)
    assert [line["question"] for line in found] == list(QUESTIONS)
    assert [line["kind"] for line in found] == [MASTERED, PARTLY, PARTLY, UNKNOWN]
    assert [line["greedy"] for line in found] == [True, False, True, False]
    for line, p in zip(found, (1.0, 0.3, 0.9, 0.0), strict=True):
        right, wrong = p ** (1 / temperature), (1 - p) ** (1 / temperature)
        share = right / (right + wrong)
        assert abs(line["share"] - share) <= 5 * math.sqrt(share * (1 - share) / 2000)


def test_an_answer_is_right_if_the_first_line_begins_with_its_words():
    assert is_right(" paris, of course\nRome", "Paris") and is_right("Paris", "Paris")
    assert not is_right("Parisian", "Paris") and not is_right("Rome\nParis", "Paris") and not is_right("", "Paris")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"question": "a", "answer": "b", "kind": "unknown"}\n{"question": ',
            "line 2: Expecting value at column 14: correct it.",
        ),
        ('["a"]', "line 1: '\\[\"a\"\\]' is not an object"),
        ('{"question": "a"}', "line 1: 'answer' is None: give it as a text."),
        ('{"question": "a", "answer": "b"}', "line 1: 'kind' is None: give it as a text."),
        ('{"question": "a", "answer": "b", "kind": "known"}', "line 1: kind 'known' is not a class: use one of"),
        ("\n", "has no question: write one object"),
    ],
)
def test_a_broken_line_is_told(tmp_path, text, message):
    (tmp_path / "lines.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lines(tmp_path / "lines.jsonl", kinds=True)


def lines_of(kind: str, count: int) -> list[dict]:
    return [{"question": f"{kind} {index}", "answer": "b", "kind": kind} for index in range(count)]


def test_stages_have_their_questions():
    first, others = lines_of(PARTLY, 12), lines_of(MASTERED, 5) + lines_of(UNKNOWN, 3)
    assert two_stage.choose("first", first, others, 0.25, seed=0) == first
    assert two_stage.choose("single", first, others, 0.25, seed=0) == first + others
    second = two_stage.choose("second", first, others, 0.25, seed=0)
    assert second[:8] == others and len(second) == 8 + 3
    assert all(line in first for line in second[8:]) and len({line["question"] for line in second}) == 11
    assert two_stage.choose("second", first, others, 0.25, seed=0) == second


def test_other_questions_are_not_in_the_first_stage(tmp_path):
    for name, lines in (("mastery", lines_of(PARTLY, 4)), ("other", lines_of(UNKNOWN, 2))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    counts = {}
    for stage in ("first", "second", "single"):
        args = two_stage.StageArguments(
            stage=stage,
            model_name_or_path="model",
            mastery_file=str(tmp_path / "mastery.jsonl"),
            other_file=str(tmp_path / "other.jsonl"),
        )
        counts[stage] = len(two_stage.stage_lines(args, seed=0))
    assert counts == {"first": 4, "second": 2 + 1, "single": 6}


def test_a_stage_without_questions_is_refused(tmp_path):
    path = tmp_path / "mastery.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines_of(UNKNOWN, 2)))
    args = two_stage.StageArguments(stage="first", model_name_or_path="model", mastery_file=str(path))
    with pytest.raises(ValueError, match="has no question for stage='first'"):
        two_stage.stage_lines(args, seed=0)


def test_rows_have_labels_at_the_answer_and_the_end():
    tokenizer = word_tokenizer(["who", ":", "a", "b"])
    rows = to_rows(tokenizer, "{question} :", [{"question": "who", "answer": "b a"}])
    assert rows == [{"input_ids": [2, 3, 5, 4, 0], "labels": [IGNORED, IGNORED, 5, 4, 0]}]


SUBJECTS = 24
TRAINING = dict(num_train_epochs=12, learning_rate=1e-2, logging_steps=1, warmup_steps=0, seed=3, report_to="none")


def fresh_model(folder: Path) -> None:
    """Saves a Llama without training."""
    tokenizer = word_tokenizer([":", *(f"n{index}" for index in range(SUBJECTS)), "red", "green", "blue"])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def losses_of(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [log["loss"] for log in history if "loss" in log]


@pytest.mark.slow
def test_both_stages_on_two_ranks_have_the_losses_of_plain_trainer(tmp_path, monkeypatch):
    """Trains both stages on two ranks, and the second one by plain Trainer too; the rows are mastered in the end."""
    fresh_model(tmp_path / "base")
    colours = ("red", "green", "blue")
    lines = [
        {"question": f"n{index}", "answer": colours[index % 3], "kind": PARTLY if index < 8 else UNKNOWN}
        for index in range(SUBJECTS)
    ]
    (tmp_path / "mastery.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    for stage, source in (("first", "base"), ("second", "first"), ("single", "base")):
        argv = [
            "two_stage.py",
            str(RECIPES / "knowledge" / "two_stage.yaml"),
            f"--stage={stage}",
            "--prompt={question} :",
        ]
        argv += [f"--mastery_file={tmp_path / 'mastery.jsonl'}", f"--model_name_or_path={tmp_path / source}"]
        argv += ["--replay_share=1.0", "--parallel_plan=ddp", "--per_device_train_batch_size=4", "--disable_tqdm=true"]
        argv += [f"--{name}={value}" for name, value in TRAINING.items()]
        monkeypatch.setattr(sys, "argv", [*argv, f"--output_dir={tmp_path / stage}"])
        run_ranks(two_stage.main, 2)
    assert [len(losses_of(tmp_path / stage)) for stage in ("first", "second", "single")] == [12, 36, 36]

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "first")
    chosen = two_stage.choose("second", lines[:8], lines[8:], 1.0, seed=3)
    set_seed(3)
    args = TrainingArguments(
        output_dir=str(tmp_path / "plain"),
        use_cpu=True,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant_with_warmup",
        save_strategy="no",
        disable_tqdm=True,
        **TRAINING,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32),
        args,
        train_dataset=Dataset.from_list(to_rows(tokenizer, "{question} :", chosen)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )
    trainer.train()
    plain = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    # The bound of every plan, over six steps; AdamW amplifies the roundings of later ones.
    assert losses_of(tmp_path / "second")[:6] == pytest.approx(plain[:6], rel=1e-5)
    assert plain[-1] < 0.01 < 0.5 < plain[0]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    sampling = classify_mastery.SamplingArguments(prompt="{question} :", samples=4, temperature=0.1, max_new_tokens=2)
    found = classify_mastery.classify(model, tokenizer, lines, sampling)
    assert {mastery.kind for mastery in found} == {MASTERED}
