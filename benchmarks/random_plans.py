# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Llamas, mixtures of experts and T5s by their sizes, and random plans for them from the search space."""

import random
from dataclasses import asdict, dataclass

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from galvatron_hf import LayerStrategy, ParallelPlan
from galvatron_hf.plan import Precision, Stage
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.space import Limits, context_degrees, layer_strategies, schedules, vocabulary_strategies
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama, or a Qwen3-MoE if there are `experts` of which a token chooses `top_k`, and the rows of a step. Or a T5
    with as many layers in each stack, if a row has `target_length` tokens in the decoder. Rows that are `packed` are
    documents, which ranks may share.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    length: int
    rows: int
    experts: int = 0
    top_k: int = 0
    target_length: int = 0
    packed: bool = False

    @classmethod
    def parse(cls, text: str) -> "Shape":
        text, _, packed = text.partition("/")
        if packed not in ("", "packed"):
            raise ValueError(f"{packed!r} does not say how rows are: write packed, or nothing.")
        sizes, _, target = text.partition(":")
        values = list(map(int, sizes.split("x")))
        named = dict(zip(list(cls.__annotations__)[: len(values)], values, strict=True))
        return cls(**named, target_length=int(target or 0), packed=bool(packed))

    def __str__(self) -> str:
        sizes = "x".join(str(value) for value in list(asdict(self).values())[: 10 if self.experts else 8])
        sizes = f"{sizes}:{self.target_length}" if self.target_length else sizes
        return f"{sizes}-packed" if self.packed else sizes  # of files too

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        if self.target_length:
            config = T5Config(
                vocab_size=self.vocabulary,
                d_model=self.hidden,
                d_kv=self.hidden // self.heads,
                d_ff=self.intermediate,
                num_layers=self.layers,
                num_decoder_layers=self.layers,
                num_heads=self.heads,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                use_cache=False,
            )
            return T5ForConditionalGeneration(config)
        sizes = dict(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        if not self.experts:
            return LlamaForCausalLM(LlamaConfig(intermediate_size=self.intermediate, **sizes))
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                head_dim=self.hidden // self.heads,
                moe_intermediate_size=self.intermediate,
                num_experts=self.experts,
                num_experts_per_tok=self.top_k,
                norm_topk_prob=True,
                **sizes,
            )
        )

    @torch.no_grad()
    def imbalance(self, ids: torch.Tensor) -> dict[int, float]:
        """Returns the most choices of experts at a rank over their mean, by expert degree, on average over layers, if
        each rank brings the same share of the tokens [rows, length]. Empty without experts.
        """
        if not self.experts:
            return {}
        logits = self.model()(ids, output_router_logits=True).router_logits
        counts = [
            torch.bincount(layer.topk(self.top_k).indices.flatten(), minlength=self.experts).double()
            for layer in logits
        ]
        found = {}
        for degree in (2, 4, 8):
            if self.experts % degree == 0:
                loads = [each.view(degree, -1).sum(1) for each in counts]
                found[degree] = float(torch.stack([load.max() / load.mean() for load in loads]).mean())
        return found

    def workload(self) -> Workload:
        return Workload(rows=self.rows, length=self.length, precision=Precision(compute="fp32"), packed=self.packed)


def draw_plans(world: int, model: ModelProfile, shape: Shape, count: int, seed: int) -> list[ParallelPlan]:
    """Draws different plans from the search space, about half of them pipelines, some of these interleaved. Of packed
    rows half of the plans have ranks share documents.
    """
    drawn, plans = random.Random(seed), {}
    layers_of_model = len(model.layers)
    pipelines = [degree for degree in (1, 2, 4, 8) if world % degree == 0 and degree <= min(world, layers_of_model)]
    while len(plans) < count:
        pipeline = 1 if drawn.random() < 0.5 else drawn.choice(pipelines[1:])
        ranks = world // pipeline
        most = {1: (1, 1, 2, 4), 2: (2, 4, 8), 4: (4, 8)}.get(pipeline, (pipeline,))
        micro_batches = min(drawn.choice(most), shape.rows)
        rows = -(-shape.rows // micro_batches)
        contexts = context_degrees(ranks, model, shape.packed, Limits())
        context = drawn.choice(contexts[1:]) if len(contexts) > 1 and drawn.random() < 0.5 else 1
        allowed = [one for one, data in layer_strategies(ranks, model, Limits(), context) if data <= rows]
        if not allowed:  # fewer rows than ranks, and heads that they cannot share
            continue
        ends = vocabulary_strategies(ranks, model, Limits())
        schedule, rounds, _ = drawn.choice(list(schedules(pipeline, [micro_batches], model.layers, Limits())))
        share = layers_of_model // rounds
        cuts = sorted(drawn.sample(range(1, share), pipeline - 1))
        stages = tuple(
            Stage(
                ranks=tuple(range(index * ranks, (index + 1) * ranks)),
                layers=tuple(number * share + layer for layer in layers),
            )
            for number in range(rounds)
            for index, layers in enumerate(zip((0, *cuts), (*cuts, share), strict=True))
        )
        kinds = [_drawn_strategy(allowed, drawn) for _ in range(drawn.choice((1, 1, 2, 3)))]
        embedding = drawn.choice(ends)
        head = drawn.choice([one for one in ends if not model.tied or one.tensor == embedding.tensor])
        plan = ParallelPlan(
            world_size=world,
            stacks=model.stack_sizes,
            micro_batches=micro_batches,
            schedule=schedule,
            precision=Precision(compute="fp32"),
            stages=stages,
            layers=tuple(kinds[layer * len(kinds) // share] for layer in range(share)) * rounds,
            embedding=embedding,
            head=embedding if model.tied and pipeline == 1 else head,  # tied, and on the same ranks
        )
        plans[plan.to_json()] = plan
    return list(plans.values())


def _drawn_strategy(allowed: list[LayerStrategy], drawn: random.Random) -> LayerStrategy:
    """Draws an expert degree first: few strategies have one above 1."""
    degree = drawn.choice(sorted({one.expert for one in allowed}))
    return drawn.choice([one for one in allowed if one.expert == degree])


def brief(plan: ParallelPlan) -> str:
    """Returns a plan in one line."""
    layers = []
    for start, strategy in enumerate(plan.layers):
        if start == 0 or strategy != plan.layers[start - 1]:
            layers.append(f"{start}:{describe(strategy)}{'r' if strategy.recompute == 'full' else ''}")
    lists = len(plan.rank_groups)
    cuts = "/".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages[:lists])
    if len(plan.stages) > lists:
        cuts += f" x{len(plan.stages) // lists}"
    ends = f"e:{describe(plan.embedding)} h:{describe(plan.head)}"
    return f"pp {cuts} m{plan.micro_batch_count} {' '.join(layers)} {ends}"


def describe(strategy) -> str:
    megatron, ulysses = getattr(strategy, "megatron_sp", False), getattr(strategy, "ulysses", 1)
    context = getattr(strategy, "context", 1)
    sharding = {"replicate": "dp", "zero2": "z2", "zero3": "z3"}[strategy.sharding] + str(strategy.shard_degree or "")
    expert = getattr(strategy, "expert", 1)
    degrees = f"t{strategy.tensor}{'s' if megatron else ''}{f'u{ulysses}' if ulysses > 1 else ''}"
    degrees += f"c{context}" if context > 1 else ""
    return f"{degrees}{f'x{expert}' if expert > 1 else ''}{sharding}"
