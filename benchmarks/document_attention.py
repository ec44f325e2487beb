# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares attention by document with sdpa under the dense mask that transformers makes for a packed row.

    OMP_NUM_THREADS=1 python benchmarks/document_attention.py

Documents have lognormal lengths. Each round draws a new row and runs forward and backward of one layer by document,
under the mask, and by document again. The table has medians over the rounds: CPU milliseconds; time with the mask /
time by document, with its range; the same for by document against itself (A/A); and the time of making the mask, which
is not in the ratios. Peak memory, beyond inputs and imports and with the mask, is VmHWM of a separate process for one
forward and backward.

Evidence tier: measured on a CPU.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from galvatron_hf.parallel.layers.varlen_attention import attention_by_document


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The 99th percentile is 25 medians, as for the files of Python's standard library.
SIGMA = 1.4


class Row:
    """A packed row: its documents, query, key and value of one layer, and the mask of transformers."""

    def __init__(self, options: argparse.Namespace, tokens: int, head_dim: int, dtype: torch.dtype, seed: int):
        draw = np.random.default_rng(seed)
        lengths: list[int] = []
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(max(1, round(options.median * draw.lognormal(sigma=SIGMA))), left))
        self.bounds = [0, *accumulate(lengths)]
        self.positions = torch.cat([torch.arange(length) for length in lengths])[None]
        heads = (options.heads, options.key_value_heads, options.key_value_heads)
        self.states = [
            torch.randn(1, tokens, count, head_dim, dtype=dtype).transpose(1, 2).requires_grad_() for count in heads
        ]
        self.grad = torch.randn(1, tokens, options.heads, head_dim, dtype=dtype)
        self.module = nn.Module()
        self.module.num_key_value_groups = options.heads // options.key_value_heads
        self.config = LlamaConfig(attn_implementation="sdpa")

    def dense_mask(self) -> torch.Tensor:
        embeddings = self.grad[:, :, 0]
        return create_causal_mask(self.config, embeddings, None, None, position_ids=self.positions)

    def under_mask(self, mask: torch.Tensor) -> None:
        output, _ = sdpa_attention_forward(self.module, *self.states, mask)
        torch.autograd.grad(output, self.states, self.grad)

    def by_document(self) -> None:
        output = attention_by_document(*self.states, self.bounds, causal=True, scale=None)
        torch.autograd.grad(output, self.states, self.grad)


def timed(run: Callable[..., torch.Tensor | None], *args: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Returns milliseconds of CPU time, which other processes on the core lengthen less than wall time."""
    begun = time.process_time()
    result = run(*args)
    return 1e3 * (time.process_time() - begun), result


def memory_of_this_process(field: str) -> int:
    """Returns the bytes of a line of /proc/self/status: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_bytes_here(kind: str, row: Row, warm_up: Row) -> int:
    """Returns the peak bytes of one forward and backward, above those of the process before it."""

    def run(of: Row) -> None:
        if kind == "by_document":
            of.by_document()
        else:
            of.under_mask(of.dense_mask())

    run(warm_up)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_of_this_process("VmRSS")
    run(row)
    return memory_of_this_process("VmHWM") - before


def peak_bytes(kind: str, tokens: int, head_dim: int, dtype: str) -> int:
    """Returns [`peak_bytes_here`] of a separate process with the same options."""
    case = ["--memory_of", kind, "--tokens", str(tokens), "--head_dims", str(head_dim), "--dtypes", dtype]
    command = [sys.executable, __file__, *sys.argv[1:], *case]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(options: argparse.Namespace, tokens: int, head_dim: int, dtype: str) -> str:
    """Returns one line of the table."""
    times: dict[str, list[float]] = {"mask": [], "dense": [], "ours": [], "again": []}
    documents = []
    warm_up = Row(options, 256, head_dim, DTYPES[dtype], seed=0)
    warm_up.by_document()
    warm_up.under_mask(warm_up.dense_mask())
    for seed in range(options.rounds):
        row = Row(options, tokens, head_dim, DTYPES[dtype], seed)
        documents.append(len(row.bounds) - 1)
        times["ours"].append(timed(row.by_document)[0])
        mask_ms, mask = timed(row.dense_mask)
        times["mask"].append(mask_ms)
        times["dense"].append(timed(row.under_mask, mask)[0])
        times["again"].append(timed(row.by_document)[0])
    ratios = [dense / ours for dense, ours in zip(times["dense"], times["ours"], strict=True)]
    same = [again / ours for again, ours in zip(times["again"], times["ours"], strict=True)]
    median = {name: statistics.median(values) for name, values in times.items()}
    ours, dense = (peak_bytes(kind, tokens, head_dim, dtype) / 2**20 for kind in ("by_document", "dense"))
    return (
        f"{tokens:6d} {head_dim:4d} {dtype:9s} {statistics.median(documents):5.0f} {median['ours']:8.0f}"
        f" {median['dense']:8.0f} {median['mask']:6.0f}   {spread(ratios)}   {spread(same)} {ours:7.0f} {dense:7.0f}"
    )


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):5.2f} [{min(ratios):5.2f}, {max(ratios):5.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="of a row")
    parser.add_argument("--head_dims", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key_value_heads", type=int, default=2)
    parser.add_argument("--median", type=int, default=512, help="tokens of the median document")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each case, each with other documents")
    parser.add_argument("--memory_of", choices=["by_document", "dense"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        case = (options.head_dims[0], DTYPES[options.dtypes[0]], 0)
        row, warm_up = (Row(options, tokens, *case) for tokens in (options.tokens[0], 256))
        print(peak_bytes_here(options.memory_of, row, warm_up))
        return
    print(
        f"{options.heads} query heads, {options.key_value_heads} key/value heads, {options.rounds} rounds, "
        f"{torch.get_num_threads()} thread(s)"
    )
    print(f"{'':26s} {'ms of CPU time':^24s}   {'dense / by doc.':^20s}   {'A/A':^20s} {'peak MiB':>15s}")
    print("tokens  dim dtype      docs  by doc.    dense   mask" + " " * 47 + "by doc.   dense")
    for tokens in options.tokens:
        for head_dim in options.head_dims:
            for dtype in options.dtypes:
                print(compare(options, tokens, head_dim, dtype), flush=True)


if __name__ == "__main__":
    main()
