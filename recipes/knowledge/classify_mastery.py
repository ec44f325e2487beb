# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Classifies questions by how well a saved causal language model has mastered them. Plain transformers, one process:

    python recipes/knowledge/classify_mastery.py recipes/knowledge/classify_mastery.yaml \\
        --model_name_or_path Qwen/Qwen3-0.6B --questions_file questions.jsonl --output_file mastery.jsonl

Each line of the questions is {"question": ..., "answer": ...}. The model answers each question once with the most
likely tokens, and `--samples` times at `--temperature`. A question is "mastered" if all these answers are right,
"unknown" if none is, and "partly mastered" otherwise. The lines of the output have the share of right samples
("share"), whether the most likely answer is right ("greedy"), and the class ("kind"), which two_stage.py reads.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_clm  # noqa: E402
from knowledge.questions import MASTERED, PARTLY, PROMPT, UNKNOWN, fill, is_right, read_lines  # noqa: E402


@dataclass
class SamplingArguments:
    """How answers are drawn."""

    prompt: str = field(default=PROMPT, metadata={"help": "The text before an answer, with {question} in it."})
    samples: int = field(default=16, metadata={"help": "Answers to draw for each question."})
    temperature: float = field(default=0.7, metadata={"help": "Temperature of the draws, above 0."})
    max_new_tokens: int = field(default=16, metadata={"help": "Longest answer, in tokens."})
    batch_size: int = field(default=32, metadata={"help": "Questions in a batch; each has all its samples there."})
    seed: int = field(default=0, metadata={"help": "Seed of the draws."})

    def __post_init__(self):
        if self.samples < 1 or self.batch_size < 1:
            raise ValueError(f"samples={self.samples} and batch_size={self.batch_size} must be at least 1.")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} draws nothing: give one above 0.")


@dataclass
class ClassificationArguments(SamplingArguments):
    """The model, the questions, and how answers are drawn."""

    model_name_or_path: str = field(default="", metadata={"help": "A saved model, local or on the Hub."})
    questions_file: str = field(default="", metadata={"help": "JSON lines of question and answer."})
    output_file: str = field(default="", metadata={"help": "Where the classes are written, as JSON lines."})
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata={"help": "Of the weights."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("model_name_or_path", "questions_file", "output_file"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing: give it as --{name} or in the YAML file.")


@dataclass(frozen=True, kw_only=True)
class Mastery:
    """How well a model has mastered a question.

    Attributes:
        greedy (`bool`): whether the answer of the most likely tokens is right.
        share (`float`): share of the sampled answers that are right, 0 to 1.
    """

    question: str
    answer: str
    greedy: bool
    share: float

    @property
    def kind(self) -> str:
        """Class of the question, one of `KINDS`."""
        if self.greedy and self.share == 1:
            return MASTERED
        return PARTLY if self.greedy or self.share > 0 else UNKNOWN


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    args: SamplingArguments,
    **how,
) -> list[list[str]]:
    """Returns the texts that `model.generate` writes after each question's prompt; `how` goes to `generate`."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    texts, each = [], how.get("num_return_sequences", 1)
    for start in range(0, len(questions), args.batch_size):
        prompts = [fill(args.prompt, question) for question in questions[start : start + args.batch_size]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        output = model.generate(
            **batch, max_new_tokens=args.max_new_tokens, pad_token_id=tokenizer.pad_token_id, **how
        )
        said = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        texts += [said[index : index + each] for index in range(0, len(said), each)]
    return texts


@torch.inference_mode()
def classify(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Sequence[dict], args: SamplingArguments
) -> list[Mastery]:
    """
    Judges the answers of a model.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model in evaluation mode.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer, which will pad on the left.
        lines (sequence of `dict`):
            Objects with `question` and `answer`.
        args ([`SamplingArguments`]):
            Prompt, temperature and number of draws.

    Returns:
        `list` of [`Mastery`], one a line, in the same order.
    """
    set_seed(args.seed)
    questions = [line["question"] for line in lines]
    likely = answer(model, tokenizer, questions, args, do_sample=False)
    how = dict(do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0, num_return_sequences=args.samples)
    drawn = answer(model, tokenizer, questions, args, **how)
    found = []
    for line, best, samples in zip(lines, likely, drawn, strict=True):
        right = sum(is_right(said, line["answer"]) for said in samples)
        greedy = is_right(best[0], line["answer"])
        found.append(
            Mastery(question=line["question"], answer=line["answer"], greedy=greedy, share=right / len(samples))
        )
    return found


def write(found: Sequence[Mastery], path: str | Path) -> None:
    """Writes one JSON object a line."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for mastery in found:
            file.write(json.dumps(asdict(mastery) | {"kind": mastery.kind}, ensure_ascii=False) + "\n")


def main() -> None:
    (args,) = train_clm.read_arguments(sys.argv[1:], (ClassificationArguments,))
    lines = read_lines(args.questions_file)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).eval()
    if torch.cuda.is_available():
        model.cuda()
    found = classify(model, tokenizer, lines, args)
    write(found, args.output_file)
    counts = Counter(mastery.kind for mastery in found)
    print(", ".join(f"{kind}: {counts[kind]}" for kind in (MASTERED, PARTLY, UNKNOWN)), f"-> {args.output_file}")


if __name__ == "__main__":
    main()
