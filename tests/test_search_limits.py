# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Searches that are stopped before their end, spaces without a feature, and the rows of a dataset."""

import itertools
import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig

from galvatron_hf.cli import search as cli_search
from galvatron_hf.cli.main import main
from galvatron_hf.cli.stopping import Stop, stop_at_interrupt
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.report import alternatives as planner_alternatives
from galvatron_hf.planner.report.alternatives import alternatives
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.simplify import simplest
from galvatron_hf.planner.space import FEATURES, Limits
from galvatron_hf.planner.step_cuts import step_cuts
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace import tracing
from galvatron_hf.utils import hub
from galvatron_hf.utils.hub import hub_is_out_of_reach
from planner_cases import random_hardware, random_model, workload


@pytest.mark.parametrize("experts", [False, True])
def test_a_stopped_search_has_a_plan_and_how_far_it_may_be_from_the_fastest(experts):
    model, hardware = (
        random_model(1, layers=4, experts=experts),
        random_hardware(1, world_size=4, memory_bytes=1 << 40),
    )
    whole = search_plan(hardware, model, workload(8))
    assert whole.bound_ms is None
    bounds = []
    for after in (0, 5, 40, 200):
        calls = itertools.count()
        stopped = search_plan(hardware, model, workload(8), stop=lambda calls=calls, after=after: next(calls) >= after)
        if stopped.bound_ms is None:  # came to its end before
            assert stopped.best == whole.best
            continue
        assert stopped.bound_ms <= whole.best.step_ms <= stopped.best.step_ms
        assert max(stopped.best.memory_bytes) <= stopped.memory_bytes
        bounds.append(stopped.bound_ms)
    assert bounds == sorted(bounds) and len(set(bounds)) > 1


def test_a_search_that_was_stopped_without_a_plan_says_so():
    model, hardware = random_model(1, layers=4), random_hardware(1, world_size=4, memory_bytes=1)
    stopped = search_plan(hardware, model, workload(8), stop=lambda: True)
    assert stopped.best is None and "stopped after" in stopped.no_plan_message
    calls = itertools.count()  # it has seen all problems, of which none has a solution
    ended = search_plan(hardware, model, workload(8), stop=lambda: next(calls) > 100_000)
    assert ended.bound_ms is None and ended.least_memory_bytes > 1
    with pytest.raises(ValueError, match="memory_bytes=0 is not the memory of a rank"):
        search_plan(hardware, model, workload(8), memory_bytes=0)


def features_of(plan: ParallelPlan) -> set[str]:
    """Returns the features that a plan has, by the names of `Limits.without`."""
    layers, ranks = plan.layers, len(plan.stages[0].ranks)
    pipeline = len(plan.rank_groups) > 1
    shardings = {one.sharding for one in (*layers, plan.embedding, plan.head)}
    found = {
        "pipeline": pipeline,
        "interleaved": len(plan.stages) > len(plan.rank_groups),
        "zero3-in-pipeline": pipeline and "zero3" in shardings,
        "tensor": any(one.tensor > 1 for one in (*layers, plan.embedding, plan.head)),
        "ulysses": any(one.ulysses > 1 for one in layers),
        "megatron-sp": any(one.megatron_sp for one in layers),
        "context": any(one.context > 1 for one in layers),
        "expert": any(one.expert > 1 for one in layers),
        "zero2": "zero2" in shardings,
        "zero3": "zero3" in shardings,
        "hybrid-sharding": any(one.shard_degree not in (None, ranks) for one in (*layers, plan.embedding, plan.head)),
        "recompute": any(one.recompute == "full" for one in layers),
        "mixed-layers": len(set(layers)) > 1,
    }
    return {name for name, there in found.items() if there}


@pytest.fixture(scope="module")
def fastest() -> list[tuple[tuple, int, set[str]]]:
    """Returns problems of several sizes with little or much memory, with the features of their fastest plans."""
    found = []
    for seed, rows in itertools.product(range(8), (2, 8)):
        model = random_model(seed, layers=4, experts=seed % 2 == 1)
        hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
        case = hardware, model, workload(rows, packed=True)
        most = max(search_plan(*case).best.memory_bytes)
        for share in (1.0, 0.7, 0.5, 0.35):
            best = search_plan(*case, memory_bytes=int(share * most)).best
            if best is not None:
                found.append((case, int(share * most), features_of(best.plan)))
    return found


@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - {"zero3-in-pipeline", "hybrid-sharding", "interleaved"}))
def test_what_is_forbidden_is_in_no_plan(fastest, feature):
    chosen = [(case, memory) for case, memory, features in fastest if feature in features][:4]
    assert chosen
    for case, memory in chosen:
        free = search_plan(*case, memory_bytes=memory).best
        found = search_plan(*case, memory_bytes=memory, limits=Limits().without(feature))
        if found.best is None:
            continue
        for one in (found.best, *found.runners_up, simplest(found), simplest(found, 0.3)):
            assert feature not in features_of(one.plan) and found.limits.allows(one.plan, case[1])
        assert not found.limits.allows(free.plan, case[1])
        assert found.best.step_ms >= free.step_ms


def test_strategies_that_are_forbidden_are_not_searched():
    """Looks at the strategies of stages, because few plans with these are the fastest."""
    model, hardware = random_model(0, layers=4), random_hardware(0, world_size=4, memory_bytes=1 << 40)

    def searched(limits: Limits) -> set[tuple[bool, str, bool]]:
        found = set()
        for cut in step_cuts(CostModels(hardware, model, workload(8)), limits):
            for one in (*cut.strategies, *itertools.chain(*cut.choices_of_ends)):
                found.add((cut.shapes[0].pipeline > 1, one.sharding, one.shard_degree is not None))
        return found

    every = searched(Limits())
    assert {(True, "zero3", False), (False, "zero3", True)} <= every
    without = searched(Limits().without("zero3-in-pipeline"))
    assert without == {one for one in every if not (one[0] and one[1] == "zero3")}
    assert searched(Limits().without("hybrid-sharding")) == {one for one in every if not one[2]}
    schedules = {
        shape.schedule for cut in step_cuts(CostModels(hardware, model, workload(8)), Limits()) for shape in cut.shapes
    }
    plain = step_cuts(CostModels(hardware, model, workload(8)), Limits().without("interleaved"))
    assert {shape.schedule for cut in plain for shape in cut.shapes} == schedules - {"interleaved"} != schedules
    with pytest.raises(ValueError, match="a forbidden feature is 'zero4'"):
        Limits().without("zero4")


@pytest.mark.parametrize("other", ["hardware", "model", "workload"])
def test_prices_of_another_case_are_not_used(other):
    hardware, model = random_hardware(0, world_size=4, memory_bytes=10**9), random_model(0, layers=4)
    case = dict(hardware=hardware, model=model, workload=workload(8))
    changed = dict(
        hardware=random_hardware(1, world_size=4, memory_bytes=10**9),
        model=random_model(1, layers=4),
        workload=replace(workload(8), length=2 * workload(8).length),
    )
    alone = search_plan(**case)
    of_other = CostModels(**case | {other: changed[other]})
    assert search_plan(**case | {other: changed[other]}, costs=of_other).best != alone.best
    found = search_plan(**case, costs=of_other)
    assert found.best == alone.best and found.costs is not of_other
    again = search_plan(**case, costs=found.costs)
    assert again.best == alone.best and again.costs is found.costs


# ---- The command line ----


@pytest.fixture
def interrupts():
    """Sets the handler of a command in the foreground, and then the one that these tests were started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_seconds_and_ctrl_c_stop(interrupts):
    assert not Stop()() and Stop(-1.0)()
    before = signal.getsignal(signal.SIGINT)
    with stop_at_interrupt() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() is True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_in_the_background_ignores_ctrl_c_as_its_shell_has_set(interrupts):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_at_interrupt() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() is False
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.fixture
def flags(tmp_path) -> list[str]:
    hardware_preset("cpu", 1, 4).to_json(tmp_path / "hardware.json")
    random_model(0, layers=4).to_json(tmp_path / "model.json")
    files = [f"--{kind}-profile={tmp_path / kind}.json" for kind in ("hardware", "model")]
    return [*files, "--seq-length", "64", "--global-batch", "8"]


def test_the_command_ends_in_time_with_the_gap(flags, capsys):
    assert main(["search", *flags, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["bound_step_ms"] == whole["fastest_step_ms"]
    limited = ["search", *flags, "--time-limit", "1e-9"]
    assert main([*limited, "--json", "--compare"]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["bound_step_ms"] < whole["fastest_step_ms"] <= stopped["fastest_step_ms"]
    assert main(limited) == 0
    printed = " ".join(capsys.readouterr().out.split())
    more = stopped["step_ms"] / stopped["bound_step_ms"] - 1
    assert "The search was stopped after" in printed and f"at most {more:.1%} longer" in printed
    assert main(["search", *flags, "--time-limit", "0"]) == 1
    assert "--time-limit 0 is no time" in capsys.readouterr().err


def test_an_interrupted_comparison_has_the_plans_that_were_found_before():
    hardware, model = random_hardware(0, world_size=4, memory_bytes=10**9), random_model(0, layers=4)
    case = dict(hardware=hardware, model=model, workload=workload(8), memory_bytes=10**9)
    whole, lengths = alternatives(**case), set()
    for calls in (0, 1, 3, 10, 30, 100, 10**6):
        after = itertools.count()
        found = alternatives(**case, interrupted=lambda after=after, calls=calls: next(after) >= calls)
        assert found == whole[: len(found)]
        lengths.add(len(found))
    assert {0, len(whole)} < lengths  # nothing, all, and some of them


def test_nothing_is_searched_after_ctrl_c(flags, capsys, monkeypatch):
    """A search that was stopped without a plan would go on for one of a small part of the space."""
    begin, searched = Stop.begin, []

    def asked(self):
        begin(self)
        self.asked = bool(searched)

    def search(*args, **kwargs):
        searched.append(search_plan(*args, **kwargs))
        return searched[-1]

    monkeypatch.setattr(Stop, "begin", asked)  # the comparison begins
    monkeypatch.setattr(cli_search, "search_plan", search)
    monkeypatch.setattr(planner_alternatives, "search_plan", search)
    for more in ([], ["--json"]):
        searched.clear()
        assert main(["search", *flags, "--compare", *more]) == 0
        printed = capsys.readouterr().out
        assert len(searched) == 1
        assert json.loads(printed)["alternatives"] == {} if more else "The comparison was stopped" in printed


def test_the_command_forbids(flags, capsys):
    assert main(["search", *flags, "--json", "--forbid", "pipeline", "recompute"]) == 0
    plan = ParallelPlan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    assert not {"pipeline", "recompute"} & features_of(plan)
    for word, more in (("pipeline", ["--pipeline", "2"]), ("tensor", ["--max-tensor", "2"])):
        assert main(["search", *flags, "--forbid", word, *more]) == 1
        assert f"--forbid {word} and {more[0]} exclude each other" in capsys.readouterr().err
    assert main(["search", *flags, "--memory-fraction", "1e-12"]) == 1
    assert "No plan fits" in capsys.readouterr().err
    assert main(["search", *flags, "--forbid", "zero4"]) == 1
    assert "a forbidden feature is 'zero4'" in capsys.readouterr().err


def test_the_rows_of_a_dataset_are_priced(flags, tmp_path, capsys):
    """Rows of one length give that length's price; short rows take less, and the longest needs the memory."""

    def found(*more: str) -> dict:
        assert main(["estimate", *flags, "--plan", "zero3+mb1", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    for name, lengths in (("even", [64] * 20), ("mixed", [64, 32, 16, 16] * 5), ("long", [640] * 20)):
        Path(tmp_path / name).write_text("\n".join(map(str, lengths)))
    even, mixed, long = (found("--dataset", str(tmp_path / name)) for name in ("even", "mixed", "long"))
    assert even["step_ms"] == long["step_ms"] == found()["step_ms"]
    assert mixed["step_ms"] < even["step_ms"] and mixed["memory_bytes"] == even["memory_bytes"]
    assert mixed["tokens_per_second"] == pytest.approx(8 * np.mean([64, 32, 16, 16]) / mixed["step_ms"] * 1e3)
    (tmp_path / "none").write_text("0\n")
    assert main(["estimate", *flags, "--plan", "zero3", "--dataset", str(tmp_path / "none")]) == 1
    assert "has no row with a token" in capsys.readouterr().err
    assert main(["estimate", *flags, "--plan", "zero3", "--tokenizer", "words"]) == 1
    assert "--tokenizer is for a --dataset" in capsys.readouterr().err


def test_a_model_of_the_hub_is_read_by_its_id(monkeypatch, capsys):
    """Without a network a stand-in gives the configuration."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)

    def from_pretrained(name, local_files_only):
        assert not local_files_only
        if name != "someone/a-model":
            raise OSError("it is not there")
        return LlamaConfig(**sizes)

    monkeypatch.setattr(tracing.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(tracing, "hub_is_out_of_reach", lambda: False)
    assert AutoConfig is tracing.AutoConfig
    flags = ["estimate", "--cluster", "h100", "--gpus", "2", "--seq-length", "128", "--global-batch", "8", "--json"]
    assert main([*flags, "--plan", "ddp", "--model", "someone/a-model"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] > 0
    assert main([*flags, "--plan", "ddp", "--model", "someone/other"]) == 1
    assert "the Hub gives no configuration for it (it is not there)" in capsys.readouterr().err


def test_without_a_way_to_the_hub_its_name_is_refused_at_once(monkeypatch, capsys, tmp_path):
    """Configurations that were downloaded before are read all the same."""

    def no_address(*unused):
        raise socket.gaierror("Temporary failure in name resolution")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(hub, "SECONDS_BETWEEN", 0.1)
    begun = time.monotonic()
    flags = ["estimate", "--cluster", "h100", "--gpus", "2", "--seq-length", "128", "--global-batch", "8"]
    assert main([*flags, "--plan", "ddp", "--model", "someone/a-modle"]) == 1
    assert time.monotonic() - begun < 5
    assert (
        "the Hub gives no configuration for it (the Hub cannot be reached, and none was down"
        in capsys.readouterr().err
    )
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    kept = tmp_path / "models--someone--a-model"
    config.save_pretrained(kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert tracing.read_config("someone/a-model").hidden_size == 64
    tries = iter([no_address, no_address, lambda *unused: []])  # a name server that is busy at first
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: next(tries)(*given))
    assert not hub_is_out_of_reach() and next(tries, None) is None
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setenv("https_proxy", "http://proxy:8080")
    assert not hub_is_out_of_reach()  # the proxy looks names up
