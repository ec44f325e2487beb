# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The Trainers of transformers under a parallel plan."""

from transformers import Seq2SeqTrainer, Trainer

from galvatron_hf.trainer.mixin import GalvatronMixin


class GalvatronTrainer(GalvatronMixin, Trainer):
    """Runs [`~transformers.Trainer`] under a parallel plan: same signature, same results.

    Args:
        model ([`~transformers.PreTrainedModel`], `str` or `os.PathLike`, *optional*): a model, or its folder or id on
            the Hub. A model on the meta device gets its weights initialised here. With it, a folder or an id, no rank
            ever holds more than its own parts.
        args ([`GalvatronTrainingArguments`] or [`~transformers.TrainingArguments`]): with the plan, else "auto".

    Example:

    ```python
    args = GalvatronTrainingArguments(output_dir="out", parallel_plan="plan.json")
    GalvatronTrainer(model, args, train_dataset=data).train()
    ```
    """


class GalvatronSeq2SeqTrainer(GalvatronMixin, Seq2SeqTrainer):
    """Runs [`~transformers.Seq2SeqTrainer`] under a parallel plan; `predict_with_generate` generates as
    [`~galvatron_hf.trainer.generation.generate`] does.
    """
