# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline schedule on this rank's stages. `torch.distributed.pipelining` gives the orders of work (see
`galvatron_hf/plan/schedule.py`) and the split of the backward for zero-bubble schedules. Its runtime is not used. It
keeps every receive buffer, send and loss graph of a step. It needs one shape for all micro-batches, and treats all
FSDP2 units of a stage in one way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers.utils import ModelOutput

from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import DTYPES, ShardedUnits
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.stage_module import StageModule
from galvatron_hf.plan.resolved import ResolvedPlan
from galvatron_hf.plan.schedule import FORWARD_WORKS, Action, PipelineShape, Work, actions
from galvatron_hf.utils.compat import input_gradients, weight_gradients


# Sends of gradients (in evaluation, of activations) that may run before a rank waits for the oldest of them.
SENDS_UNDER_WAY = 2

# The tensors of one layer state, in the order of their names.
Tensors = tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class _Transfer:
    """Holds tensors that are sent or received until the transfer ends."""

    tensors: Tensors
    works: list[dist.Work]

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(kw_only=True)
class _InFlight:
    """Holds the tensors that a stage keeps of a micro-batch from its forward to its backward.

    Attributes:
        received (`Tensors`, *optional*): the state before the stage, leaves; None at the first stage.
        result (`Tensors`): the state after the stage, or the last stage's loss and logits; `sent` transfers it.
        weight_gradients (`Callable`, *optional*): the second half of a split backward.
    """

    received: Tensors | None
    result: Tensors
    sent: _Transfer | None = None
    weight_gradients: Callable[[], None] | None = None


@dataclass(kw_only=True)
class PipelineStep:
    """Holds the state of one step; keys are (stage, micro-batch).

    Attributes:
        order (`Sequence[Action]`): this rank's actions.
        has_backward (`bool`): False in evaluation, which keeps nothing for a backward.
        keeps_outputs (`bool`): whether outputs of the last stage are kept whole, not their losses alone.
        outputs (`dict[int, ModelOutput]`): the last stage's output of each micro-batch, with its graph.
    """

    batches: Sequence[MicroBatch]
    order: Sequence[Action]
    has_backward: bool = True
    keeps_outputs: bool = True
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    arriving: dict[tuple[Work, int, int], _Transfer] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    sends: deque[_Transfer] = field(default_factory=deque)
    outputs: dict[int, ModelOutput] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)

    def ordered_outputs(self) -> list[ModelOutput]:
        """Returns the outputs of all micro-batches in order; none on the ranks of other stages."""
        return [self.outputs[index] for index in sorted(self.outputs)]


class Pipeline:
    """Runs this rank's part of a pipeline.

    Args:
        group (`ProcessGroup`): the ranks with this rank's index in each pipeline rank.
        pairs (`dict[int, Sequence[ProcessGroup]]`): for each pipeline rank that this one talks to, the two ranks with
            this rank's index. One group is for activations, one for gradients. No transfer waits for another pair or
            direction: one communicator of a GPU runs its transfers in turn, and some schedules would stand still.
        state_features (`Mapping[str, int]`): the features of the hidden states of each stack.
        dtype (`torch.dtype`): the format of these tensors.
    """

    def __init__(
        self,
        shape: PipelineShape,
        pipeline_rank: int,
        stages: dict[int, StageModule],
        units: ShardedUnits,
        runner: ModelRunner,
        group: dist.ProcessGroup,
        pairs: dict[int, Sequence[dist.ProcessGroup]],
        state_features: Mapping[str, int],
        dtype: torch.dtype,
        timeline: Timeline,
    ):
        self.shape, self.pipeline_rank, self.stages, self.units = shape, pipeline_rank, stages, units
        self.runner, self.timeline = runner, timeline
        self.group, self.pairs = group, pairs
        self.state_features, self.dtype = state_features, dtype

    @classmethod
    def from_plan(
        cls,
        resolved: ResolvedPlan,
        world: WorldMesh,
        stages: dict[int, StageModule],
        units: ShardedUnits,
        runner: ModelRunner,
        state_features: Mapping[str, int],
        timeline: Timeline,
    ) -> Pipeline:
        """Makes this rank's part of a plan's pipeline, whose groups were prepared."""
        groups = resolved.plan.rank_groups
        own = resolved.pipeline.pipeline_rank_of_stage[next(iter(stages))]
        pairs = {}
        for pair in resolved.neighbours:
            if own in pair:
                peer = pair[1] if own == pair[0] else pair[0]
                pairs[peer] = world.joined([groups[index] for index in pair])
        return cls(
            resolved.pipeline,
            own,
            stages=stages,
            units=units,
            runner=runner,
            group=world.joined(groups)[0],
            pairs=pairs,
            state_features=state_features,
            dtype=DTYPES[resolved.precision.activations],
            timeline=timeline,
        )

    @property
    def has_last(self) -> bool:
        """Returns True on ranks of the last stage, which makes losses and logits."""
        return self.shape.stages - 1 in self.stages

    def train(self, batches: Sequence[MicroBatch], between: Callable[[], None] | None = None) -> list[torch.Tensor]:
        """Runs forward and backward of a step's micro-batches, which are the same on all ranks but differ in shape;
        collective. Returns this rank's parts of the losses, detached, on the last stage's ranks alone. `between` is
        called after the last forward, of a schedule that runs all forwards first.
        """
        step = self._step(batches, keeps_outputs=False)
        order = step.order
        if between is not None:
            self._run(step, [action for action in order if action.work in FORWARD_WORKS])
            between()
            order = [action for action in order if action.work not in FORWARD_WORKS]
        self._run(step, order)
        self.units.finish_step()
        return step.losses

    def begin(self, batches: Sequence[MicroBatch]) -> PipelineStep:
        """Runs the forward of a step's micro-batches; [`Pipeline.finish`] runs the backward. Collective. All
        micro-batches are in flight at once, whatever the schedule.
        """
        step = self._step(batches)
        self._run(step, [action for action in step.order if action.work in FORWARD_WORKS])
        return step

    def finish(self, step: PipelineStep, gradients: Mapping[int, Tensors]) -> None:
        """Runs the backward of a step; collective. `gradients` are those of the last stage's losses, if there are any,
        and logits, by micro-batch. No backward is split: that of another step may follow, whose weights a split one
        would have freed.
        """
        for index, tensors in gradients.items():
            given = _Transfer(tensors=tensors, works=[])
            step.arriving[Work.RECEIVE_BACKWARD, self.shape.stages - 1, index] = given
        left_out = {*FORWARD_WORKS, Work.BACKWARD_WEIGHT}
        self._run(step, [action for action in step.order if action.work not in left_out], splits=False)
        self.units.finish_step()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> list[ModelOutput]:
        """Runs the forward of micro-batches; returns outputs on the last stage's ranks alone. Collective."""
        step = self._step(batches, has_backward=False)
        self._run(step, [action for action in step.order if action.work in FORWARD_WORKS])
        return step.ordered_outputs()

    def _step(self, batches: Sequence[MicroBatch], **options: bool) -> PipelineStep:
        order = actions(self.shape, len(batches))[self.pipeline_rank]
        return PipelineStep(batches=batches, order=order, left=dict.fromkeys(self.stages, len(batches)), **options)

    def _run(self, step: PipelineStep, order: Sequence[Action], splits: bool = True) -> None:
        work_of = {
            Work.FORWARD: self._forward,
            Work.BACKWARD: self._backward,
            Work.BACKWARD_INPUT: self._backward_input if splits else self._backward,
            Work.BACKWARD_WEIGHT: self._backward_weight,
            Work.SEND_FORWARD: self._send_forward,
            Work.SEND_BACKWARD: self._send_backward,
            Work.RECEIVE_FORWARD: self._receive,
            Work.RECEIVE_BACKWARD: self._receive,
        }
        for action in order:
            work_of[action.work](step, action)
        while step.sends:
            self._wait(step.sends.popleft())

    # ---- Compute ----

    def _forward(self, step: PipelineStep, action: Action) -> None:
        key, batch = (action.stage, action.micro_batch), step.batches[action.micro_batch]
        stage, received, state = self.stages[action.stage], self._awaited(step, Work.RECEIVE_FORWARD, action), None
        if received is not None:
            received = tuple(tensor.requires_grad_(torch.is_grad_enabled()) for tensor in received)
            names = stage.resolved.receives
            state = LayerState.in_layout(batch.ends.boundary, dict(zip(names, received, strict=True)))
        with self.timeline.span(action):
            output = self.runner.run(stage, batch, state)
            if not stage.is_last:
                result = tuple(output.tensors[name].to(self.dtype) for name in stage.resolved.sends)
            else:
                roots = (output.loss, output.logits) if step.keeps_outputs else (output.loss,)
                result = tuple(tensor for tensor in roots if tensor is not None)
                if step.keeps_outputs:
                    step.outputs[action.micro_batch] = output
                else:
                    step.losses.append(output.loss.detach())
                if not step.has_backward:
                    return
        step.in_flight[key] = _InFlight(received=received, result=result)
        if action.stage + 1 in self.stages:  # the next stage is on the same ranks
            local = _Transfer(tensors=_detached(result), works=[])
            step.arriving[Work.RECEIVE_FORWARD, action.stage + 1, action.micro_batch] = local
            if not step.has_backward:
                del step.in_flight[key]

    def _backward(self, step: PipelineStep, action: Action) -> None:
        kept, gradients = self._begin_backward(step, action)
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=step.left[action.stage] == 1, stage=action.stage)
            self._full_backward(kept, gradients)
        step.left[action.stage] -= 1
        self._hand_back(step, action, kept)

    def _full_backward(self, kept: _InFlight, gradients: Tensors | None) -> None:
        found = zip(kept.result, gradients or (None,), strict=True)
        found = [(tensor, gradient) for tensor, gradient in found if tensor.requires_grad]
        if found:  # not if all of the stage is frozen
            torch.autograd.backward(*zip(*found, strict=True))

    def _backward_input(self, step: PipelineStep, action: Action) -> None:
        kept, gradients = self._begin_backward(step, action)
        stage = self.stages[action.stage]
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=False, stage=action.stage, keep_gradients=True)
            if kept.received is None:
                # No stage waits for the first stage's input gradient: all of its backward comes later.
                kept.weight_gradients = lambda: self._full_backward(kept, gradients)
            else:
                weights = [weight for weight in stage.parameters() if weight.requires_grad]
                found = input_gradients(kept.result, gradients, kept.received, weights)
                kept.weight_gradients = lambda: weight_gradients(weights, found)
        step.in_flight[action.stage, action.micro_batch] = kept
        self._hand_back(step, action, kept)

    def _backward_weight(self, step: PipelineStep, action: Action) -> None:
        kept = step.in_flight.pop((action.stage, action.micro_batch))
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=False, stage=action.stage, keep_gradients=True)
            # Dropped first: it refers to `kept`, and the garbage collector alone would find the cycle.
            compute, kept.weight_gradients = kept.weight_gradients, None
            compute()
            del compute
            self.units.collect(action.stage)
            step.left[action.stage] -= 1
            if step.left[action.stage] == 0:
                self.units.reduce_kept_gradients(action.stage)

    def _begin_backward(self, step: PipelineStep, action: Action) -> tuple[_InFlight, Tensors | None]:
        kept = step.in_flight.pop((action.stage, action.micro_batch))
        gradients = self._awaited(step, Work.RECEIVE_BACKWARD, action)
        if kept.sent is not None:
            kept.sent.wait()  # over already: the gradient depends on it
            kept.sent = None
        return kept, gradients

    def _hand_back(self, step: PipelineStep, action: Action, kept: _InFlight) -> None:
        """Takes the gradients of the received tensors, for the stage before."""
        if kept.received is None:
            return
        gradients = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received)
        for leaf in kept.received:
            leaf.grad = None
        if action.stage - 1 in self.stages:
            local = _Transfer(tensors=gradients, works=[])
            step.arriving[Work.RECEIVE_BACKWARD, action.stage - 1, action.micro_batch] = local
        else:
            step.gradients[action.stage, action.micro_batch] = gradients

    # ---- Transfers ----

    def _receive(self, step: PipelineStep, action: Action) -> None:
        batch, stage = step.batches[action.micro_batch], self.stages[action.stage].resolved
        forward, tensors = action.work is Work.RECEIVE_FORWARD, []
        for name in stage.receives if forward else stage.sends:
            part = batch.streams[name].grid.rectangle(batch.ends.boundary, self.runner.mesh.index)
            shape = (*part.shape, self.state_features[name])
            tensors.append(torch.empty(shape, dtype=self.dtype, device=batch.device))
        peer = self.shape.pipeline_rank_of_stage[action.stage + (-1 if forward else 1)]
        transfer = self._transfer(dist.irecv, tensors, 0 if forward else 1, peer)
        step.arriving[action.work, action.stage, action.micro_batch] = transfer

    def _awaited(self, step: PipelineStep, work: Work, action: Action) -> Tensors | None:
        """Waits for the tensors that an action needs; None if it needs none."""
        transfer = step.arriving.pop((work, action.stage, action.micro_batch), None)
        if transfer is None:
            return None
        with self.timeline.span(Action(work, action.stage, action.micro_batch)):
            return self._wait(transfer)

    def _wait(self, transfer: _Transfer) -> Tensors:
        """Waits for a transfer, and measures how long in a step of training."""
        if not transfer.works:  # between stages of this rank
            return transfer.tensors
        with self.timeline.waits.wait():
            return transfer.wait()

    def _send_forward(self, step: PipelineStep, action: Action) -> None:
        kept = step.in_flight[action.stage, action.micro_batch]
        with self.timeline.span(action):
            peer = self.shape.pipeline_rank_of_stage[action.stage + 1]
            transfer = self._transfer(dist.isend, _detached(kept.result), 0, peer)
            if not step.has_backward:
                del step.in_flight[action.stage, action.micro_batch]
                self._limit_sends(step, transfer)
            else:
                kept.sent = transfer

    def _send_backward(self, step: PipelineStep, action: Action) -> None:
        with self.timeline.span(action):
            gradients = step.gradients.pop((action.stage, action.micro_batch))
            peer = self.shape.pipeline_rank_of_stage[action.stage - 1]
            self._limit_sends(step, self._transfer(dist.isend, gradients, 1, peer))

    def _limit_sends(self, step: PipelineStep, transfer: _Transfer) -> None:
        step.sends.append(transfer)
        while len(step.sends) > SENDS_UNDER_WAY:
            self._wait(step.sends.popleft())

    def _transfer(self, operation: Callable, tensors: Tensors, direction: int, peer: int) -> _Transfer:
        """Starts one message for each tensor to or from a pipeline rank."""
        group, index = self.pairs[peer][direction], 0 if peer < self.pipeline_rank else 1
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        messages = [dist.P2POp(operation, tensor, group=group, group_peer=index) for tensor in tensors]
        return _Transfer(tensors=tensors, works=dist.batch_isend_irecv(messages))


def _detached(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach() for tensor in tensors)
