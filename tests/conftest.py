# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes the helper modules of the tests importable by name, records CPU seconds, and begins with the longest files."""

import gc
import os
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))

from cpu_seconds import CpuSeconds  # noqa: E402
from time_limit import TimeLimit, shuffled  # noqa: E402


# Files of the fast tests that take longest. They begin first, so that two workers end at about the same time.
LONGEST = (
    "test_search.py",
    "test_predicted_memory.py",
    "test_pipeline_trainer.py",
    "test_parallelize.py",
    "test_trainer_equivalence.py",
    "test_pipeline.py",
    "test_auto.py",
    "test_launch.py",
    "test_packed_rows.py",
    "test_trainer_packing.py",
)


def pytest_addoption(parser):
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds of every test to this file")
    parser.addoption("--seconds", metavar="N", type=float, help="skip the tests whose turn comes after N seconds")
    parser.addoption("--order", metavar="NAME", help="shuffle the files, by this name")


def pytest_configure(config):
    config.pluginmanager.register(CpuSeconds(config.getoption("cpu_seconds")))
    if (seconds := config.getoption("seconds")) is not None:
        config.pluginmanager.register(TimeLimit(seconds))


def pytest_collection_modifyitems(config, items):
    if (name := config.getoption("order")) is not None:
        places = shuffled((item.path for item in items), name)
        items.sort(key=lambda item: places[item.path])
        return
    order = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))  # stable: other files keep their order


def pytest_collection_finish():
    # Trainer collects garbage whenever it has trained. What the imports made is none: collections leave it alone.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quick_profiles(tmp_path_factory):
    """Makes `parallel_plan="auto"` measure for less than a second, and keeps its profiles out of the user's cache."""
    from galvatron_hf.trainer.planning import auto_planner

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GALVATRON_CACHE", str(tmp_path_factory.mktemp("profiles")))
        for name in ("HARDWARE_SECONDS", "MODEL_SECONDS", "CALIBRATION_SECONDS"):
            patch.setattr(auto_planner, name, 0.1)
        yield


# Ranks are forks of this process. In the first backward, a build of torch for GPUs starts a thread for each GPU, and
# after that refuses every backward in a fork. Hidden GPUs have no threads. Nor has the GPU that a FakeTensorMode makes
# up, if the first backward comes before it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

import elementwise_sharding  # noqa: E402


torch.ones((), requires_grad=True).backward()


@pytest.hookimpl(tryfirst=True)  # before the fixtures of a module, which may train
def pytest_runtest_protocol(item):
    # Trainer's full_determinism turns this on and leaves it on. torch.empty then writes NaN: memory is resident that
    # measurements of other tests do not expect.
    torch.use_deterministic_algorithms(False)
    elementwise_sharding.use(shortcut=item.get_closest_marker("dtensor_search") is None)


def pytest_runtest_logreport(report):
    """Shows a failure at once: of a run that is stopped for its time, the summary at the end is never seen."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext[-4000:]}", flush=True)
