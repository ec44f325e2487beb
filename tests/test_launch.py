# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The launchers that people use, and no launcher at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, Precision
from oracle import Rows
from plans import pipeline_plans, uniform
from trainer_runs import assert_equal_weights, assert_same_steps, on_ranks, run


ROOT = Path(__file__).parent.parent
S = LayerStrategy
ALONE = dict(gradient_accumulation_steps=1, save_strategy="steps", save_steps=3, max_steps=4)


def launched(tmp_path: Path, launcher: list[str], plan_ranks: int) -> tuple[subprocess.CompletedProcess, Path]:
    script, plan, output = tmp_path / "script.py", tmp_path / "plan.json", tmp_path / "steps.json"
    script.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from trainer_runs import run\n"
        f"seen = run({str(tmp_path / 'run')!r}, {str(plan)!r}, options=dict(max_steps=2))\n"
        "if os.environ['RANK'] == '0':\n"
        f"    json.dump(seen.steps(), open({str(output)!r}, 'w'))\n"
    )
    layers = (S(tensor=2), S(), S(ulysses=2), S(tensor=2, megatron_sp=True))
    single_stage(layers, plan_ranks).to_json(plan)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, str(script)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return process, output


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu4.yaml"]
ACCELERATE += ["--main_process_port", "0"]


def check_launch(tmp_path: Path, launcher: list[str], ranks: int) -> None:
    process, output = launched(tmp_path, launcher, ranks)
    assert process.returncode == 0, process.stderr[-4000:]
    wanted = run(tmp_path / "plain", options=dict(gradient_accumulation_steps=1, max_steps=2), trainer_class=Trainer)
    for seen, other in zip(json.loads(output.read_text()), wanted.steps(), strict=True):
        assert tuple(seen) == pytest.approx(other, rel=1e-5)


def test_torchrun_trains_as_one_process(tmp_path):
    check_launch(tmp_path, TORCHRUN, 2)


def test_threads_of_gloo_that_free_tensors_late_do_not_abort_a_process_that_ends(tmp_path):
    """Rank 1 comes a little later, rank 0 ends meanwhile, and its interpreter is busy in C as it does."""
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


@pytest.mark.slow
def test_accelerate_launch_trains_as_one_process(tmp_path):
    check_launch(tmp_path, ACCELERATE, 4)


@pytest.mark.slow
def test_launching_fewer_ranks_than_the_plan_has_is_refused(tmp_path):
    process, output = launched(tmp_path, TORCHRUN, 4)
    assert process.returncode != 0
    assert not output.exists()
    assert "world_size=4, but 2 processes were started" in process.stderr
    assert "torchrun --nproc_per_node 4" in process.stderr


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("raise RuntimeError('this rank fails')", marks=pytest.mark.slow),
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_rank_that_dies_in_a_step_ends_the_job_and_leaves_no_process(tmp_path, fault):
    """Within the minute that docs/pipeline.md states, from the fault on; an exception is shown first."""
    script, plan, died = tmp_path / "script.py", tmp_path / "plan.json", tmp_path / "died"
    pipeline_plans()["1f1b_mixed"].to_json(plan)
    script.write_text(
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from galvatron_hf.parallel.pipeline.runtime import Pipeline\n"
        "from trainer_runs import run\n"
        "def die(*unused):\n"
        f"    with open({str(died)!r}, 'w') as file:\n"
        "        file.write(str(time.time()))\n"
        f"    {fault}\n"
        "if os.environ['RANK'] == '2':\n"
        "    Pipeline._backward = die\n"
        f"run({str(tmp_path / 'run')!r}, {str(plan)!r}, options=dict(max_steps=2))\n"
    )
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    process = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode != 0
    assert time.time() - float(died.read_text()) < 60
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    if "raise" in fault:
        assert process.stderr.index("this rank fails") < process.stderr.index("Connection")
    else:
        assert "Signal 9 (SIGKILL)" in process.stderr or "exitcode  : -9" in process.stderr


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
    """Its micro-batches, recompute and precision are the same there, so it makes itself a world of one rank."""
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
