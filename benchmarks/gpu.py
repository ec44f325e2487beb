# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tests equivalence on GPUs, and measures attention kernels, step time and model FLOP utilisation.

    torchrun --nproc_per_node N benchmarks/gpu.py                       one process per GPU
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/gpu.py --tiny --device cpu

docs/benchmarks/gpu.md has its figures on one GPU; it has not run on several. `--tiny --device cpu` runs the same code
on a model of a few thousand weights; its times mean nothing.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from galvatron_hf import ParallelPlan, parallelize
from galvatron_hf.plan import Precision


# Dense bf16 peak in FLOP/s, from NVIDIA's data sheets (A100: 312e12; H100 and H200 SXM: 989e12).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def llama(tiny: bool, length: int) -> LlamaConfig:
    """Returns a model of Llama-3.2-1B's shape, or a tiny one."""
    if tiny:
        return LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=length,
        )
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )


def build(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device).train()


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the median wall time of `run` in milliseconds, after two warm-up calls."""
    times = []
    for index in range(repeats + 2):
        wait(device)
        begun = time.perf_counter()
        run()
        wait(device)
        if index >= 2:
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def compare_with_one_process(device: torch.device, length: int) -> None:
    """Prints the largest relative gradient error of a tiny model against plain transformers, in fp32 and bf16."""
    world_size, config = dist.get_world_size(), llama(True, length)
    tokens = torch.randint(0, config.vocab_size, (2 * world_size, 64), device=device)
    dist.broadcast(tokens, src=0)
    tensor = 2 if world_size % 2 == 0 else 1
    for compute in ("fp32", "bf16"):
        reference, model = build(config, device), build(config, device)
        plan = ParallelPlan.uniform(
            world_size,
            config.num_hidden_layers,
            tensor=tensor,
            megatron_sp=tensor > 1,
            precision=Precision(compute=compute, master="fp32", reduce="fp32"),
        )
        parallel = parallelize(model, plan)
        with torch.autocast(device.type, torch.bfloat16, enabled=compute == "bf16"):
            expected = reference(input_ids=tokens, labels=tokens).loss
        expected.backward()
        loss = parallel.forward_backward({"input_ids": tokens, "labels": tokens})
        gradients = dict(reference.named_parameters())
        worst = 0.0
        for name, parameter in model.named_parameters():
            error = (parameter.grad.full_tensor() - gradients[name].grad).abs().max()
            worst = max(worst, (error / gradients[name].grad.abs().max()).item())
        losses = f"loss {loss.item():.6f} against {expected.item():.6f}"
        report(f"equivalence {compute}: {losses}, gradients within {worst:.1e}")


def compare_attention(device: torch.device, length: int, repeats: int) -> None:
    """Times forward and backward of causal SDPA and `varlen_attn` on one row, bf16, 32/8 heads of 64."""
    query = torch.randn(1, 32, length, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(1, 8, length, 64, device=device, dtype=torch.bfloat16) for _ in range(2))

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    kernels = {"sdpa": sdpa}
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        bounds = torch.tensor([0, length], device=device, dtype=torch.int32)

        def varlen() -> torch.Tensor:
            rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
            output = varlen_attn(*rows, bounds, bounds, length, length, window_size=(-1, 0), enable_gqa=True)
            return output.view(1, length, 32, 64)

        kernels["varlen_attn"] = varlen
    expected = sdpa()
    for name, kernel in kernels.items():
        error = (kernel() - expected).abs().max().item()
        ms = median_ms(lambda kernel=kernel: kernel().sum().backward(), device, repeats)
        report(f"attention {name}: {ms:.2f} ms forward + backward at {length} tokens, largest difference {error:.1e}")


def measure_steps(device: torch.device, options: argparse.Namespace) -> None:
    """Measures step time, memory, model FLOP utilisation and a profile of one plan."""
    world_size, config = dist.get_world_size(), llama(options.tiny, options.length)
    model = build(config, device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    if options.plan:
        plan = ParallelPlan.from_json(options.plan)
    else:
        precision = Precision(compute="bf16", master="fp32", reduce="fp32")
        plan = ParallelPlan.uniform(world_size, config.num_hidden_layers, precision=precision)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (options.rows * world_size, options.length), device=device)
    dist.broadcast(tokens, src=0)
    batch = {"input_ids": tokens, "labels": tokens}

    def step() -> None:
        parallel.forward_backward(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    ms = median_ms(step, device, options.repeats)
    # PaLM's count (arXiv 2204.02311, appendix B): 6 per weight and 12 * layers * hidden * length per token.
    flops = tokens.numel() * (6 * weights + 12 * config.num_hidden_layers * config.hidden_size * options.length)
    per_second = 1e3 / ms
    line = f"step {ms:.1f} ms, {tokens.numel() * per_second:.0f} tokens/s"
    line += f", {flops * per_second / world_size / 1e12:.2f} TFLOP/s a rank"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
        if peak is not None:
            line += f", MFU {flops * per_second / world_size / peak:.1%} of {name}"
        line += f", peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    report(line)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
        wait(device)
    sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    report(profiler.key_averages().table(sort_by=sort, row_limit=20, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", help="a plan's JSON file; default ZeRO-3 in bf16")
    parser.add_argument("--rows", type=int, default=4, help="rows per rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the script")
    options = parser.parse_args()
    if options.tiny:
        options.length, options.repeats = min(options.length, 128), min(options.repeats, 2)
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    compare_with_one_process(device, options.length)
    compare_attention(device, options.length, options.repeats)
    measure_steps(device, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
