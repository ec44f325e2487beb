# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tests and times kernels of a GPU: matrix products, copies, attention by document, the head with its loss."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.parallel.layers.vocab_parallel_loss import linear_cross_entropy, loss_of_chunk


HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
CHUNKS = (1024, 2048, 4096, 8192)


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Returns the median milliseconds of `run` after two calls: on a GPU between events on its stream."""
    times = []
    for index in range(repeats + 2):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            taken = began.elapsed_time(ended)
        else:
            start = time.perf_counter()
            run()
            taken = 1e3 * (time.perf_counter() - start)
        if index >= 2:
            times.append(taken)
    return statistics.median(times)


def measure(device: torch.device, tiny: bool, compiled: bool) -> list[dict[str, Any]]:
    return [
        *_rates(device, tiny),
        *_attention_errors(device, tiny),
        *_attention_times(device, tiny),
        *_head(device, tiny, compiled),
    ]


def _rates(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    side, dtype = (256 if tiny else 8192), torch.bfloat16
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = median_ms(lambda: left @ right, device)
    source = torch.empty(side * side * 8, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source), device)
    return [
        {
            "kernel": f"matrix product of random numbers, {side}, bf16",
            "ms": product,
            "TFLOP/s": 2e-9 * side**3 / product,
        },
        {"kernel": f"copy of {source.nbytes >> 20} MiB", "ms": copy, "GB/s": 2e-6 * source.nbytes / copy},
    ]


def _states(device: torch.device, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    heads = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    draw = torch.Generator(device).manual_seed(0)
    made = [torch.randn(1, each, length, HEAD_DIM, device=device, dtype=dtype, generator=draw) for each in heads]
    return [states.requires_grad_() for states in made]


def _attention_errors(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Compares attention by document, forward and backward, with SDPA in float64 document by document."""
    lengths = [3, 17, 40, 4] if tiny else [1, 17, 300, 706, 512, 512]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        states = _states(device, bounds[-1], dtype)
        output = attention_by_document(*states, bounds, causal=True, scale=None)
        weights = torch.randn_like(output)
        gradients = torch.autograd.grad(output, states, weights)
        exact = [each.detach().double().requires_grad_() for each in states]
        pieces = zip(*(each.split(lengths, dim=2) for each in exact), strict=True)
        whole = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
        expected = torch.cat(whole, dim=2).transpose(1, 2)
        wanted = torch.autograd.grad(expected, exact, weights.double())
        pairs = zip([output, *gradients], [expected, *wanted], strict=True)
        errors = [((one - other).norm() / other.norm()).item() for one, other in pairs]
        name = str(dtype).removeprefix("torch.")
        bound = {"float32": 1e-5, "bfloat16": 1e-2}[name]
        found.append({"kernel": f"attention by document against float64, {name}", "error": max(errors)})
        found[-1]["equal"] = max(errors) <= bound
    return found


def _attention_times(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    found = []
    length = 256 if tiny else 16384
    for documents in (1, 2, 8):
        each = length // documents
        states = _states(device, length, torch.bfloat16)
        bounds = list(range(0, length + 1, each))
        others = [0, *(bound - 8 for bound in bounds[1:-1]), length - 16, length]  # no lengths of rows
        rows = [part.detach().unflatten(2, (documents, each))[0].transpose(0, 1).requires_grad_() for part in states]
        gradient = torch.randn(1, length, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        row_gradient = gradient.view(documents, each, HEADS, HEAD_DIM).transpose(1, 2)

        def by_document(states=states, bounds=bounds, gradient=gradient) -> None:
            output = attention_by_document(*states, bounds, causal=True, scale=None)
            torch.autograd.grad(output, states, gradient)

        def by_other_lengths(states=states, bounds=others, gradient=gradient) -> None:
            output = attention_by_document(*states, bounds, causal=True, scale=None)
            torch.autograd.grad(output, states, gradient)

        def sdpa(rows=rows, gradient=row_gradient) -> None:
            output = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            torch.autograd.grad(output, rows, gradient)

        products = 2 + 5  # of the forward and the backward, each 2 FLOPs, half of them masked
        flops = products * 2 * HEADS * HEAD_DIM * length * each / 2
        for name, run in (
            ("of rows", by_document),
            ("of documents of about that length", by_other_lengths),
            ("SDPA", sdpa),
        ):
            ms = median_ms(run, device)
            found.append({"kernel": f"attention {name}, {documents} x {each}", "ms": ms, "TFLOP/s": 1e-9 * flops / ms})
    return found


def _head(device: torch.device, tiny: bool, compiled: bool) -> list[dict[str, Any]]:
    """Times forward and backward of the head and its loss, by tokens of a chunk, and in plain transformers' way."""
    tokens, hidden_size, vocabulary = (64, 32, 128) if tiny else (16384, 4096, 128256)
    draw = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16, generator=draw).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, device=device, generator=draw).mul_(0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=draw)
    flops = 6 * tokens * hidden_size * vocabulary
    found: list[dict[str, Any]] = []
    compiled_loss = torch.compile(loss_of_chunk)

    def chunked(chunk: int, chunk_loss=None) -> None:
        options = dict(start=0, group=None, vocab_size=vocabulary, chunk_tokens=chunk, chunk_loss=chunk_loss)
        loss = linear_cross_entropy(hidden, weight, None, targets, **options)
        torch.autograd.grad(loss / tokens, (hidden, weight))

    def plain() -> None:
        loss = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        torch.autograd.grad(loss, (hidden, weight))

    runs = {f"head and loss, chunks of {chunk}": lambda chunk=chunk: chunked(chunk) for chunk in CHUNKS}
    if compiled:
        for chunk in CHUNKS[::2]:
            name = f"head and loss, chunks of {chunk}, compiled"
            runs[name] = lambda chunk=chunk: chunked(chunk, compiled_loss)
    for name, run in (runs | {"head and loss, plain": plain}).items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ms = median_ms(run, device, 5)
        found.append({"kernel": name, "ms": ms, "TFLOP/s": 1e-9 * flops / ms})
        if device.type == "cuda":
            found[-1]["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found
