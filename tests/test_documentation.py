# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The documentation: links, code, commands, plans, quoted messages, and pages that scripts write."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from galvatron_hf import ParallelPlan


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_diagrams  # noqa: E402
import make_reference  # noqa: E402


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
RUN = "<!-- run -->"  # before a block of Python that is executed; blocks of a page continue each other


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def _blocks(language: str) -> Iterator[tuple[Path, str, bool]]:
    """Yields the page, the text and whether it is executed, of each block of a language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[2] == language:
                yield page, match[3], text[: match.start()].rstrip().endswith(RUN)


# ---- Links ----


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page that are the same in the repository's view of it and in the site."""
    titles = re.findall(r"^#{1,6} (.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title).lower() for title in titles]
    in_repository = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}
    in_site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in plain}
    return in_repository & in_site


def test_links_between_documents_lead_to_files_and_to_their_headings():
    wrong, count = [], 0
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            count += 1
            found = (page.parent / target).resolve() if target else page
            if not found.exists():
                wrong.append(f"{page.name} links to {target}")
            elif anchor and anchor not in _anchors(found):
                wrong.append(f"{page.name} links to {target}#{anchor}, which is no heading")
    assert wrong == [] and count > 250


def test_files_that_the_text_names_exist():
    """Files of the repository in code, such as `tests/test_traffic.py`, are there; recipes may be of another kind."""
    named = re.compile(r"`((?:benchmarks|docs|notebooks|src|tests)/[\w/.-]+\.\w+)`")
    wrong = [
        f"{page.name} names {path}"
        for page in PAGES[:2] + sorted(DOCS.rglob("*.md"))
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert wrong == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {"contributing.md", "changelog.md"}
    assert sorted(listed) == sorted(pages)


# ---- Code ----


def test_python_of_the_documentation_compiles():
    count = 0
    for page, code, _ in _blocks("python"):
        compile(code, str(page), "exec")
        count += 1
    assert count > 15


def test_marked_python_of_the_documentation_runs(tmp_path):
    """Runs each page's marked blocks one after the other, each page in a process of its own on the CPU."""
    by_page: dict[str, list[str]] = {}
    for page, code, runs in _blocks("python"):
        if runs:
            by_page.setdefault(str(page.relative_to(ROOT)), []).append(code)
    assert len(by_page) >= 4
    (tmp_path / "pages.json").write_text(json.dumps(by_page))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, str(ROOT / "tests" / "documentation_blocks.py"), "pages.json"]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("ran docs/") == len(by_page)


def _commands() -> Iterator[tuple[Path, list[str]]]:
    """Yields the page and the words of each command line in blocks of the shell."""
    for page, text, _ in _blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield page, words


def test_commands_of_the_documentation_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `--output FILE` needs its folder
    parsers: dict[str, argparse.ArgumentParser] = {}
    wrong, count = [], 0
    for page, words in _commands():
        if "galvatron" not in words:
            continue
        name, *arguments = words[words.index("galvatron") + 1 :]
        if name not in make_reference.COMMANDS:
            wrong.append(f"{page.name}: galvatron {name}")
            continue
        try:
            parsers.setdefault(name, make_reference.command_parser(name)).parse_args(arguments)
            count += 1
        except SystemExit:
            wrong.append(f"{page.name}: {shlex.join(words)}")
    assert wrong == [] and count > 12


def test_plans_of_the_documentation_are_possible():
    plans = [json.loads(text) for _, text, _ in _blocks("json") if '"version"' in text]
    assert len(plans) >= 4
    for plan in plans:
        ParallelPlan.from_json(plan)


# ---- Messages ----


def _templates() -> set[str]:
    """Returns the texts of the source, with a … in place of each value."""
    found = set()
    for source in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add(re.sub("…+", "…", "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_message_of_troubleshooting_is_one_of_the_source():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [match[3].strip() for match in FENCE.finditer(text) if match[2] == "text"]
    assert len(messages) >= 30
    templates = _templates()
    assert [message for message in messages if not any(message in template for template in templates)] == []


# ---- Pages that scripts write ----


@pytest.mark.parametrize("name", make_reference.PAGES)
def test_the_reference_is_that_of_the_code(name):
    assert (make_reference.FOLDER / name).read_text(encoding="utf-8") == make_reference.PAGES[name](), (
        "the reference is stale: run make reference"
    )


def test_the_reference_has_every_field_argument_and_command():
    pages = {name: (make_reference.FOLDER / name).read_text(encoding="utf-8") for name in make_reference.PAGES}
    for name in (*make_reference.PLAN_FIELDS, *make_reference.LAYER_FIELDS, *make_reference.GROUP_FIELDS):
        assert f"| `{name}` |" in pages["plan.md"]
    assert '| `parallel_plan` | `str` | `"auto"` |' in pages["arguments.md"]
    for name in make_reference.COMMANDS:
        assert f"## galvatron {name}" in pages["cli.md"]
    for name in __import__("galvatron_hf").__all__:
        assert f"### {name}\n" in pages["api.md"]


@pytest.mark.parametrize("draw", make_diagrams.DIAGRAMS, ids=lambda draw: draw.__name__)
def test_the_pictures_are_those_of_the_script(draw):
    path = make_diagrams.FOLDER / f"{draw.__name__.replace('_', '-')}.svg"
    assert path.read_text(encoding="utf-8") == draw().svg(), "the picture is stale: run make reference"


def test_the_picture_of_a_pipeline_has_the_order_of_the_runtime():
    from galvatron_hf.plan import Stage  # noqa: F401
    from galvatron_hf.plan.pipeline_shape import PipelineShape
    from galvatron_hf.plan.schedule import Work, actions

    plan = ParallelPlan.uniform(3, 3, pipeline=3, micro_batches=4)
    kinds = {Work.FORWARD: "F", Work.BACKWARD: "B"}
    for stage, order in enumerate(actions(PipelineShape.from_plan(plan), 4)):
        computed = [(kinds[action.work], action.micro_batch) for action in order if action.work in kinds]
        assert computed == make_diagrams.order_1f1b(stage, 3, 4)
