# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares `galvatron data` and its forecast with loaders that really pad, counted FLOPs and written-out sums."""

import gzip
import io
import json
import statistics
from itertools import product

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset, DatasetDict
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers.trainer_pt_utils import LengthGroupedSampler

from galvatron_hf.cli.data import flops, histogram, summary
from galvatron_hf.cli.main import main
from galvatron_hf.data import named_dataset
from galvatron_hf.data.cost import GroupCost, SequenceCost, assumed_sharing
from galvatron_hf.data.forecast import DataWorkload, forecast_modes
from galvatron_hf.data.group_placement import place_groups
from galvatron_hf.data.placement import place
from tiny_models import word_tokenizer


COST = SequenceCost(per_token=3e-5, per_token_squared=2e-8, per_sequence=1e-3)
LENGTHS = np.random.default_rng(0).lognormal(4, 1.2, size=203).astype(np.int64) + 1
ROWS = Dataset.from_dict({"input_ids": [[7] * count for count in LENGTHS.tolist()]})


def _pad(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)


def _really_padded(order, ranks: int, rows: int, micro_batches: int):
    """Returns [micro-batches of all whole steps, ranks] of batches [rows, S], as a loader of every rank gives them."""
    of_ranks = [
        DataLoader(
            ROWS,
            batch_sampler=BatchSamplerShard(BatchSampler(order(), rows, drop_last=True), ranks, rank),
            collate_fn=_pad,
        )
        for rank in range(ranks)
    ]
    steps = len(LENGTHS) // (ranks * rows * micro_batches)
    return list(zip(*of_ranks, strict=True))[: steps * micro_batches]


def _random():
    return SeedableRandomSampler(ROWS, data_seed=5, generator=torch.Generator())


def _grouped():
    return LengthGroupedSampler(8, dataset=ROWS, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("number, order", [(0, _random), (1, _grouped)], ids=["padded", "grouped"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_padded_modes_are_those_of_loaders_that_pad(number, order, micro_batches):
    rows = 8 // micro_batches
    workload = DataWorkload(batch_size=32, ranks=4, max_tokens=int(LENGTHS.max()) * rows + 1, steps=99, seed=5)
    found = forecast_modes(LENGTHS, workload, COST)[number]
    batches = _really_padded(order, 4, rows, micro_batches)
    numbers = [[batch.numel() for batch in of_ranks] for of_ranks in batches]
    useful = sum(int((batch != 0).sum()) for of_ranks in batches for batch in of_ranks)
    seconds = [
        [sum(3e-5 * row.numel() + 2e-8 * row.numel() ** 2 + 1e-3 for row in batch) for batch in of_ranks]
        for of_ranks in batches
    ]
    slowest = sum(max(of_ranks) for of_ranks in seconds)
    assert found.micro_batches == micro_batches
    assert found.useful_tokens == useful
    assert found.padding == pytest.approx(1 - useful / sum(map(sum, numbers)), rel=1e-12)
    assert found.imbalance == pytest.approx(slowest / (sum(map(sum, seconds)) / 4), rel=1e-12)
    assert found.cost == pytest.approx(slowest, rel=1e-12)


def test_packed_mode_places_the_batches_of_the_padded_one():
    workload = DataWorkload(batch_size=32, ranks=4, max_tokens=700, steps=99, seed=5)
    padded, _, packed, _ = forecast_modes(LENGTHS, workload, COST)
    batches = [LENGTHS[rows] for rows in BatchSampler(_random(), 32, drop_last=True)]
    placements = [place(batch, 4, COST, max_tokens=700) for batch in batches]
    seconds = sum(placed.seconds(batch, COST) for placed, batch in zip(placements, batches, strict=True))
    assert packed.cost == pytest.approx(seconds, rel=1e-12)
    assert packed.micro_batches == sum(len(placed.micro_batches) for placed in placements) / 6
    assert packed.micro_batches > 1
    assert packed.padding == 0 and packed.useful_tokens == padded.useful_tokens
    assert packed.cost < padded.cost


def test_one_small_batch_is_packed_as_well_as_can_be():
    lengths = np.array([900, 500, 400, 300, 200, 100])
    packed = forecast_modes(lengths, DataWorkload(batch_size=6, ranks=2), COST)[2]
    costs = COST.seconds(lengths)
    best = min(
        max(costs[list(side)].sum(), costs[[not s for s in side]].sum()) for side in product([True, False], repeat=6)
    )
    assert packed.cost == pytest.approx(best, rel=1e-12)
    assert packed.imbalance == pytest.approx(best / costs.sum() * 2, rel=1e-12)


def test_dynamic_groups_hold_what_no_rank_does():
    """Costs and shares are counted anew from the placements, and the fewest tokens of a rank still suffice."""
    lengths = np.array([4000, 900, 500, 400, 300, 200, 100, 50] * 4)
    workload = DataWorkload(batch_size=8, ranks=4, max_tokens=1200, seed=3)
    (dynamic,) = forecast_modes(lengths, workload, COST)
    assert dynamic.mode == "dynamic" and dynamic.useful_tokens == lengths.sum() and dynamic.padding == 0
    groups = GroupCost(sequence=COST, sharing={"ring": assumed_sharing(COST)})
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3)).numpy().reshape(4, 8)
    cost, shared, largest = 0.0, 0, 1
    for batch in lengths[order]:
        placement = place_groups(batch, 4, groups, max_tokens=1200)
        for pairs in placement.micro_batches:
            loads = np.zeros(4)
            for document, ranks in pairs:
                loads[list(ranks)] += groups.seconds(batch[[document]], len(ranks))
                shared += int(batch[document]) if len(ranks) > 1 else 0
                largest = max(largest, len(ranks))
            cost += loads.max()
    assert dynamic.cost == pytest.approx(cost, rel=1e-12) and largest == dynamic.largest_group == 4
    assert dynamic.shared_tokens == pytest.approx(shared / lengths.sum(), rel=1e-12)


def test_a_dataset_that_no_rank_holds_is_said_to_need_groups(tmp_path, capsys):
    (tmp_path / "lengths").write_text("\n".join(["4000", "900", "500", "400"] * 2))
    assert main(["data", str(tmp_path / "lengths"), "--batch-size", "4", "--ranks", "4", "--max-tokens", "1200"]) == 0
    printed = capsys.readouterr().out
    assert "only packing='dynamic' trains all sequences" in printed and "up to 4 ranks" in printed


def test_only_as_many_batches_as_asked_for_are_looked_at():
    few = forecast_modes(LENGTHS, DataWorkload(batch_size=32, ranks=4, steps=2), COST)
    drawn = [int(LENGTHS[rows].sum()) for rows in BatchSampler(SeedableRandomSampler(ROWS, data_seed=42), 32, True)]
    assert few[0].useful_tokens in {drawn[i] + drawn[j] for i in range(6) for j in range(i)}


def test_flops_are_those_that_torch_counts():
    s, h = 24, 16
    shapes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    to_qkv, to_out, up, down = (torch.randn(shape, requires_grad=True) for shape in shapes)
    x = torch.randn(s, h, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        query, key, value = (x @ to_qkv).split(h, dim=-1)
        attended = (query @ key.T).softmax(-1) @ value @ to_out
        ((attended + x) @ up @ down).sum().backward()
    assert SequenceCost(**flops(h, 5)).seconds([s]).tolist() == [5 * counter.get_total_flops()]


def test_histogram_and_summary_count_every_sequence_once():
    lengths = np.array([1, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**40 - 1, 2**40])
    bins = histogram(lengths)
    assert [entry["from"] for entry in bins] == [2**power for power in range(41)]
    for entry in bins:
        inside = [length for length in lengths.tolist() if entry["from"] <= length < entry["to"]]
        assert (entry["sequences"], entry["tokens"]) == (len(inside), sum(inside))
    assert sum(entry["sequences"] for entry in bins) == len(lengths)
    found, values = summary(LENGTHS), LENGTHS.tolist()
    percentiles = statistics.quantiles(values, n=100, method="inclusive")
    assert found["median"] == statistics.median(values) and found["mean"] == pytest.approx(statistics.fmean(values))
    assert (found["p90"], found["p99"]) == (pytest.approx(percentiles[89]), pytest.approx(percentiles[98]))
    assert (found["sequences"], found["tokens"], found["max"]) == (len(values), sum(values), max(values))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a dataset in every form that the command opens."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    ROWS.shuffle(seed=1).save_to_disk(tmp_path / "saved")
    DatasetDict(other=ROWS.select([0]), train=ROWS).save_to_disk(tmp_path / "splits")
    ROWS.to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.jsonl"):
        ROWS.to_json(tmp_path / name)
    (tmp_path / "rows.arrow").symlink_to(tmp_path / "splits" / "train" / "data-00000-of-00001.arrow")
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LENGTHS.tolist())) + "\n\n")
    ROWS.rename_column("input_ids", "text").save_to_disk(tmp_path / "renamed")
    Dataset.from_dict({"text": ["not tokenised"]}).save_to_disk(tmp_path / "texts")
    (tmp_path / "bad.txt").write_text("12\n1.5\n")
    (tmp_path / "long.txt").write_text("5\n9223372036854775807\n")
    (tmp_path / "bad.jsonl").write_text("{not json")
    (tmp_path / "bad.arrow").write_text("not arrow")
    (tmp_path / "empty.txt").write_text("0\n")
    (tmp_path / "nothing.jsonl").touch()
    (tmp_path / "lengths.txt.gz").write_bytes(gzip.compress(b"5"))
    Dataset.from_dict({"text": [{"a": 1}]}).save_to_disk(tmp_path / "structs")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "lengths").write_text("5\n")
    (tmp_path / "rows.csv").write_text("length,name\n" + "".join(f"{length},a\n" for length in LENGTHS))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write((tmp_path / "rows.jsonl").read_text())
    shards = tmp_path / "shards" / "train"
    shards.mkdir(parents=True)
    for number in range(3):
        ROWS.shard(3, number, contiguous=True).to_parquet(shards / f"{number}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "saved",
        "splits",
        "rows.parquet",
        "rows.json",
        "rows.jsonl",
        "rows.arrow",
        "lengths.txt",
        "rows.csv",
        "rows.jsonl.gz",
        "shards",
    ],
)
def test_every_form_of_a_dataset_gives_the_same_figures(folder, capsys, name):
    written = folder / "figures.json"
    assert main(["data", str(folder / name), "--batch-size", "32", "--ranks", "4", "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    assert figures["lengths"] == summary(LENGTHS) | {"rows_without_tokens": 0}
    assert figures["histogram"] == histogram(LENGTHS)
    if name != "saved":  # whose rows stand in another order
        modes = forecast_modes(LENGTHS, DataWorkload(batch_size=32, ranks=4), SequenceCost(**flops(2048, 24)))
        assert [mode["padding"] for mode in figures["modes"]] == [mode.padding for mode in modes]
        assert [mode["relative_speed"] for mode in figures["modes"]] == [m.speed / modes[0].speed for m in modes]
    printed = capsys.readouterr().out
    assert "203 sequences" in printed and "relative and not measured" in printed and "tokens/s\n" not in printed
    assert "\x1b" not in printed


def test_text_is_counted_in_tokens(folder, capsys):
    """A file of text has a row in each line; the words of a row are its tokens."""
    word_tokenizer().save_pretrained(folder / "words")
    lines = ["w1 w2 w3", "w4", "w5 w6"] * 8
    (folder / "raw.txt").write_text("\n".join(lines) + "\n")
    Dataset.from_dict({"text": lines, "other": lines}).to_json(folder / "text.jsonl")
    for name in ("raw.txt", "text.jsonl"):
        flags = ["data", str(folder / name), "--tokenizer", str(folder / "words"), "--batch-size", "8"]
        assert main(flags) == 0
        assert "24 sequences, 48 tokens" in capsys.readouterr().out
    assert main([*flags, "--column", "other"]) == 0
    assert "24 sequences, 48 tokens" in capsys.readouterr().out


def test_column_and_split_are_chosen(folder, capsys):
    assert main(["data", str(folder / "renamed"), "--column", "text", "--batch-size", "8"]) == 0
    assert "203 sequences" in capsys.readouterr().out
    assert main(["data", str(folder / "splits"), "--split", "other", "--batch-size", "1", "--ranks", "1"]) == 0
    assert f"1 sequences, {LENGTHS[0]:,} tokens" in capsys.readouterr().out
    assert main(["data", str(folder / "rows.parquet"), "--split", "train[:16]", "--batch-size", "8"]) == 0
    assert "16 sequences" in capsys.readouterr().out


def test_a_dataset_of_the_hub_is_loaded_by_its_id(monkeypatch, capsys):
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return ROWS

    monkeypatch.setattr(named_dataset, "load_dataset", load)
    assert main(["data", "someone/tokens", "--split", "validation", "--config", "en", "--batch-size", "8"]) == 0
    assert asked == [(("someone/tokens", "en"), {"split": "validation"})]


def test_measured_costs_give_tokens_per_second_and_cuts_are_counted(folder, capsys):
    written = folder / "figures.json"
    options = ["--cost", "3e-5,2e-8,1e-3", "--max-length", "64", "--max-tokens", "512", "--steps", "3", "--seed", "9"]
    assert main(["data", str(folder / "lengths.txt"), *options, "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    kept = np.array([min(length, 64) for length in LENGTHS.tolist()])
    modes = forecast_modes(kept, DataWorkload(batch_size=64, ranks=8, max_tokens=512, steps=3, seed=9), COST)
    assert figures["cut"] == {
        "max_length": 64,
        "sequences": sum(length > 64 for length in LENGTHS.tolist()),
        "tokens": int(LENGTHS.sum() - kept.sum()),
    }
    assert figures["lengths"]["max"] == LENGTHS.max() > 64
    assert [mode["useful_tokens_per_second"] for mode in figures["modes"]] == [m.useful_tokens / m.cost for m in modes]
    printed = capsys.readouterr().out
    assert "useful tokens/s" in printed and "not measured" not in printed
    for mode, entry in zip(modes, figures["modes"], strict=True):
        row = next(line for line in printed.splitlines() if f" {entry['mode']} " in line)
        assert f"{mode.padding:.1%}" in row and f"{mode.useful_tokens / mode.cost:,.0f}" in row
        assert f"{mode.imbalance:.2f}" in row


def test_rows_without_tokens_are_left_out_and_counted(tmp_path, capsys):
    (tmp_path / "lengths").write_text("0\n5\n0\n7\n")
    assert main(["data", str(tmp_path / "lengths"), "--batch-size", "2", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 sequences, 12 tokens" in printed and "left out: 2 rows without tokens" in printed


def test_a_terminal_without_unicode_gets_plain_bars(tmp_path, monkeypatch):
    (tmp_path / "lengths").write_text("5\n7\n")
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", plain)
    assert main(["data", str(tmp_path / "lengths"), "--batch-size", "2", "--ranks", "2"]) == 0
    plain.flush()
    assert b"###" in plain.buffer.getvalue()


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["absent/folder/of/rows"], "'absent/folder/of/rows' does not exist"),
        (["absent.csv"], "'absent.csv' does not exist"),
        (["nothing.jsonl"], "'nothing.jsonl' is empty"),
        (["nothing"], "no file in it has rows"),
        ([""], "The name of the dataset is empty"),
        (["absent.jsonl.gz"], "'absent.jsonl.gz' does not exist"),
        (["lengths.txt.gz"], "is compressed, which is read of files of rows alone"),
        (["structs", "--tokenizer", "words"], "no text in the column 'text'"),
        (["texts", "--tokenizer", "absent/tokenizer/folder"], "tokenizer='absent/tokenizer/folder' cannot be loaded"),
        (["saved", "--tokenizer", "words"], "no text in the column 'text'"),
        (["lengths", "--tokenizer", "words"], "is a file of lengths, which has no tokenizer"),
        (["long.txt"], "is '9223372036854775807', which is longer than any sequence"),
        (["long.txt", "--split", "test"], "split='test', but 'long.txt' is a file of lengths"),
        (["long.txt", "--seed", "-1"], "seed=-1 is out of range: give a number from 0"),
        (["."], "cannot be opened as a dataset"),
        (["bad.jsonl"], "cannot be opened as a dataset"),
        (["bad.arrow"], "cannot be opened as a dataset"),
        (["splits", "--split", "validation"], "not 'validation'"),
        (["texts"], "no lists of token ids in the column 'input_ids'"),
        (["saved", "--column", "ids"], "name another of its columns ['input_ids']"),
        (["bad.txt"], "Line 2 of"),
        (["empty.txt"], "no sequence with a token"),
        (["lengths.txt", "--batch-size", "12"], "not a multiple of ranks=8"),
        (["lengths.txt", "--batch-size", "1024"], "more than the 203 sequences"),
        (["lengths.txt", "--ranks", "0"], "ranks=0 is less than 1"),
        (["lengths.txt", "--steps", "0"], "steps=0 is less than 1"),
        (["lengths.txt", "--max-length", "0"], "max_length=0 is less than 1"),
        (["lengths.txt", "--max-tokens", "7"], "max_tokens=7 on each of 8 ranks is less than the longest sequence"),
        (["lengths.txt", "--layers", "0"], "layers=0 is less than 1"),
        (["lengths.txt", "--cost", "1,2"], "not three numbers of seconds"),
        (["lengths.txt", "--cost", "0,0,0"], "is zero for every sequence"),
        (["lengths.txt", "--cost=-1,0,0"], "per_token=-1"),
        (["lengths.txt", "--json", "absent/figures.json"], "absent/figures.json"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(folder, monkeypatch, capfd, arguments, reason):
    monkeypatch.chdir(folder)
    assert main(["data", *arguments]) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("galvatron: ")]
    assert len(lines) == 1 and reason in lines[0] and "Traceback" not in lines[0]
