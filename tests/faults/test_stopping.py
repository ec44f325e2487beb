# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Signals that ask to stop: all ranks save once after the same step, and a later run goes on as if nothing was."""

import os
import signal
import time
from pathlib import Path

import pytest
from job import Job, plans

from faults import fail_at
from trainer_runs import on_ranks, run


STEP = 3
RARELY = dict(save_steps=100)


@pytest.mark.parametrize(
    "plan, kind",
    [
        ("layers_of_two", "sigterm_and_again"),
        ("pipeline_of_two", "sigusr1"),
        pytest.param("layers", "sigterm_and_again", marks=pytest.mark.slow),
        pytest.param("pipeline", "sigusr1", marks=pytest.mark.slow),
        pytest.param("replicate", "sigusr1", marks=pytest.mark.slow),
        pytest.param("replicate", "sigterm", marks=pytest.mark.slow),
        pytest.param("layers", "sigusr1", marks=pytest.mark.slow),
        pytest.param("pipeline", "sigterm_and_again", marks=pytest.mark.slow),
    ],
)
def test_a_signal_on_one_rank_ends_the_step_saves_once_and_ends_training(tmp_path, plan, kind, uninterrupted):
    job = Job(folder=tmp_path, plan=plan, options=RARELY | dict(save_strategy="epoch"))
    job.fork(fail_at(job.ranks // 2, STEP, kind, micro_batch=1))
    assert job.checkpoints() == [f"checkpoint-{STEP}"]
    assert max(job.logs()) == STEP
    assert max(job.logs("train_loss")) == STEP  # train() has come to its end
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)


def test_a_signal_to_a_rank_and_its_children_leaves_it_the_workers_of_its_loader(tmp_path, uninterrupted):
    job = Job(folder=tmp_path, plan="layers_of_two", options=RARELY | dict(dataloader_num_workers=2))
    job.fork(fail_at(0, STEP, "sigterm_to_group"))
    assert job.checkpoints() == [f"checkpoint-{STEP}"]
    assert max(job.logs("train_loss")) == STEP
    job.fork(resume=True)
    assert job.logs() == uninterrupted("layers_of_two")


def test_handlers_are_given_back(tmp_path):
    def work():
        mine = signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.getsignal(signal.SIGUSR1)
        run(tmp_path, plans()["layers_of_two"], options=dict(max_steps=1))
        return mine[1] == signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

    assert on_ranks(work, 2) == [(True, True)] * 2


def test_the_saving_of_one_rank_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="enable_jit_checkpoint=True saves when one rank gets SIGTERM"):
        run(tmp_path, plans()["layers"], options=dict(enable_jit_checkpoint=True))


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((name.removeprefix(b"RANK=").decode() for name in variables if name.startswith(b"RANK=")), "")


def wait_for_step(job: Job, step: int) -> None:
    while max(job.logs(), default=0) < step:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("plan, target", [("layers_of_two", "rank 1"), ("pipeline_of_two", "launcher")])
def test_a_signal_from_outside_ends_a_launched_job(tmp_path, plan, target, uninterrupted):
    """Ends each rank itself, after a step of 0.5 s and a save; torchrun would kill it 30 s after a signal."""
    job = Job(folder=tmp_path, plan=plan, options=RARELY)
    sent, reached = [], []

    def stop(launcher) -> None:
        wait_for_step(job, 2)
        pids = [launcher.pid] if target == "launcher" else [pid for pid in job.pids() if rank_of(pid) == "1"]
        sent.append(time.monotonic())
        os.kill(pids[0], signal.SIGTERM)
        reached.append(max(job.logs()))

    outcome = job.launch(fail_at(0, 1, "slow_steps"), while_running=stop)
    seconds = time.monotonic() - sent[0]
    print(f"{plan}, {target}: {seconds:.1f} s from the signal to the end of the job")
    # torchrun itself never exits 0 after a signal to it, but it has waited for its workers
    assert (outcome.code == 0) == (target == "rank 1"), outcome.text[-4000:]
    assert outcome.left == []
    (checkpoint,) = job.checkpoints()
    assert checkpoint in [f"checkpoint-{reached[0] + further}" for further in range(3)]
    assert max(job.logs("train_loss")) == max(job.logs())  # train() has come to its end: torchrun killed no rank
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)
