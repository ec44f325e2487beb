# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with experts on bytes of Python's standard library, with rows that travel to the experts one by
one ("plain") and as centroids of clusters (LSH-MoE), and says how much is sent and what it costs.

    PYTHONPATH=recipes OMP_NUM_THREADS=1 python benchmarks/lsh_rate.py --steps 300 --seeds 0 1 2
    ... --ways plain 6x16 6x16:0.5 12x32

A way is HASHESxWIDTH, or HASHESxWIDTH:BOUND with the largest residual of a cluster. One process makes the clusters of
`--ranks` ranks, which have equal parts of the tokens; all ways of a seed begin with the same weights and see the same
tokens. The table has, over the seeds:

- *loss*: mean training loss of the last tenth of the steps, with its range;
- *sent*: centroids / choices of experts, of the first and of the last tenth of the steps;
- *residual*: mean distance of a row from its centroid as a part of its norm, in the last tenth;
- *cosine*: of the gradient of all weights with the plain one, for the trained weights and new tokens.

Evidence tier: measured on a CPU.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from data.python_stdlib import load_python_stdlib
from galvatron_hf.parallel.layers.lsh import (
    DispatchStatistics,
    LshDispatch,
    buckets,
    centroids,
    clusters,
    expand,
    projections,
)


EXPERTS = 8
WAYS = ("plain", "2x8", "6x16", "6x16:0.5", "12x32")


class SimulatedDispatch:
    """The forward of a layer's experts, with the clusters of several ranks in one process; plain without `options`."""

    def __init__(self, compute: Callable, layer: int, ranks: int):
        self.compute, self.layer, self.ranks = compute, layer, ranks
        self.options: LshDispatch | None = None
        self.statistics = DispatchStatistics()

    def __call__(self, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [tokens, features]; the experts and weights of each token are [tokens, top_k]."""
        if self.options is None:
            return self.compute(hidden, choices, weights)
        # An expert's rows of another rank are as those of another expert: no cluster has both.
        rank = torch.arange(len(hidden)) * self.ranks // len(hidden)
        owners = (choices + EXPERTS * rank[:, None]).flatten()
        order = torch.argsort(owners, stable=True)
        token = order // choices.shape[1]
        by = projections(self.options, hidden.shape[1], self.layer, hidden.device)
        rows, hashed = hidden[token], buckets(hidden, by)[token]
        found = clusters(rows, owners[order], hashed, self.options, EXPERTS * self.ranks)
        means = centroids(rows, found.of_row, int(found.counts.sum()))
        self.statistics.add(rows, means, found.of_row)
        experts = torch.arange(EXPERTS * self.ranks).repeat_interleave(found.counts) % EXPERTS
        done = self.compute(means, experts[:, None], means.new_ones(len(means), 1))
        back = expand(done, rows, means, found.of_row)[torch.argsort(order)]
        return (back.unflatten(0, choices.shape) * weights.unsqueeze(-1)).sum(1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one way and seed; see the table."""

    loss: float
    first_sent: float
    last_sent: float
    residual: float
    cosine: float


def options_of(way: str) -> LshDispatch | None:
    """Returns the options of a way such as "plain", "6x16" or "6x16:0.5"."""
    if way == "plain":
        return None
    sizes, _, bound = way.partition(":")
    hashes, _, width = sizes.partition("x")
    return LshDispatch(hashes=int(hashes), width=int(width), max_residual=float(bound) if bound else None)


def build(options: argparse.Namespace, seed: int) -> tuple[PreTrainedModel, list[SimulatedDispatch]]:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        moe_intermediate_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 32,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=options.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model, dispatches = Qwen3MoeForCausalLM(config), []
    for index, layer in enumerate(model.model.layers):
        dispatch = SimulatedDispatch(layer.mlp.experts.forward, index, options.ranks)
        layer.mlp.experts.forward = dispatch
        dispatches.append(dispatch)
    return model, dispatches


def batch_of(corpus: torch.Tensor, options: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Returns random pieces [rows, length] of the corpus."""
    starts = torch.randint(0, len(corpus) - options.length, (options.rows,), generator=generator)
    return corpus[starts[:, None] + torch.arange(options.length)]


def gradient(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of all weights, flat."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def sent_and_residual(dispatches: list[SimulatedDispatch]) -> tuple[float, float]:
    """Returns centroids / choices and the mean residual since the last call."""
    taken = [dispatch.statistics for dispatch in dispatches]
    for dispatch in dispatches:
        dispatch.statistics = DispatchStatistics()
    if not taken[0].pairs:
        return 1.0, 0.0
    sent = sum(one.centroids for one in taken) / sum(one.pairs for one in taken)
    return sent, statistics.mean(float(one.mean_residual) for one in taken)


def train(corpus: torch.Tensor, way: str, options: argparse.Namespace, seed: int) -> Result:
    model, dispatches = build(options, seed)
    for dispatch in dispatches:
        dispatch.options = options_of(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    generator, tenth = torch.Generator().manual_seed(seed), max(1, options.steps // 10)
    losses, figures = [], {}
    for step in range(options.steps):
        ids = batch_of(corpus, options, generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step + 1 in (tenth, options.steps - tenth, options.steps):
            figures[step + 1] = sent_and_residual(dispatches)
    ids = batch_of(corpus, options, generator)
    own = gradient(model, ids)
    for dispatch in dispatches:
        dispatch.options = None
    plain = gradient(model, ids)
    return Result(
        loss=float(torch.stack(losses[-tenth:]).mean()),
        first_sent=figures[tenth][0],
        last_sent=figures[options.steps][0],
        residual=figures[options.steps][1],
        cosine=float(torch.nn.functional.cosine_similarity(own.double(), plain.double(), dim=0)),
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the model and of how it is trained."""
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=2e-3)


def corpus_of_bytes() -> torch.Tensor:
    text = "".join(load_python_stdlib()["text"]).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="plain, HASHESxWIDTH or HASHESxWIDTH:BOUND")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ranks", type=int, default=2)
    add_model_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = corpus_of_bytes()
    print("| way | loss | range | sent first | sent last | residual | cosine |\n|---|--:|--:|--:|--:|--:|--:|")
    for way in options.ways:
        results = [train(corpus, way, options, seed) for seed in options.seeds]
        losses = [result.loss for result in results]
        first, last, residual, cosine = (
            statistics.mean(getattr(result, name) for result in results)
            for name in ("first_sent", "last_sent", "residual", "cosine")
        )
        print(
            f"| {way} | {statistics.mean(losses):.3f} | {min(losses):.3f} to {max(losses):.3f} | {first:.2f} | "
            f"{last:.2f} | {residual:.2f} | {cosine:.4f} |",
            flush=True,
        )
    print("tier: measured on a CPU")


if __name__ == "__main__":
    main()
