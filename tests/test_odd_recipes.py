# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Files of arguments and datasets that recipes refuse in one sentence, or read although they are odd."""

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import train_clm  # noqa: E402
from data import chats, labels, pairs, preferences, text  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["one two three"], vocab_size=300)


def read(tmp_path: Path, content: str) -> tuple:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    return train_clm.parse_arguments([str(path), "--output_dir", str(tmp_path), "--use_cpu", "true"])


@pytest.mark.parametrize(
    "content, message",
    [
        ("overflow: Split\n", r"overflow of .*run.yaml is 'Split': choose one of \['split', 'truncate'\]"),
        ("dtype: float31\n", "dtype of .* is 'float31': choose one of"),
        ("packing: dynamc\n", "packing of .* is 'dynamc': choose one of"),
        ("max_steps: 3\na: [1\n", r"run.yaml is not YAML \(line 3: expected ',' or ']'"),
        ("max_steps: '\x01'\n", "run.yaml is not YAML"),
        ("- max_steps\n", "has no arguments: write lines such as max_steps: 100"),
        ("1: 2\nother: 3\n", r"unknown arguments \[1, 'other'\]"),
        ("config_overrides: '{'\n", "config_overrides='{' is not JSON"),
        ("config_overrides: '[1]'\n", r"config_overrides=\[1\] has no names: write"),
    ],
)
def test_values_of_a_file_are_checked_as_those_of_the_command_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_a_bare_no_is_a_word(tmp_path):
    """YAML reads it as false."""
    *_, training = read(tmp_path, "save_strategy: no\neval_strategy: off\nlogging_strategy: 'no'\n")
    assert [training.save_strategy, training.eval_strategy, training.logging_strategy] == ["no"] * 3


def test_a_file_may_be_empty(tmp_path):
    assert read(tmp_path, "# max_steps: 3\n")[-1].max_steps == -1


def documents_of(path: Path, percentage: float = 50, **options) -> DatasetDict:
    return text.load_documents(str(path), None, "text", percentage, 0, **options)


def test_too_few_rows_are_refused(tmp_path, tokenizer):
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"too few rows \(1\)"):
        documents_of(path)
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    for percentage in (0, 100, -1, 200):
        with pytest.raises(ValueError, match=f"validation_split_percentage={percentage} leaves no row"):
            documents_of(path, percentage)
    for most in (0, -1):
        with pytest.raises(ValueError, match=f"max_documents={most} leaves no document"):
            documents_of(path, max_documents=most)
    documents = documents_of(path)
    for length in (1, 0, -4):
        with pytest.raises(ValueError, match=f"max_length={length} leaves no token"):
            text.documents_to_rows(documents, tokenizer, "text", length, "split")
    path.write_text('{"text": ""}\n' * 4)
    cache = tmp_path / "cache"

    def make() -> DatasetDict:
        return text.documents_to_rows(documents_of(path), tokenizer, "text", 8, "split")

    with pytest.raises(ValueError, match="None of the 2 documents of the split 'train' has two tokens"):
        text.cached(cache / "rows", make, lambda rows, folder: rows.save_to_disk(folder), None)
    assert not cache.exists()


def test_a_split_that_is_not_used_may_have_other_columns(tmp_path):
    rows, other = Dataset.from_dict({"text": ["one"] * 4}), Dataset.from_dict({"other": ["one"] * 4})
    DatasetDict(train=rows, validation=rows, test=other).save_to_disk(tmp_path / "data")
    assert documents_of(tmp_path / "data").column_names == {"train": ["text"], "validation": ["text"]}
    DatasetDict(train=rows, validation=other).save_to_disk(tmp_path / "renamed")
    with pytest.raises(ValueError, match=r"text_column='text' is not in .*choose one of \['other'\]"):
        documents_of(tmp_path / "renamed")


@pytest.mark.parametrize(
    "load",
    [
        lambda name: text.load_documents(name, None, "text", 50, 0),
        lambda name: chats.load_chats(name, None, "text", 50, 0),
        lambda name: labels.load_labelled(name, None, "text", "label", 50, 0, 2),
        lambda name: pairs.load_pairs(name, None, "text", "label", 50, 0),
        lambda name: preferences.load_preferences(name, None, 50, 0),
    ],
)
def test_a_dataset_without_a_split_to_train_is_refused(tmp_path, load):
    DatasetDict(test=Dataset.from_dict({"text": ["one"], "label": ["a"]})).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"has the splits \['test'\] and no split 'train': rename one of them"):
        load(str(tmp_path / "data"))


def test_rows_without_text_are_left_out_and_other_values_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,count\none,1\n,2\nthree,3\n")  # an empty field is None
    documents = documents_of(tmp_path / "rows.csv")
    assert sorted(documents["train"]["text"][:] + documents["validation"]["text"][:]) == ["one", "three"]
    with pytest.raises(ValueError, match=r"The column 'count' of .* has no texts but Value\('int64'\)"):
        text.load_documents(str(tmp_path / "rows.csv"), None, "count", 50, 0)
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": None}) + "\n")
    with pytest.raises(ValueError, match=r"too few rows \(0\)"):
        documents_of(tmp_path / "none.jsonl")
