# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of every test and its children: `pytest --cpu-seconds FILE` writes them, `make quality` reads them.

A CPU second does not pass while a process waits, so that these figures depend little on what else the machine does.
A fixture's seconds count for the first test that uses the fixture.
"""

import os
import sys
from pathlib import Path

import pytest


LIMIT_SECONDS = 15.0
PHASES = ("setup", "call", "teardown")


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuSeconds:
    """A pytest plugin. Workers of pytest-xdist measure, their controller writes the file."""

    def __init__(self, path: str | None) -> None:
        self.path, self.lines, self.wall = path, [], {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._measure(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._measure(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._measure(item, "teardown"))

    def _measure(self, item: pytest.Item, phase: str):
        begin = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((phase, cpu_seconds() - begin))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.wall[report.nodeid] = self.wall.get(report.nodeid, 0.0) + report.duration
        if report.when == "teardown":
            measured = dict(report.user_properties)
            self.lines.append((sum(measured.get(phase, 0.0) for phase in PHASES), report.nodeid))
            self._write(self.lines[-1:], "a")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            self.path = None
        self._write([], "w")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write(sorted(self.lines, reverse=True), "w")

    def _write(self, lines: list[tuple[float, str]], mode: str) -> None:
        """Writes each test as it ends, so that a run that is stopped leaves what it measured; at the end in order."""
        if self.path is None:
            return
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = ["# CPU seconds, wall-clock seconds, test\n"] * (mode == "w")
        with path.open(mode) as file:
            file.writelines([*header, *(f"{seconds:.2f} {self.wall[name]:.2f} {name}\n" for seconds, name in lines)])


def above_limit(path: Path, limit: float = LIMIT_SECONDS) -> list[tuple[float, str]]:
    """Returns the CPU seconds and names of the tests in a file that took more than `limit`."""
    lines = [line.split(maxsplit=2) for line in path.read_text().splitlines() if not line.startswith("#")]
    return [(float(seconds), name) for seconds, _, name in lines if float(seconds) > limit]


def main(path: Path) -> None:
    """Reports fast tests above the limit. The exit status is 0: CPU seconds depend on the machine."""
    if not path.exists():
        print(
            f"{path} does not exist: run `make test` first to see which fast tests take over {LIMIT_SECONDS:g} CPU s"
        )
        return
    for seconds, name in above_limit(path):
        print(f"{name} took {seconds:.1f} CPU s, over {LIMIT_SECONDS:g}: make it cheaper or mark it slow")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
