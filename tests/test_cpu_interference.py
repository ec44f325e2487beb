# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks the benchmarks' watch over cores, and which steps count under it."""

import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cpu_interference as watches  # noqa: E402
import plan_runs  # noqa: E402
from interleaved_worlds import Turn  # noqa: E402
from random_plans import Shape  # noqa: E402


def watch_of(folder: Path, *cores: list[tuple[float, float]]) -> watches.CoreWatch:
    """Returns a watch over cores that did these pieces of work, each with its end and its seconds."""
    files = [folder / str(core) for core in range(len(cores))]
    for file, pieces in zip(files, cores, strict=True):
        file.write_text("".join(f"{at} {seconds}\n" for at, seconds in pieces))
    return watches.CoreWatch(files=files)


def test_a_moment_is_as_slow_as_its_slowest_core(tmp_path):
    even = [(float(at), 0.002) for at in range(20)]
    disturbed = [(float(at), 0.006 if 10 <= at < 14 else 0.002) for at in range(20)]
    watch = watch_of(tmp_path, even, disturbed)
    assert watch.slowdown(0.0, 8.0) == pytest.approx(1.0)
    assert watch.slowdown(10.0, 12.5) == pytest.approx(3.0)
    assert watch.slowdown(8.0, 11.5) == pytest.approx(2.0)  # two of the four pieces
    assert watch.slowdown(100.0, 101.0) == 1.0  # of which nothing is known


def test_a_line_that_is_being_written_does_not_count(tmp_path):
    watch = watch_of(tmp_path, [(1.0, 0.002), (2.0, 0.002)])
    with watch.files[0].open("a") as file:
        file.write("3.0 0.0")
    assert watch.slowdown(2.5, 3.5) == 1.0


def test_quiet_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(watches, "time", Namespace(perf_counter=lambda: now[0], sleep=sleep))
    usual = [(float(at), 0.002) for at in range(90)]
    watch_of(tmp_path, usual).wait_for_quiet(seconds=0.2, most=5.0)
    assert 100.2 <= now[0] < 101.0
    slow = [(now[0] + 0.1 * at, 0.006) for at in range(50)]
    begun = now[0]
    watch_of(tmp_path, usual + slow).wait_for_quiet(seconds=0.2, most=1.0)
    assert begun + 1.0 <= now[0] < begun + 1.5


def test_every_core_is_watched_until_the_body_ends():
    def children() -> list[str]:
        return subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True).stdout.split()

    before = len(children())
    with pytest.raises(KeyboardInterrupt), watches.cpu_interference() as watch:
        assert len(watch.files) == len(os.sched_getaffinity(0))
        begun = time.perf_counter()
        while time.perf_counter() < begun + 300 and any(len(f.read_text().splitlines()) < 3 for f in watch.files):
            time.sleep(0.1)
        assert all(len(file.read_text().splitlines()) >= 3 for file in watch.files)
        assert 1.0 <= watch.slowdown(begun, time.perf_counter())
        files = watch.files
        raise KeyboardInterrupt
    assert len(children()) == before and not any(file.exists() for file in files)


class World:
    """Takes four steps of a second a turn; turns begin ten seconds apart."""

    def __init__(self):
        self.turns = 0

    def turn(self) -> Turn:
        begun = 10.0 * self.turns
        self.turns += 1
        return Turn(seconds=4.0, times=[begun + step for step in range(5)], tokens=[])

    def finish(self) -> str:
        return "ending"


class Watch:
    """Tells that cores are half as fast in some of the turns, later a little less than before."""

    def __init__(self, slow: set[int]):
        self.slow = slow

    def slowdown(self, begin: float, end: float) -> float:
        return 2.0 + begin / 1e3 if begin // 10 in self.slow else 1.02

    def wait_for_quiet(self) -> None:
        pass


@pytest.mark.parametrize(
    ("slow", "turns", "counted", "left_out"),
    [
        (set(), 2, 4, 0),
        ({0}, 2, 2, 2),  # half of the steps are enough
        ({0, 1}, 3, 2, 4),  # one turn more than asked for
        (set(range(9)), 6, 2, 10),  # no quiet in three times as many: those that were slowed down least
    ],
)
def test_steps_on_disturbed_cores_do_not_count(monkeypatch, slow, turns, counted, left_out):
    world = World()
    monkeypatch.setattr(plan_runs, "World", lambda *unused: world)
    options = Namespace(rounds=2, steps=4, warmup=0)
    [run] = plan_runs.measure(["a plan"], Shape.parse("8x1x1x1x8x8x8x8"), ["a seat"], options, Watch(slow))
    assert (world.turns, len(run.steps), run.left_out) == (turns, counted, left_out)
    assert run.ending == "ending" and run.seconds == 1.0
    assert run.slowdown == pytest.approx(1.02 if left_out < 10 else 2.0025, abs=1e-6)


def test_profiles_that_were_disturbed_are_made_again(monkeypatch):
    disturbed, made = iter([1.5, 1.2]), iter([("a", "b"), ("c", "d")])
    monkeypatch.setattr(plan_runs, "on_ranks", lambda *unused: next(made))
    for name in ("HardwareProfile", "ModelProfile"):
        monkeypatch.setattr(plan_runs, name, Namespace(from_json=str.upper))
    watch = Namespace(slowdown=lambda *unused: next(disturbed))
    assert plan_runs.profiled("a shape", [], watch) == ("C", "D", 1.2)
    disturbed, made = iter([1.01]), iter([("a", "b")])
    watch = Namespace(slowdown=lambda *unused: next(disturbed))
    assert plan_runs.profiled("a shape", [], watch) == ("A", "B", 1.01)
