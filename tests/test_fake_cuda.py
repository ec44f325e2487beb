# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps on GPUs that are not there (see fake_cuda/): the host waits for no device, tensors are on it, and all ranks of
a communicator do the same in the same order.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_hf.models.families import adapter_for
from galvatron_hf.plan import ParallelPlan, SequenceGroups
from galvatron_hf.plan.schedule import PipelineShape, runs_forwards_first
from nccl_simulator import play_collectives
from plans import expert_plans, mixed_plans, pipeline_plans, shared_out, uniform, uniform_plans
from test_encoder_decoders import PIPELINES as PIPELINES_OF_TWO
from test_encoder_decoders import PLANS as TWO_STACKS
from tiny_models import EXPERT_FAMILIES


FOLDER = Path(__file__).parent / "fake_cuda"
WORLD_SIZE = 4
TIMEOUT_SECONDS = 300.0  # of one case; the first one waits for the imports too
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
GROUPS = SequenceGroups(max_tokens_per_rank=None, max_degree=4)
PLANS = uniform_plans(WORLD_SIZE) | mixed_plans() | pipeline_plans() | {"pair": uniform_plans(2)["zero3"]}
DENSE = list(PLANS)
PLANS |= {f"experts, {name}": plan for name, plan in expert_plans().items()}
PLANS |= {f"experts, first dense, {name}": plan for name, plan in expert_plans(dense=[0]).items()}
PLANS["groups"] = replace(mixed_plans()["mixed_c"], sequence_groups=GROUPS)
PLANS["context"] = uniform(4, context=4, recompute="full")
PLANS |= {f"two stacks, {name}": plan for name, plan in (TWO_STACKS | PIPELINES_OF_TWO).items()}
BATCHES = ("padded", "masked", "packed")
BF16 = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the device that does nothing"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has devices of its own"),
]


class DryRuns:
    """Runs fake_cuda/dry_run.py in one process for all tests: importing transformers takes longer than a case. PyTorch
    may read the memory of a fake device, which is not there, and end the process by a signal. A case in which that
    happens runs once more, in a new process.
    """

    def __init__(self, library: Path):
        self.environment = os.environ | {"IDLE_DEVICE": str(library), "OMP_NUM_THREADS": "1"}
        self.process, self.errors = None, None
        self.start()

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(FOLDER / "dry_run.py")],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __call__(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns what the script prints for a case."""
        for attempt in range(2):
            found = self.printed_for(case)
            if found is not None:
                return found
            code = self.process.wait()
            self.errors.seek(0)
            said = f"The dry run of {case.get('name')} ended with {code}:\n{self.errors.read()[-6000:]}"
            self.end()
            self.start()  # other tests go on with the new one
            if code not in CRASHES or attempt:
                raise AssertionError(said)
            warnings.warn(said, stacklevel=2)

    def printed_for(self, case: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what the script prints for a case, or None if it ends before."""
        limit = threading.Timer(TIMEOUT_SECONDS, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith('{"'):
                    return json.loads(line)
        except BrokenPipeError:
            pass  # it has ended
        finally:
            limit.cancel()
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory) -> Iterator[DryRuns]:
    """Compiles the device that does nothing, and starts the process that has it."""
    made, root = tmp_path_factory.mktemp("fake_cuda") / "libidle_device.so", Path(torch.__file__).parent
    linked = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    source = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", str(FOLDER / "idle_device.cpp")]
    subprocess.run(["g++", *source, *linked, "-o", str(made)], check=True)
    runs = DryRuns(made)
    yield runs
    runs.end()


def case(plan: str, batch: str = "padded", family: str = "llama", rank: int = 0, **more: Any) -> dict[str, Any]:
    fields = json.loads(PLANS[plan].to_json()) | {"precision": BF16}
    ParallelPlan.from_json(json.dumps(fields))
    return {"name": plan, "plan": fields, "batch": batch, "family": family, "rank": rank, "steps": 1, **more}


def dry_run(dry_runs: DryRuns, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what fake_cuda/dry_run.py prints for each case."""
    return [dry_runs(one) for one in cases]


def of_all_ranks(plan: str, batch: str = "padded", family: str = "llama", **more: Any) -> list[dict[str, Any]]:
    return [case(plan, batch, family, rank=rank, **more) for rank in range(PLANS[plan].world_size)]


def family_of(plan: str, family: str, untied: str) -> str:
    """Returns a family, or an untied one if the plan cuts embedding and head differently."""
    return family if PLANS[plan].embedding == PLANS[plan].head else untied


# ---- Waits and devices ----

# One of each kind; the other combinations of plan, batch and family are slow.
FAST = [
    case("1f1b", "packed", "qwen2", rank=3, traced=True, steps=2),
    case("two stacks, mixed", "packed", "t5", rank=1),
    case("groups", "shared", rank=1),
    case("context", "shared", rank=2),
    case("two stacks, inside the decoder", "packed", "bart", rank=2),
]
ORDERED = of_all_ranks("1f1b_mixed", "packed")
# The degrees of experts are 1, 2 and 4; those of tensor ranks, Megatron-SP and packed rows are among them.
EXPERTS = [
    case("experts, all_kinds", "masked", "mixtral", rank=1),
    case("experts, gpipe", "packed", "qwen3_moe", rank=3),
]
EXPERT_MODELS = ("mixtral", "qwen3_moe", "deepseek_v3")
READ_ROWS = "Event.synchronize at utils/device.py in tolist"
FAULTS = {
    "offsets for each layer": case("zero3_recompute", "packed"),
    "norm from the host": case("zero3"),
    "spans that wait": case("1f1b", traced=True),
    "gradient read in each layer": case("zero3"),
    "mask read on the device": case("zero3", "masked"),
    "counts read again in the recompute": case("experts, recompute", "packed", "mixtral"),
    "choices counted on the host": case("experts, expert_2", "packed", "mixtral"),
    "objects stay on the device": case("zero3"),
}
SLOW_FAMILIES = ("qwen3", "mistral", "gemma2", "phi3", "gpt2")


@pytest.fixture(scope="module")
def fast(dry_runs) -> dict[str, list[dict[str, Any]]]:
    """Returns what the fast cases have done, all from one process: importing transformers takes longer than a case."""
    cases = {"waits": FAST, "experts": EXPERTS, "ordered": ORDERED}
    cases |= {"trainer": in_trainer("zero3", "packed"), "counted": [COUNTED]}
    found = iter(dry_run(dry_runs, [one for group in cases.values() for one in group]))
    return {name: [next(found) for _ in group] for name, group in cases.items()}


def check_waits_and_devices(found: list[dict[str, Any]], cases: list[dict[str, Any]]) -> None:
    assert len(found) == len(cases)
    for one, given in zip(found, cases, strict=True):
        named = {name: value for name, value in given.items() if name != "plan"}
        assert one["waits"] == [], f"{named}: {one['waits']}"
        assert one["elsewhere"] == [] and one["pickled"] == "cpu", named


def test_a_step_waits_for_no_device(fast):
    check_waits_and_devices(fast["waits"], FAST)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_of_every_plan_waits_for_no_device(dry_runs, batch):
    """Takes a step of a third of the plans with each kind of batch."""
    cases = []
    for index, (name, plan) in enumerate(
        shared_out({name: PLANS[name] for name in DENSE}, BATCHES.index(batch), 3).items()
    ):
        family = family_of(name, SLOW_FAMILIES[index % len(SLOW_FAMILIES)], "llama_biases")
        cases.append(case(name, batch, family, rank=plan.world_size - 1, traced=True, steps=2))
    check_waits_and_devices(dry_run(dry_runs, cases), cases)


def reads_of_rows(one: dict[str, Any]) -> int:
    """Returns how often the host of a case waits for the number of rows that arrive at experts: once in each forward
    of a layer that sends rows, but not in a recompute. A loss of routers whose counts no forward of the step completes
    in time has a forward of all micro-batches before.
    """
    plan, (model, counts) = PLANS[one["name"]], with_experts(one["family"])
    layers = [layer for stage in plan.stages if one["rank"] in stage.ranks for layer in range(*stage.layers)]
    sending = sum(counts[layer] > 0 and plan.layers[layer].expert > 1 for layer in layers)
    shape, parts, forwards = PipelineShape.from_plan(plan), plan.micro_batch_count, 1
    complete = parts == 1 if len(plan.stages) == 1 else runs_forwards_first(shape, parts)
    if adapter_for(model).router_loss(model) is not None and not complete:
        forwards = 2
    return sending * parts * forwards


@functools.cache
def with_experts(family: str):
    """Returns a model and the experts of its layers."""
    with torch.device("meta"):
        model = EXPERT_FAMILIES[family].build()
    return model, adapter_for(model).expert_counts(model)


def check_reads_of_rows(found: list[dict[str, Any]], cases: list[dict[str, Any]]) -> None:
    """Asserts that the host waits for numbers of rows as often as said, and for nothing else."""
    for one, given in zip(found, cases, strict=True):
        assert Counter(one["waits"]) == +Counter({READ_ROWS: reads_of_rows(given)}), given["name"]
        assert one["elsewhere"] == [] and one["pickled"] == "cpu", given["name"]


def test_layers_with_experts_wait_once_for_the_number_of_rows(fast):
    check_reads_of_rows(fast["experts"], EXPERTS)
    assert [reads_of_rows(one) for one in EXPERTS] == [16, 4]


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_layers_with_experts_wait_as_often_as_said_under_every_plan(dry_runs, family):
    """Takes a third of the plans in each family."""
    batches, dense = itertools.cycle(["packed", "masked", "padded"]), "first dense, " * (family == "deepseek_v3")
    names = [f"experts, {dense}{name}" for name in shared_out(expert_plans(), EXPERT_MODELS.index(family), 3)]
    if dense:  # the attention of this family has no tensor degree
        names = [name for name in names if all(layer.tensor == 1 for layer in PLANS[name].layers)]
    cases = [case(name, next(batches), family, rank=index % 4, steps=2) for index, name in enumerate(names)]
    check_reads_of_rows(dry_run(dry_runs, cases), cases)


def in_trainer(plan: str, batch: str, family: str = "llama") -> list[dict[str, Any]]:
    return [case(plan, batch, family, work="train") | {"steps": steps} for steps in (1, 3)]


def check_one_wait_in_a_step(one: dict[str, Any], three: dict[str, Any]) -> None:
    """Two more steps of Trainer's loop wait twice more for the numbers of a step's check, and for nothing else."""
    more = Counter(three["waits"])
    more.subtract(one["waits"])
    assert +more == {"Event.synchronize at utils/device.py in tolist": 2}


def test_a_step_in_trainers_loop_waits_once(fast):
    check_one_wait_in_a_step(*fast["trainer"])


def test_a_step_of_other_plans_in_trainers_loop_waits_once(dry_runs):
    cases = [("1f1b", "padded", "gpt2"), ("zero_bubble", "packed", "llama"), ("mixed_a", "padded", "gemma2")]
    found = dry_run(dry_runs, [one for given in cases for one in in_trainer(*given)])
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


def test_the_script_for_gpus_takes_its_steps_at_their_size(dry_runs):
    """Its loop is plain Trainer's and is tried on the CPU: `gpu.py --tiny --device cpu`."""
    found = dry_run(dry_runs, [{"work": "gpu script", "section": section} for section in WAYS])
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


def where_ranks_hang(ranks: list[dict[str, Any]]) -> list[str]:
    """Plays what all ranks have issued, with hosts of different speeds; returns where they stand that never go on."""
    members = {name: one for rank in ranks for name, one in rank["members"].items()}
    issued, hanging = [rank["issued"] for rank in ranks], []
    for streams, slow in ((None, ()), (2, (0,)), (1, ()), (1, (1, 3))):
        late = [rank for rank in slow if rank < len(ranks)]
        hanging += play_collectives(issued, members, streams=streams, slow=late)
    return hanging


def test_all_ranks_of_a_communicator_do_the_same(fast):
    assert unequal_orders(fast["ordered"]) == []
    assert where_ranks_hang(fast["ordered"]) == []


def check_order_under(dry_runs: DryRuns, cases: dict[str, list[dict[str, Any]]]) -> None:
    found = iter(dry_run(dry_runs, [one for ranks in cases.values() for one in ranks]))
    for plan, ranks in cases.items():
        seen = [next(found) for _ in ranks]
        assert unequal_orders(seen) == [] and where_ranks_hang(seen) == [], plan


@pytest.mark.parametrize("part", [0, 1])
def test_all_ranks_of_a_communicator_do_the_same_under_pipelines(dry_runs, part):
    """Plays two thirds of the pipelines, and a quarter of the plans of one stage."""
    batches = itertools.cycle(["padded", "packed", "masked"])
    names = [name for index, name in enumerate(pipeline_plans()) if index % 3]
    names += shared_out(uniform_plans(WORLD_SIZE) | mixed_plans(), 0, 4)
    plans = {name: next(batches) for name in names[part::2]}
    families = {plan: family_of(plan, "llama_tied", "llama") for plan in plans}
    check_order_under(dry_runs, {plan: of_all_ranks(plan, batch, families[plan]) for plan, batch in plans.items()})


@pytest.mark.parametrize("part", [0, 1])
def test_all_ranks_do_the_same_under_plans_with_experts(dry_runs, part):
    """Plays a third of the plans with each of two families."""
    batches, family = itertools.cycle(["padded", "packed", "masked"]), EXPERT_MODELS[part]
    plans = {f"experts, {name}": next(batches) for name in shared_out(expert_plans(), part, 3)}
    check_order_under(dry_runs, {plan: of_all_ranks(plan, batch, family) for plan, batch in plans.items()})


# ---- Two stacks ----


@pytest.mark.parametrize("name", ["sequence", "inside the encoder"])
def test_all_ranks_of_two_stacks_wait_for_no_device_and_do_the_same(dry_runs, name):
    cases = of_all_ranks(f"two stacks, {name}", "masked", "t5")
    seen = dry_run(dry_runs, cases)
    check_waits_and_devices(seen, cases)
    assert unequal_orders(seen) == [] and where_ranks_hang(seen) == []


# ---- The checks can fail ----


def test_faults_are_seen(dry_runs):
    faults = [one | {"fault": name} for name, one in FAULTS.items()]
    *found, first, second = dry_run(dry_runs, faults + of_all_ranks("pair", fault="one more sum"))
    counts = {fault: len(one["waits"]) for fault, one in zip(FAULTS, found, strict=True)}
    layers = len(PLANS["zero3"].layers)
    # Each layer asks for them, and its attention; both again in the recompute.
    assert counts["offsets for each layer"] == 4 * layers
    assert counts["norm from the host"] == 1 and counts["gradient read in each layer"] == layers
    assert counts["spans that wait"] > 2 and counts["mask read on the device"] == 3
    sending = sum(layer.expert > 1 for layer in PLANS["experts, recompute"].layers)
    assert counts["counts read again in the recompute"] == 2 * sending
    assert counts["choices counted on the host"] == 2 * layers
    assert found[-1]["pickled"] == "cuda"
    assert unequal_orders([first, second]) and where_ranks_hang([first, second])
