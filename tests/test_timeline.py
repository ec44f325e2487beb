# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The measured timeline of a pipeline: whole, in order, on clocks that agree, and a trace that viewers open."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from galvatron_hf.parallel.activation.layer_state import LayerState
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.pipeline.trace import HostClock, Span, Timeline
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions
from ranks import run_ranks
from tiny_models import FAMILIES, LAYERS, VOCABULARY


STEPS = 2
MICRO_BATCHES = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 0.02, 0.04


def make_plan(schedule: str, world_size: int, lists: int, virtual: int = 1, sharding: str = "zero2") -> ParallelPlan:
    """Returns a plan of `lists` rank lists of consecutive ranks, each with `virtual` stages of as many layers."""
    size, count = world_size // lists, lists * virtual
    vocabulary = VocabularyStrategy(sharding=sharding)
    return ParallelPlan(
        world_size=world_size,
        stacks={"decoder": LAYERS},
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        stages=tuple(
            Stage(
                ranks=tuple(range(index % lists * size, (index % lists + 1) * size)),
                layers=(index * LAYERS // count, (index + 1) * LAYERS // count),
            )
            for index in range(count)
        ),
        layers=(LayerStrategy(sharding=sharding),) * LAYERS,
        embedding=vocabulary,
        head=vocabulary,
    )


PLANS = {
    "gpipe": make_plan("gpipe", 2, 2),
    "1f1b": make_plan("1f1b", 4, 4),
    "1f1b_data": make_plan("1f1b", 4, 2, sharding="zero3"),
    "interleaved": make_plan("interleaved", 2, 2, virtual=2, sharding="replicate"),
    "zero_bubble": make_plan("zero_bubble", 2, 2),
}


class Slow(torch.autograd.Function):
    """Waits forward and backward, and changes nothing."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


def slow_down(parallel) -> None:
    """Makes every stage take equally long."""
    run = parallel.runner.run

    def slow(*args):
        result = run(*args)
        if isinstance(result, LayerState):
            slowed = {name: Slow.apply(tensor) for name, tensor in result.tensors.items()}
            return replace(result, tensors=slowed)
        return replace(result, loss=Slow.apply(result.loss))

    parallel.runner.run = slow


class Event:
    """A CUDA event on a device whose clock advances by 1 ms for each event; the time between two has 32 bits."""

    made = 0

    def __init__(self, enable_timing: bool = False):
        self.time = None

    def record(self) -> None:
        Event.made += 1
        self.time = float(Event.made)

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return float(torch.tensor(other.time - self.time))


def test_events_of_a_gpu_become_times_of_the_hosts_clock(monkeypatch):
    """Marks count from origins that change: after many of them, their times still are those of the events."""
    for name, value in (("Event", Event), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(time, "time", lambda: 100.0)  # at the first event
    timeline = Timeline(torch.device("cuda"), spans_kept=3)
    timeline.on = True
    for micro_batch in range(5000):
        with timeline.span(Action(Work.FORWARD, 0, micro_batch)):
            pass
    spans = timeline.spans
    assert [span.action.micro_batch for span in spans] == [4997, 4998, 4999]
    assert [span.begin - 100.0 for span in spans] == pytest.approx([9.995, 9.997, 9.999], abs=1e-6)
    assert [span.end - span.begin for span in spans] == pytest.approx([1e-3] * 3, abs=1e-6)


def waited_seconds() -> float:
    """Returns how long this thread has waited for a core so far; 0 if the kernel does not count it."""
    path = Path("/proc/thread-self/schedstat")
    return 1e-9 * int(path.read_text().split()[1]) if path.exists() else 0.0


def note_waits(timeline: Timeline, waits: list[float]) -> None:
    """Adds [`waited_seconds`] to a list at the begin and at the end of each span."""

    class Noting(HostClock):
        def mark(self) -> float:
            waits.append(waited_seconds())
            return super().mark()

    timeline._clock = Noting()


def traced_steps(
    plan: ParallelPlan,
    folder: str | None = None,
    slow: bool = False,
    on: bool = True,
    steps: int = STEPS,
    waits: list[float] | None = None,
) -> list[Span]:
    """Returns the spans that one rank measures in a few steps."""
    parallel = parallelize(FAMILIES["llama"].build(), plan)
    timeline = parallel.timeline
    if slow:
        slow_down(parallel)
    if waits is not None:
        note_waits(timeline, waits)
    ids = torch.randint(0, VOCABULARY, (2 * MICRO_BATCHES, 8), generator=torch.Generator().manual_seed(0))
    parallel.forward_backward({"input_ids": ids, "labels": ids})  # whatever is done once is done
    timeline.on = on
    for step in range(steps):
        timeline.step = step
        parallel.forward_backward({"input_ids": ids, "labels": ids})
    if folder is not None:
        timeline.write(folder)
    return list(timeline.spans)


@pytest.fixture(scope="module", params=list(PLANS))
def traced(request) -> tuple[ParallelPlan, list[list[Span]]]:
    plan = PLANS[request.param]
    return plan, run_ranks(traced_steps, plan.world_size, plan)


def place_of(plan: ParallelPlan, rank: int) -> int:
    lists = plan.rank_groups
    return next(place for place, ranks in enumerate(lists) if rank in ranks)


def test_computes_are_the_schedules_in_its_order_in_every_step(traced):
    plan, by_rank = traced
    for rank, spans in enumerate(by_rank):
        order = actions(PipelineShape.from_plan(plan), MICRO_BATCHES)[place_of(plan, rank)]
        expected = [action for action in order if action.work.is_compute]
        assert expected
        for step in range(STEPS):
            assert [s.action for s in spans if s.step == step and s.action.work.is_compute] == expected


def test_each_received_tensor_is_awaited_once_directly_before_its_use(traced):
    plan, by_rank = traced
    used_in = {
        Work.RECEIVE_FORWARD: {Work.FORWARD},
        Work.RECEIVE_BACKWARD: {Work.BACKWARD, Work.BACKWARD_INPUT},
    }
    for rank, spans in enumerate(by_rank):
        own = [index for index, stage in enumerate(plan.stages) if rank in stage.ranks]
        expected = Counter()
        for stage in own:
            for micro_batch in range(MICRO_BATCHES):
                if stage > 0 and stage - 1 not in own:
                    expected[Action(Work.RECEIVE_FORWARD, stage, micro_batch)] = STEPS
                if stage < len(plan.stages) - 1 and stage + 1 not in own:
                    expected[Action(Work.RECEIVE_BACKWARD, stage, micro_batch)] = STEPS
        assert Counter(span.action for span in spans if span.action.work.is_receive) == expected
        for wait, use in pairwise(spans):
            if wait.action.work.is_receive:
                assert use.action.work in used_in[wait.action.work]
                assert (use.action.stage, use.action.micro_batch) == (wait.action.stage, wait.action.micro_batch)


def test_each_send_stands_directly_after_the_compute_it_comes_from(traced):
    plan, by_rank = traced
    made_in = {
        Work.SEND_FORWARD: {Work.FORWARD},
        Work.SEND_BACKWARD: {Work.BACKWARD, Work.BACKWARD_INPUT},
    }
    for rank, spans in enumerate(by_rank):
        own = [index for index, stage in enumerate(plan.stages) if rank in stage.ranks]
        expected = Counter()
        for stage in own:
            for micro_batch in range(MICRO_BATCHES):
                if stage < len(plan.stages) - 1 and stage + 1 not in own:
                    expected[Action(Work.SEND_FORWARD, stage, micro_batch)] = STEPS
                if stage > 0 and stage - 1 not in own:
                    expected[Action(Work.SEND_BACKWARD, stage, micro_batch)] = STEPS
        assert Counter(span.action for span in spans if span.action.work in made_in) == expected
        for source, send in pairwise(spans):
            if send.action.work in made_in:
                assert source.action.work in made_in[send.action.work]
                assert (source.action.stage, source.action.micro_batch) == (send.action.stage, send.action.micro_batch)


def test_spans_of_a_rank_do_not_overlap(traced):
    _, by_rank = traced
    for spans in by_rank:
        assert all(span.begin <= span.end for span in spans)
        assert all(earlier.end <= later.begin for earlier, later in pairwise(spans))


def test_no_stage_begins_before_the_stage_it_depends_on_has_ended_on_another_rank(traced):
    """Compares times of different ranks, whose clocks agree."""
    plan, by_rank = traced
    last = len(plan.stages) - 1
    for step in range(STEPS):
        ends: dict[tuple[bool, int, int, int], float] = {}
        begins: dict[tuple[bool, int, int, int], float] = {}
        for rank, spans in enumerate(by_rank):
            for span in spans:
                action = span.action
                forward = action.work is Work.FORWARD
                if span.step == step and action.work in (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT):
                    index = plan.stages[action.stage].ranks.index(rank)
                    ends[forward, action.stage, action.micro_batch, index] = span.end
                    begins[forward, action.stage, action.micro_batch, index] = span.begin
        assert len(begins) == 2 * len(plan.stages) * MICRO_BATCHES * len(plan.stages[0].ranks)
        for (forward, stage, micro_batch, index), begin in begins.items():
            before = stage - 1 if forward else stage + 1
            if stage == last and not forward:
                assert ends[True, stage, micro_batch, index] <= begin
            elif 0 <= before:
                assert ends[forward, before, micro_batch, index] <= begin


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_spans_account_for_a_step_of_stages_that_take_equally_long(schedule, virtual):
    """Requires 90% inside spans in the median step, without the time in which a rank waits for a core."""
    plan, steps = make_plan(schedule, 2, 2, virtual, sharding="replicate"), 5

    def work() -> tuple[list[Span], list[float]]:
        waits = []
        return traced_steps(plan, slow=True, steps=steps, waits=waits), waits

    by_rank, one = run_ranks(work, 2), FORWARD_SECONDS + BACKWARD_SECONDS
    accounted = [[], []]
    for step in range(steps):
        own = [[span for span in spans if span.step == step] for spans, _ in by_rank]
        step_seconds = max(s[-1].end for s in own) - min(s[0].begin for s in own)
        assert step_seconds >= (virtual * MICRO_BATCHES + plan.world_size - 1) * one
        for rank, spans in enumerate(own):
            measured, first = sum(span.end - span.begin for span in spans), by_rank[rank][0].index(spans[0])
            waits = by_rank[rank][1][2 * first : 2 * (first + len(spans))]
            between = sum(begin - end for end, begin in zip(waits[1:-1:2], waits[2::2], strict=True))
            seconds = spans[-1].end - spans[0].begin
            assert measured <= seconds
            accounted[rank].append(measured / (seconds - between))
            for span in spans:
                if span.action.work is Work.FORWARD:
                    assert span.end - span.begin >= FORWARD_SECONDS
                if span.action.work is Work.BACKWARD:
                    assert span.end - span.begin >= BACKWARD_SECONDS
    assert all(median(parts) >= 0.9 for parts in accounted), accounted


def test_the_trace_of_all_ranks_is_one_file_that_names_every_rank_and_stage(tmp_path):
    plan = PLANS["interleaved"]
    by_rank = run_ranks(lambda: traced_steps(plan, folder=tmp_path / "trace", slow=True), 2)
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["timeline.json"]
    events = json.loads((tmp_path / "trace" / "timeline.json").read_text())["traceEvents"]
    named = {kind: [event for event in events if event["name"] == kind] for kind in ("process_name", "thread_name")}
    processes = {event["pid"]: event["args"]["name"] for event in named["process_name"]}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named["thread_name"]}
    assert sorted(processes.values()) == ["rank 0", "rank 1"]
    assert {(processes[pid], name) for (pid, _), name in threads.items()} == {
        ("rank 0", "stage 0"),
        ("rank 0", "stage 2"),
        ("rank 1", "stage 1"),
        ("rank 1", "stage 3"),
    }
    # Viewers take number 0 for the idle task, and a thread with its process's number for the main thread.
    numbers = [*processes, *(tid for _, tid in threads)]
    assert min(numbers) > 0 and len(set(numbers)) == len(numbers)
    assert all("ts" not in event for event in events if event["ph"] == "M")
    first = min(span.begin for spans in by_rank for span in spans)
    expected = Counter()
    for rank, spans in enumerate(by_rank):
        for span in spans:
            begin_us, us = round(1e6 * (span.begin - first)), round(1e6 * (span.end - span.begin))
            expected[f"rank {rank}", f"stage {span.action.stage}", span.action.micro_batch, begin_us, us] += 1
    found = Counter(
        (
            processes[event["pid"]],
            threads[event["pid"], event["tid"]],
            event["args"]["micro_batch"],
            round(event["ts"]),
            round(event["dur"]),
        )
        for event in events
        if event["ph"] == "X"
    )
    assert found == expected
    forwards = [event for event in events if event["name"].startswith("forward ")]
    assert len(forwards) == STEPS * MICRO_BATCHES * len(plan.stages)
    assert min(event["dur"] for event in forwards) >= 1e6 * FORWARD_SECONDS
    kinds = {event["name"].rsplit(" ", 1)[0]: event["cat"] for event in events if event["ph"] == "X"}
    assert kinds == {
        "forward": "compute",
        "backward": "compute",
        "send activations": "send",
        "send gradients": "send",
        "wait: receive activations": "wait",
        "wait: receive gradients": "wait",
    }


def test_nothing_is_measured_unless_it_is_on():
    plan = PLANS["gpipe"]
    assert run_ranks(lambda: traced_steps(plan, on=False), 2) == [[], []]
    timeline = Timeline(torch.device("cpu"))
    spans = [timeline.span(Action(Work.FORWARD, 0, micro_batch)) for micro_batch in range(2)]
    assert spans[0] is spans[1]


def test_of_a_long_run_the_latest_whole_steps_are_kept(tmp_path):
    def record() -> int:
        # Rank 1 does twice as much in a step, and so forgets earlier.
        timeline = Timeline(torch.device("cpu"), spans_kept=10)
        timeline.on = True
        for timeline.step in range(1000):
            for micro_batch in range(2 + 2 * dist.get_rank()):
                with timeline.span(Action(Work.FORWARD, dist.get_rank(), micro_batch)):
                    pass
        timeline.write(tmp_path)
        return len(timeline.spans)

    assert run_ranks(record, 2) == [10, 10]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    written = Counter((event["pid"], event["args"]["step"]) for event in events if event["ph"] == "X")
    assert written == {(1, 998): 2, (1, 999): 2, (2, 998): 4, (2, 999): 4}
