# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or stand still: the job ends in time, says who and where, and resumes on the same curve."""

import pytest
from job import Job

from faults import fail_at


@pytest.mark.parametrize("plan", ["layers", "pipeline"])
def test_a_killed_rank_ends_the_job_which_resumes_on_the_same_curve(tmp_path, plan, uninterrupted):
    job = Job(folder=tmp_path, plan=plan)
    with pytest.raises(AssertionError, match="SIGKILL"):
        job.fork(fail_at(2, 4, "kill_in_backward"))
    assert job.checkpoints() == ["checkpoint-2"]
    job.fork(resume=True)
    assert job.logs() == uninterrupted(plan)
