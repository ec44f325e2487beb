# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The search problem of one pipeline degree, micro-batch count and schedule, as arrays: nothing here knows of models.

Layers 0 to L - 1 are cut into p consecutive runs, the stages. Every layer gets one option of its kind, and neighbours
of different layouts pay a move. A stage adds up two costs of its layers and a memory, and takes the largest of their
working memories:

    A_i = stage + sum of layers + moves        B_i likewise
    memory_i = stage + sum of (state + in flight * activation - at once * shared) + largest working memory  <= budget
    minimise the largest, over stages i, of
        sum of A_j up to j = i  +  B_i
        sum of A_j up to j = i  +  B_i - k_i A_i / 3  +  sum of A_j behind i
        sum of A_j up to j = i  +  B_i - k_i A_i      +  2 sum of A_j behind i

A is what one of the m micro-batches takes on a stage, and B what the others do, and what follows once behind the last.
These are the paths of 1F1B through its slowest stage, in which k_i = p - 1 - i micro-batches go forward before the
first comes back. Those behind it may be so quick that it never waits for them. It may wait for its first gradient
while they work, and have k_i forwards, taken to be a third of A each, less to do behind that. Or it waits for its last
one too, while k_i micro-batches come back. Of stages that are alike the longest of the three is the pipeline's
`sum A + max B`, which counts too much where one is much slower than those behind it. Where stages are interleaved, and
with fewer micro-batches than stages, the cost is that sum: no k, and the A behind i counts once. Of GPipe it is that
sum too, or what 1F1B takes if that is more, because a stage waits for its gradients there as well.

Costs are integers (picoseconds), memory is bytes: sums are exact in any order, so that equal plans cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


Numbers = np.ndarray | int


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices for one place: arrays of one length; `layout` is an index of the branch's layouts."""

    a: np.ndarray
    b: np.ndarray
    memory: np.ndarray
    working: np.ndarray
    layout: np.ndarray

    def __len__(self) -> int:
        return len(self.a)


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """
    One problem; see the module.

    Args:
        kinds (`np.ndarray`): (L,) kind of each layer.
        a, b, state, activation, working (`np.ndarray`): (K, S) of each kind under each option; int64.
        allowed (`np.ndarray`): (K, S) whether the kind can have it.
        layout (`np.ndarray`): (S,) index of the layout of each option.
        move_a, move_b (`np.ndarray`): (Y, Y) from one layout to the next.
        boundary (`int`): the layout in which hidden states go from stage to stage.
        in_flight (`np.ndarray`): (p,) micro-batches whose activations a stage keeps at most.
        shared (`np.ndarray`): (K, S) bytes, of those of a layer's state and of one micro-batch's activations, that are
            first the one and then the other: gradients take the place of activations.
        at_once (`np.ndarray`): (p,) how often they do in a stage, at most as often as it has activations in flight.
        stage_a, stage_b, stage_memory (`np.ndarray`): (p,) of each stage, whatever its layers.
        starts, finishes ([`Options`]): of the embedding, in the first stage, and of the head, in the last.
        budget (`int`): bytes of a rank.
        ahead (`np.ndarray`): (p,) k; B is at least so many times A.
        waits (`tuple[int, int, int]`): how often A of those behind a stage counts on each of its paths.
    """

    kinds: np.ndarray
    a: np.ndarray
    b: np.ndarray
    state: np.ndarray
    activation: np.ndarray
    working: np.ndarray
    allowed: np.ndarray
    layout: np.ndarray
    move_a: np.ndarray
    move_b: np.ndarray
    boundary: int
    in_flight: np.ndarray
    shared: np.ndarray
    at_once: np.ndarray
    stage_a: np.ndarray
    stage_b: np.ndarray
    stage_memory: np.ndarray
    starts: Options
    finishes: Options
    budget: int
    ahead: np.ndarray
    waits: tuple[int, int, int]

    @property
    def stages(self) -> int:
        """p."""
        return len(self.in_flight)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.kinds)

    def paths(self, stage: int, a: Numbers, b: Numbers) -> tuple[Numbers, ...]:
        """What a stage of so much A and B has of each path itself; fractions are rounded up."""
        ahead = int(self.ahead[stage]) * a
        return a + b, a + b - ahead // 3, a + b - ahead

    def beside_waiting(self, ahead: int) -> SearchProblem:
        """With B less so many times A, of which and A all paths of a stage with this k are sums of multiples."""
        starts, finishes = (replace(one, b=one.b - ahead * one.a) for one in (self.starts, self.finishes))
        return replace(
            self,
            b=self.b - ahead * self.a,
            move_b=self.move_b - ahead * self.move_a,
            stage_b=self.stage_b - ahead * self.stage_a,
            starts=starts,
            finishes=finishes,
        )

    def detours(self) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y, 2) how much more A and B it costs, at most, to come to the first layout, or to go on from it, than
        with the second."""
        moves = np.stack([self.move_a, self.move_b], axis=2)
        return (moves[:, :, None] - moves[:, None]).max(axis=0), (moves[:, None] - moves[None]).max(axis=2)

    def worth_having(self) -> np.ndarray:
        """(S,) options without which the best solution costs as much.

        One goes if another one, even if that is in another layout with the costliest moves there and back, costs no
        more and needs no more memory in any layer.
        """
        waiting = self.beside_waiting(int(self.ahead.max()))
        extra = sum(waiting.detours())
        columns = ("state", "activation", "least", "working")
        kept = np.ones(len(self.layout), dtype=bool)
        for option in range(len(kept)):
            more = extra[self.layout, self.layout[option]]
            better = self.a + more[:, 0] <= self.a[:, [option]]
            better &= waiting.b + more[:, 1] <= waiting.b[:, [option]]
            for name in columns:
                column = getattr(self, name)
                better &= column <= column[:, [option]]
            better = (better & (self.allowed | ~self.allowed[:, [option]])).all(axis=0) & kept
            better[option] = False
            kept[option] = not better.any()
        return kept

    def restricted(self, kept: np.ndarray) -> SearchProblem:
        """With some of the options only."""
        columns = ("a", "b", "state", "activation", "shared", "working", "allowed")
        fewer = {name: getattr(self, name)[:, kept] for name in columns}
        return replace(self, **fewer, layout=self.layout[kept])

    @property
    def least(self) -> np.ndarray:
        """(K, S) bytes of a layer and of one micro-batch, where most gradients take the place of activations.

        What a layer adds to any stage is a sum of multiples, none negative, of this, its state and its activations.
        """
        return self.state + self.activation - max(1, int(self.at_once.max())) * self.shared

    def memory(self, stages: int | np.ndarray) -> np.ndarray:
        """(K, S) or (Q, K, S) bytes that a layer adds to a stage, or to each of (Q,), without its working memory."""
        flight, at_once = (values[stages, ..., None, None] for values in (self.in_flight, self.at_once))
        return self.state + flight * self.activation - at_once * self.shared


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A solution: `bounds` (p + 1 layer indices), an option of each layer, of the embedding and of the head."""

    bounds: tuple[int, ...]
    options: tuple[int, ...]
    start: int
    finish: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a solution costs: integers, of each stage where there are several."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    memory: tuple[int, ...]

    cost: int


def score(branch: SearchProblem, choice: Choice) -> Score:
    """Adds a solution up, one layer after the other."""
    a, b, memory = [], [], []
    for stage in range(branch.stages):
        first, last = stage == 0, stage == branch.stages - 1
        cost_a, cost_b = int(branch.stage_a[stage]), int(branch.stage_b[stage])
        held, working, layout = int(branch.stage_memory[stage]), 0, branch.boundary
        if first:
            start = branch.starts
            cost_a += int(start.a[choice.start])
            cost_b += int(start.b[choice.start])
            held += int(start.memory[choice.start])
            working, layout = int(start.working[choice.start]), int(start.layout[choice.start])
        for layer in range(choice.bounds[stage], choice.bounds[stage + 1]):
            kind, option = branch.kinds[layer], choice.options[layer]
            behind = int(branch.layout[option])
            cost_a += int(branch.move_a[layout, behind] + branch.a[kind, option])
            cost_b += int(branch.move_b[layout, behind] + branch.b[kind, option])
            held += int(branch.memory(stage)[kind, option])
            working, layout = max(working, int(branch.working[kind, option])), behind
        behind = int(branch.finishes.layout[choice.finish]) if last else branch.boundary
        cost_a += int(branch.move_a[layout, behind])
        cost_b += int(branch.move_b[layout, behind])
        if last:
            finish = branch.finishes
            cost_a += int(finish.a[choice.finish])
            cost_b += int(finish.b[choice.finish])
            held += int(finish.memory[choice.finish])
            working = max(working, int(finish.working[choice.finish]))
        a.append(cost_a)
        b.append(cost_b)
        memory.append(held + working)
    cost = max(
        sum(a[:stage]) + own + waits * sum(a[stage + 1 :])
        for stage in range(branch.stages)
        for own, waits in zip(branch.paths(stage, a[stage], b[stage]), branch.waits, strict=True)
    )
    return Score(a=tuple(a), b=tuple(b), memory=tuple(memory), cost=cost)
