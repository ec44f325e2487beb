# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or stand still: the job ends in time, says who and where, and resumes on the same curve."""

import re
import threading
import time

import pytest
from job import Job, plans
from transformers import TrainerCallback

from faults import fail_at
from galvatron_hf.trainer.fault import watchdog
from trainer_runs import on_ranks, run


RANK, STEP = 2, 4
FIRST_STAGE = {"layers": "layer 1", "pipeline": "stage 1, layer 2"}


def stands_still(kind: str) -> bool:
    """Returns whether the rank stays without working. Other ranks notice that by ddp_timeout, a death without it."""
    return kind.startswith(("stop", "sleep"))


def limit(kind: str) -> dict[str, int]:
    return dict(ddp_timeout=8 if stands_still(kind) else 120)


def assert_reported(text: str, plan: str, kind: str, rank: int = RANK) -> None:
    """Checks for a report, that another rank waited in a collective with known ranks, and whose fault it was."""
    assert len(re.findall(r"RankLostError: ", text)) >= 1
    assert re.search(rf"Rank {rank} {BLAMED[kind].format(FIRST_STAGE.get(plan))}", text), text[-6000:]
    where = rf"in [a-z_ ]+( over ranks \[[0-9, ]+\])?, step {STEP}, (micro-batch \d|outside of)"
    waited = "lost a connection"
    if stands_still(kind):
        waited = rf"({waited}|waited longer than ddp_timeout \(8 s\))"
    assert re.search(rf"Rank [013] {waited} {where}", text), text[-6000:]


# What a rank that is not there looks like to the others.
GONE = r"does not answer: it died, or is stopped\. \d+ s ago it was in step [1-4]"
LATE = rf"was late: it waits for nobody, in step {STEP}, micro-batch 0, {{}}, {{}} .*, at\n(?s:.*)fall_asleep"
FAILED = rf"failed first, in step {STEP}, micro-batch 0, forward, {{}} .*: RuntimeError: this rank fails"
BLAMED = {
    "kill_in_forward": GONE,
    "kill_in_backward": GONE,
    "kill_in_collective": GONE,
    "stop_process": GONE,
    "raise_in_forward": FAILED,
    "sleep_in_forward": LATE.replace("{}", "forward", 1),
    "sleep_in_backward": LATE.replace("{}", "backward", 1),
}
# Every kind, in turn in a stage that is all and in one of two; what ends a rank of a pipeline in both.
CASES = [(("layers", "pipeline")[index % 2], kind) for index, kind in enumerate(BLAMED)]
CASES += [("layers", "kill_in_backward"), ("pipeline", "kill_in_forward"), ("pipeline", "sleep_in_backward")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, kind",
    list(dict.fromkeys(CASES)),
)
def test_the_job_ends_says_why_and_resumes(tmp_path, plan, kind, uninterrupted):
    job = Job(folder=tmp_path, plan=plan, options=limit(kind))
    with pytest.raises(AssertionError) as failure:
        job.fork(fail_at(RANK, STEP, kind))
    assert_reported(str(failure.value), plan, kind)
    assert job.checkpoints() == ["checkpoint-2"]
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)


# Every kind is above; a launcher sees a process that dies, and one that does not end.
@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, kind, rank", [("pipeline_of_two", "kill_in_collective", 1), ("layers", "sleep_in_backward", RANK)]
)
def test_a_launched_job_ends_and_leaves_no_process(tmp_path, plan, kind, rank):
    """Takes 6 s for answers after a death; after a rank falls asleep ddp_timeout, 6 s, and 10 s until it is ended. The
    rank would sleep for longer than the launch may take."""
    outcome = Job(folder=tmp_path, plan=plan, options=limit(kind)).launch(fail_at(rank, STEP, kind))
    print(f"{plan}, {kind}: {outcome.seconds:.1f} s with start-up")
    assert outcome.code != 0
    assert outcome.left == []
    assert_reported(outcome.text, plan, kind, rank)


@pytest.mark.slow
def test_a_restarted_attempt_resumes_by_itself(tmp_path, uninterrupted, plan="pipeline_of_two"):
    faults = [fail_at(1, 4, "kill_in_forward"), fail_at(0, 6, "raise_in_forward", attempt=1)]
    options = dict(launcher=("--max_restarts", "2"), environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    for folder in ("first", "second"):
        job = Job(folder=tmp_path / folder, plan=plan)
        outcome = job.launch(*faults, **options)
        # The launcher frees the port that it gives rank 0; another process that takes it uses up a restart.
        if not re.search("EADDRINUSE|address already in use", outcome.text, re.IGNORECASE):
            break
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.left == []
    resumed = re.findall(r"Restart (\d) of this job resumes from \S*/(checkpoint-\d+)\.", outcome.text)
    assert dict(resumed) == {"1": "checkpoint-2", "2": "checkpoint-4"}, outcome.text
    assert job.logs() == uninterrupted(plan)


def test_no_thread_outlives_the_training_that_it_watched(tmp_path):
    """Ends training while the store answers late: a thread in torch's C++ code at exit aborts the process."""

    def work():
        talk = watchdog.Watchdog._exchange
        watchdog.Watchdog._exchange = lambda dog: (talk(dog), time.sleep(0.5))  # a store that answers late
        watchdog.PERIOD_SECONDS = 0.0
        run(tmp_path, plans()["layers_of_two"], options=dict(max_steps=1))
        return [thread.name for thread in threading.enumerate() if thread.name == "galvatron-watchdog"]

    assert on_ranks(work, 2) == [[]] * 2


def test_an_error_that_is_caught_does_not_follow_into_the_next_run(tmp_path):
    """Handles the error of a run, then trains for longer than a process may stand still after an error."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("all ranks")

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(3)

    def work():
        with pytest.raises(KeyError):
            run(tmp_path, plans()["layers_of_two"], callbacks=(Fails(),))
        watchdog.END_SECONDS = 1.0
        return len(run(tmp_path, plans()["layers_of_two"], options=dict(max_steps=2), callbacks=(Slow(),)).steps())

    assert on_ranks(work, 2) == [2] * 2
