# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline schedule on this rank's stages.

The orders of work are those of `torch.distributed.pipelining` (see `galvatron_hf/plan/schedule.py`), and so is the
split of the backward for zero-bubble schedules. Its own runtime is not used: it keeps every receive buffer, send and
loss graph of a step, wants one shape for all micro-batches, and treats all FSDP2 units of a stage alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.pipeline.forward import ModelRunner
from galvatron_hf.parallel.pipeline.stage import StageModule
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions
from galvatron_hf.utils.compat import input_gradients, weight_gradients


# Gradients (in evaluation, activations) that may be on their way before a rank waits for the oldest of them.
SENDS_UNDER_WAY = 2


@dataclass(kw_only=True)
class _Transfer:
    """A tensor on its way, with what has to live as long."""

    tensor: torch.Tensor
    works: list[dist.Work]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


@dataclass(kw_only=True)
class _InFlight:
    """What a stage keeps of a micro-batch from its forward to its backward."""

    received: torch.Tensor | None
    result: torch.Tensor
    sent: _Transfer | None = None
    weight_gradients: Callable[[], None] | None = None


@dataclass(kw_only=True)
class _Step:
    """The state of one step."""

    batches: Sequence[MicroBatch]
    loss_of: Callable[[int, CausalLMOutput], torch.Tensor] | None
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    arriving: dict[tuple[Work, int, int], _Transfer] = field(default_factory=dict)
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    leaving: deque[_Transfer] = field(default_factory=deque)
    outputs: dict[int, CausalLMOutput] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        shape ([`PipelineShape`]): schedule and stages.
        place (`int`): index of this rank's list.
        stages (`dict[int, StageModule]`): this rank's stages.
        units ([`ShardedUnits`]): their units.
        forward ([`ModelRunner`]): runs a stage.
        group (`ProcessGroup`): the ranks with this rank's index in each list.
        pairs (`dict[int, Sequence[ProcessGroup]]`): for each list that this one talks to, the two ranks with this
            rank's index, once for activations and once for gradients. Nothing waits for another pair or direction: on
            one communicator of a GPU transfers run one after the other, and some schedules would stand still.
        hidden_size (`int`): features between layers.
        dtype (`torch.dtype`): their format.
        timeline ([`Timeline`]): told when each action begins and ends.
    """

    def __init__(
        self,
        shape: PipelineShape,
        place: int,
        stages: dict[int, StageModule],
        units: ShardedUnits,
        forward: ModelRunner,
        group: dist.ProcessGroup,
        pairs: dict[int, Sequence[dist.ProcessGroup]],
        hidden_size: int,
        dtype: torch.dtype,
        timeline: Timeline,
    ):
        self.shape, self.place, self.stages, self.units = shape, place, stages, units
        self.forward, self.timeline = forward, timeline
        self.group, self.pairs = group, pairs
        self.hidden_size, self.dtype = hidden_size, dtype

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, and with it losses and logits."""
        return self.shape.stages - 1 in self.stages

    def train(
        self, batches: Sequence[MicroBatch], loss_of: Callable[[int, CausalLMOutput], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Forward and backward of a step's micro-batches; collective.

        Args:
            batches (`Sequence[MicroBatch]`): the same on all ranks; shapes may differ.
            loss_of (`Callable`): this rank's part of a micro-batch's loss, from its index and the last stage's output.

        Returns:
            `list[torch.Tensor]`: the losses, detached; empty where the last stage is not.
        """
        step = _Step(batches=batches, loss_of=loss_of, left=dict.fromkeys(self.stages, len(batches)))
        self._run(step, actions(self.shape, len(batches))[self.place])
        self.units.finish_step()
        return step.losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> list[CausalLMOutput]:
        """Forward of micro-batches; collective.

        Returns:
            `list[CausalLMOutput]`: the last stage's outputs; empty where it is not.
        """
        step = _Step(batches=batches, loss_of=None)
        forward = (Work.FORWARD, Work.SEND_FORWARD, Work.RECEIVE_FORWARD)
        order = actions(self.shape, len(batches))[self.place]
        self._run(step, [action for action in order if action.work in forward])
        return [step.outputs[index] for index in sorted(step.outputs)]

    def _run(self, step: _Step, order: Sequence[Action]) -> None:
        work_of = {
            Work.FORWARD: self._forward,
            Work.BACKWARD: self._backward,
            Work.BACKWARD_INPUT: self._backward_input,
            Work.BACKWARD_WEIGHT: self._backward_weight,
            Work.SEND_FORWARD: self._send_forward,
            Work.SEND_BACKWARD: self._send_backward,
            Work.RECEIVE_FORWARD: self._receive,
            Work.RECEIVE_BACKWARD: self._receive,
        }
        for action in order:
            work_of[action.work](step, action)
        while step.leaving:
            step.leaving.popleft().wait()

    # ---- Compute ----

    def _forward(self, step: _Step, action: Action) -> None:
        key, batch = (action.stage, action.micro_batch), step.batches[action.micro_batch]
        received = self._awaited(step, Work.RECEIVE_FORWARD, action)
        if received is not None:
            received.requires_grad_(torch.is_grad_enabled())
        with self.timeline.span(action):
            result = self.forward.run(self.stages[action.stage], batch, received)
            if isinstance(result, CausalLMOutput):
                if step.loss_of is None:
                    step.outputs[action.micro_batch] = result
                    return
                result = step.loss_of(action.micro_batch, result)
                step.losses.append(result.detach())
            else:
                result = result.to(self.dtype)
        step.in_flight[key] = _InFlight(received=received, result=result)
        if action.stage + 1 in self.stages:  # a neighbour on the same ranks
            handed = _Transfer(tensor=result.detach(), works=[])
            step.arriving[Work.RECEIVE_FORWARD, action.stage + 1, action.micro_batch] = handed
            if step.loss_of is None:
                del step.in_flight[key]

    def _backward(self, step: _Step, action: Action) -> None:
        kept, gradient = self._begin_backward(step, action)
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=step.left[action.stage] == 1, stage=action.stage)
            self._full_backward(kept, gradient)
        self._end_backward(step, action, kept)

    def _full_backward(self, kept: _InFlight, gradient: torch.Tensor | None) -> None:
        if kept.result.requires_grad:  # not if all of the stage is frozen
            torch.autograd.backward(kept.result, gradient)

    def _backward_input(self, step: _Step, action: Action) -> None:
        kept, gradient = self._begin_backward(step, action)
        stage = self.stages[action.stage]
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=False, stage=action.stage, keep_gradients=True)
            if kept.received is None:
                # Nobody waits for the first stage's input gradient: all of its backward comes later.
                kept.weight_gradients = lambda: self._full_backward(kept, gradient)
            else:
                weights = [weight for weight in stage.parameters() if weight.requires_grad]
                found = input_gradients(kept.result, gradient, kept.received, weights)
                kept.weight_gradients = lambda: weight_gradients(weights, found)
        step.in_flight[action.stage, action.micro_batch] = kept
        self._hand_back(step, action, kept)

    def _backward_weight(self, step: _Step, action: Action) -> None:
        kept = step.in_flight.pop((action.stage, action.micro_batch))
        with self.timeline.span(action):
            self.units.begin_micro_batch(last=False, stage=action.stage, keep_gradients=True)
            # Let go of first: it holds what is kept, and only the garbage collector would find the circle.
            compute, kept.weight_gradients = kept.weight_gradients, None
            compute()
            del compute
            self.units.collect(action.stage)
            step.left[action.stage] -= 1
            if step.left[action.stage] == 0:
                self.units.reduce_kept_gradients(action.stage)

    def _begin_backward(self, step: _Step, action: Action) -> tuple[_InFlight, torch.Tensor | None]:
        kept = step.in_flight.pop((action.stage, action.micro_batch))
        gradient = self._awaited(step, Work.RECEIVE_BACKWARD, action)
        if kept.sent is not None:
            kept.sent.wait()  # it has arrived, or there would be no gradient
            kept.sent = None
        return kept, gradient

    def _end_backward(self, step: _Step, action: Action, kept: _InFlight) -> None:
        step.left[action.stage] -= 1
        self._hand_back(step, action, kept)

    def _hand_back(self, step: _Step, action: Action, kept: _InFlight) -> None:
        """Takes the gradient of what was received, for the stage before."""
        if kept.received is None:
            return
        gradient = kept.received.grad
        gradient = torch.zeros_like(kept.received) if gradient is None else gradient
        kept.received.grad = None
        if action.stage - 1 in self.stages:
            handed = _Transfer(tensor=gradient, works=[])
            step.arriving[Work.RECEIVE_BACKWARD, action.stage - 1, action.micro_batch] = handed
        else:
            step.gradients[action.stage, action.micro_batch] = gradient

    # ---- Transfers ----

    def _receive(self, step: _Step, action: Action) -> None:
        batch = step.batches[action.micro_batch]
        part = batch.grid.rectangle(batch.boundary, self.forward.mesh.index)
        tensor = torch.empty(*part.shape, self.hidden_size, dtype=self.dtype, device=batch.input_ids.device)
        forward = action.work is Work.RECEIVE_FORWARD
        peer = self.shape.rank_group_of_stage[action.stage + (-1 if forward else 1)]
        works = self._transfer(dist.irecv, tensor, 0 if forward else 1, peer)
        step.arriving[action.work, action.stage, action.micro_batch] = _Transfer(tensor=tensor, works=works)

    def _awaited(self, step: _Step, work: Work, action: Action) -> torch.Tensor | None:
        """What has been received for an action, or None where nothing comes."""
        transfer = step.arriving.pop((work, action.stage, action.micro_batch), None)
        if transfer is None:
            return None
        with self.timeline.span(Action(work, action.stage, action.micro_batch)):
            return transfer.wait()

    def _send_forward(self, step: _Step, action: Action) -> None:
        kept = step.in_flight[action.stage, action.micro_batch]
        with self.timeline.span(action):
            tensor = kept.result.detach().contiguous()
            works = self._transfer(dist.isend, tensor, 0, self.shape.rank_group_of_stage[action.stage + 1])
            transfer = _Transfer(tensor=tensor, works=works)
            if step.loss_of is None:
                del step.in_flight[action.stage, action.micro_batch]
                self._leave(step, transfer)
            else:
                kept.sent = transfer

    def _send_backward(self, step: _Step, action: Action) -> None:
        with self.timeline.span(action):
            tensor = step.gradients.pop((action.stage, action.micro_batch)).contiguous()
            works = self._transfer(dist.isend, tensor, 1, self.shape.rank_group_of_stage[action.stage - 1])
            self._leave(step, _Transfer(tensor=tensor, works=works))

    def _leave(self, step: _Step, transfer: _Transfer) -> None:
        step.leaving.append(transfer)
        while len(step.leaving) > SENDS_UNDER_WAY:
            step.leaving.popleft().wait()

    def _transfer(self, operation, tensor: torch.Tensor, direction: int, peer: int) -> list[dist.Work]:
        group, index = self.pairs[peer][direction], 0 if peer < self.place else 1
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=index)])
