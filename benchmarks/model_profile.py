# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks that a model's measured parts add up: their profile against whole micro-batches on one rank.

    OMP_NUM_THREADS=1 python benchmarks/model_profile.py --rounds 3

Micro-batches are timed before and after each profile, in CPU time of one thread. Other work on the machine changes
this time; the difference of the two timings is printed next to the errors.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from galvatron_hf import ModelProfile, ParallelPlan, parallelize, profile_model
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import Precision
from galvatron_hf.plan.deal import Deal


VOCABULARY, LAYERS = 8000, 8
SHAPES = ((1024, 1024), (1024, 256), (512, 512))  # tokens, length of the documents
TURNS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="profiles of each format (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each profile (default: 20)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    errors, apart = [], []
    for dtype in ("fp32", "bf16"):
        model = AutoModelForCausalLM.from_config(config)
        plan = ParallelPlan.uniform(1, LAYERS, sharding="replicate", precision=Precision(compute=dtype, reduce="fp32"))
        parallel = parallelize(AutoModelForCausalLM.from_config(config), plan)
        for _ in range(given.rounds):
            before = [micro_batch_ms(parallel, *shape) for shape in SHAPES]
            profile = profile_model(model, dtype=dtype, device="cpu", tokens=1024, seconds=given.seconds)
            after = [micro_batch_ms(parallel, *shape) for shape in SHAPES]
            for shape, *both in zip(SHAPES, before, after, strict=True):
                real = [statistics.mean(pair) for pair in zip(*both, strict=True)]
                apart += [abs(second / first - 1) for first, second in zip(*both, strict=True)]
                errors += compare(profile, real, *shape)
    for name, sizes in (("told and measured", [abs(error) for error in errors]), ("measured twice", apart)):
        print(f"{name}: {len(sizes)} comparisons, median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}")


def compare(profile: ModelProfile, real: list[float], tokens: int, length: int) -> list[float]:
    """Returns the relative errors of forward and backward of a micro-batch that takes `real` ms."""
    squares, stretch = tokens * length, float(profile.made["wall time over CPU time"])
    times = [profile.kinds[kind].times[1] for kind in profile.layers]
    times += [profile.embedding.times[1], profile.head.times[1]]
    told = [sum(getattr(each, way).ms(tokens, squares) for each in times) / stretch for way in ("forward", "backward")]
    errors = [prediction / measured - 1 for prediction, measured in zip(told, real, strict=True)]
    print(
        f"{profile.dtype}, {tokens} tokens in documents of {length}: "
        + ", ".join(
            f"{way} {prediction:.1f} ms told, {measured:.1f} measured ({error:+.1%})"
            for way, prediction, measured, error in zip(("forward", "backward"), told, real, errors, strict=True)
        )
        + f"; fits off by {times[0].forward.error:.1%} and {times[0].backward.error:.1%}",
        flush=True,
    )
    return errors


def micro_batch_ms(parallel: ParallelModel, tokens: int, length: int) -> list[float]:
    """Returns the medians of forward and backward in ms of CPU time."""
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    documents = Deal.of_documents(bounds=tuple(range(0, tokens + 1, length)), cuts=(0, tokens))
    positions = torch.arange(tokens).remainder(length)[None]
    taken = []
    for _ in range(TURNS):
        parallel.units.begin_micro_batch(last=True)
        began = time.process_time()
        loss = parallel.runner(ids, shift_labels=ids, position_ids=positions, documents=documents).loss
        between = time.process_time()
        loss.backward()
        taken.append((1e3 * (between - began), 1e3 * (time.process_time() - between)))
        parallel.model.zero_grad()
    return [statistics.median(each) for each in zip(*taken[1:], strict=True)]


if __name__ == "__main__":
    main()
