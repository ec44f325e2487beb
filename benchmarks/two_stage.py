# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares fine-tuning in two stages with fine-tuning in one, on synthetic facts that a model has mastered partly.

    PYTHONPATH=recipes OMP_NUM_THREADS=1 python benchmarks/two_stage.py --seeds 0 1 2 3 4

For each seed, a Llama of two layers is pretrained on statements such as "the capital of n17 is o42". A fact is stated
0 to 64 times. `classify_mastery.py` classifies the facts by the phrase of the pretraining. 60% of each class are
fine-tuned as "question : what is the capital of n17 ? answer : o42"; the others are held out. Ways to fine-tune:

    one stage     all rows, shuffled
    two stages    the partly mastered rows, and then the others with a share of the first ones again
    random first  the same two runs, but the first stage's rows are drawn from all rows without regard to their class

All three train the same number of rows, all of them of the same length, in batches of the same size. The third way
tells the effect of the classes from that of two runs, each with its own warm-up. Accuracy is the share of questions
whose most likely answer is right. A difference is the mean over the seeds of two stages - other way with the same
pretrained model; its spread is the standard deviation of these differences.

Training is `GalvatronTrainer` on one process under `parallel_plan="ddp"`.
"""

import argparse
import collections
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments
from knowledge.classify_mastery import SamplingArguments, answer, classify
from knowledge.questions import KINDS, MASTERED, PARTLY, UNKNOWN, is_right, to_rows
from knowledge.two_stage import choose, stage_trainer


RELATIONS = ("capital", "leader", "language", "river")
STATEMENTS = ("the {relation} of {subject} is {answer}", "{subject} has the {relation} {answer}")
STATED = "the {question} is"  # the first statement as a prompt
ASKED = "question : what is the {question} ? answer :"
TIMES = (0, 1, 2, 4, 8, 16, 32, 64)
WAYS = ("one stage", "two stages", "random first")
ROWS = (
    ("fine-tuned", "asked", PARTLY),
    ("fine-tuned", "asked", MASTERED),
    ("fine-tuned", "asked", UNKNOWN),
    ("held out", "asked", PARTLY),
    ("held out", "asked", MASTERED),
    ("held out", "stated", PARTLY),
    ("held out", "stated", MASTERED),
)


def make_facts(options: argparse.Namespace, draw: random.Random) -> list[dict]:
    """Returns facts: a subject of its own, an answer drawn from the relation's, and how often it is stated."""
    facts = []
    for index in range(options.facts * len(TIMES)):
        relation, subject = index % len(RELATIONS), f"n{index}"
        facts.append(
            {
                "relation": RELATIONS[relation],
                "subject": subject,
                "question": f"{RELATIONS[relation]} of {subject}",
                "answer": f"o{relation * options.answers + draw.randrange(options.answers)}",
                "times": TIMES[index // len(RELATIONS) % len(TIMES)],
            }
        )
    return facts


def make_tokenizer(options: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token a word."""
    words = " ".join((*STATEMENTS, STATED, ASKED, *RELATIONS)).split()
    words += [f"n{index}" for index in range(options.facts * len(TIMES))]
    words += [f"o{index}" for index in range(options.answers * len(RELATIONS))]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["<end>", "<pad>", "<unk>", *words]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )


def arguments(folder: Path, steps: int, rate: float, options: argparse.Namespace, seed: int):
    """Returns the training arguments that all runs share."""
    return GalvatronTrainingArguments(
        output_dir=str(folder),
        parallel_plan="ddp",
        use_cpu=True,
        per_device_train_batch_size=options.batch,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        dataloader_drop_last=True,
        logging_strategy="no",
        log_level="warning",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def pretrain(facts: list[dict], folder: Path, options: argparse.Namespace, seed: int) -> None:
    """Trains a new model on every fact as often as it is stated, in turn by both statements, and saves it."""
    tokenizer = make_tokenizer(options)
    texts = [
        STATEMENTS[time % len(STATEMENTS)].format(**fact) + " <end>" for fact in facts for time in range(fact["times"])
    ]
    random.Random(seed).shuffle(texts)
    ids = tokenizer(texts, return_token_type_ids=False)["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    set_seed(seed)
    trainer = GalvatronTrainer(
        LlamaForCausalLM(config),
        arguments(folder, len(rows) // options.batch, options.pretrain_rate, options, seed),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    trainer.save_model()


def load(folder: Path):
    """Returns a saved model in evaluation mode and its tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def tune(source: Path, folder: Path, lines: list[dict], steps: int, options: argparse.Namespace, seed: int) -> Path:
    """Fine-tunes a saved model for so many steps, as the recipe does; returns the folder of the result."""
    trainer = stage_trainer(str(source), ASKED, lines, arguments(folder, steps, options.rate, options, seed))
    trainer.train()
    trainer.save_model()
    return folder


@torch.inference_mode()
def accuracies(folder: Path, parts: dict[str, list[dict]]) -> list[float | None]:
    """Returns the accuracy of a saved model on each of ROWS; None if it has no question."""
    model, tokenizer = load(folder)
    values = []
    for part, phrase, kind in ROWS:
        lines = [line for line in parts[part] if line["kind"] == kind]
        args = SamplingArguments(prompt=ASKED if phrase == "asked" else STATED, max_new_tokens=2, batch_size=512)
        said = answer(model, tokenizer, [line["question"] for line in lines], args, do_sample=False)
        right = [is_right(texts[0], line["answer"]) for texts, line in zip(said, lines, strict=True)]
        values.append(statistics.mean(right) if right else None)
    return values


def run_seed(seed: int, options: argparse.Namespace, folder: Path) -> dict:
    """Runs the experiment once; returns counts and accuracies."""
    begun, draw = time.perf_counter(), random.Random(seed)
    facts = make_facts(options, draw)
    base = folder / "base"
    pretrain(facts, base, options, seed)
    sampling = SamplingArguments(
        prompt=STATED, samples=options.samples, temperature=options.temperature, max_new_tokens=2, batch_size=256
    )
    found = classify(*load(base), facts, sampling)
    parts, kinds = {"fine-tuned": [], "held out": []}, collections.Counter()
    for kind in KINDS:
        lines = [fact | {"kind": kind} for fact, mastery in zip(facts, found, strict=True) if mastery.kind == kind]
        kinds.update((kind, line["times"]) for line in lines)
        draw.shuffle(lines)
        cut = round(0.6 * len(lines))
        if kind != UNKNOWN or not options.without_unknown:
            parts["fine-tuned"] += lines[:cut]
        parts["held out"] += lines[cut:]

    rows = parts["fine-tuned"]
    partly = [line for line in rows if line["kind"] == PARTLY]
    share, batch = options.replay_share, options.batch
    first_steps = round((1 - share) * options.epochs * len(partly) / batch)
    second_steps = round(options.epochs * (len(rows) - len(partly) + share * len(partly)) / batch)
    (length,) = {len(row["input_ids"]) for row in to_rows(load(base)[1], ASKED, rows)}
    values = {"before": accuracies(base, parts)}
    alone = tune(base, folder / "single", rows, first_steps + second_steps, options, seed)
    values["one stage"] = accuracies(alone, parts)
    drawn = draw.sample(rows, len(partly))
    for way, begin in (("two stages", partly), ("random first", drawn)):
        questions = {line["question"] for line in begin}
        others = [line for line in rows if line["question"] not in questions]
        first = tune(base, folder / f"{way} 1", begin, first_steps, options, seed)
        lines = choose("second", begin, others, share, seed)
        second = tune(first, folder / f"{way} 2", lines, second_steps, options, seed)
        values[way] = accuracies(second, parts)
    return {
        "seed": seed,
        "seconds": time.perf_counter() - begun,
        "steps": [first_steps, second_steps],
        "tokens": (first_steps + second_steps) * batch * length,
        "rows": [len(rows), len(partly)],
        "kinds": {kind: [kinds[kind, times] for times in TIMES] for kind in KINDS},
        "values": values,
    }


def spread(values: list[float]) -> float:
    """Returns the standard deviation of a sample; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def report(results: list[dict]) -> None:
    """Prints the classes by how often facts were stated, and the accuracies with their differences."""
    print("\nAccuracies in %, mean ± standard deviation; a difference exceeds its spread or is within it.")
    print(f"{len(results)} seeds, {statistics.mean(result['seconds'] for result in results):.0f} s each")
    print("\n| class before fine-tuning | " + " | ".join(f"stated {times} times" for times in TIMES) + " |")
    print("|---|" + "---|" * len(TIMES))
    for kind in KINDS:
        counts = [statistics.mean(column) for column in zip(*(r["kinds"][kind] for r in results), strict=True)]
        print(f"| {kind} | " + " | ".join(f"{count:.0f}" for count in counts) + " |")
    names = ("before", *WAYS)
    print("\n| questions | phrase | class | " + " | ".join(names), end="")
    print(" | two stages - one stage | two stages - random first |\n|" + "---|" * (len(names) + 5))
    for index, row in enumerate(ROWS):
        runs = [{name: result["values"][name][index] for name in names} for result in results]
        runs = [run for run in runs if None not in run.values()]
        if not runs:
            continue
        cells = []
        for name in names:
            column = [100 * run[name] for run in runs]
            cells.append(f"{statistics.mean(column):.1f} ± {spread(column):.1f}")
        for other in ("one stage", "random first"):
            column = [100 * (run["two stages"] - run[other]) for run in runs]
            mean, deviation = statistics.mean(column), spread(column)
            verdict = ", exceeds" if abs(mean) > deviation else ", within"
            cells.append(f"{mean:+.1f} ± {deviation:.1f}{verdict if len(column) > 1 else ''}")
        print("| " + " | ".join((*row, *cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--facts", type=int, default=120, help="facts for each number of statements")
    parser.add_argument("--answers", type=int, default=250, help="possible answers of each relation")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pretrain_rate", type=float, default=2e-3)
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate of fine-tuning")
    parser.add_argument("--epochs", type=int, default=8, help="of one stage")
    parser.add_argument("--replay_share", type=float, default=0.25)
    parser.add_argument("--without_unknown", action="store_true", help="do not fine-tune on unknown facts")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--results", type=Path, help="file of finished seeds; a later call adds those that it lacks")
    options = parser.parse_args()
    results = []
    if options.results is not None and options.results.exists():
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
    for seed in options.seeds:
        if seed in {result["seed"] for result in results}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_seed(seed, options, Path(folder)))
        print(json.dumps(results[-1]), flush=True)
        if options.results is not None:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")
    report(results)


if __name__ == "__main__":
    main()
