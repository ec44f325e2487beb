# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models, rows and arguments of `gpu.py`, and what a step of them computes."""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


# Dense bf16 peak in FLOP/s, from NVIDIA's data sheets (A100: 312e12; H100 and H200 SXM: 989e12).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}

# Vocabulary, hidden size, MLP, layers, heads, key/value heads, tied (Llama-3.2-1B, Llama-3.1-8B).
SIZES = {
    "tiny": (128, 64, 128, 2, 4, 2, False),
    "small": (1024, 256, 688, 4, 8, 4, False),
    "narrow": (1024, 256, 688, 16, 4, 4, False),
    "1B": (128256, 2048, 8192, 16, 32, 8, True),
    "8B": (128256, 4096, 14336, 32, 32, 8, False),
}


def llama(size: str, length: int, layers: int | None = None) -> LlamaConfig:
    """Returns a configuration of `SIZES`, with fewer `layers` if given."""
    vocabulary, hidden, intermediate, all_layers, heads, key_value_heads, tied = SIZES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=length,
        tie_word_embeddings=tied,
        use_cache=False,
        pad_token_id=0,
    )


def build(config: LlamaConfig, device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """Returns a model with random weights, always the same on one kind of device."""
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Counts the FLOPs of a training step as torchtitan does: 6 for each weight and token without the embedding, and
    12 * layers * heads * head size * length for each token (PaLM, arXiv 2204.02311, appendix B), which counts the half
    of attention's scores that a causal mask hides.
    """

    layers: float
    head: float
    attention: float

    @classmethod
    def of(cls, config: LlamaConfig, tokens: int, length: int) -> "StepFlops":
        hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        projections = 2 * hidden * (config.num_attention_heads + config.num_key_value_heads) * head_dim
        layer = projections + 3 * hidden * config.intermediate_size
        return cls(
            layers=6.0 * tokens * config.num_hidden_layers * layer,
            head=6.0 * tokens * config.vocab_size * hidden,
            attention=12.0 * tokens * config.num_hidden_layers * hidden * length,
        )

    @property
    def all(self) -> float:
        return self.layers + self.head + self.attention


class RandomRows(Dataset):
    """Rows of random tokens, of `length` tokens or of uniformly drawn lengths from `shortest` to `length`."""

    def __init__(self, count: int, length: int, vocabulary: int, shortest: int | None = None):
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest or length, length + 1, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, vocabulary, (each,), generator=draw).tolist() for each in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index]}

    def tokens(self) -> int:
        return sum(map(len, self.rows))


def collator() -> DataCollatorForLanguageModeling:
    """Returns a collator that pads rows of tokens and makes labels of them; token 0 is padding."""
    tokenizer = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"), mlm=False
    )


def arguments(folder: str, device: str, rows: int, steps: int, bf16: bool, **more: Any) -> dict[str, Any]:
    """Returns training arguments for both trainers; `rows` are those of a rank."""
    return {
        "output_dir": folder,
        "use_cpu": device == "cpu",
        "bf16": bf16,
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "seed": 0,
        **more,
    }
