# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks that notebooks run from top to bottom, and that their files hold the outputs of such a run."""

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest


NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from execute import execute  # noqa: E402


@pytest.fixture(autouse=True)
def alone(request):
    """Has one notebook at a time start ranks: notebook_launcher's ranks meet at one port, 29500."""
    if request.node.get_closest_marker("slow") is None:
        yield
        return
    with open(Path(tempfile.gettempdir()) / "galvatron-hf-notebooks.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns what each code cell prints on the standard output."""
    return [
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_says_what_it_needs_and_keeps_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert f"colab.research.google.com/github/galvatron-hf/galvatron-hf/blob/main/notebooks/{path.name}" in (
        notebook.cells[0].source
    )
    assert "**Hardware:**" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(text for cell, text in zip(code[1:], _printed(notebook)[1:]) if "print(" in cell.source)
    assert not any(re.search(r"/(home|root|tmp|work)/", json.dumps(cell.outputs)) for cell in code)


_LIKE_COLAB = """
import sys, types
from pathlib import Path

shell = types.ModuleType("IPython")
shell.get_ipython = lambda: "<google.colab._shell.Shell>"
sys.modules["IPython"] = shell
from accelerate import notebook_launcher

notebook_launcher(lambda: print("started", flush=True), num_processes=2)
"""


@pytest.mark.slow
def test_colab_starts_as_many_ranks_as_a_notebook_asks_for():
    """accelerate starts one process on Colab without two GPUs, and two on Kaggle, by whose variable it knows it."""
    first = nbformat.read(NOTEBOOKS / "experts.ipynb", as_version=4).cells[1].source
    (name,) = re.findall(r'os.environ\["(KAGGLE\w*)"\]', first)
    for more, ranks in (({}, 1), ({name: "2"}, 2)):
        variables = {key: value for key, value in os.environ.items() if not key.startswith("KAGGLE")} | more
        command = [sys.executable, "-c", _LIKE_COLAB]
        found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert found.stdout.count("started") == ranks, found.stderr
    launching = {path.stem for path in NOTEBOOKS.glob("*.ipynb") if "notebook_launcher(" in path.read_text()}
    assert launching == {path.stem for path in NOTEBOOKS.glob("*.ipynb") if name in path.read_text()}


@pytest.mark.slow
def test_the_quickstart_runs_and_its_losses_are_plain_trainers(tmp_path):
    printed = _printed(execute(NOTEBOOKS / "quickstart.ipynb", tmp_path))
    history = {}
    for folder in ("parallel", "plain"):
        state = json.loads((tmp_path / "output" / folder / "trainer_state.json").read_text())
        history[folder] = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(history["plain"]) == 20 and history["parallel"] == pytest.approx(history["plain"], rel=1e-5)
    assert "2 ranks, 4 layers" in printed[-2] and "largest relative difference" in printed[-1]


@pytest.mark.slow
def test_the_cluster_notebook_predicts_what_its_file_holds(tmp_path):
    def figures(notebook: nbformat.NotebookNode) -> list[list[str]]:
        return [re.findall(r"[\d.,]+", text) for text in _printed(notebook) if "(predicted)" in text]

    path = NOTEBOOKS / "plan_a_cluster.ipynb"
    held = figures(nbformat.read(path, as_version=4))
    assert figures(execute(path, tmp_path)) == held and len(held) == 6


@pytest.mark.slow
def test_packed_training_is_faster_than_padded_and_the_same(tmp_path):
    execute(NOTEBOOKS / "long_tailed_data.ipynb", tmp_path)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs) == 3 and all(run["none"]["seconds"] > run["static"]["seconds"] for run in runs)
    for run in runs:
        assert run["static"]["losses"] == pytest.approx(run["none"]["losses"], rel=1e-5)


@pytest.mark.slow
def test_a_loss_of_routers_evens_them_and_fewer_hashes_send_less(tmp_path):
    printed = "".join(_printed(execute(NOTEBOOKS / "experts.ipynb", tmp_path)))
    free, balanced = (float(share) for share in re.findall(r"the fullest expert gets ([\d.]+) times", printed))
    assert 1 < balanced < free - 0.5
    runs = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert all(1 <= run["imbalance"] <= 2 for run in runs.values())  # two ranks
    sent = [runs[f"lsh{hashes}"]["logs"][-1]["expert_rows_sent"] for hashes in (2, 8, 16)]
    assert sent == sorted(sent) and 0 < sent[0] < sent[-1] < 1


@pytest.mark.slow
def test_a_predicted_step_is_computed_by_hand(tmp_path):
    printed = "".join(_printed(execute(NOTEBOOKS / "reading_a_profile.ipynb", tmp_path)))
    by_hand, predicted = re.search(r"by hand ([\d.]+) ms, predicted ([\d.]+) ms", printed).groups()
    assert float(by_hand) == pytest.approx(float(predicted), rel=1e-6) and float(predicted) > 1
