# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps on GPUs that are not there (see fake_cuda/): the host waits for no device, tensors are on it, and all ranks of
a communicator do the same in the same order.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_hf.plan import ParallelPlan
from plans import mixed_plans, pipeline_plans, uniform_plans


FOLDER = Path(__file__).parent / "fake_cuda"
WORLD_SIZE = 4
PLANS = uniform_plans(WORLD_SIZE) | mixed_plans() | pipeline_plans() | {"pair": uniform_plans(2)["zero3"]}
BF16 = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the device that does nothing"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has devices of its own"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Compiles the device that does nothing."""
    made, root = tmp_path_factory.mktemp("fake_cuda") / "libidle_device.so", Path(torch.__file__).parent
    linked = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    source = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", str(FOLDER / "idle_device.cpp")]
    subprocess.run(["g++", *source, *linked, "-o", str(made)], check=True)
    return made


def case(plan: str, batch: str = "padded", family: str = "llama", rank: int = 0, **more: Any) -> dict[str, Any]:
    fields = json.loads(PLANS[plan].to_json()) | {"precision": BF16}
    ParallelPlan.from_json(json.dumps(fields))
    return {"plan": fields, "batch": batch, "family": family, "rank": rank, "steps": 1, **more}


def dry_run(library: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what fake_cuda/dry_run.py prints for each case, from one process."""
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "dry_run.py")],
        input="\n".join(map(json.dumps, cases)),
        env=os.environ | {"IDLE_DEVICE": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60 + 30 * len(cases),
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]


def of_all_ranks(plan: str, batch: str = "padded", family: str = "llama", **more: Any) -> list[dict[str, Any]]:
    return [case(plan, batch, family, rank=rank, **more) for rank in range(PLANS[plan].world_size)]


def family_of(plan: str, family: str, untied: str) -> str:
    """Returns a family, or an untied one if the plan cuts embedding and head differently."""
    return family if PLANS[plan].embedding == PLANS[plan].head else untied


# ---- Waits and devices ----

# One of each kind of plan, batch and family; the other combinations are slow.
FAST = [
    case("tensor_recompute", "masked", "gpt2", traced=True, steps=2),
    case("1f1b", "packed", "qwen2", rank=3, traced=True, steps=2),
    case("zero_bubble", "padded", rank=1, steps=2),
    case("mixed_a", "packed", "gemma2", rank=2, steps=2),
]
ORDERED = {"1f1b_mixed": of_all_ranks("1f1b_mixed", "packed")}
FAULTS = {
    "offsets for each layer": case("zero3_recompute", "packed"),
    "norm from the host": case("zero3"),
    "spans that wait": case("1f1b", traced=True),
    "gradient read in each layer": case("zero3"),
    "mask read on the device": case("zero3", "masked"),
    "objects stay on the device": case("zero3"),
}
SLOW_FAMILIES = ("qwen3", "mistral", "gemma2", "phi3", "gpt2")


@pytest.fixture(scope="module")
def fast(library) -> dict[str, list[dict[str, Any]]]:
    """Returns what the fast cases have done, all from one process: importing transformers takes longer than a case."""
    faults = [one | {"fault": name} for name, one in FAULTS.items()]
    cases = {"waits": FAST, **ORDERED, "faults": faults, "one more sum": of_all_ranks("pair", fault="one more sum")}
    cases |= {"trainer": in_trainer("zero3", "packed"), "counted": [COUNTED]}
    found = iter(dry_run(library, [one for group in cases.values() for one in group]))
    return {name: [next(found) for _ in group] for name, group in cases.items()}


def check_waits_and_devices(found: list[dict[str, Any]], cases: list[dict[str, Any]]) -> None:
    assert len(found) == len(cases)
    for one, given in zip(found, cases, strict=True):
        named = {name: value for name, value in given.items() if name != "plan"}
        assert one["waits"] == [], f"{named}: {one['waits']}"
        assert one["elsewhere"] == [] and one["pickled"] == "cpu", named


def test_a_step_waits_for_no_device(fast):
    check_waits_and_devices(fast["waits"], FAST)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "masked", "packed"])
def test_a_step_of_every_plan_waits_for_no_device(library, batch):
    cases = []
    for index, (name, plan) in enumerate(PLANS.items()):
        family = family_of(name, SLOW_FAMILIES[index % len(SLOW_FAMILIES)], "llama_biases")
        cases.append(case(name, batch, family, rank=plan.world_size - 1, traced=True, steps=2))
    check_waits_and_devices(dry_run(library, cases), cases)


def in_trainer(plan: str, batch: str, family: str = "llama") -> list[dict[str, Any]]:
    return [case(plan, batch, family, work="train") | {"steps": steps} for steps in (1, 3)]


def check_one_wait_in_a_step(one: dict[str, Any], three: dict[str, Any]) -> None:
    """Two more steps of Trainer's loop wait twice more for the numbers of a step's check, and for nothing else."""
    more = Counter(three["waits"])
    more.subtract(one["waits"])
    assert +more == {"Event.synchronize at utils/device.py in tolist": 2}


def test_a_step_in_trainers_loop_waits_once(fast):
    check_one_wait_in_a_step(*fast["trainer"])


@pytest.mark.slow
def test_a_step_of_other_plans_in_trainers_loop_waits_once(library):
    cases = [("1f1b", "padded", "gpt2"), ("zero_bubble", "packed", "llama"), ("mixed_a", "padded", "gemma2")]
    found = dry_run(library, [one for given in cases for one in in_trainer(*given)])
    for index in range(len(cases)):
        check_one_wait_in_a_step(*found[2 * index : 2 * index + 2])


# ---- benchmarks/gpu.py ----

# The ways of each section that are not compiled.
WAYS = {
    "8B": ["zero3"],
    "1B": ["zero3", "zero3, recompute"],
    "ragged": ["zero3, packed", "replicate, packed"],
    "narrow": ["replicate", "zero3", "zero3, recompute"],
}


@pytest.mark.slow
def test_the_script_for_gpus_takes_its_steps_at_their_size(library):
    """Its loop is plain Trainer's and is tried on the CPU: `gpu.py --tiny --device cpu`."""
    found = dry_run(library, [{"work": "gpu script", "section": section} for section in WAYS])
    assert found == [dict.fromkeys(ways, []) for ways in WAYS.values()]


# ---- What the profiler counts ----

SIZES = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
COUNTED = {"work": "count", "length": 384, "config": SIZES | HEADS}


def test_bytes_are_counted_with_the_operators_of_the_device(fast):
    [found] = fast["counted"]
    for packed in (False, True):
        peaks = [found[f"{device} {packed}"]["head"]["forward_peak_bytes"] for device in ("cpu", "cuda")]
        # On the CPU each chunk makes the gradient of the weight in fp32; a GPU adds its product to the sum.
        assert peaks[0] - peaks[1] >= 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    # One kernel for all documents keeps what attention of rows keeps, and the offsets. The CPU joins their outputs.
    rows, documents = found["cpu False"]["layer"], found["cuda True"]["layer"]
    assert 0 <= documents["saved_bytes"] - rows["saved_bytes"] < 64
    assert found["cpu True"]["layer"]["saved_bytes"] - rows["saved_bytes"] == 2 * SIZES["hidden_size"] * 2 * 384


# ---- The order of communicators ----


def unequal_orders(ranks: list[dict[str, Any]]) -> list[str]:
    """Returns the communicators whose ranks do not do the same in the same order: the same collectives of the same
    sizes, each part of an exchange as long as its receiver expects, and a send for each receive.
    """
    wrong = []
    members = {name: one for rank in ranks for name, one in rank["members"].items()}
    for name, group in members.items():
        for index, calls in enumerate(itertools.zip_longest(*(ranks[rank]["order"].get(name, []) for rank in group))):
            if not all(calls) or not _meet([call for call in calls]):
                wrong.append(f"call {index} of {name} on {group}: {calls}")
                break
    return wrong


def _meet(calls: list[list]) -> bool:
    kinds, sizes, splits = zip(*calls, strict=True)
    if set(kinds) <= {"send", "recv_"}:
        return sorted(kinds) == ["recv_", "send"] and sizes[0] == sizes[1]
    if len(set(kinds)) > 1:
        return False
    if not any(splits):
        return all(size == sizes[0] for size in sizes)
    sent = [split["input_split_sizes"] for split in splits]
    expected = [split["output_split_sizes"] for split in splits]
    ranks = range(len(calls))
    return all(sent[i][j] == expected[j][i] for i in ranks for j in ranks if sent[i] and expected[j])


@pytest.mark.parametrize("plan", ORDERED)
def test_all_ranks_of_a_communicator_do_the_same(fast, plan):
    assert unequal_orders(fast[plan]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_all_ranks_of_a_communicator_do_the_same_under_every_plan(library, part):
    batches = itertools.cycle(["padded", "packed", "masked"])
    plans = {name: next(batches) for name in list(PLANS)[part::2]}
    cases = {plan: of_all_ranks(plan, batch, family_of(plan, "llama_tied", "llama")) for plan, batch in plans.items()}
    found = iter(dry_run(library, [one for ranks in cases.values() for one in ranks]))
    for plan, ranks in cases.items():
        assert unequal_orders([next(found) for _ in ranks]) == [], plan


# ---- The checks can fail ----


def test_faults_are_seen(fast):
    counts = {fault: len(one["waits"]) for fault, one in zip(FAULTS, fast["faults"], strict=True)}
    layers = len(PLANS["zero3"].layers)
    # Each layer asks for them, and its attention; both again in the recompute.
    assert counts["offsets for each layer"] == 4 * layers
    assert counts["norm from the host"] == 1 and counts["gradient read in each layer"] == layers
    assert counts["spans that wait"] > 2 and counts["mask read on the device"] == 3
    assert fast["faults"][-1]["pickled"] == "cuda"
    assert unequal_orders(fast["one more sum"])
