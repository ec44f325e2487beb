# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trains under the launchers that people use, and without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, Precision
from oracle import Rows
from plans import pipelined, uniform
from trainer_runs import assert_equal_weights, assert_same_steps, on_ranks, run


ROOT = Path(__file__).parent.parent
S = LayerStrategy
ALONE = dict(gradient_accumulation_steps=1, save_strategy="steps", save_steps=3, max_steps=4)


def launched(folder: Path, launcher: list[str], plan_ranks: int, then: str = "") -> subprocess.CompletedProcess:
    """Launches ranks that train two steps and write their values to `steps.json`; `then` is code that follows."""
    script, plan = folder / "script.py", folder / "plan.json"
    script.write_text(
        "import json, os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from trainer_runs import run\n"
        f"seen = run({str(folder / 'run')!r}, {str(plan)!r}, options=dict(max_steps=2))\n"
        "if os.environ['RANK'] == '0':\n"
        f"    json.dump(seen.steps(), open({str(folder / 'steps.json')!r}, 'w'))\n" + then
    )
    layers = (S(tensor=2), S(), S(ulysses=2), S(tensor=2, megatron_sp=True))
    single_stage(layers, plan_ranks).to_json(plan)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, str(script)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu4.yaml"]
ACCELERATE += ["--main_process_port", "0"]


def assert_steps_of_one_process(folder: Path) -> None:
    options = dict(gradient_accumulation_steps=1, max_steps=2)
    wanted = run(folder / "plain", options=options, trainer_class=Trainer).steps()
    for seen, other in zip(json.loads((folder / "steps.json").read_text()), wanted, strict=True):
        assert tuple(seen) == pytest.approx(other, rel=1e-5)


def job_that_fails(folder: Path, fault: str) -> subprocess.CompletedProcess:
    """Launches two ranks that train, then train as a pipeline, in whose first backward rank 1 runs `fault`."""
    plan = folder / "pipeline.json"
    pipelined([(0,), (1,)], (S(), S(recompute="full"), S(), S())).to_json(plan)
    then = (
        "from galvatron_hf.parallel.pipeline.runtime import Pipeline\n"
        "def die(*unused):\n"
        f"    {fault}\n"
        "if os.environ['RANK'] == '1':\n"
        "    Pipeline._backward = die\n"
        f"run({str(folder / 'pipeline')!r}, {str(plan)!r}, options=dict(max_steps=2))\n"
    )
    return launched(folder, TORCHRUN, 2, then)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """Returns a job that trained until the kernel killed a rank, and its folder. Both tests below look at this launch,
    because each launched rank imports for six seconds."""
    folder = tmp_path_factory.mktemp("killed")
    return job_that_fails(folder, "os.kill(os.getpid(), signal.SIGKILL)"), folder


@pytest.mark.slow
def test_torchrun_trains_as_one_process(killed):
    process, folder = killed
    assert (folder / "steps.json").exists(), process.stderr[-4000:]
    assert_steps_of_one_process(folder)


def assert_ended(process: subprocess.CompletedProcess, folder: Path) -> None:
    """Checks that the job failed and left no process. It cannot have waited for ddp_timeout, which is longer than
    [`launched`] waits."""
    assert process.returncode != 0
    left = subprocess.run(["pgrep", "-f", str(folder / "script.py")], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@pytest.mark.slow
def test_a_rank_that_dies_in_a_step_ends_the_job_and_leaves_no_process(killed):
    process, folder = killed
    assert_ended(process, folder)
    assert "Signal 9 (SIGKILL)" in process.stderr or "exitcode  : -9" in process.stderr


@pytest.mark.slow
def test_an_exception_in_a_step_ends_the_job_and_is_shown_first(tmp_path):
    process = job_that_fails(tmp_path, "raise RuntimeError('this rank fails')")
    assert_ended(process, tmp_path)
    before_other_ranks, *_ = process.stderr.partition("Connection")  # what a rank says that has lost another one
    assert "this rank fails" in before_other_ranks


@pytest.mark.slow
@pytest.mark.parametrize("launcher, ranks", [(TORCHRUN, 2), (ACCELERATE, 4)], ids=["torchrun", "accelerate"])
def test_a_launched_job_ends_without_an_error(tmp_path, launcher, ranks):
    process = launched(tmp_path, launcher, ranks)
    assert process.returncode == 0, process.stderr[-4000:]
    assert_steps_of_one_process(tmp_path)


@pytest.mark.slow
def test_launching_fewer_ranks_than_the_plan_has_is_refused(tmp_path):
    process = launched(tmp_path, TORCHRUN, 4)
    assert process.returncode != 0
    assert not (tmp_path / "steps.json").exists()
    assert "world_size=4, but 2 processes were started" in process.stderr
    assert process.stderr.count("torchrun --nproc_per_node 4") == 1  # of two ranks
    assert "galvatron_hf/trainer" not in process.stderr  # no traceback of a rank


@pytest.mark.slow
def test_threads_of_gloo_that_free_tensors_late_do_not_abort_a_process_that_ends(tmp_path):
    """Lets rank 0 end before rank 1 comes, with an interpreter that is busy in C as it ends."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, sys, time\n"
        "atexit.register(sum, range(20_000_000))\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "from galvatron_hf.parallel.comm.mesh import WorldMesh\n"
        "child = os.fork()\n"
        "rank = int(child != 0)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path / 'store'}', rank=rank, world_size=2)\n"
        "from galvatron_hf.plan.resolved import RankGroup\n"
        "world = WorldMesh('cpu')\n"
        "world.prepare([RankGroup(ranks=(0, 1), joins_stages=True)])\n"
        "group = world.joined([(0,), (1,)])[0]\n"
        "dist.barrier(group)\n"
        "time.sleep(0.1 * rank)\n"
        "gathered = [torch.empty(1) for _ in range(2)]\n"
        "work = dist.all_gather(gathered, torch.ones(1), group=group, async_op=True)\n"
        "del gathered, work\n"
        "if rank == 1:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (process.stdout, process.returncode) == ("0\n", 0), process.stderr


def alone(work: Callable[[], Any]) -> Any:
    """Runs `work` in a process of its own without a launcher."""

    def without_launcher() -> Any:
        dist.destroy_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        return work()

    return on_ranks(without_launcher, 1)[0]


def test_one_process_without_a_plan_is_plain_trainer_to_the_bit(tmp_path):
    more = dict(options=ALONE | dict(eval_strategy="steps", eval_steps=2), eval_dataset=Rows(4, seed=2))
    plain = run(tmp_path / "plain", trainer_class=Trainer, **more)
    seen = run(tmp_path / "own", **more)
    names = ("loss", "grad_norm", "learning_rate")
    assert seen.steps(*names) == plain.steps(*names)
    assert seen.steps("eval_loss") == plain.steps("eval_loss")
    assert seen.random == plain.random
    assert_equal_weights(seen.weights, plain.weights)
    files, plain_files = (
        {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*")} for name in ("own", "plain")
    )
    assert files == plain_files
    assert not dist.is_initialized()


def test_plan_for_one_rank_counts_without_a_launcher(tmp_path):
    """Trains under plans of one rank, whose micro-batches, recompute and precision apply there too."""
    options = ALONE | dict(gradient_accumulation_steps=2)
    plans = {
        "recompute": uniform(1, recompute="full"),
        "micro_batches": single_stage((S(), S(sharding="zero2"), S(sharding="replicate"), S()), 1, micro_batches=3),
        "bf16": single_stage((S(),) * 4, 1, precision=Precision(compute="bf16")),
    }

    def work():
        checkpoint = tmp_path / "recompute" / "checkpoint-3"
        runs = {
            name: run(tmp_path / name, plan, options=options, then=lambda made: made.parallel.plan)
            for name, plan in plans.items()
        }
        return runs, run(tmp_path / "resumed", plans["micro_batches"], options=options, resume=checkpoint)

    runs, resumed = alone(work)
    plain = run(tmp_path / "plain", options=ALONE, trainer_class=Trainer)
    for name in ("recompute", "micro_batches"):
        assert runs[name].result.layers == plans[name].layers
        assert_same_steps(runs[name], plain)
    assert_same_steps(resumed, plain, after=3)
    losses = [[loss for (loss,) in one.steps("loss")] for one in (runs["bf16"], plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # 8 bits of mantissa
