# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Windows, overlap, medians and fits of links from measured times, on made-up clocks and CPUs."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from galvatron_hf.profiler.measure import compute, cpu_timing, layer_timing, links
from galvatron_hf.profiler.measure.links import measure_links
from galvatron_hf.profiler.measure.model import _recompute_fixed
from galvatron_hf.profiler.measure.rounds import Accuracy, median_error
from galvatron_hf.profiler.profiles.hardware import KINDS, wire_share
from galvatron_hf.profiler.trace.isolated_layers import Part
from ranks import run_ranks


CPU = torch.device("cpu")


def exactly(rounds: int) -> Accuracy:
    return Accuracy(least=rounds, most=rounds)


def test_what_is_computed_between_messages_is_no_part_of_their_time(monkeypatch):
    clock = [0.0]

    def takes(ms: float):
        def run() -> None:
            clock[0] += 1e-3 * ms

        return run

    monkeypatch.setattr(cpu_timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(links, "synchronize", lambda device: None)
    runs = []
    between = SimpleNamespace(
        run=lambda: runs.append(takes(2.0)()), begin=runs.clear, taken_ms=lambda: 2.0 * len(runs)
    )

    def measured(ms: float, transfers: int = 1) -> float:
        trial = links.Trial(kind="send", ranks=2, stride=1, size=4, call=takes(ms), transfers=transfers, calls=20)
        return links._measured(trial, CPU, between)

    assert measured(0.5) == pytest.approx(0.5)
    assert measured(0.5, transfers=2) == pytest.approx(0.25)
    assert measured(0.0) == pytest.approx(0.0)


def test_links_of_a_synthetic_machine_are_recovered(monkeypatch):
    """Times are half as long on all ranks but one, and much longer in one repetition of three: neither counts."""
    repetition = [0]

    def measured(trial, device, filler):
        repetition[0] += 1
        truth = 0.25 * trial.ranks + trial.stride + 1e3 * wire_share(trial.kind, trial.ranks) * trial.size / 3e9
        disturbed = 100 if repetition[0] % 3 == 0 else 1
        return truth * disturbed * (1 if dist.get_rank() == 2 else 0.5)

    def fitted():
        monkeypatch.setattr(links, "_measured", measured)
        repetition[0] = 0
        # 28 trials: the third call is another one's in each repetition, and all have one disturbed of three
        return [
            dataclasses.astuple(link)
            for link in measure_links(CPU, 4, (4096, 1 << 20), exactly(3), 10.0, 1e6, lambda what: None)
        ]

    found = run_ranks(fitted, 4)
    assert found[0] == found[1] == found[2] == found[3]
    for kind, ranks, stride, latency_ms, bytes_per_s, error, points in found[0]:
        assert latency_ms == pytest.approx(0.25 * ranks + stride)
        assert bytes_per_s == pytest.approx(3e9)
        assert error == pytest.approx(0, abs=1e-9) and len(points) == 2


def test_a_measurement_is_of_one_message(monkeypatch):
    now = [0.0]

    def call():
        now[0] += 0.006

    monkeypatch.setattr(links, "synchronize", lambda device: None)
    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
    trial = links.Trial(kind="send", ranks=2, stride=1, size=8, call=call, transfers=2, calls=5)
    between = SimpleNamespace(
        run=lambda: now.__setitem__(0, now[0] + 0.004), begin=lambda: None, taken_ms=lambda: 5 * 4.0
    )
    assert links._measured(trial, CPU, between) == pytest.approx(3.0)


def test_a_cpu_that_became_slower_does_not_make_messages_longer(monkeypatch):
    """A run takes 1 ms of the CPU and 2 ms on the wall, then 1.5 and 3."""
    wall, cpu, pace = [0.0], [0.0], [1.0]

    def multiply(*unused, **ignored):
        wall[0] += 2e-3 * pace[0]
        cpu[0] += 1e-3 * pace[0]

    clocks = dict(perf_counter=lambda: wall[0], thread_time=lambda: cpu[0], process_time=lambda: cpu[0])
    for module in (links, cpu_timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(**clocks))
        monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setattr(cpu_timing.torch, "mm", multiply)
    monkeypatch.setattr(cpu_timing, "slowest", lambda values, device: values)
    between = cpu_timing.ComputeFiller(CPU)
    between.products = 1
    between.measure(100.0)
    assert between.ms == pytest.approx(2.0)
    pace[0] = 1.5
    between.begin()
    between.run(), between.run()
    assert between.taken_ms() == pytest.approx(6.0)
    between.device = torch.device("cuda")  # where a CPU's time says nothing
    assert between.taken_ms() == pytest.approx(4.0)
    between.device = CPU
    trial = links.Trial(
        kind="all_reduce", ranks=2, stride=1, size=8, call=lambda: wall.__setitem__(0, wall[0] + 7e-3), calls=5
    )
    assert links._measured(trial, CPU, between) == pytest.approx(7.0)


class SimulatedGpu:
    """Holds the milliseconds until which a GPU is busy, in the place of `torch.cuda`; the host queues work at once."""

    def __init__(self):
        self.busy = 0.0

    def Event(self, enable_timing: bool):  # noqa: N802  (the name of torch's class)
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.busy)
        event.elapsed_time = lambda later: later.at - event.at
        return event


def test_short_messages_of_a_gpu_are_as_long_as_on_its_stream(monkeypatch):
    """The host needs no time to queue a message of 0.04 ms; waiting for each product would hide it."""
    gpu, device = SimulatedGpu(), torch.device("cuda")
    monkeypatch.setattr(cpu_timing.torch, "cuda", gpu)
    monkeypatch.setattr(cpu_timing.torch, "mm", lambda *unused, **out: setattr(gpu, "busy", gpu.busy + 0.1))
    monkeypatch.setattr(cpu_timing, "random_matrix", lambda side, device: torch.zeros(1))
    monkeypatch.setattr(cpu_timing, "slowest", lambda values, device: values)
    for module in (links, cpu_timing):
        monkeypatch.setattr(module, "synchronize", lambda device: None)
    between = cpu_timing.ComputeFiller(device)
    assert between.products == 5  # half a millisecond of products
    between.measure(10.0)
    assert between.ms == pytest.approx(0.5)
    trial = links.Trial(
        kind="all_reduce", ranks=2, stride=1, size=8, call=lambda: setattr(gpu, "busy", gpu.busy + 0.04), calls=50
    )
    assert links._measured(trial, device, between) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ((0, 0, 0, 0, 0), 3.0),
        ((4096, 0, 7, 4096, 8), 3.0),  # of 2, 3 and 5
        ((9, 8, 4096, 4096, 4096), 2.0),
        ((4096, 1024, 9, 4096, 9), 4.0),  # where all were new, 3 and 5 used the fewest
    ],
)
def test_a_message_whose_memory_was_new_does_not_count(pages, expected):
    assert cpu_timing.typical_ms([1.0, 2.0, 3.0, 4.0, 5.0], pages) == expected


def test_a_measurement_knows_how_much_memory_was_new_on_any_rank(monkeypatch):
    """One rank has new memory in every other measurement, which then takes ten times as long on all."""

    def fitted():
        pages, done = [0], [0]

        def measured(trial, device, filler):
            done[0] += 1
            is_new = done[0] % 2 == 0
            if dist.get_rank() == 2 and is_new:
                pages[0] += 9 * trial.calls
            return (10.0 if is_new else 1.0) * (1 + trial.size / 4096)

        monkeypatch.setattr(links, "_measured", measured)
        monkeypatch.setattr(links, "new_pages", lambda: pages[0])
        # 12 trials for each of 3 rounds of warming up, and 5 measurements: new ones are the same trials' each time
        # unless their number is odd, so that one call more is made between any two rounds.
        monkeypatch.setattr(cpu_timing.ComputeFiller, "measure", lambda self, ms: done.__setitem__(0, done[0] + 1))
        found = measure_links(CPU, 3, (4096, 1 << 20), exactly(5), 10.0, 1e6, lambda what: None)
        return [ms for link in found for size, ms in link.points if size == 1 << 20]

    for found in run_ranks(fitted, 3):
        assert found and found == pytest.approx([257.0] * len(found))


def test_the_end_of_a_forward_is_timed_from_the_last_tensor_that_it_saves():
    now, given = [0.0], torch.ones(4, requires_grad=True)

    def forward(saving: bool) -> torch.Tensor:
        now[0] += 1.0
        first = given.exp() if saving else given + 1
        now[0] += 3.0
        return first * 2  # keeps nothing

    timer = object.__new__(layer_timing.LayerTimer)
    timer.clock = SimpleNamespace(now=lambda: now[0], mark=lambda: now[0], between=lambda mark, later: later - mark)
    for saving, behind in ((True, 3.0), (False, 4.0)):
        part = Part(run=functools.partial(forward, saving), input=given, modules=())
        assert timer._job("layer", part, last=True).run() == (4.0, 0.0, behind)
        assert timer._job("layer", part, copies=2).run() == (2.0, 0.0)


@pytest.mark.parametrize("device, point", [("cpu", (32, 8)), ("cuda", (512, 128))])
def test_recompute_is_timed_where_its_bookkeeping_shows(device, point):
    """Times layers of 1 ms a token forward, a quarter of it after the last saved tensor, 2 backward, 0.7 outside."""
    timer = object.__new__(layer_timing.LayerTimer)
    timer.tokens, timer.length, timer.device = 512, 128, torch.device(device)
    timer.counted = SimpleNamespace(of_image=None)
    assert timer.recompute_point == point
    found = {("layer", 0, 1, *key): (1.0 * key[0], 2.0 * key[0]) for key in timer.points()}
    found["layer", 0, 1, 512, 128] += (0.25 * 512,)
    found["recompute", 0] = (1.0 * point[0], (2.0 + 0.75) * point[0] + 0.7)
    assert _recompute_fixed(found, 0, timer) == pytest.approx(0.7)
    found["recompute", 0] = (1.0 * point[0], 2.0 * point[0])  # noise
    assert _recompute_fixed(found, 0, timer) == 0.0


def test_no_longer_message_takes_less():
    assert dict(links._rising([(8, 1.0), (4, 2.0), (16, 3.0)])) == pytest.approx({4: 1.2, 8: 1.2, 16: 3.0})
    assert links._rising([(4, 1.0), (8, 2.0)]) == [(4, 1.0), (8, 2.0)]


@pytest.mark.parametrize(("pace", "exposed"), [(1.0, 0.75), (1.5, 0.75), (0.8, 0.75)])
def test_what_is_exposed_is_what_a_message_adds_to_computing_at_the_cpus_pace_then(monkeypatch, pace, exposed):
    """Products take 10 ms, and messages 8 ms, three quarters of them not hidden; the last run has another pace."""

    def together(product, messages, products, reduces, device):
        faster = pace if products and reduces and products > reduces else 1.0
        computed = faster * 10.0 * products
        waited = exposed * 8.0 * reduces if products else 8.0 * reduces
        return computed, computed + waited if reduces else 0.0, computed / 2

    class Products:
        def __init__(self, *unused):
            pass

        def run(self, calls):
            return 10.0 * calls

    monkeypatch.setattr(compute, "_together", together)
    monkeypatch.setattr(compute, "_Products", Products)
    monkeypatch.setattr(compute, "slowest", lambda values, device: values)
    found = compute.measure_overlap(CPU, exactly(3), 80.0, lambda what: None)
    assert found["exposed"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("quota", "window_ms"),
    [
        ((0.5, 0.01), 150.0),
        ((0.5, 0.04), 160.0),
        ((0.5, 0.07), 210.0),
        ((0.5, 0.1), 200.0),
        ((0.5, 0.002), 30.0),
        ((1.0, 0.1), 30.0),
        (None, 30.0),
    ],
)
def test_a_measurement_lasts_for_many_periods_of_a_quota_or_for_whole_ones(monkeypatch, quota, window_ms):
    monkeypatch.setattr(cpu_timing, "cpu_quota", lambda: quota)
    assert cpu_timing.window_ms(CPU) == pytest.approx(window_ms)


def test_the_error_of_a_median_is_that_of_normal_noise():
    draws = torch.randn(2000, 41, generator=torch.Generator().manual_seed(0)) * 0.1 + 1
    true_error = draws.median(dim=1).values.std().item()
    estimates = [median_error(row.tolist()) for row in draws[:200]]
    assert sum(estimates) / len(estimates) == pytest.approx(true_error, rel=0.1)
    assert median_error([2.0, 2.0, 2.0]) == 0.0


def test_measuring_ends_when_the_median_is_accurate_and_not_before_the_fewest_samples():
    accuracy = Accuracy(error=0.05, least=3, most=6)
    assert not accuracy.reached([1.0, 1.0])
    assert accuracy.reached([1.0, 1.0, 1.0])
    assert not accuracy.reached([1.0, 1.5, 2.0, 1.0, 1.5])
    assert accuracy.reached([1.0, 1.5, 2.0, 1.0, 1.5, 2.0])  # no more than six


def test_overlap_is_measured_until_the_exposed_share_is_accurate_too(monkeypatch):
    """What a message adds to computing changes from round to round by a fifth of the message's time."""

    def rounds(change: float) -> int:
        steps, added = [], itertools.cycle([0.0, change])

        def together(product, messages, products, reduces, device):
            both = products and reduces and products > reduces
            computed = 10.0 * products + (next(added) * 8.0 * reduces if both else 0.0)
            return computed, 8.0 * reduces, 10.0 * products

        monkeypatch.setattr(compute, "_together", together)
        monkeypatch.setattr(compute, "_Products", lambda *unused: SimpleNamespace(run=lambda calls: 10.0 * calls))
        monkeypatch.setattr(compute, "slowest", lambda values, device: values)
        compute.measure_overlap(CPU, Accuracy(error=0.05, least=3, most=7), 80.0, steps.append)
        return len(steps)

    assert rounds(0.0) == 3
    assert rounds(0.2) == 7


def test_links_are_measured_until_they_are_accurate_on_average(monkeypatch):
    """One all-reduce of several alternates between two times, the other messages always take one time."""

    def rounds(error: float) -> int:
        times: dict[tuple, int] = {}

        def measured(trial, device, filler):
            key = trial.kind, trial.ranks, trial.stride, trial.size
            times[key] = times.get(key, 0) + 1
            return 1.0 + (key[0] == "all_reduce" and key[3] == 4096 and times[key] % 2)

        monkeypatch.setattr(links, "_measured", measured)
        monkeypatch.setattr(links, "new_pages", lambda: 0)
        measure_links(CPU, 2, (4096, 1 << 20), Accuracy(error=error, least=3, most=7), 10.0, 1e6, lambda what: None)
        return max(times.values()) - links._WARM_UP

    for found in run_ranks(lambda: (rounds(0.15), rounds(0.01)), 2):
        assert found == (3, 7)


def test_a_message_that_is_hidden_is_measured_most_often_and_takes_the_least_time(monkeypatch):
    """Noise alone is left of what computation hides: a time around zero says nothing by agreeing with itself."""

    def found() -> tuple[int, float]:
        noise, rounds = itertools.cycle([-2e-3, 1e-3, 0.0]), []
        monkeypatch.setattr(links, "_measured", lambda trial, device, filler: next(noise))
        monkeypatch.setattr(links, "_measure_round", counted(links._measure_round, rounds))
        monkeypatch.setattr(links, "new_pages", lambda: 0)
        made = measure_links(CPU, 2, (4096, 1 << 20), Accuracy(least=3, most=7), 10.0, 1e6, lambda what: None)
        return len(rounds), min(ms for link in made for _, ms in link.points)

    for rounds, least in run_ranks(found, 2):
        assert rounds == 7
        assert least == links._LEAST_MS


def test_one_measurement_without_new_memory_is_not_accurate_by_agreeing_with_itself(monkeypatch):
    """Half of the measurements use new memory; those without it always take one time."""

    def found() -> tuple[int, set[float]]:
        pages, rounds = [0], []

        def measured(trial, device, filler):
            if len(rounds) % 2:
                pages[0] += 9 * trial.calls
            return 10.0 if len(rounds) % 2 else 1.0

        monkeypatch.setattr(links, "_measured", measured)
        monkeypatch.setattr(links, "_measure_round", counted(links._measure_round, rounds))
        monkeypatch.setattr(links, "new_pages", lambda: pages[0])
        made = measure_links(CPU, 2, (4096, 1 << 20), Accuracy(least=3, most=9), 10.0, 1e6, lambda what: None)
        return len(rounds), {ms for link in made for _, ms in link.points}

    for rounds, times in run_ranks(found, 2):
        assert rounds == 6 and times == {1.0}  # the second, fourth and sixth round have no new memory


def counted(function, calls: list):
    def count(*args):
        calls.append(args)
        return function(*args)

    return count


def test_only_links_that_are_not_accurate_are_measured_again(monkeypatch):
    """All-reduces alternate between two times, the others always take one time."""

    def counts():
        rounds: dict[tuple, int] = {}

        def measured(trial, device, filler):
            key = trial.kind, trial.ranks, trial.stride, trial.size
            rounds[key] = rounds.get(key, 0) + 1
            return 1.0 + (trial.kind == "all_reduce" and rounds[key] % 2)

        monkeypatch.setattr(links, "_measured", measured)
        monkeypatch.setattr(links, "new_pages", lambda: 0)
        measure_links(CPU, 3, (4096, 1 << 20), Accuracy(least=3, most=7), 10.0, 1e6, lambda what: None)
        return {(key[0], count - links._WARM_UP) for key, count in rounds.items()}

    for found in run_ranks(counts, 3):
        assert found == {("all_reduce", 7)} | {(kind, 3) for kind in KINDS if kind != "all_reduce"}


def test_rounds_of_layers_end_when_their_medians_are_accurate_or_time_is_over(monkeypatch):
    now = [0.0]

    def rounds(noise: float, seconds: float) -> int:
        runs = []

        def run() -> tuple[float, float]:
            now[0] += 1.0
            runs.append(1)
            return 1.0 + noise * (len(runs) % 2), 1.0

        timer = object.__new__(layer_timing.LayerTimer)
        timer.clock, timer.accuracy = cpu_timing.DeviceClock(CPU), 0.05
        samples = timer._samples([layer_timing._Job(key=("layer",), run=run)], seconds, False)
        assert len(runs) == 1 + len(samples["layer",])  # the first one allocates
        return len(samples["layer",])

    monkeypatch.setattr(layer_timing.time, "perf_counter", lambda: now[0])
    least, most = layer_timing.ROUNDS
    assert rounds(noise=0.0, seconds=1e6) == least
    assert rounds(noise=2.0, seconds=1e6) == most
    assert rounds(noise=2.0, seconds=5.5) == 5
    assert rounds(noise=2.0, seconds=0.1) == least
