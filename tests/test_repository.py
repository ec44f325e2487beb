# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What the repository promises around the code: licence, versions, and installing once."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
HEADER = "# Copyright 2026 The galvatron-hf team.\n# SPDX-License-Identifier: Apache-2.0\n"
SOURCES = sorted(
    path for folder in ("src", "tests", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def _constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_source_file_begins_with_the_licence():
    assert [str(path) for path in SOURCES if not path.read_text().startswith(HEADER)] == []


def test_no_source_file_is_over_800_lines():
    assert [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 800] == []


def test_tested_versions_are_exact_and_torch_is_first():
    assert _constraints()[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in _constraints())


def test_every_direct_dependency_has_a_tested_version():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    required = [config["options"]["install_requires"], *(extras[name] for name in ("test", "dev", "plots"))]
    names = {re.match(r"[A-Za-z0-9_-]+", line)[0] for block in required for line in block.split() if line[0] != "%"}
    assert names - {line.split("==")[0] for line in _constraints()} == set()


@pytest.fixture
def checkout(tmp_path):
    """What `make` looks at, without an environment."""
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
    assert re.findall(r"^make (\S+)", script, re.M) == ["test", "quality", "test-slow"]
    assert script.count('PYTEST_ARGS="-rs') == 2
    assert script.count('--minutes $((MINUTES - SECONDS / 60))"') == 1 and "MINUTES=80 " in script


@pytest.mark.parametrize("minutes, outcome", [("0", "1 skipped"), ("5", "1 passed")])
def test_tests_that_a_run_has_no_time_for_are_skipped_and_say_so(minutes, outcome):
    name = f"{__file__}::test_every_source_file_begins_with_the_licence"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--minutes", minutes, name]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert outcome in said
    assert ("the 0 minutes that this run has are over" in said) == (minutes == "0")
