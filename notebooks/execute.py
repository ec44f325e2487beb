# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Executes the notebooks from top to bottom and saves their outputs; `make notebooks` runs it.

    python notebooks/execute.py [notebooks/quickstart.ipynb ...]
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
SECONDS = 600  # longest time of one cell


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Returns the notebook with new outputs; its files are written to `folder`. A cell that fails raises its error."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for notebook_path in [Path(argument) for argument in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as output:
            nbformat.write(execute(notebook_path, Path(output)), notebook_path)
        print(notebook_path.name)
