# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The forward of one layer of a family that runs on whole rows: nothing is moved, and nothing is cut."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.rng import random_stream


class WholeRowLayer(ParallelLayer):
    """Runs one layer with the arguments of its family's own forward, and returns what it returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.current.whole_rows:
            return self.original(*args, **kwargs)
        batch = self.current.value
        self._begin()
        if self.recomputes:
            # Random streams are keyed, so that recompute needs no saved state of the generator.
            options = dict(use_reentrant=False, preserve_rng_state=False)
            output = checkpoint(lambda *inputs: self._run(batch, inputs, kwargs), *args, **options)
        else:
            output = self._run(batch, args, kwargs)
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(self._begin)
        return output

    def _run(self, batch: MicroBatch, args: tuple, kwargs: dict[str, Any]) -> Any:
        rectangle, device = self.rectangle(batch), batch.device
        key = (*batch.key, self.resolved.index, rectangle.row_start, rectangle.position_start)
        self._forget()
        try:
            with (
                self.current.active(batch),
                random_stream(device, *key) if self.layer.training else contextlib.nullcontext(),
            ):
                return self.original(*args, **kwargs)
        finally:
            self._forget()


class OwnHead:
    """Keeps the forward of a head whose logits the family goes on with."""

    def __init__(self, module: nn.Module):
        self.original = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.original(*args, **kwargs)

    def compile(self, **options: Any) -> None:
        """Compiles the head's product by `torch.compile` with `options`."""
        self.original = torch.compile(self.original, **options)
