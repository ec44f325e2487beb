# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The page of model families: all types of the installed transformers, and for some of them what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from family_runs import KINDS, REFUSED, RIGHT, WRONG, Family, Outcome, run_family
from tiny_configurations import MODEL_TYPES


sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from make_families import PAGE, general, page_row, plain  # noqa: E402


TEXT = plain(PAGE.read_text())
ROWS = {re.match(r"\| `([^`]+)`", row)[1]: row for row in re.findall(r"^\| `.*$", TEXT, re.M)}
SENTENCES = re.findall(r"^\d+\. (.*)$", TEXT, re.M)
GROUPS = {
    name: sentence
    for sentence, types in re.findall(r"^- (.*)\n  (`.*)$", TEXT, re.M)
    for name in re.findall(r"`([^`]+)`", types)
}
# Dense, with experts, with a kind refused, on whole rows, the same without stages, refused, and impossible to build.
SAMPLE = ("smollm3", "qwen2_moe", "minimax_m2", "bloom", "rwkv", "zamba", "gemma4_assistant")


def test_the_page_has_every_model_type_of_transformers_once():
    rows = re.findall(r"^\| `([^`]+)`", TEXT, re.M)
    grouped = [name for types in re.findall(r"^  (`.*)$", TEXT, re.M) for name in re.findall(r"`([^`]+)`", types)]
    assert sorted(rows + grouped) == MODEL_TYPES


def without_numbers(row: str) -> str:
    return re.sub(r"\d+e-\d+", RIGHT, row)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_the_page_says_what_happens(model_type):
    family = run_family(model_type)
    assert not family.defects
    if family.unbuilt or family.refusal:
        assert GROUPS[model_type] == general(family.unbuilt or family.refusal)
    else:
        assert without_numbers(ROWS[model_type]) == without_numbers(page_row(family, list(SENTENCES)))


def test_no_family_computes_other_numbers_or_fails():
    assert len(ROWS) > 160
    cells = [cell for row in ROWS.values() for cell in without_numbers(row).split("|")[3:-1]]
    assert len(cells) == len(ROWS) * len(KINDS)
    assert {cell.split()[0] for cell in cells if cell.strip()} == {RIGHT, REFUSED}


def test_a_row_has_wrong_numbers_under_a_sentence():
    plans = {"data": Outcome(kind=RIGHT, error=2e-6), "tensor": Outcome(kind=WRONG, sentence="Layer 3 of GlmModel")}
    sentences: list[str] = []
    row = page_row(Family(model_type="glm", model_class="GlmForCausalLM", plans=plans), sentences)
    assert row == "| `glm` | `GlmForCausalLM` | 2e-6 | wrong (1) |  |  |  |"
    assert sentences == ["Layer N of X"]
