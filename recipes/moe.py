# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains a mixture-of-experts model, new or pretrained, on any text, its experts spread over ranks.

A new Qwen3-MoE of 8 experts on the standard library's source, 4 CPU ranks with 2 experts each:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/moe.py \\
        recipes/moe.yaml --expert_degree 4 --output_dir output/moe

A model of the Hub on 8 GPUs under the fastest plan that a search finds:

    accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \\
        recipes/moe.py --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name wikitext \\
        --dataset_config_name wikitext-103-raw-v1 --max_length 4096 --bf16 --learning_rate 1e-5 --output_dir output/moe

Arguments are those of train_clm.py, and those below. With the loss of routers (`output_router_logits` of the model's
configuration) a plan of several micro-batches without a pipeline, or with the schedule 1f1b, runs a forward more in
each step; `gpipe` and one micro-batch do not.
"""

import sys
from dataclasses import dataclass, field

from transformers import PreTrainedModel

import train_clm
from galvatron_hf import LayerStrategy, ParallelPlan
from galvatron_hf.models.families import adapter_for


@dataclass
class ExpertArguments:
    """Where the experts are."""

    expert_degree: int | None = field(
        default=None,
        metadata={
            "help": "Ranks over which the experts of a layer are spread; weights are in ZeRO-3. Absent: parallel_plan."
        },
    )


def spread_experts(model: PreTrainedModel, degree: int, world_size: int) -> ParallelPlan:
    """Returns a plan in which `degree` ranks share the experts of each layer that has some."""
    adapter = adapter_for(model)
    counts = adapter.expert_counts(model)
    return ParallelPlan(
        world_size=world_size,
        stacks=adapter.stack_sizes(model),
        layers=tuple(LayerStrategy(expert=degree if count else 1) for count in counts),
    )


def main() -> None:
    expert_args, model_args, data_args, training_args = train_clm.parse_arguments(
        sys.argv[1:], (ExpertArguments, *train_clm.ARGUMENTS)
    )
    train_clm.start(model_args, training_args)
    tokenizer, rows = train_clm.prepare(model_args, data_args, training_args)
    model = train_clm.get_model(model_args, tokenizer)
    if expert_args.expert_degree is not None:
        shape = model if isinstance(model, PreTrainedModel) else train_clm.empty_model(model)
        training_args.parallel_plan = spread_experts(shape, expert_args.expert_degree, training_args.world_size)
    train_clm.train(model, tokenizer, rows, training_args)


if __name__ == "__main__":
    main()
