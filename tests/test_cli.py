# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The command line answers at once: --help imports no heavy package."""

import re
import subprocess
import sys

import pytest

from galvatron_hf.cli.main import COMMANDS, main


def _modules_loaded_by(arguments: list[str]) -> set[str]:
    code = (
        "import contextlib, io, sys; from galvatron_hf.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print(*sys.modules)"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_help_imports_the_standard_library_alone():
    loaded = _modules_loaded_by(["--help"])
    assert not {"torch", "transformers", "scipy", "numpy", "rich"} & loaded
    assert len(loaded) < 150 and {name for name in loaded if name.startswith("galvatron_hf.")} == {
        "galvatron_hf.cli",
        "galvatron_hf.cli.main",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_imports_neither_torch_nor_transformers(command):
    loaded = _modules_loaded_by([command, "--help"])
    assert not {"torch", "transformers", "scipy", "datasets"} & loaded and len(loaded) < 450


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_its_arguments(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and printed.startswith(f"usage: galvatron {command} ")
    assert re.search(r"--json|verify", printed)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["--version", "search"], ["search"]])
def test_wrong_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("usage: galvatron")
