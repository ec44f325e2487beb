# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""States of two tensors: moved between layouts and back, and handed from pipeline stage to pipeline stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from collective_counts import count_collectives
from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.plan.layout import Grid, Layout
from galvatron_hf.plan.schedule import PipelineShape
from meshes import stage_mesh
from ranks import run_ranks


ROWS, LENGTH = 4, 8


def whole(features: int, first: int) -> torch.Tensor:
    """Returns different numbers, [ROWS, LENGTH, features]."""
    count = ROWS * LENGTH * features
    return torch.arange(first, first + count, dtype=torch.float64).view(ROWS, LENGTH, features)


def part(tensor: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """Returns a rank's part, by fractions."""
    row, position = divmod(index // layout.replicas, layout.positions)
    rows, length = ROWS // layout.data, LENGTH // layout.positions
    return tensor[row * rows : (row + 1) * rows, position * length : (position + 1) * length]


def test_each_tensor_comes_from_its_own_layout():
    start = {"hidden": Layout(4), "encoder": Layout(1, 4, 1)}
    wanted = {"hidden": whole(3, 1), "encoder": whole(2, 1000)}
    target = Layout(2, 1, 2)

    def work():
        index, mesh = dist.get_rank(), stage_mesh(range(4), (2, 4))
        leaves = {name: part(wanted[name], start[name], index).clone().requires_grad_() for name in start}
        grids = {"hidden": Grid(ROWS, LENGTH), "encoder": Grid(ROWS, LENGTH)}
        where = dict(streams={name: SimpleNamespace(grid=grid) for name, grid in grids.items()}, mesh=mesh)
        with count_collectives() as log:
            moved = LayerState(leaves, start).redistribute(target, **where)
        assert log.count() == 2 and list(moved.tensors) == ["hidden", "encoder"]
        for name, tensor in moved.tensors.items():
            assert moved.layouts[name] == target and torch.equal(tensor, part(wanted[name], target, index))
        back = moved.redistribute(Layout(4), **where)
        loss = sum((tensor * part(wanted[name], Layout(4), index)).sum() for name, tensor in back.tensors.items())
        loss.backward()
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, part(wanted[name], start[name], index))

    run_ranks(work, 4)


class Runner:
    """Runs three stages: hidden = first * x; hidden * second, the extra tensor goes on; loss = sum(hidden * extra)."""

    def __init__(self, weights: list[torch.Tensor]):
        self.weights, self.mesh = weights, SimpleNamespace(index=0)

    def run(self, stage, batch, received):
        if received is None:
            tensors = {"hidden": batch.inputs * self.weights[0], "extra": batch.inputs[..., :2] * 3.0}
            return LayerState.in_layout(batch.ends.boundary, tensors)
        if not stage.is_last:
            tensors = {"hidden": received.tensors["hidden"] * self.weights[1], "extra": received.tensors["extra"]}
            return LayerState.in_layout(batch.ends.boundary, tensors)
        states = received.tensors
        loss = (states["hidden"].sum(-1) * states["extra"].prod(-1)).sum() * self.weights[2]
        return CausalLMOutput(loss=loss, logits=states["hidden"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_every_tensor_crosses_the_boundary_with_its_gradient(schedule):
    shape = PipelineShape(schedule=schedule, pipeline_rank_of_stage=(0, 1, 2))
    inputs = [torch.randn(1, LENGTH, 3, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    weights = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.5, -2.0, 3.0)]
    hidden = [x * weights[0] * weights[1] for x in inputs]
    losses = [
        (h.sum(-1) * (x[..., :2] * 3.0).prod(-1)).sum() * weights[2] for h, x in zip(hidden, inputs, strict=True)
    ]
    sum(losses).backward()

    def work():
        rank = dist.get_rank()
        pairs = {}
        for other in (0, 1):
            for direction in range(2):
                group = dist.new_group([other, other + 1])
                if rank in (other, other + 1):
                    pairs.setdefault(2 * other + 1 - rank, [None, None])[direction] = group
        own = [weight.detach().clone().requires_grad_() for weight in weights]
        passed = SimpleNamespace(receives=("hidden", "extra"), sends=("hidden", "extra"))
        stage = SimpleNamespace(is_last=rank == 2, parameters=lambda: [own[rank]], resolved=passed)
        ignore = lambda *args, **kwargs: None  # noqa: E731
        pipeline = Pipeline(
            shape,
            rank,
            stages={rank: stage},
            units=SimpleNamespace(
                begin_micro_batch=ignore, finish_step=ignore, collect=ignore, reduce_kept_gradients=ignore
            ),
            runner=Runner(own),
            group=dist.group.WORLD,
            pairs=pairs,
            state_features={"hidden": 3, "extra": 2},
            dtype=torch.float64,
            timeline=Timeline(torch.device("cpu")),
        )
        batches = [
            SimpleNamespace(
                inputs=x,
                device=x.device,
                ends=SimpleNamespace(boundary=Layout(1)),
                streams=dict.fromkeys(passed.sends, SimpleNamespace(grid=Grid(1, LENGTH))),
            )
            for x in inputs
        ]
        found = pipeline.train(batches)
        assert own[rank].grad.item() == pytest.approx(weights[rank].grad.item(), rel=1e-12)
        outputs = pipeline.evaluate(batches)
        if rank == 2:
            assert [loss.item() for loss in found] == pytest.approx([loss.item() for loss in losses], rel=1e-12)
            assert all(torch.allclose(o.logits, h, rtol=1e-12) for o, h in zip(outputs, hidden, strict=True))

    run_ranks(work, 3)
