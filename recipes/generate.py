# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Continues prompts with a saved causal language model. Plain transformers, one process:

    python recipes/generate.py output/quickstart --prompts "def main(" "class Queue:"
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.hf_argparser import HfArg


@dataclass
class GenerationArguments:
    """Prompts and sampling."""

    prompts: list[str] = HfArg(
        default_factory=lambda: ["import os\nimport sys\n\ndef ", "class TestQueue(unittest.TestCase):\n"],
        help="The texts to continue.",
    )
    max_new_tokens: int = HfArg(default=80, help="How many tokens each continuation has at most.")
    temperature: float = HfArg(default=0.7, help="Below 1 likely tokens are preferred; 0 takes the most likely token.")
    seed: int = HfArg(default=0, help="Seed of the draws.")


def generate(model_name_or_path: str, args: GenerationArguments) -> list[str]:
    """Returns each prompt with its continuation."""
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_name_or_path, dtype=torch.float32).eval()
    set_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    texts = []
    for prompt in args.prompts:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**ids, max_new_tokens=args.max_new_tokens, **sampling)
        texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    return texts


def main() -> None:
    parser = HfArgumentParser(GenerationArguments)
    parser.add_argument("model_name_or_path", help="Folder of the saved model, or a model of the Hub.")
    args, positional = parser.parse_args_into_dataclasses(look_for_args_file=False)
    for text in generate(positional.model_name_or_path, args):
        print(f"{'-' * 80}\n{text}")


if __name__ == "__main__":
    main()
