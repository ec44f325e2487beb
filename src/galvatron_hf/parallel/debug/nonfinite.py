# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the first non-finite number of a step: the step is computed again while every rank checks its own part. The
first one in the order of the computation counts, because it spreads through collectives and later layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.slots import MissingModule
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.comm.collective_log import observe_collectives
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.executor import Batch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan.deal import Deal
from galvatron_hf.plan.layout import Layout, Rectangle
from galvatron_hf.plan.schedule import Action, Work


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Names the first value of a micro-batch that a rank found to be infinite or NaN.

    Attributes:
        position (`tuple[int, int, int]`): pass, module and check, in the order of the computation. The same check has
            the same position on all ranks.
        what (`str`): description of the tensor, such as "the output of layer 3".
        rows (`tuple[int, ...]`): rows of the global batch that have the value.
    """

    rank: int
    micro_batch: int
    position: tuple[int, int, int]
    what: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        where = f"rank {self.rank}, micro-batch {self.micro_batch}, {_ranges(self.rows)} of the global batch"
        return f"{where}: {self.what}"


def find_nonfinite(parallel: ParallelModel, batch: Batch, run: Callable[[], Any]) -> list[NonFinite]:
    """Finds the first non-finite value of each micro-batch; overwrites the model's gradients. Collective: every rank
    gets the values of all ranks that had one first, none if everything is finite this time. `batch` is the global
    batch or its micro-batches; `run` computes its forward and backward again.
    """
    watch = _Watch(parallel, batch)
    with watch.watching():
        run()
    found = [one for rank_found in gather_objects(list(watch.first.values())) for one in rank_found]
    first: dict[int, tuple[int, int, int]] = {}
    for one in found:
        first[one.micro_batch] = min(one.position, first.get(one.micro_batch, one.position))
    found = [one for one in found if one.position == first[one.micro_batch]]
    return sorted(found, key=lambda one: (one.micro_batch, one.rank))


class _Watch:
    """Checks the outputs and gradients of modules, the inputs to collectives and the weights' gradients."""

    def __init__(self, parallel: ParallelModel, batch: Batch):
        self.parallel = parallel
        self.batch = batch
        self.first: dict[int, NonFinite] = {}
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.weights: dict[int, nn.Parameter] = {}
        self.module_index, self.check, self.name, self.stack = 0, 0, "", parallel.adapter.stacks[0].name
        self.rectangle: Rectangle | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        for index, (name, module, stack, layout_of) in enumerate(self._modules_in_order()):
            if isinstance(module, (PipelineIdentityLayer, MissingModule)):
                continue  # on another stage
            self.handles.append(module.register_forward_pre_hook(self._entered(index, name, stack, layout_of)))
            self.handles.append(module.register_forward_hook(self._left(index, name, stack, layout_of)))
        for stage in self.parallel.runner.stages:
            self.handles.append(stage.register_forward_pre_hook(lambda *unused: self._watch_weights()))
        try:
            with observe_collectives(self._collective):
                yield
        finally:
            for handle in self.handles:
                handle.remove()

    def _modules_in_order(self) -> list[tuple[str, nn.Module, str, Callable[[MicroBatch], Layout]]]:
        """Returns embedding, layers and head in the order of the forward, each with its stack and the layout of its
        output.
        """
        model, adapter = self.parallel.model, self.parallel.adapter
        stacks = [stack.name for stack in adapter.stacks]
        modules = [
            ("the embedding", module, stacks[0], lambda batch: batch.ends.embedding)
            for module in adapter.lookups(model)
        ]
        for layer, plan in zip(adapter.layers(model), self.parallel.resolved.layers, strict=True):
            modules.append((f"layer {plan.index}", layer, plan.stack, lambda batch, layout=plan.layout: layout))
        return [*modules, ("the head", adapter.head(model), stacks[-1], lambda batch: batch.ends.head)]

    def _entered(self, index: int, name: str, stack: str, layout_of: Callable[[MicroBatch], Layout]):
        def enter(*unused) -> None:
            self._go(index, name, stack, self._rectangle(stack, layout_of))
            self._watch_weights()

        return enter

    def _left(self, index: int, name: str, stack: str, layout_of: Callable[[MicroBatch], Layout]):
        def leave(module: nn.Module, inputs, output) -> None:
            rectangle = self._rectangle(stack, layout_of)
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor is None:
                    continue
                self._look(f"the output of {name}", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._gradient(index, name, stack, rectangle, gradient))

        return leave

    def _gradient(self, index: int, name: str, stack: str, rectangle: Rectangle, gradient: torch.Tensor) -> None:
        self._go(-index, name, stack, rectangle)
        self._look(f"the gradient of the output of {name}", gradient)

    def _go(self, index: int, name: str, stack: str, rectangle: Rectangle) -> None:
        self.module_index, self.check, self.name, self.stack, self.rectangle = index, 0, name, stack, rectangle

    def _rectangle(self, stack: str, layout_of: Callable[[MicroBatch], Layout]) -> Rectangle:
        batch = self.parallel.runner.current.value
        return batch.streams[stack].grid.rectangle(layout_of(batch), self.parallel.mesh.index)

    def _watch_weights(self) -> None:
        """Checks the gradients of the weights in use before they are summed over ranks."""
        for name, weight in self.parallel.model.named_parameters():
            if weight.requires_grad and id(weight) not in self.weights:
                self.weights[id(weight)] = weight
                look = self._weight_gradient(name)
                self.handles.append(weight.register_hook(look))

    def _weight_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._look(f"this rank's part of the gradient of {name}", local_tensor(gradient))

    def _collective(self, kind: str, x: torch.Tensor, group) -> None:
        if x.is_floating_point():
            # -inf is allowed here: it is the largest logit of a rank without logits.
            self._look(f"what it put into {kind} in the {self._action.work.value} of {self.name}", x.clamp(min=0.0))

    @property
    def _action(self) -> Action:
        return self.parallel.timeline.action

    def _look(self, what: str, tensor: torch.Tensor) -> None:
        self.check += 1
        micro_batch = self._action.micro_batch
        known = self.first.get(micro_batch)
        if bool(tensor.isfinite().all()):
            return
        rows = self._rows_of(tensor, micro_batch)
        if known is None:
            self.first[micro_batch] = NonFinite(
                rank=torch.distributed.get_rank(),
                micro_batch=micro_batch,
                # A gradient that enters a stage still has the module of the forward: it sorts after those of modules.
                position=(int(self._action.work is not Work.FORWARD), self.module_index, self.check),
                what=what,
                rows=rows,
            )
        elif len(rows) < len(known.rows):
            self.first[micro_batch] = replace(known, rows=rows)

    def _rows_of(self, tensor: torch.Tensor, micro_batch: int) -> tuple[int, ...]:
        """Returns the rows of the global batch with a wrong value; all rows of this rank if it is not known which."""
        if not isinstance(self.batch, Mapping) and "documents" in self.batch[0]:
            documents = self.batch[micro_batch]["documents"]
            of_stack = documents[self.stack] if isinstance(documents, Mapping) else documents
            return self._rows_of_packed(tensor, of_stack)
        start, stop = self._rows_of_micro_batch(micro_batch)
        if self.rectangle is None:
            return tuple(range(start, stop))
        held = range(self.rectangle.row_start, self.rectangle.row_stop)
        if tensor.ndim == 3 and tensor.shape[:2] == self.rectangle.shape:
            wrong = tensor.isfinite().flatten(1).all(1).logical_not().tolist()
            held = [row for row, is_wrong in zip(held, wrong, strict=True) if is_wrong]
        return tuple(sorted({min(start + row, stop - 1) for row in held}))

    def _rows_of_micro_batch(self, micro_batch: int) -> tuple[int, int]:
        """Returns the rows of a micro-batch of a global batch, or of one batch of a step that computes each alone."""
        if isinstance(self.batch, Mapping):
            batch = self.parallel.adapter.with_positions(self.batch)
            rows, count = batch["input_ids"].shape[0], self.parallel.executor.micro_batch_count(batch)
            return micro_batch * rows // count, (micro_batch + 1) * rows // count
        rows = [self.parallel.adapter.with_positions(part)["input_ids"].shape[0] for part in self.batch]
        if self.parallel.pipeline is not None:
            return 0, sum(rows)  # the micro-batch is one of an unknown batch
        return sum(rows[:micro_batch]), sum(rows[: micro_batch + 1])

    def _rows_of_packed(self, tensor: torch.Tensor, documents: Deal) -> tuple[int, ...]:
        held = range(documents.tokens)
        if self.rectangle is not None:
            held = range(self.rectangle.position_start, self.rectangle.position_stop)
            if tensor.ndim == 3 and tensor.shape[:2] == self.rectangle.shape:
                wrong = tensor[0].isfinite().all(1).logical_not().tolist()
                held = [position for position, is_wrong in zip(held, wrong, strict=True) if is_wrong]
        return tuple(documents.rows_at(held) or documents.rows_at(range(documents.tokens)))


def _ranges(numbers: tuple[int, ...]) -> str:
    """Formats numbers of rows: "row 3", "rows 0-3, 6"."""
    parts, start = [], 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            parts.append(f"{numbers[start]}-{number}" if index > start else str(number))
            start = index + 1
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
