# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron data`: shows a dataset's sequence lengths and the cost of padding, grouping, packing and sharing them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table


if TYPE_CHECKING:
    from galvatron_hf.data.cost import SequenceCost
    from galvatron_hf.data.forecast import DataWorkload

_BAR = 24  # characters of the longest bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron data`."""
    add_dataset_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.set_defaults(run=run)


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a dataset, its global batches and the cost of a sequence."""
    parser.add_argument(
        "dataset", help="a save_to_disk folder, a folder of files, a file of rows or of lengths, or an id on the Hub"
    )
    parser.add_argument("--config", help="the configuration of a dataset of the Hub")
    parser.add_argument("--split", help="the split of the dataset (default: train)")
    parser.add_argument(
        "--column", help="the column of token ids (default: input_ids), or of text with --tokenizer (default: text)"
    )
    parser.add_argument("--tokenizer", help="a tokenizer, local or on the Hub, for a dataset of text")
    parser.add_argument("--cost", metavar="A,B,C", help="measured cost: s tokens take A*s + B*s*s + C seconds")
    numbers = {
        "--max-length": (None, "cut longer sequences to N tokens"),
        "--batch-size": (64, "sequences of a global batch (default: 64)"),
        "--ranks": (8, "data ranks (default: 8)"),
        "--max-tokens": (None, "tokens of a rank's micro-batch (default: its share of a batch of the longest rows)"),
        "--hidden-size": (2048, "hidden size to count FLOPs for, without --cost (default: 2048)"),
        "--layers": (24, "layers to count FLOPs for, without --cost (default: 24)"),
        "--steps": (50, "global batches to forecast (default: 50)"),
        "--seed": (42, "seed of the sequences' order (default: 42)"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(name, type=int, metavar="N", default=default, help=text)


def run(given: argparse.Namespace) -> int:
    """Prints the figures and writes them to --json."""
    figures = _figures(given)
    _show(figures)
    if given.json is not None:
        from galvatron_hf.cli.output import json_text  # it imports the planner

        with open(given.json, "w", encoding="utf-8") as file:
            file.write(json_text(figures))
    return 0


def batches_of(given: argparse.Namespace) -> DataWorkload:
    """Returns the global batches of the arguments."""
    from galvatron_hf.data.forecast import DataWorkload  # it imports torch, which --help does not need

    if not 0 <= given.seed < 1 << 63:
        raise ValueError(f"seed={given.seed} is out of range: give a number from 0 to 2^63 - 1.")
    names = ("batch_size", "ranks", "max_tokens", "steps", "seed")
    return DataWorkload(**{name: getattr(given, name) for name in names})


def cost_of(given: argparse.Namespace) -> SequenceCost:
    """Returns the cost of a sequence, measured or counted."""
    from galvatron_hf.data.cost import SequenceCost

    return SequenceCost(**_coefficients(given))


def _coefficients(given: argparse.Namespace) -> dict[str, float]:
    return measured_cost(given.cost) if given.cost is not None else flops(given.hidden_size, given.layers)


def read_lengths(given: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Returns the tokens of the dataset's sequences, and the number of rows without tokens."""
    from galvatron_hf.data.named_dataset import named_lengths

    every = named_lengths(
        given.dataset, split=given.split, column=given.column, config=given.config, tokenizer=given.tokenizer
    )
    lengths = every[every > 0]
    if not len(lengths):
        raise ValueError(f"{given.dataset!r} has no sequence with a token: give another dataset or column.")
    return lengths, len(every) - len(lengths)


def kept_lengths(given: argparse.Namespace) -> np.ndarray:
    """Returns the tokens of the dataset's sequences, cut to --max-length."""
    return _cut(read_lengths(given)[0], given.max_length)


def _cut(lengths: np.ndarray, max_length: int | None) -> np.ndarray:
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} is less than 1: give a positive number.")
    return np.minimum(lengths, max_length or lengths.max())


def _figures(given: argparse.Namespace) -> dict[str, Any]:
    from galvatron_hf.data.forecast import forecast_modes

    workload, coefficients, cost = batches_of(given), _coefficients(given), cost_of(given)
    lengths, empty = read_lengths(given)
    kept = _cut(lengths, given.max_length)
    modes = forecast_modes(kept, workload, cost)
    longest = int(kept.max())
    return {
        "dataset": given.dataset,
        "lengths": summary(lengths) | {"rows_without_tokens": empty},
        "histogram": histogram(lengths),
        "cut": {
            "max_length": given.max_length,
            "sequences": int((kept < lengths).sum()),
            "tokens": int((lengths - kept).sum()),
        },
        "workload": asdict(workload)
        | {
            "steps": min(workload.steps, len(lengths) // workload.batch_size),
            "max_tokens": workload.token_limit(longest),
            "padded_rows": workload.padded_rows(longest),
        },
        "cost": coefficients | {"unit": "FLOPs" if given.cost is None else "seconds"},
        "model": None if given.cost is not None else {"hidden_size": given.hidden_size, "layers": given.layers},
        "modes": [
            {
                "mode": mode.mode,
                "micro_batches": mode.micro_batches,
                "padding": mode.padding,
                "imbalance": mode.imbalance,
                "useful_tokens_per_second": None if given.cost is None else mode.speed,
                "relative_speed": mode.speed / modes[0].speed,
                "shared_tokens": mode.shared_tokens,
                "largest_group": mode.largest_group,
            }
            for mode in modes
        ],
    }


def measured_cost(text: str) -> dict[str, float]:
    """Returns the coefficients of a text `a,b,c`, in seconds."""
    try:
        per_token, per_token_squared, per_sequence = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"cost={text!r} is not three numbers of seconds: write it as 2e-5,1e-9,1e-4.") from None
    if not any((per_token, per_token_squared, per_sequence)):
        raise ValueError(f"cost={text!r} is zero for every sequence: give measured seconds.")
    return {"per_token": per_token, "per_token_squared": per_token_squared, "per_sequence": per_sequence}


def flops(hidden_size: int, layers: int) -> dict[str, float]:
    """Returns the coefficients of a sequence's FLOPs, forward and backward. A layer of hidden size h takes 72*s*h^2 +
    12*s^2*h FLOPs for s tokens (arXiv 2104.04473, equation 3, without recompute and vocabulary).
    """
    for name, value in (("hidden_size", hidden_size), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{name}={value} is less than 1: give a positive number.")
    return {
        "per_token": 72.0 * layers * hidden_size**2,
        "per_token_squared": 12.0 * layers * hidden_size,
        "per_sequence": 0.0,
    }


def summary(lengths: np.ndarray) -> dict[str, float]:
    """Returns the count, the sum and quantiles of lengths in tokens."""
    median, p90, p99 = np.quantile(lengths, [0.5, 0.9, 0.99]).tolist()
    return {
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "median": median,
        "mean": float(lengths.mean()),
        "p90": p90,
        "p99": p99,
        "max": int(lengths.max()),
    }


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Returns the sequences and their tokens in bins [from, to) of powers of two; the first and last are not empty."""
    # The exponent of frexp is exact for integers below 2^53, unlike a logarithm.
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    return [
        {
            "from": 2**exponent,
            "to": 2 ** (exponent + 1),
            "sequences": int((exponents == exponent).sum()),
            "tokens": int(lengths[exponents == exponent].sum()),
        }
        for exponent in range(int(exponents.min()), int(exponents.max()) + 1)
    ]


def _show(figures: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    lengths, cut, workload, cost = (figures[name] for name in ("lengths", "cut", "workload", "cost"))
    console.print(f"{lengths['sequences']:,} sequences, {lengths['tokens']:,} tokens", markup=False)
    names = ("median", "mean", "p90", "p99", "max")
    console.print("tokens per sequence: " + ", ".join(f"{name} {lengths[name]:,.0f}" for name in names))
    if lengths["rows_without_tokens"]:
        console.print(f"left out: {lengths['rows_without_tokens']:,} rows without tokens")
    console.print(_histogram_table(figures["histogram"], lengths, "#" if console.options.ascii_only else "█"))
    if cut["sequences"]:
        lost = cut["tokens"] / lengths["tokens"]
        console.print(
            f"all further figures are for sequences cut to {cut['max_length']:,} tokens: {cut['sequences']:,} "
            f"sequences lose {lost:.1%} of all tokens"
        )
    console.print(
        f"{workload['steps']} global batches of {workload['batch_size']} sequences (seed {workload['seed']}) on "
        f"{workload['ranks']} data ranks; a rank's micro-batch has at most {workload['max_tokens']:,} tokens "
        f"({workload['padded_rows']} rows if padded)"
    )
    console.print(_mode_table(figures["modes"], measured=cost["unit"] == "seconds"))
    dynamic = figures["modes"][-1]
    if len(figures["modes"]) == 1:
        console.print(
            "A rank cannot hold the longest sequence, so that only packing='dynamic' trains all sequences without "
            "cutting them; the cost of sharing is assumed."
        )
    if dynamic["shared_tokens"]:
        console.print(
            f"dynamic: {dynamic['shared_tokens']:.1%} of the tokens are in sequences that ranks share, up to "
            f"{dynamic['largest_group']} ranks; a hop is assumed to take a tenth of the linear work of its tokens"
        )
    if figures["model"] is not None:
        console.print(
            "Speeds are relative and not measured: they count the FLOPs of {layers} layers of hidden size "
            "{hidden_size}. Use --cost for tokens/s.".format(**figures["model"])
        )


def _histogram_table(bins: list[dict[str, int]], lengths: dict[str, float], character: str) -> Table:
    table = Table("tokens", "sequences", "", "all tokens")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[2] else "right"
    most = max(entry["sequences"] for entry in bins)
    for entry in bins:
        table.add_row(
            f"{entry['from']:,} - {entry['to'] - 1:,}",
            f"{entry['sequences']:,}",
            character * -(-_BAR * entry["sequences"] // most),
            f"{entry['tokens'] / lengths['tokens']:.1%}",
        )
    return table


def _mode_table(modes: list[dict[str, Any]], measured: bool) -> Table:
    table = Table("mode", "micro-batches", "padding", "slowest/mean", "speed")
    if measured:
        table.add_column("useful tokens/s")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for mode in modes:
        cells = [
            mode["mode"],
            f"{mode['micro_batches']:.1f}",
            f"{mode['padding']:.1%}",
            f"{mode['imbalance']:.2f}",
            f"{mode['relative_speed']:.2f}x",
        ]
        table.add_row(*cells, *([f"{mode['useful_tokens_per_second']:,.0f}"] if measured else []))
    return table
