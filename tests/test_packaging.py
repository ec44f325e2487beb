# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The package that is built has all of the source, and its command starts in an environment with nothing else."""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parent.parent
SOURCE = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}


def test_the_changelog_has_the_version():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0].startswith(version)
    assert any(heading.split(" ")[0] == version for heading in headings)


def test_templates_of_issues_are_forms():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        names = [part["id"] for part in form["body"]]
        assert len(names) == len(set(names)) and form["name"] and form["description"]


@pytest.mark.slow
def test_the_wheel_has_the_source_and_its_command_starts_in_an_empty_environment(tmp_path):
    built = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(built, check=True, capture_output=True, timeout=240)
    (wheel,), (sdist,) = ((tmp_path / "dist").glob(ending) for ending in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name for name in names if name.endswith(".py")} == SOURCE
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {f"src/{name}" for name in SOURCE} <= names and {"LICENSE", "README.md", "setup.cfg"} <= names
    venv.create(tmp_path / "empty", with_pip=True)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = tmp_path / "empty" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=120, env=alone)
    options = dict(check=True, capture_output=True, text=True, env=alone)
    seen = subprocess.run([python.parent / "galvatron", "--help"], **options)
    assert "find the fastest plan" in seen.stdout
    plan = "from galvatron_hf import ParallelPlan; print(ParallelPlan.uniform(2, 4, tensor=2).layers[0].tensor)"
    seen = subprocess.run([python, "-c", plan], cwd=tmp_path, **options)
    assert seen.stdout == "2\n"
