# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Launcher files to copy: what they start on each machine, and that machines which they start train together."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from test_recipes import SMALL_RUN, corpus_folder


ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "recipes" / "launch"
ACCELERATE = ROOT / "recipes" / "accelerate"
# Stand for Slurm's commands: the second runs its command once for each node, at the same time, as srun does.
SCONTROL = '#!/bin/bash\n[ "$1 $2 $3" = "show hostnames two-nodes" ] && printf "localhost\\nother\\n"\n'
SRUN = """#!/bin/bash
[ "$1" = "--kill-on-bad-exit=1" ] || exit 3
shift
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" &
    started+=($!)
done
for one in "${started[@]}"; do
    wait "$one" || failed=1
done
exit ${failed:-0}
"""
SHOW_ARGUMENTS = '#!/bin/bash\nprintf "%s\\n" "$@" > "$SHOWN/$SLURM_NODEID"\n'


@pytest.mark.parametrize("name, machines, processes", [("cpu4", 1, 4), ("1x8", 1, 8), ("2x8", 2, 16)])
def test_accelerate_reads_its_configurations(name, machines, processes):
    config = load_config_from_file(str(ACCELERATE / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig)
    assert (config.num_machines, config.num_processes) == (machines, processes)
    assert config.mixed_precision == "no" and config.distributed_type == "MULTI_GPU"
    assert config.use_cpu is (name == "cpu4")


@pytest.fixture
def slurm(tmp_path):
    """Returns a folder of commands that stand for Slurm's, and the environment of a job of two nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "two-nodes"}
    return folder, {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"} | job


def run_script(name: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH / name), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("gpus, processes", [(None, 16), ("4", 8)])
def test_slurm_starts_one_launcher_on_each_node(slurm, tmp_path, gpus, processes):
    folder, environment = slurm
    (folder / "accelerate").write_text(SHOW_ARGUMENTS)
    (folder / "accelerate").chmod(0o755)
    shown = tmp_path / "shown"
    shown.mkdir()
    environment |= {"SHOWN": str(shown)} | ({} if gpus is None else {"SLURM_GPUS_ON_NODE": gpus})
    run = run_script("slurm.sh", environment, "recipes/train_clm.py", "--output_dir", "a folder")
    assert run.returncode == 0, run.stderr
    for node in (0, 1):
        command, *arguments = (shown / str(node)).read_text().splitlines()
        given = launch_command_parser().parse_args(arguments)
        assert command == "launch"
        assert (given.num_machines, given.num_processes, int(given.machine_rank)) == (2, processes, node)
        assert (given.main_process_ip, given.main_process_port) == ("localhost", 22345)
        assert given.training_script == "recipes/train_clm.py"
        assert given.training_script_args == ["--output_dir", "a folder"]


def test_a_failed_node_fails_the_job(slurm):
    folder, environment = slurm
    (folder / "accelerate").write_text('#!/bin/bash\nexit "$SLURM_NODEID"\n')
    (folder / "accelerate").chmod(0o755)
    assert run_script("slurm.sh", environment, "recipes/train_clm.py").returncode != 0


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh"])
def test_a_script_without_a_recipe_says_what_to_write(name):
    run = run_script(name, dict(os.environ))
    assert run.returncode == 2 and "recipes/train_clm.py ARGUMENTS" in run.stderr


def test_several_machines_need_a_meeting_point():
    run = run_script("torchrun.sh", {**os.environ, "NODES": "2"}, "recipes/train_clm.py")
    assert run.returncode != 0 and "RENDEZVOUS: is the address of the first of 2 machines" in run.stderr


def test_the_kubernetes_job_and_its_command_agree():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    shell, option, script = container["command"]
    exec_word, accelerate, launch, *arguments = shlex.split(script.replace("$JOB_COMPLETION_INDEX", "1"))
    assert (shell, option, exec_word, accelerate, launch) == ("bash", "-c", "exec", "accelerate", "launch")
    given = launch_command_parser().parse_args(arguments)
    machines, gpus = job["spec"]["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == machines
    assert (given.num_machines, given.num_processes) == (machines, machines * gpus)
    assert '--machine_rank "$JOB_COMPLETION_INDEX"' in script and given.machine_rank == 1
    name = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == name
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert given.main_process_ip == f"{job['metadata']['name']}-0.{name}"
    assert given.main_process_port == service["spec"]["ports"][0]["port"]
    assert (ROOT / given.config_file).is_file() and (ROOT / given.training_script).is_file()
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def small_run(folder: Path) -> list[str]:
    """Returns a recipe and its arguments for one step of a tiny model."""
    argv = ["recipes/train_clm.py", "recipes/quickstart.yaml", *SMALL_RUN, "--parallel_plan=zero3", "--max_steps=1"]
    argv += ["--eval_strategy=no", "--save_strategy=no", "--logging_steps=1", f"--output_dir={folder / 'run'}"]
    return [*argv, "--dataset_name", corpus_folder(folder / "corpus")]


def assert_trained_on_two_ranks(run: subprocess.CompletedProcess, folder: Path) -> None:
    assert run.returncode == 0, run.stderr[-4000:]
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    assert 4 < history[0]["loss"] < 7  # a new model knows nothing: ln(300) = 5.7
    assert json.loads((folder / "run" / "parallel_plan.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_two_nodes_of_a_slurm_job_train_together(slurm, tmp_path):
    _, environment = slurm
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "hf-cache")}
    more = {"PROCESSES_PER_NODE": "1", "LAUNCH_CONFIG": str(ACCELERATE / "cpu4.yaml")}
    assert_trained_on_two_ranks(run_script("slurm.sh", environment | more | cache, *small_run(tmp_path)), tmp_path)


@pytest.mark.slow
def test_torchrun_trains_on_two_ranks(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PROCESSES_PER_NODE": "2"}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "hf-cache")
    assert_trained_on_two_ranks(run_script("torchrun.sh", environment, *small_run(tmp_path)), tmp_path)


def launchers_of(folder: Path) -> list[int]:
    """Returns the processes of `accelerate launch` that train into a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "launch" in words and any(word.endswith("/accelerate") for word in words):
                found += [int(process.name)] if f"--output_dir={folder / 'run'}" in words else []
    return found


@pytest.mark.slow
def test_the_signal_before_a_time_limit_has_the_ranks_of_a_slurm_job_save(slurm, tmp_path):
    """Slurm signals what srun has started, the launchers: their ranks save one checkpoint, and end before them."""
    _, environment = slurm
    environment |= {"HF_DATASETS_CACHE": str(tmp_path / "hf-cache"), "PYTHONUNBUFFERED": "1"}
    environment |= {"PROCESSES_PER_NODE": "1", "LAUNCH_CONFIG": str(ACCELERATE / "cpu4.yaml")}
    arguments = [*small_run(tmp_path), "--max_steps=100000", "--save_strategy=steps", "--save_steps=100000"]
    command = ["bash", str(LAUNCH / "slurm.sh"), *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as job:
        text = ""
        for line in job.stdout:
            text += line
            if "'loss'" in line:
                break
        launchers = launchers_of(tmp_path)
        for launcher in launchers:
            os.kill(launcher, signal.SIGUSR1)
        text += job.communicate(timeout=120)[0]
    assert len(launchers) == 2 and job.returncode != 0, text[-4000:]
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert (checkpoint / "manifest.json").is_file(), text[-4000:]
    assert (tmp_path / "run" / "training_run.json").is_file()  # train() came to its end on rank 0
