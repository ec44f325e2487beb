# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The recipes: corpus, tokenizer, rows, arguments, plans, and a whole run of the script that people edit."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerControl,
    TrainerState,
)

from galvatron_hf import ParallelPlan
from galvatron_hf.plan.supported import unsupported
from ranks import run_ranks
from tiny_models import EXPERT_FAMILIES


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(RECIPES))

import classify  # noqa: E402
import generate  # noqa: E402
import moe  # noqa: E402
import progress  # noqa: E402
import seq2seq  # noqa: E402
import sft  # noqa: E402
import train_clm  # noqa: E402
from data import chats, labels, pairs, python_stdlib, text  # noqa: E402


DOCUMENTS = [f"def function_{i}(x):\n    return x + {i}\n" * (1 + i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(DOCUMENTS, vocab_size=300)


# --- documents


def test_standard_library_is_read_without_installed_packages_and_unreadable_files(tmp_path):
    files = {
        "b.py": b"b = 1\n",
        "package/a.py": "# -*- coding: latin-1 -*-\nname = 'caf\u00e9'\n".encode("latin-1"),
        "site-packages/other.py": b"other = 1\n",
        "empty.py": b"",
        "broken.py": b"x = '\xff'\n",
        "notes.txt": b"not Python",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = python_stdlib.load_python_stdlib(tmp_path)
    assert corpus["path"][:] == ["b.py", "package/a.py"]
    assert corpus["text"][1] == "# -*- coding: latin-1 -*-\nname = 'caf\u00e9'\n"


def test_folder_without_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No Python source below"):
        python_stdlib.load_python_stdlib(tmp_path)


def test_this_interpreters_library_is_a_corpus():
    corpus = python_stdlib.load_python_stdlib()
    assert "os.py" in corpus["path"][:]
    assert not any("site-packages" in path for path in corpus["path"][:])
    assert sum(map(len, corpus["text"][:])) > 5_000_000  # about 9 million characters without its tests, 31 with them


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder", "saved"])
def test_local_datasets_give_their_documents(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    dataset, source = Dataset.from_dict({"text": DOCUMENTS, "id": range(60)}), tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        dataset.to_json(source)
    elif kind == "csv":
        dataset.to_csv(source)
    elif kind == "parquet":
        dataset.to_parquet(source)
    elif kind == "saved":
        dataset.save_to_disk(source)
    else:
        for i, document in enumerate(DOCUMENTS):
            (source / str(i % 3)).mkdir(parents=True, exist_ok=True)
            (source / str(i % 3) / f"{i}.txt").write_text(document)
    documents = text.load_documents(str(source), None, "text", validation_percentage=10, seed=0)
    assert {split: rows.num_rows for split, rows in documents.items()} == {"train": 54, "validation": 6}
    assert documents["train"].column_names == ["text"]
    found = documents["train"]["text"][:] + documents["validation"]["text"][:]
    # the text reader drops the line end at the end of a file
    assert sorted(document.rstrip("\n") for document in found) == sorted(
        document.rstrip("\n") for document in DOCUMENTS
    )


def test_a_number_of_documents_is_a_seeded_choice(tmp_path):
    Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(tmp_path / "corpus")

    def chosen(seed, most):
        found = text.load_documents(str(tmp_path / "corpus"), None, "text", 20, seed, max_documents=most)
        return found["train"]["text"][:] + found["validation"]["text"][:]

    assert len(chosen(0, 10)) == 10 and set(chosen(0, 10)) <= set(DOCUMENTS)
    assert chosen(0, 10) == chosen(0, 10) != chosen(1, 10)
    assert sorted(chosen(0, 1000)) == sorted(DOCUMENTS)


def test_missing_column_and_unknown_file_are_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"content": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"text_column='text' is not in .*choose one of \['content'\]"):
        text.load_documents(str(tmp_path / "corpus.jsonl"), None, "text", 10, seed=0)
    (tmp_path / "corpus.pdf").write_text("x")
    with pytest.raises(ValueError, match="is not a kind of file that is read: use "):
        text.load_documents(str(tmp_path / "corpus.pdf"), None, "text", 10, seed=0)
    for missing in ("corpus.jsonl", "texts/corpus.csv.gz", "/no/such/folder", "./no/folder"):
        with pytest.raises(ValueError, match="does not exist: give a folder"):
            text.load_documents(missing, None, "text", 10, seed=0)


def test_folders_of_rows_and_compressed_files_are_read(tmp_path):
    dataset = Dataset.from_dict({"text": DOCUMENTS})
    for number in range(2):
        (tmp_path / "parquet" / "part").mkdir(parents=True, exist_ok=True)
        dataset.shard(2, number).to_parquet(tmp_path / "parquet" / "part" / f"{number}.parquet")
    (tmp_path / "parquet" / "README.md").write_text("What this is.")
    dataset.to_json(tmp_path / "rows.jsonl")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write((tmp_path / "rows.jsonl").read_text())
    for name in ("parquet", "rows.jsonl.gz"):
        found = text.load_dataset_of(str(tmp_path / name), None)["train"]
        assert sorted(found["text"]) == sorted(DOCUMENTS)


def test_binary_and_broken_files_are_no_documents(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text(DOCUMENTS[0])
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / "none.txt").touch()
    (folder / "b.txt.gz").write_bytes(gzip.compress(DOCUMENTS[1].encode()))
    (folder / "meta.json").write_text('{"license": "MIT"}')
    found = {document.rstrip() for document in text.load_dataset_of(str(folder), None)["train"]["text"]}
    assert found == {DOCUMENTS[0].rstrip(), DOCUMENTS[1].rstrip(), '{"license": "MIT"}'}
    (folder / "b.txt.gz").unlink()
    (folder / "meta.json").unlink()
    [document] = text.load_dataset_of(str(folder), None)["train"]["text"]
    assert document.rstrip() == DOCUMENTS[0].rstrip()
    (folder / "a.txt").unlink()
    with pytest.raises(ValueError, match="mixed' has no file with text"):
        text.load_dataset_of(str(folder), None)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl' is empty: remove it"):
        text.load_dataset_of(str(tmp_path / "empty.jsonl"), None)
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="broken.parquet' cannot be read as parquet"):
        text.load_dataset_of(str(tmp_path / "broken.parquet"), None)


def test_a_new_model_of_a_configuration(tmp_path, tokenizer):
    LlamaConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64).save_pretrained(
        tmp_path
    )
    args = train_clm.ModelArguments(config_name=str(tmp_path), config_overrides={"num_hidden_layers": 1})
    config = train_clm.get_model(args, tokenizer).config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (48, 1, len(tokenizer))
    with pytest.raises(ValueError, match="give one of them"):
        train_clm.ModelArguments(config_name="one", model_name_or_path="other")


# --- tokens and rows


@pytest.mark.parametrize("sample", [DOCUMENTS[0], "\t\u00e9\u4e16\U0001f40d \r\n\x00  x", ""])
def test_trained_tokenizer_gives_any_text_back(tokenizer, sample):
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def test_trained_tokenizer_ends_and_pads_with_different_tokens(tokenizer):
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def _rows(tokenizer, documents, max_length, overflow):
    corpus = DatasetDict(train=Dataset.from_dict({"text": documents}))
    return text.documents_to_rows(corpus, tokenizer, "text", max_length, overflow)["train"]["input_ids"][:]


@pytest.mark.parametrize("max_length", [2, 7, 16, 10_000])
def test_split_rows_hold_each_document_once_and_apart(tokenizer, max_length):
    rows = _rows(tokenizer, DOCUMENTS, max_length, "split")
    assert all(2 <= len(row) <= max_length for row in rows)
    expected = []
    for document in DOCUMENTS:
        ids = tokenizer.backend_tokenizer.encode(document).ids + [tokenizer.eos_token_id]
        # the only token that may be missing is a last one left alone in its row
        expected.append(ids[:-1] if len(ids) % max_length == 1 else ids)
    assert [token for row in rows for token in row] == [token for ids in expected for token in ids]
    assert all(tokenizer.eos_token_id not in row[:-1] for row in rows)


def test_truncated_rows_are_the_beginnings(tokenizer):
    rows = _rows(tokenizer, DOCUMENTS, 9, "truncate")
    full = [tokenizer.backend_tokenizer.encode(document).ids + [tokenizer.eos_token_id] for document in DOCUMENTS]
    assert rows == [ids[:9] for ids in full]


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process_and_follows_the_content(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from data import text\n"
        "from datasets import Dataset\n"
        "from transformers import AutoTokenizer\n"
        "documents = Dataset.from_dict({'text': list('abcd')}).train_test_split(test_size=0.5, seed=1)\n"
        "print(text.fingerprint(documents, AutoTokenizer.from_pretrained(sys.argv[2]), ['text', 9]))\n"
    )
    command = [sys.executable, "-c", code, str(RECIPES), str(tmp_path)]
    elsewhere = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def here(texts, max_length=9):
        documents = Dataset.from_dict({"text": list(texts)}).train_test_split(test_size=0.5, seed=1)
        return text.fingerprint(documents, tokenizer, ["text", max_length])

    assert here("abcd") == elsewhere
    assert len({here("abcd"), here("abce"), here("abcd", max_length=8)}) == 3


def test_cache_is_made_once_and_an_interrupted_one_leaves_nothing(tmp_path):
    made = []

    def make():
        made.append(1)
        return "content"

    def save(content, folder):
        (Path(folder) / "file").write_text(content)

    def fail(content, folder):
        save(content, folder)
        raise KeyboardInterrupt

    def load(folder):
        return (Path(folder) / "file").read_text()

    target = tmp_path / "cache" / "rows"
    with pytest.raises(KeyboardInterrupt):
        text.cached(target, make, fail, load)
    assert not target.exists()
    assert text.cached(target, make, save, load) == text.cached(target, make, save, load) == "content"
    assert len(made) == 2  # the interrupted one, and one for the two calls after it


# --- arguments, plans, model


def test_command_line_wins_over_the_file(tmp_path):
    argv = [str(RECIPES / "quickstart.yaml"), "--max_steps", "3", "--output_dir", str(tmp_path)]
    _, data, training = train_clm.parse_arguments(argv)
    assert (training.max_steps, training.output_dir) == (3, str(tmp_path))
    assert (training.learning_rate, data.max_length) == (
        float(_quickstart()["learning_rate"]),
        _quickstart()["max_length"],
    )


def test_unknown_name_in_the_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rat: 1.0\n")
    with pytest.raises(ValueError, match=r"unknown arguments \['learning_rat'\]"):
        train_clm.parse_arguments([str(tmp_path / "run.yaml")])


def test_the_file_may_have_a_recipes_own_arguments(tmp_path):
    (tmp_path / "run.yaml").write_text("expert_degree: 4\nmax_length: 64\n")
    kinds = (moe.ExpertArguments, *train_clm.ARGUMENTS)
    experts, _, data, _ = train_clm.parse_arguments([str(tmp_path / "run.yaml"), "--max_length=32"], kinds)
    assert (experts.expert_degree, data.max_length) == (4, 32)


def _quickstart() -> dict:
    return yaml.safe_load((RECIPES / "quickstart.yaml").read_text())


@pytest.mark.parametrize("path", sorted((RECIPES / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_plans_of_the_recipes_run_in_this_release(path):
    assert unsupported(ParallelPlan.from_json(path)) == []


def test_plan_of_the_documentation_runs_in_this_release():
    page = (ROOT / "docs" / "writing-a-plan.md").read_text()
    plan = ParallelPlan.from_json(re.search(r"```json\n(.*?)```", page, re.S)[1])
    assert unsupported(plan) == []


def test_the_mixed_plan_fits_its_launcher_and_its_model(tokenizer):
    plan = ParallelPlan.from_json(RECIPES / "plans" / "mixed-4cpu.json")
    launcher = yaml.safe_load((RECIPES / "accelerate" / "cpu4.yaml").read_text())
    assert plan.world_size == launcher["num_processes"] == 4
    model_args, _, _ = train_clm.parse_arguments([str(RECIPES / "quickstart.yaml")])
    with torch.device("meta"):
        model = train_clm.get_model(model_args, tokenizer)
    assert plan.num_layers == model.config.num_hidden_layers
    unused = len(tokenizer) - model_args.vocab_size  # this test's tokenizer is smaller than the quickstart's
    parameters = model.num_parameters() - 2 * unused * model.config.hidden_size
    assert 0.8e6 <= parameters <= 1e6  # as the recipe says


def test_the_quickstart_leaves_its_plan_to_the_search():
    assert "parallel_plan" not in _quickstart()


def test_the_mixed_plan_mixes_every_kind_of_layer():
    plan = ParallelPlan.from_json(RECIPES / "plans" / "mixed-4cpu.json")
    assert {layer.sharding for layer in plan.layers} == {"replicate", "zero2", "zero3"}
    assert any(layer.tensor > 1 and layer.megatron_sp for layer in plan.layers)
    assert any(layer.ulysses > 1 for layer in plan.layers)
    assert {layer.recompute for layer in plan.layers} == {"none", "full"}


def test_new_model_takes_the_overrides_and_the_tokenizers_ids(tokenizer):
    overrides = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    overrides |= {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    args = train_clm.ModelArguments(model_type="qwen2", config_overrides=json.dumps(overrides))
    model = train_clm.get_model(args, tokenizer)
    config = model.config
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen2", 300, 32)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- runs


def test_throughput_is_tokens_over_seconds_since_the_line_before(monkeypatch, capsys):
    clock = iter([10.0, 14.0, 14.0, 24.0, 24.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    state, control, callback = TrainerState(max_steps=4), TrainerControl(), progress.ThroughputCallback()
    callback.on_train_begin(None, state, control)
    for step, tokens in ((1, 2_000), (2, 12_000)):
        state.global_step, state.num_input_tokens_seen = step, tokens
        callback.on_log(None, state, control, logs={"loss": 1.5})
    callback.on_train_end(None, state, control)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert lines == ["step 1/4 | loss 1.5 | 500 tokens/s", "step 2/4 | loss 1.5 | 1,000 tokens/s"]


def test_tokens_that_ranks_share_are_shown(capsys):
    callback, state = progress.ThroughputCallback(), TrainerState(max_steps=2)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, None, logs={"loss": 1.5, "shared_tokens_percent": 41.5, "largest_group_ranks": 3})
    callback.on_train_end(None, state, TrainerControl())
    assert "loss 1.5 | 42% of tokens shared by up to 3 ranks" in capsys.readouterr().out


SMALL_RUN = [
    "--vocab_size=300",
    "--max_length=32",
    '--config_overrides={"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, '
    '"num_attention_heads": 4, "num_key_value_heads": 2}',
    "--max_eval_rows=8",
    "--per_device_train_batch_size=2",
    "--learning_rate=1e-2",
    "--warmup_steps=0",
    "--logging_steps=5",
    "--disable_tqdm=true",
]


def corpus_folder(folder: Path) -> str:
    folder.mkdir()
    for i, document in enumerate(DOCUMENTS):
        (folder / f"{i}.py").write_text(document)
    return str(folder)


def _check_run(output: Path, steps: int) -> None:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[0] > 4  # a new model knows nothing: ln(300) = 5.7
    assert losses[-1] < losses[0] - 1
    assert any("eval_loss" in entry for entry in history)
    assert (output / f"checkpoint-{steps}").is_dir()
    prompt = "def function_3(x):"
    texts = generate.generate(str(output), generate.GenerationArguments(prompts=[prompt], max_new_tokens=8))
    assert texts[0].startswith(prompt) and len(texts[0]) > len(prompt)


def test_one_process_trains_saves_and_generates(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    argv = [
        "train_clm.py",
        str(RECIPES / "quickstart.yaml"),
        "--dataset_name",
        corpus_folder(tmp_path / "corpus"),
        *SMALL_RUN,
    ]
    argv += ["--parallel_plan=auto", "--max_steps=20", "--eval_steps=20", "--save_steps=20"]
    monkeypatch.setattr(sys, "argv", [*argv, f"--output_dir={tmp_path / 'run'}"])
    train_clm.main()
    _check_run(tmp_path / "run", steps=20)


EXPERTS_RUN = [
    *SMALL_RUN,
    '--config_overrides={"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, '
    '"output_router_logits": true}',
]


def test_a_model_with_experts_is_trained_saved_and_loaded(tmp_path, monkeypatch):
    argv = ["moe.py", str(RECIPES / "moe.yaml"), "--expert_degree=1"]
    argv += ["--dataset_name", corpus_folder(tmp_path / "corpus")]
    argv += [*EXPERTS_RUN, "--max_steps=10", "--eval_steps=10", "--save_steps=10", f"--output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", argv)
    run_ranks(moe.main, 1)
    _check_run(tmp_path / "run", steps=10)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_experts_are_spread_over_ranks_in_layers_that_have_them():
    plan = moe.spread_experts(EXPERT_FAMILIES["deepseek_v3"].build(), 4, 8)
    assert [layer.expert for layer in plan.layers] == [1, 4, 4, 4] and plan.world_size == 8


@pytest.mark.slow
def test_a_classifier_is_trained_on_labelled_texts(tmp_path, monkeypatch):
    """Two ranks learn which of two words a text has, from a file with columns of other names."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    texts = [f"{word} = {index} + {index % 7}\n" for index in range(60) for word in ("left", "right")]
    table = {"code": texts, "side": [text.split()[0] for text in texts]}
    Dataset.from_dict(table).to_json(tmp_path / "sides.jsonl")
    argv = ["classify.py", str(RECIPES / "classify.yaml"), "--dataset_name", str(tmp_path / "sides.jsonl")]
    argv += ["--text_column=code", "--label_column=side", "--vocab_size=300", "--max_length=32", "--max_steps=20"]
    argv += [
        '--config_overrides={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "max_position_embeddings": 64}'
    ]
    argv += ["--disable_tqdm=true", "--learning_rate=5e-3", f"--output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", argv)
    run_ranks(classify.main, 2)
    metrics = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert metrics["eval_accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert model.config.id2label == {0: "left", 1: "right"}


@pytest.mark.slow
def test_an_encoder_decoder_is_trained_on_pairs(tmp_path, monkeypatch):
    """Four ranks train under the plan with a stage for each stack, and save a model of transformers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    table = {"code": [f"x = {i}" for i in range(64)], "text": [f"sets x to {i}" for i in range(64)]}
    Dataset.from_dict(table).to_json(tmp_path / "pairs.jsonl")
    argv = ["seq2seq.py", str(RECIPES / "seq2seq.yaml"), "--dataset_name", str(tmp_path / "pairs.jsonl")]
    argv += ["--source_column=code", "--target_column=text", "--vocab_size=300", "--max_length=32", "--max_steps=12"]
    argv += [
        '--config_overrides={"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, '
        '"num_heads": 4}'
    ]
    argv += ["--disable_tqdm=true", "--learning_rate=2e-2", f"--output_dir={tmp_path / 'run'}"]
    argv += [f"--parallel_plan={RECIPES / 'plans' / 't5-4cpu.json'}"]
    monkeypatch.setattr(sys, "argv", argv)
    run_ranks(seq2seq.main, 4)
    history = json.loads((tmp_path / "run" / "train_results.json").read_text())
    assert history["train_loss"] < 4.5  # a new model knows nothing: ln(300) = 5.7
    weights = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def tiny_chat_model(folder: Path) -> Path:
    """Saves a Llama without training, and a tokenizer of a few words."""
    tokenizer = text.train_tokenizer(["### user\nWhat is 12 ?\n### assistant\nIt is 12 ."] * 3, 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_on_chats(folder: Path, monkeypatch, *more: str) -> list[float]:
    """Trains on two ranks, on conversations with other questions and the same answer; returns the losses."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "hf-cache")
    questions = [{"role": "user", "content": f"What is {index} ?"} for index in range(64)]
    answer = {"role": "assistant", "content": "It is so ."}
    Dataset.from_list([{"talk": [question, answer]} for question in questions]).to_json(folder / "chats.jsonl")
    base = tiny_chat_model(folder / "base")
    argv = ["sft.py", str(RECIPES / "sft.yaml"), "--model_name_or_path", str(base), "--messages_column=talk"]
    argv += ["--dataset_name", str(folder / "chats.jsonl"), "--max_length=64", "--max_steps=20", "--logging_steps=1"]
    argv += ["--disable_tqdm=true", "--warmup_steps=0", f"--output_dir={folder / 'run'}", *more]
    monkeypatch.setattr(sys, "argv", argv)
    run_ranks(sft.main, 2)
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [log["loss"] for log in history if "loss" in log]
    assert losses[0] > 5  # a new model knows nothing: ln(300) = 5.7
    return losses


@pytest.mark.slow
def test_adapters_learn_conversations(tmp_path, monkeypatch):
    """Trains adapters with TRL's trainer under the plan of a search; plain PEFT loads them."""
    losses = train_on_chats(tmp_path, monkeypatch, "--learning_rate=3e-2")
    assert losses[-1] < losses[0] - 0.3  # the head of a model that knows nothing is frozen
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    prompt = "### user\nWhat is 7 ?\n### assistant\n"
    texts = generate.generate(
        str(tmp_path / "run"), generate.GenerationArguments(prompts=[prompt], max_new_tokens=8, temperature=0.0)
    )
    assert texts[0].startswith(prompt)


@pytest.mark.slow
def test_a_whole_model_learns_what_the_assistant_says_alone(tmp_path, monkeypatch):
    """The questions cannot be foretold, so that a loss near 0 is that of the answers."""
    losses = train_on_chats(tmp_path, monkeypatch, "--lora_rank=0", "--learning_rate=1e-2", "--max_steps=80")
    assert losses[-1] < 0.3
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_dataset_without_conversations_is_refused(tmp_path):
    Dataset.from_dict({"text": ["a"]}).to_json(tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match="'messages' is not a column of .*choose one of \\['text'\\]"):
        chats.load_chats(str(tmp_path / "texts.jsonl"), None, "messages", 2.0, 0)


@pytest.mark.slow
def test_functions_of_the_library_are_conversations():
    found = chats.load_chats("python-stdlib", None, "messages", 2.0, 0)["train"][0]["messages"]
    assert [message["role"] for message in found] == ["user", "assistant"]
    assert found[0]["content"].startswith("What does this function do?\ndef ")


def test_functions_of_the_library_are_pairs():
    code = 'def f(x):\n    """Returns twice x.\n\n    More.\n    """\n    return 2 * x\n\n\ndef g():\n    pass\n'
    assert list(pairs._documented(code)) == [("def f(x):\n    return 2 * x", "Returns twice x.")]
    assert list(pairs._documented("def broken(:\n")) == []


def test_packages_of_the_library_are_labels():
    found = labels.load_labelled("python-stdlib", None, "text", "label", 10.0, 0, classes=3)
    names, train = found["train"].features["label"].names, found["train"]
    assert len(names) == 3 and set(train["label"][:]) == {0, 1, 2}
    counts = [sum(part["label"][:].count(label) for part in found.values()) for label in range(3)]
    assert len(set(counts)) == 1 and counts[0] > 100


@pytest.mark.slow
def test_four_launched_ranks_train_with_experts(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu4.yaml"]
    command += ["--main_process_port", "0", "recipes/moe.py", "recipes/moe.yaml", *EXPERTS_RUN, "--expert_degree=4"]
    command += ["--max_steps=10", "--eval_steps=10", "--save_steps=10", f"--output_dir={tmp_path / 'run'}"]
    command += ["--dataset_name", corpus_folder(tmp_path / "corpus")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "hf-cache")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    _check_run(tmp_path / "run", steps=10)
    assert "most rows at a rank over their mean" in run.stdout + run.stderr


@pytest.mark.slow
def test_four_launched_ranks_train_under_a_plan_of_every_kind(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu4.yaml"]
    command += ["--main_process_port", "0", "recipes/train_clm.py", "recipes/quickstart.yaml", *SMALL_RUN]
    command += ["--max_steps=10", "--eval_steps=10", "--save_steps=10", f"--output_dir={tmp_path / 'run'}"]
    command += ["--parallel_plan=recipes/plans/mixed-4cpu.json"]
    command += ["--dataset_name", corpus_folder(tmp_path / "corpus")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "hf-cache")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    _check_run(tmp_path / "run", steps=10)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())
