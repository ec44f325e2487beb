# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The `forward` of a parallelised model: the whole batch in, loss and logits of the whole batch out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import ModelOutput

from galvatron_hf.models.input_names import AUDIO, IMAGES, TOKENS
from galvatron_hf.models.losses import LossKind, SpanLossKind, count_targets
from galvatron_hf.parallel.activation.micro_batch import MicroBatch, split_rows
from galvatron_hf.parallel.comm.collectives import gather_rows
from galvatron_hf.parallel.comm.meeting import Meetings
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.layers.per_token import per_token_output
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.router_loss import RouterStatistics
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import Action, Work


MAIN_INPUTS = (IMAGES, AUDIO, TOKENS)  # by which the batches of ranks are compared
# Options of a family's forward, with the values under which a plan computes what the family computes.
_OPTIONS: dict[str, tuple] = {
    "use_cache": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "logits_to_keep": (None, 0),
    "cache_position": (None,),
    "past_key_values": (None,),
    "inputs_embeds": (None,),
}


@dataclass
class WholeOutput(ModelOutput):
    """Holds loss and logits [B, S, V] of a whole batch, the same on every rank, and `aux_loss`, the routers' loss
    without its coefficient, if a model has one. The logits are gathered when they are
    read, which is collective: a caller that reads the loss alone needs no memory for them.
    """

    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def gathered_by(self, gather: Callable[[], torch.Tensor]) -> WholeOutput:
        """Returns this output, whose logits `gather` makes when they are read."""
        self.__dict__["_gather"] = gather
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "router_logits":
            raise AttributeError(
                "Under a parallel plan no rank keeps the router_logits of all layers; read aux_loss, the loss that "
                "they have together."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _gathered(self) -> None:
        gather = self.__dict__.pop("_gather", None)
        if gather is not None:
            self["logits"] = gather()

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            self._gathered()
        return super().__getattribute__(name)

    def __getitem__(self, key: str | int | slice) -> Any:
        if key not in ("loss", "aux_loss"):
            self._gathered()
        return super().__getitem__(key) if key != "loss" or self.loss is None else self.loss

    def __contains__(self, key: object) -> bool:
        return key == "logits" or super().__contains__(key)

    def __iter__(self):
        self._gathered()
        return super().__iter__()

    def keys(self):
        self._gathered()
        return super().keys()

    def values(self):
        self._gathered()
        return super().values()

    def items(self):
        self._gathered()
        return super().items()


@dataclass
class WholeSpans(WholeOutput):
    """Holds the logits of first and last positions [B, S, 2]."""

    @property
    def start_logits(self) -> torch.Tensor:
        return self.logits[..., 0]

    @property
    def end_logits(self) -> torch.Tensor:
        return self.logits[..., 1]


class WholeBatchForward:
    """Runs a parallelised model as the family's own forward runs on one process, and replaces it. Every rank calls it
    with the same whole batch, and gets loss and logits of the whole batch. A loss that every rank computes from them
    has the gradients of one process.

    Outside of [`WholeBatchForward.of_step`] the ranks compare their inputs, which waits for the device.

    Attributes:
        call (`int`): calls since the step began, for the random streams.
    """

    def __init__(
        self,
        runner: ModelRunner,
        plan: ParallelPlan,
        units: ShardedUnits,
        timeline: Timeline,
        signature: inspect.Signature,
        meetings: Meetings,
        pipeline: Pipeline | None = None,
        tied: TiedWeights | None = None,
    ):
        self.runner, self.plan, self.units, self.timeline = runner, plan, units, timeline
        self.signature, self.meetings, self.pipeline, self.tied = signature, meetings, pipeline, tied
        self.ends_step, self.call, self.batch, self.checks_inputs = True, 0, 0, True
        self._outputs: list[torch.autograd.graph.Node] = []  # of the calls in the present step

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput | tuple:
        """Runs a batch; arguments are those of the family's forward. With `fused_lm_head=True`, an option of TRL's
        trainers, the result is a [`PerTokenOutput`]. Collective, as is reading the logits of the result. ValueError
        for an argument that has no layout under a plan, and if ranks pass different tokens.
        """
        inputs = self._arguments(args, kwargs)
        per_token, as_dict = inputs.pop("fused_lm_head", False), inputs.pop("return_dict", None)
        routers = self.runner.router_statistics(inputs["input_ids"].device, inputs.pop("output_router_logits", None))
        as_dict = self.runner.model.config.return_dict if as_dict is None else as_dict
        self._check_same(next(inputs[name] for name in MAIN_INPUTS if inputs.get(name) is not None))
        self.runner.position.micro_batch = self.call
        if self.pipeline is None:
            self.call += 1
            output = self._run(inputs, per_token, routers)
        else:
            output = self._run_in_pipeline(inputs, routers)
            if per_token:
                output = self._per_token(output, inputs, routers)
        return output if as_dict else output.to_tuple()

    @contextlib.contextmanager
    def of_step(self, batch: int = 0, ends_step: bool = True) -> Iterator[None]:
        """Lets calls be those of a training loop, which gives every rank the same batch: the `batch`-th of its step.
        `ends_step` says whether the next backward is the last before the gradients are used.
        """
        if batch == 0:
            self.call = 0
        self.batch, self.ends_step, self.checks_inputs = batch, ends_step, False
        try:
            yield
            if ends_step:
                self.units.finish_step()
        finally:
            self.batch, self.ends_step, self.checks_inputs = 0, True, True
            self._outputs.clear()

    def check_graph(self, loss: torch.Tensor) -> None:
        """Raises ValueError if a loss depends on a weight other than through the model's outputs: this rank may have a
        part of the weight, and the gradients of all ranks are summed.
        """
        names = {id(parameter): name for name, parameter in self.runner.model.named_parameters()}
        seen, waiting = {None, *self._outputs}, [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ValueError(
                    f"The loss depends on {name} other than through model(...), and a rank may have a part of it; use "
                    "weight_decay, or change the gradient in a callback's on_pre_optimizer_step."
                )
            waiting += [following for following, _ in node.next_functions]

    # ---- Arguments ----

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name, without options that have no effect."""
        names = [name for name in self.signature.parameters if name != "self"]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        for name, neutral in _OPTIONS.items():
            value = inputs.pop(name, None)
            if not any(value is one or (not isinstance(value, torch.Tensor) and value == one) for one in neutral):
                raise ValueError(
                    f"The model was called with {name!r}, which has no layout under a parallel plan; leave it out of "
                    "the call and of the batch."
                )
        inputs = self.runner.adapter.with_positions(inputs)
        if inputs.get("input_ids") is None:
            raise ValueError(
                f"The model was called with {sorted(inputs)} and without input_ids, which a parallel plan needs; pass "
                "input_ids [B, S]."
            )
        return inputs

    def _check_same(self, given: torch.Tensor) -> None:
        """Raises ValueError on every rank if the ranks pass different tokens, images or recordings; collective."""
        if not self.checks_inputs or dist.get_world_size() == 1:
            return
        self.meetings.meet("model(...)")
        weights = torch.arange(1, given.numel() + 1, device=given.device)
        found = (tuple(given.shape), (given.flatten() * weights).sum().item())
        if len(set(gather_objects(found))) > 1:
            raise ValueError(
                "The ranks called the model with different inputs, and under a parallel plan they compute one batch "
                "together; call it with the same batch on every rank, such as one of the trainer's evaluation loader."
            )

    # ---- Without a pipeline ----

    def _run(self, inputs: dict[str, Any], per_token: bool, routers: RouterStatistics | None) -> ModelOutput:
        if torch.is_grad_enabled():
            self.units.begin_micro_batch(last=self.ends_step)
        labels = {name: inputs.pop(name, None) for name in self._loss.names} if per_token else {}
        items = inputs.get("num_items_in_batch")
        with self.timeline.span(Action(Work.FORWARD, 0, self.batch)):
            output = self.runner(**inputs, return_logits=True, routers=routers)
        rows = inputs["input_ids"].shape[0]
        parts = [self.runner.local_rows(rows, index) for index in range(self.runner.mesh.size)]
        own = parts[self.runner.mesh.index]
        local = output.logits[: own.stop - own.start]
        for tensor in (local, output.loss):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._backward_begins)
                if not self.checks_inputs:
                    self._outputs.append(tensor.grad_fn)
        group = self.runner.mesh.block(self.runner.mesh.size)
        if per_token:
            labels = {name: None if value is None else value[own] for name, value in labels.items()}
            output = per_token_output(
                local,
                labels[self._loss.labels],
                labels[self._loss.targets],
                items,
                whole_rows=lambda tensor: gather_rows(tensor, parts, group),
            )
            return _with_router_loss(output, self._of_routers(routers, output.loss), routers)
        aux_loss = self._of_routers(routers, local if output.loss is None else output.loss)
        whole = _with_router_loss(self._output_class(loss=output.loss), aux_loss, routers)
        return whole.gathered_by(lambda: gather_rows(local, parts, group))

    def _of_routers(self, routers: RouterStatistics | None, anchor: torch.Tensor) -> torch.Tensor | None:
        """Completes the counts of a batch; returns its routers' loss, see [`RouterStatistics.added_to`]."""
        if routers is None:
            return None
        routers.sum_over_ranks()
        return routers.added_to(anchor)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        self.timeline.action = Action(Work.BACKWARD, 0, self.batch)

    # ---- With a pipeline ----

    def _run_in_pipeline(self, inputs: dict[str, Any], routers: RouterStatistics | None) -> WholeOutput:
        """Runs the forward of all micro-batches, and has the backward of all follow when the caller's begins."""
        if self._loss.is_labelled(inputs) and inputs.get("num_items_in_batch") is None:
            inputs["num_items_in_batch"] = count_targets(inputs, self._loss)
        options = {"num_items_in_batch": inputs.pop("num_items_in_batch", None), "return_logits": True}
        options["routers"] = routers
        parts = split_rows(inputs, min(self.plan.micro_batch_count, inputs["input_ids"].shape[0]))
        batches = []
        for part in parts:
            self.runner.position.micro_batch = self.call
            batches.append(self.runner.micro_batch(**part, **options))
            self.call += 1
        if torch.is_grad_enabled():
            anchor = torch.zeros((), device=inputs["input_ids"].device, requires_grad=True)
            loss, logits = _PipelineStep.apply(anchor, self, batches)
        else:
            loss, logits = self.whole_outputs(batches, self.pipeline.evaluate(batches))
        loss = loss if batches[0].targets is not None else None
        aux_loss = self._of_routers(routers, logits if loss is None else loss)
        return _with_router_loss(self._output_class(loss=loss), aux_loss, routers, logits=logits)

    def rows_of(self, batch: MicroBatch) -> list[slice]:
        """Returns the rows of a micro-batch whose logits each rank of the last stage has."""
        return [self.runner.local_rows(batch.first.real_rows, index) for index in range(self.runner.mesh.size)]

    def whole_outputs(
        self, batches: list[MicroBatch], outputs: list[ModelOutput]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns loss and logits [B, S, V] of all micro-batches on every rank. `outputs` are the last stage's."""
        mesh, device = self.runner.mesh, batches[0].device
        whole, shape = [torch.zeros((), device=device), None], None
        if outputs:
            logits = []
            for batch, output in zip(batches, outputs, strict=True):
                parts = self.rows_of(batch)
                own = parts[mesh.index]
                local = output.logits.detach()[: own.stop - own.start]
                logits.append(gather_rows(local, parts, mesh.block(mesh.size)))
                if output.loss is not None:
                    whole[0] += output.loss.detach()
            whole[1] = torch.cat(logits)
            shape = tuple(whole[1].shape), whole[1].dtype
        group, source = self.pipeline.group, self.pipeline.shape.pipeline_rank_of_stage[-1]
        size, dtype = next(one for one in gather_objects(shape) if one is not None)
        if whole[1] is None:
            whole[1] = torch.empty(size, dtype=dtype, device=device)
        for tensor in whole:
            dist.broadcast(tensor, group=group, group_src=source)
        return whole[0], whole[1]

    # ---- Both ----

    @property
    def _loss(self) -> LossKind:
        return self.runner.loss

    @property
    def _output_class(self) -> type[WholeOutput]:
        return WholeSpans if isinstance(self._loss, SpanLossKind) else WholeOutput

    def _per_token(self, output: WholeOutput, inputs: dict[str, Any], routers: RouterStatistics | None) -> ModelOutput:
        labels = [inputs.get(name) for name in (self._loss.labels, self._loss.targets)]
        made = per_token_output(output.logits, *labels, inputs.get("num_items_in_batch"))
        return _with_router_loss(made, output.aux_loss, routers)


def _with_router_loss(
    output: ModelOutput,
    aux_loss: torch.Tensor | None,
    routers: RouterStatistics | None,
    logits: torch.Tensor | None = None,
) -> ModelOutput:
    """Returns an output with the routers' loss in its loss and beside it, in the order of the families' outputs."""
    loss = output.loss
    if routers is not None and loss is not None:
        loss = loss + routers.kind.coefficient * aux_loss
    others = {name: value for name, value in output.items() if name != "loss"}
    if logits is not None:
        others["logits"] = logits
    return type(output)(loss=loss, aux_loss=aux_loss, **others)


class _PipelineStep(torch.autograd.Function):
    """Runs the forward of a pipeline's micro-batches, and their backward when the gradients of loss and logits are
    known: the loss of the caller needs the logits of all.
    """

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, forward: WholeBatchForward, batches: list[MicroBatch]):
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.step = forward.pipeline.begin(batches)
        ctx.forward, ctx.batches = forward, batches
        return forward.whole_outputs(batches, ctx.step.ordered_outputs())

    @staticmethod
    def backward(ctx, of_loss: torch.Tensor | None, of_logits: torch.Tensor | None):
        forward, step, begun, seeds = ctx.forward, ctx.step, 0, {}
        for index, batch in enumerate(ctx.batches):
            if index in step.outputs:
                own = forward.rows_of(batch)[forward.runner.mesh.index]
                rows = slice(begun + own.start, begun + own.stop)
                seeds[index] = _seeds(step.outputs[index], of_loss, None if of_logits is None else of_logits[rows])
            begun += batch.first.real_rows
        earlier = forward.tied.take_gradients() if forward.tied is not None else []
        with torch.enable_grad():  # a split backward looks at graphs as a forward does
            forward.pipeline.finish(step, seeds)
        if forward.tied is not None:
            forward.tied.sum_gradients(earlier)
        ctx.step = None
        return None, None, None


def _seeds(
    output: ModelOutput, of_loss: torch.Tensor | None, of_logits: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of a micro-batch's loss, if it has one, and of its logits, of which rows were added."""
    logits = torch.zeros_like(output.logits)
    if of_logits is not None:
        logits[: of_logits.shape[0]] = of_logits
    if output.loss is None:
        return (logits,)
    return torch.zeros_like(output.loss) if of_loss is None else of_loss.to(output.loss), logits
