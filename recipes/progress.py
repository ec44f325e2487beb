# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Progress bar with throughput."""

import time

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class ThroughputCallback(ProgressCallback):
    """
    Shortens the log lines of [`~transformers.ProgressCallback`] and appends tokens/s since the previous line.

    `include_num_input_tokens_seen` counts the tokens over all ranks: with padding for `"all"`, without it for
    `"non_padding"`. Wall time counts, including evaluation and checkpoints.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._start(state)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if self.training_bar is None:
            return
        shown = [f"step {state.global_step}/{state.max_steps}"]
        shown += [
            f"{name} {logs[name]:.4g}" for name in ("loss", "eval_loss", "grad_norm", "learning_rate") if name in logs
        ]
        tokens = state.num_input_tokens_seen - self._tokens
        if "loss" in logs and tokens:
            shown.append(f"{tokens / (time.perf_counter() - self._started_at):,.0f} tokens/s")
            self._start(state)
        if "shared_tokens_percent" in logs:
            ranks = logs["largest_group_ranks"]
            shown.append(f"{logs['shared_tokens_percent']:.0f}% of tokens shared by up to {ranks} ranks")
        if len(shown) > 1:
            self.training_bar.write(" | ".join(shown))

    def _start(self, state: TrainerState) -> None:
        self._started_at = time.perf_counter()
        self._tokens = state.num_input_tokens_seen
