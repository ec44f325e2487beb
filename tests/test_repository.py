# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Promises of the repository around the code: licence, versions, installing once, and test runs."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpu_seconds import above_limit
from time_limit import shuffled


ROOT = Path(__file__).parent.parent
HEADER = "# Copyright 2026 The galvatron-hf team.\n# SPDX-License-Identifier: Apache-2.0\n"
SOURCES = sorted(
    path
    for folder in ("src", "tests", "recipes", "benchmarks", "notebooks", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


def _constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_source_file_begins_with_the_licence():
    assert [str(path) for path in SOURCES if not path.read_text().startswith(HEADER)] == []


def test_no_source_file_is_over_800_lines():
    assert [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 800] == []


def test_the_map_of_the_source_names_files_and_functions_that_exist():
    rows = re.findall(r"^\|[^|]+\| `([\w/.]+)` \| (?:`(\w+)`)? ?\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(rows) > 20
    for path, name in rows:
        source = ROOT / "src" / "galvatron_hf" / path
        assert source.exists(), path
        assert not name or re.search(rf"^(?:class|def| +def)? ?{name}\b", source.read_text(), re.M), (path, name)


def test_tested_versions_are_exact_and_torch_is_first():
    assert _constraints()[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in _constraints())


def test_every_direct_dependency_has_a_tested_version():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    required = [
        config["options"]["install_requires"],
        *(extras[name] for name in ("test", "dev", "plots", "notebooks", "docs")),
    ]
    names = {re.match(r"[A-Za-z0-9_-]+", line)[0] for block in required for line in block.split() if line[0] != "%"}
    assert names - {line.split("==")[0] for line in _constraints()} == set()


@pytest.fixture
def checkout(tmp_path):
    """Returns a folder with the files that `make` reads, without an environment."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def _would_run(checkout: Path, target: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--dry-run", target], cwd=checkout, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["quickstart", "test", "test-all", "style", "quality"])
def test_make_installs_the_first_time_only(checkout, target):
    first = _would_run(checkout, target)
    assert (
        0 < first.index("-m venv .venv") < first.index("pip install $(grep '^torch==") < first.index("pip install -e")
    )
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert "pip install" not in _would_run(checkout, target)
    os.utime(checkout / "constraints.txt", (2e9, 2e9))  # newer than what was installed
    assert "pip install" in _would_run(checkout, target)


def test_ci_runs_the_fast_and_the_slow_tests_and_shows_skips():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.findall(r"^make (\S+)", script, re.M) == ["test", "quality", "docs", "test-slow", "test-float8"]
    assert script.count('PYTEST_ARGS="-rs') == 3


@pytest.fixture
def suite(tmp_path) -> Callable[..., str]:
    """Returns a function that runs pytest with options on a test file, with this conftest's plugins and no others."""
    # Without the fixture of all tests, whose imports take seconds.
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text().split("@pytest.fixture")[0])
    for helper in ("cpu_seconds.py", "time_limit.py"):
        shutil.copy(ROOT / "tests" / helper, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    def run(tests: str, *options: str) -> str:
        (tmp_path / "test_some.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    return run


def test_make_runs_every_fast_and_every_slow_test_on_all_cores():
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^\t\$\(PYTEST\) -m (.*) --cpu-seconds", makefile, re.M) == ['"not slow"', "slow"]
    assert "\nWORKERS ?= 3\n" in makefile and "-n $(WORKERS) --dist loadscope" in makefile


def test_a_fast_test_above_the_limit_is_reported(suite, tmp_path):
    """Runs a test whose child computes for longer than the limit, and one that sleeps for longer."""
    tests = (
        "import subprocess, sys, time\n"
        "BUSY = 'import time\\nwhile time.process_time() < 0.8: pass'\n"
        "def test_busy():\n    subprocess.run([sys.executable, '-c', BUSY], check=True)\n"
        "def test_idle():\n    time.sleep(1)\n"
    )
    suite(tests, "-p", "xdist.plugin", "-n", "2", "--cpu-seconds", "seconds.txt")
    assert [name for _, name in above_limit(tmp_path / "seconds.txt", 0.7)] == ["test_some.py::test_busy"]
    script = [sys.executable, "cpu_seconds.py", "seconds.txt"]
    seconds = (tmp_path / "seconds.txt").read_text()
    (tmp_path / "seconds.txt").write_text(seconds + "20.10 9.00 test_some.py::test_long\n")
    said = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == "test_some.py::test_long took 20.1 CPU s, over 15: make it cheaper or mark it slow\n"


def test_tests_whose_turn_comes_too_late_are_skipped_by_name(suite):
    """Runs a test that takes longer than the limit, and two after it, of which one has a fixture that fails."""
    tests = (
        "import time, pytest\n"
        "@pytest.fixture\ndef fails():\n    raise AssertionError\n"
        "def test_long():\n    time.sleep(1.2)\n"
        "def test_late():\n    raise AssertionError\n"
        "def test_with_a_fixture(fails):\n    pass\n"
    )
    for workers in ((), ("-p", "xdist.plugin", "-n", "1")):
        said = suite(tests, "-rs", "--seconds=1", "--order=a commit", *workers)
        assert re.findall(r"SKIPPED \[1\] (\S+): (.*)", said) == [
            (f"test_some.py:{line}", "its turn came after the 1 s of this run") for line in (7, 9)
        ]
        assert "1 passed, 2 skipped" in said


def test_the_name_of_a_run_shuffles_its_files():
    files = [Path(f"test_{index}.py") for index in range(20)]
    orders = [sorted(files, key=shuffled(reversed(files * 2), name).get) for name in ("a", "b", "a")]
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == sorted(files)
