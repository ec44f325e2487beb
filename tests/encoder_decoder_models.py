# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders of every tested family, small enough for eight ranks on two cores, batches and plans for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from tiny_models import VOCABULARY, randomise


ENCODER_LAYERS, DECODER_LAYERS = 3, 2  # of different length, so that an index into the wrong stack is seen

_T5_LIKE = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=40,
    num_layers=ENCODER_LAYERS,
    num_decoder_layers=DECODER_LAYERS,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    dropout_rate=0.0,
    pad_token_id=0,
    decoder_start_token_id=0,
    attn_implementation="sdpa",
)
_BART_LIKE = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=ENCODER_LAYERS,
    decoder_layers=DECODER_LAYERS,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=64,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    attn_implementation="sdpa",
)


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """Holds a model class with the configuration that makes it tiny."""

    prefix: str
    base: dict[str, Any] = field(default_factory=lambda: _BART_LIKE)
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, **changes: Any) -> PreTrainedModel:
        """Returns the model in training mode, with weights that make every part of it matter."""
        config = getattr(transformers, f"{self.prefix}Config")(**(self.base | self.options | changes))
        torch.manual_seed(0)
        name = "MarianMTModel" if self.prefix == "Marian" else f"{self.prefix}ForConditionalGeneration"
        model = getattr(transformers, name)(config)
        randomise(model, 0)
        buffers = dict(model.named_buffers())
        if "final_logits_bias" in buffers:
            buffers["final_logits_bias"].copy_(torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)))
        return model.train()


ENCODER_DECODERS: dict[str, EncoderDecoder] = {
    "t5": EncoderDecoder(prefix="T5", base=_T5_LIKE),
    "t5_gated": EncoderDecoder(
        prefix="T5", base=_T5_LIKE, options=dict(feed_forward_proj="gated-gelu", scale_decoder_outputs=False)
    ),
    "t5_eager": EncoderDecoder(prefix="T5", base=_T5_LIKE, options=dict(attn_implementation="eager")),
    "mt5": EncoderDecoder(prefix="MT5", base=_T5_LIKE, options=dict(feed_forward_proj="gated-gelu")),
    "umt5": EncoderDecoder(prefix="UMT5", base=_T5_LIKE),
    "bart": EncoderDecoder(prefix="Bart"),
    "mbart": EncoderDecoder(prefix="MBart", options=dict(scale_embedding=True)),
    "pegasus": EncoderDecoder(prefix="Pegasus"),
    "marian": EncoderDecoder(prefix="Marian", options=dict(decoder_vocab_size=VOCABULARY, scale_embedding=True)),
    "blenderbot": EncoderDecoder(prefix="Blenderbot"),
    "blenderbot-small": EncoderDecoder(prefix="BlenderbotSmall"),
    "plbart": EncoderDecoder(prefix="PLBart"),
    "m2m_100": EncoderDecoder(prefix="M2M100", options=dict(attn_implementation="eager")),
}


def padded_batch(model: PreTrainedModel, rows: int = 4, source: int = 11, target: int = 7) -> dict[str, torch.Tensor]:
    """Returns rows of different lengths on both sides; their decoder's tokens are left to the model."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (rows, source), generator=generator)
    labels = torch.randint(4, VOCABULARY, (rows, target), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, source - 3 * (row % 3) :] = 0
        labels[row, target - 2 * (row % 3) :] = -100
    ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def two_stacks(
    encoder: Sequence[LayerStrategy],
    decoder: Sequence[LayerStrategy],
    *,
    lists: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
    cuts: Sequence[int] = (),
    ends: VocabularyStrategy | None = None,
    head: VocabularyStrategy | None = None,
    **options: Any,
) -> ParallelPlan:
    """Returns a plan of both stacks with a stage for each list of ranks; `cuts` are where later stages begin."""
    layers = (*encoder, *decoder)
    bounds = [0, *cuts, len(layers)]
    return ParallelPlan(
        world_size=len({rank for ranks in lists for rank in ranks}),
        stacks={"encoder": len(encoder), "decoder": len(decoder)},
        layers=layers,
        stages=tuple(
            Stage(ranks=tuple(ranks), layers=(bounds[index], bounds[index + 1])) for index, ranks in enumerate(lists)
        ),
        embedding=ends or VocabularyStrategy(),
        head=head or ends or VocabularyStrategy(),
        **options,
    )


def random_plan(seed: int) -> ParallelPlan:
    """Draws a plan of four ranks for the tiny models: any strategy for each layer, one to four stages."""
    draw = random.Random(seed)
    stages = draw.choice([1, 1, 2, 2, 4])
    size, count = 4 // stages, ENCODER_LAYERS + DECODER_LAYERS
    kinds = [(tensor, ulysses) for tensor in (1, 2, 4) for ulysses in (1, 2, 4) if size % (tensor * ulysses) == 0]
    layers = []
    for _ in range(count):
        tensor, ulysses = draw.choice(kinds)
        layers.append(
            LayerStrategy(
                tensor=tensor,
                ulysses=ulysses,
                megatron_sp=tensor > 1 and draw.random() < 0.5,
                sharding=draw.choice(["replicate", "zero2", "zero3"]),
                recompute=draw.choice(["none", "full"]),
            )
        )
    lists = [tuple(range(stage * size, (stage + 1) * size)) for stage in range(stages)]
    tensor = draw.choice([degree for degree in (1, 2, 4) if size % degree == 0])
    return two_stacks(
        layers[:ENCODER_LAYERS],
        layers[ENCODER_LAYERS:],
        lists=lists,
        cuts=sorted(draw.sample(range(1, count), stages - 1)),
        ends=VocabularyStrategy(tensor=tensor, sharding=draw.choice(["replicate", "zero2", "zero3"])),
        schedule=draw.choice(["gpipe", "1f1b"]),
        micro_batches=4 if stages > 1 else draw.choice([1, 2]),
    )
