# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The command line answers at once: --help imports no heavy package."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from galvatron_hf.cli import env
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


def test_a_reader_that_has_seen_enough_gets_no_error():
    """As `galvatron env | head` does; the pipe is closed before the command writes."""
    code = "import sys; sys.stdin.read(); from galvatron_hf.cli.main import main; sys.exit(main(['env', '--json']))"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_a_command_that_is_stopped_says_so(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "environment", stop)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "galvatron: stopped.\n"


@pytest.mark.parametrize(
    "command",
    [
        ["rent", "--tokens", "1e9", "--global-batch", "8", "--seq-length", "8", "--offers"],
        ["plot", "accuracy", "--output", "picture.png"],
    ],
    ids=["rent", "plot"],
)
def test_ctrl_c_ends_a_command_without_a_traceback(command, tmp_path):
    """The command reads a file that nobody writes to its end. A job in the background ignores the signal from its
    start, and so would the command that it starts.
    """
    pipe = tmp_path / "file"
    os.mkfifo(pipe)
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from galvatron_hf.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *command, str(pipe)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            writer = _opened_for_writing(pipe, process)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            os.close(writer)
            assert process.stderr.read() == "galvatron: stopped.\n"
        finally:
            process.kill()  # or the end of the block would wait for a command that has not stopped


def _opened_for_writing(pipe: Path, reader: subprocess.Popen) -> int:
    """Opens a pipe as soon as its reader has."""
    while reader.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            time.sleep(0.05)
    raise AssertionError(reader.stderr.read())


@pytest.mark.parametrize("world, local, nodes", [("8", "4", 2), ("8", "0", None), ("", "x", None)])
def test_settings_of_a_broken_launcher_are_shown(monkeypatch, capsys, world, local, nodes):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [str(found[name]) for name in ("world size", "ranks of this node")] == [world, local]
    assert found["nodes"] == nodes


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: no such file')", "RuntimeError('two\\nlines')"])
def test_a_torch_that_cannot_be_imported_is_shown(tmp_path, error):
    (tmp_path / "torch.py").write_text(f"raise {error}")
    code = "import sys; sys.path.insert(0, '.'); from galvatron_hf.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "env"]
    shown = [
        subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True) for more in ([], ["--json"])
    ]
    assert [one.returncode for one in shown] == [0, 0], shown
    reason = error.replace("('", ": ").replace("')", "").replace("\\n", " ")
    assert (
        shown[0].stdout.endswith(f"- torch cannot be imported: {reason}\n") and "- galvatron-hf: " in shown[0].stdout
    )
    assert json.loads(shown[1].stdout)["torch cannot be imported"] == reason
