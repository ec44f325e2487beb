# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Tries every model type of the installed transformers with the heads of eight tasks, and writes `docs/families.md` and
its neighbours; `make families` runs it, in about ten minutes on two cores for causal language models alone.

    python docs/make_families.py [--task TASK ...] [--only llama mixtral ...]

With `--only` the rows are printed, and the pages stay.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forks, in which a GPU of this process cannot be used
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

from family_runs import CRASHED, KINDS, REFUSED, RIGHT, WRONG, Family, run_family  # noqa: E402
from galvatron_hf.utils.compat import DTENSOR_LOGGER  # noqa: E402
from tiny_configurations import CAUSAL_LM, TYPES_OF_TASK  # noqa: E402
from tiny_models import LAYERS  # noqa: E402


# Each task's page, the auto class that makes its models, and what they are called.
PAGES = {
    "causal-lm": (ROOT / "docs" / "families.md", "AutoModelForCausalLM", "causal language models"),
    "seq2seq-lm": (ROOT / "docs" / "families-seq2seq-lm.md", "AutoModelForSeq2SeqLM", "encoder-decoders"),
    "masked-lm": (ROOT / "docs" / "families-masked-lm.md", "AutoModelForMaskedLM", "masked language models"),
    "sequence-classification": (
        ROOT / "docs" / "families-sequence-classification.md",
        "AutoModelForSequenceClassification",
        "classifiers of sequences",
    ),
    "token-classification": (
        ROOT / "docs" / "families-token-classification.md",
        "AutoModelForTokenClassification",
        "classifiers of tokens",
    ),
    "question-answering": (
        ROOT / "docs" / "families-question-answering.md",
        "AutoModelForQuestionAnswering",
        "models that answer questions",
    ),
    "image-classification": (
        ROOT / "docs" / "families-image-classification.md",
        "AutoModelForImageClassification",
        "classifiers of images",
    ),
    "audio-classification": (
        ROOT / "docs" / "families-audio-classification.md",
        "AutoModelForAudioClassification",
        "classifiers of recordings",
    ),
}
PAGE = PAGES[CAUSAL_LM][0]
# Names of classes, which differ between model types that are refused for one reason.
CLASS = re.compile(r"\b(?!AutoModel|PreTrained)(?:FSDP)?\w*[a-z]\w*[A-Z]\w*(?<!Error)\b")

INTRODUCTION = """# Model families: {kind}

<!-- `make families` writes this page: change docs/make_families.py instead. -->

Which {kind} of transformers run under a plan, which are refused, and how far gradients are from those of one process.
`make families` (`docs/make_families.py`) has made this page with torch {torch} and transformers {transformers}, from
all {count} model types that `{auto_class}` knows.

Each type is tried with a tiny configuration of {layers} layers and random weights. Two CPU ranks compute one training
step in fp32 on a padded batch, on images or on recordings, under one plan of each kind. Loss, gradients and clipped
norm are compared with those of plain transformers on one process:

| kind | plan of two ranks |
|---|---|
| data | ZeRO-3, ZeRO-2, replicated layers, recompute, mixed |
| tensor | two tensor ranks, with and without Megatron-SP, recompute; vocabulary-parallel embedding and head |
| ulysses | two Ulysses ranks, recompute, ZeRO-2 |
| pipeline | two stages (1F1B) with two micro-batches, recompute |
| expert | two expert ranks in the layers with experts, recompute, ZeRO-2 |

A family whose layers no adapter cuts runs on whole rows, if tensor, Ulysses and context degrees are 1: its own forward
computes a rank's rows from token ids to logits. How it runs its layers is found out by a run of that forward with
stand-ins for layers and head. Pipelines need layers that pass on their hidden states alone. Documents are not packed
if a family's layers are not cut. `galvatron search` and `parallel_plan="auto"` plan those of them that
[models](models.md) names.

A number in the table is the largest error of a gradient's entry, relative to the largest entry of its tensor or, if
that is more, to a hundredth of the norm of all gradients; over 1e-5 is wrong. A type that runs here may still be
refused with other options of its configuration, or with packed rows.
"""


def make_page(families: Sequence[Family], task: str = CAUSAL_LM) -> str:
    """Returns the page of a task in Markdown."""
    families = sorted(families, key=lambda family: family.model_type)
    running = [family for family in families if not family.unbuilt and not family.refusal]
    refused = [family for family in families if family.refusal]
    unbuilt = [family for family in families if family.unbuilt]
    introduction = INTRODUCTION.format(
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        count=len(families),
        layers=LAYERS,
        auto_class=PAGES[task][1],
        kind=PAGES[task][2],
    )
    parts = [
        introduction,
        _summary(running, refused, unbuilt),
        "## Families that run\n",
        *_running_table(running),
        "## Families that are refused\n",
        _grouped(refused, lambda family: family.refusal),
        "## Families without a tiny model\n",
        "transformers cannot make these models from a configuration here, so they were not tried.\n",
        _grouped(unbuilt, lambda family: family.unbuilt),
    ]
    return "\n".join(parts)


def page_row(family: Family, sentences: list[str]) -> str:
    """Returns the row of a type that runs. Sentences of refusals are numbered; new ones are added to `sentences`."""
    cells = [f"`{family.model_type}`", f"`{family.model_class}`"]
    for kind in KINDS:
        outcome = family.plans.get(kind)
        if outcome is None:
            cells.append("")
        elif outcome.kind == RIGHT:
            cells.append(f"{outcome.error:.0e}".replace("e-0", "e-"))
        else:
            sentence = general(outcome.sentence)
            if sentence not in sentences:
                sentences.append(sentence)
            cells.append(f"{outcome.kind} ({sentences.index(sentence) + 1})")
    return f"| {' | '.join(cells)} |"


def general(sentence: str) -> str:
    """Returns a sentence without what differs between model types: names of classes and numbers of layers."""
    return re.sub(r"\b([Ll]ayer) \d+", r"\1 N", CLASS.sub("X", sentence))


def _summary(running: Sequence[Family], refused: Sequence[Family], unbuilt: Sequence[Family]) -> str:
    rows = [
        ("run under some plan", len(running)),
        *((f"... of them right under {kind}", sum(_is(family, kind, RIGHT) for family in running)) for kind in KINDS),
        ("refused under every plan", len(refused)),
        ("without a tiny model", len(unbuilt)),
    ]
    broken = [family for family in running if family.defects]
    if broken:
        rows.append((f"with a plan that computes other numbers ({WRONG}) or fails ({CRASHED})", len(broken)))
    lines = ["## Counts\n", "| model types | |", "|---|---:|", *(f"| {name} | {count} |" for name, count in rows)]
    with_experts = sum("expert" in family.plans for family in running)
    lines += ["", f"{with_experts} of those that run have experts; for the others the table's last cell is empty.\n"]
    return "\n".join(lines)


def _is(family: Family, kind: str, wanted: str) -> bool:
    return kind in family.plans and family.plans[kind].kind == wanted


def _running_table(running: Sequence[Family]) -> list[str]:
    sentences: list[str] = []
    lines = ["| model type | class | " + " | ".join(KINDS) + " |", "|---|---|" + "---|" * len(KINDS)]
    lines += [page_row(family, sentences) for family in running]
    if sentences:
        lines += ["", "X is a class, N a number.\n"]
        lines += [f"{number}. {_escaped(sentence)}" for number, sentence in enumerate(sentences, 1)]
    return [*lines, ""]


def _grouped(families: Sequence[Family], sentence_of: Callable[[Family], str]) -> str:
    """Lists the types under each sentence, the sentence with most types first."""
    groups: dict[str, list[str]] = {}
    for family in families:
        groups.setdefault(general(sentence_of(family)), []).append(f"`{family.model_type}`")
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return "\n".join(f"- {_escaped(sentence)}\n  {', '.join(types)}\n" for sentence, types in ordered)


def _escaped(sentence: str) -> str:
    return re.sub(r"([*_<])", r"\\\1", sentence)


def plain(page: str) -> str:
    """Returns Markdown without the escapes of sentences."""
    return re.sub(r"\\([*_<])", r"\1", page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tries every model type of transformers with the head of a task.")
    parser.add_argument("--task", nargs="+", choices=PAGES, default=list(PAGES), help="write the pages of these")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="print the outcomes of these")
    options = parser.parse_args(arguments)
    prepare()
    for task in options.task:
        write_page(task, options.only)


def write_page(task: str, only: Sequence[str] | None) -> None:
    """Writes the page of a task, or prints the outcomes of some model types."""
    families = []
    for model_type in only or TYPES_OF_TASK[task]:
        family = run_family(model_type, task)
        families.append(family)
        for kind, outcome in family.defects.items():
            print(f"{model_type}, {kind}: {outcome.kind}: {outcome.sentence}")
        if only:
            print(family.unbuilt or family.refusal or page_row(family, []))
            for kind, outcome in family.plans.items():
                if outcome.kind == REFUSED and not family.refusal:
                    print(f"  {kind}: {outcome.sentence}")
    if not only:
        page = PAGES[task][0]
        page.write_text(make_page(families, task))
        print(f"{page.relative_to(ROOT)}: {len(families)} model types", flush=True)


def prepare() -> None:
    """Quiets transformers, and makes this process fit to be forked."""
    transformers.logging.set_verbosity_error()
    logging.getLogger(DTENSOR_LOGGER).setLevel(logging.ERROR)  # the tests gather weights in several steps
    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).backward()  # starts the threads of the backward, none for forks to miss


if __name__ == "__main__":
    main()
