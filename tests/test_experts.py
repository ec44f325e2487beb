# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Layers with experts under every kind of plan, against one process: every family, the loss of the routers over the
global batch with a coefficient of 0.5, packed rows, and a model's own forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from equivalence import Reference, assert_near, assert_same_gradients, reference, whole_gradients
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel import executor
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers import experts
from galvatron_hf.parallel.layers.experts import ParallelExperts
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.router_loss import RouterStatistics
from galvatron_hf.plan import ParallelPlan
from plans import expert_plans, shared_out
from ranks import run_ranks
from test_mutations import complaint
from test_packed_rows import check_packed, long_tailed
from test_parallelize import check_cases
from tiny_models import BATCHES, EXPERT_FAMILIES


FAMILIES = list(EXPERT_FAMILIES)
# With few of their plans in the fast tests: each kind of plan occurs.
FAST = {
    "mixtral": ["zero_bubble"],
    "qwen2_moe": ["interleaved"],
    "qwen3_moe": ["tensor_1f1b"],
    "olmoe": ["tensor"],
    "phimoe": ["shardings"],
    "granitemoe": ["expert_1"],
    "granitemoeshared": ["micro_batches"],
    "deepseek_v2": ["permuted"],
    "deepseek_v3": ["ulysses"],
    "glm4_moe": ["all_kinds"],
    "ernie4_5_moe": ["megatron_sp"],
    "dots1": ["gpipe"],
    "minimax_m2": ["expert_4"],
    "gpt_oss": ["recompute"],
    "hunyuan_v1_moe": ["1f1b"],
    "llama4_text": ["expert_2"],
    "minimax": ["recompute"],
}


def plans_of(oracle: Reference) -> dict[str, ParallelPlan]:
    """Returns the plans that a family's layers fit."""
    adapter = adapter_for(oracle.model)
    counts, cut = adapter.expert_counts(oracle.model), adapter.structure is None
    dense = [index for index, count in enumerate(counts) if not count]
    return expert_plans(dense=dense, tensor=cut, sequence=cut)


def oracle_of(family: str, batch: str = "right", **changes) -> Reference:
    return reference(EXPERT_FAMILIES[family].build(**changes), BATCHES[batch]())


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_every_family_with_experts(part):
    cases = {}
    for family in list(FAST)[part::4]:
        oracle = oracle_of(family)
        plans = plans_of(oracle)
        cases |= {f"{family} {name}": (oracle, plans[name]) for name in FAST[family]}
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_more_plans_of_every_family_with_experts(family):
    """Runs a sixth of the plans in each family, and each plan in several families."""
    oracles = {batch: oracle_of(family, batch) for batch in ("right", "left", "odd", "plain")}
    cases = {}
    for index, (name, plan) in enumerate(shared_out(plans_of(oracles["right"]), FAMILIES.index(family), 6).items()):
        batch = list(oracles)[index % len(oracles)]
        cases[f"{name}, {batch}"] = oracles[batch], plan
    check_cases(4, cases)


PLANS = expert_plans()


@pytest.mark.slow
def test_packed_rows_with_experts():
    oracles = {name: reference(EXPERT_FAMILIES[name].build(), long_tailed()) for name in ("qwen3_moe", "deepseek_v3")}
    cases = [("qwen3_moe", name) for name in ("all_kinds", "expert_4", "1f1b", "gpipe")]
    plans = {name: plans_of(one) for name, one in oracles.items()}

    def work() -> None:
        world = WorldMesh("cpu")
        for family, name in [*cases, ("deepseek_v3", "ulysses")]:
            try:
                check_packed(oracles[family], plans[family][name], world)
            except AssertionError as error:
                raise AssertionError(f"{family} {name}: {error}") from error

    run_ranks(work, 4)


@pytest.mark.slow
def test_a_loss_of_ones_own_has_that_of_the_routers():
    """Uses loss and aux_loss of the model's output in other proportions than the family does."""
    wanted = oracle_of("mixtral")
    model = copy.deepcopy(wanted.model)
    output = model(**wanted.batch)
    loss = 0.5 * output.loss + 0.25 * output.aux_loss + output.logits.square().mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def work() -> None:
        world = WorldMesh("cpu")
        for name in ("expert_4", "tensor", "micro_batches", "1f1b"):
            parallel = parallelize(copy.deepcopy(wanted.model), PLANS[name], world)
            seen = parallel.model(**wanted.batch)
            assert_near("aux_loss", float(seen.aux_loss), float(output.aux_loss))
            assert_near("loss", float(seen.loss), float(output.loss))
            (0.5 * seen.loss + 0.25 * seen.aux_loss + seen.logits.square().mean()).backward()
            parallel.units.finish_step()
            assert_same_gradients(whole_gradients(parallel.model, model), gradients, where=name)

    run_ranks(work, 4)


def test_losses_of_tokens_have_the_loss_of_the_routers():
    """The output of `fused_lm_head=True`, an option of TRL's trainers, under a plan with and without stages."""
    wanted = oracle_of("mixtral")
    aux_loss = float(wanted.model(**wanted.batch).aux_loss.detach())

    def work() -> None:
        world = WorldMesh("cpu")
        for name in ("expert_2", "1f1b"):
            parallel = parallelize(copy.deepcopy(wanted.model), PLANS[name], world)
            output = parallel.model(**wanted.batch, fused_lm_head=True)
            assert_near("loss", float(output.loss), wanted.loss)
            assert_near("aux_loss", float(output.aux_loss), aux_loss)
            output.loss.backward()
            parallel.units.finish_step()
            assert_same_gradients(whole_gradients(parallel.model, wanted.model), wanted.gradients, where=name)

    run_ranks(work, 4)


@pytest.mark.slow
@pytest.mark.parametrize("configured", [True, False])
def test_a_call_may_ask_for_the_loss_of_the_routers_or_not(configured):
    plain = EXPERT_FAMILIES["mixtral"].build(output_router_logits=configured)
    batch, found = BATCHES["right"](), {}
    for asked in (None, True, False):
        output = plain(**batch, use_cache=False, output_router_logits=asked)
        found[asked] = float(output.loss), [name for name in output if name != "router_logits"]

    def work() -> None:
        world = WorldMesh("cpu")
        for name in ("expert_2", "1f1b"):
            parallel = parallelize(copy.deepcopy(plain), PLANS[name], world)
            for asked, (loss, names) in found.items():
                output = parallel.model(**batch, output_router_logits=asked)
                assert_near(f"loss, {asked}", float(output.loss), loss)
                assert list(output) == names and float(output[0]) == float(output.loss)
            parallel.model.config.output_router_logits = not configured
            assert_near("loss, changed", float(parallel.model(**batch).loss), found[not configured][0])
            with pytest.raises(AttributeError, match="no rank keeps the router_logits"):
                output.router_logits  # noqa: B018

    run_ranks(work, 4)


def test_a_loss_of_logits_alone_leaves_the_routers_loss_out():
    wanted = oracle_of("mixtral")
    model = copy.deepcopy(wanted.model)
    model(**wanted.batch).logits.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def work() -> None:
        parallel = parallelize(copy.deepcopy(wanted.model), PLANS["expert_2"])
        parallel.model(**wanted.batch).logits.square().mean().backward()
        parallel.units.finish_step()
        assert_same_gradients(whole_gradients(parallel.model, model), gradients)

    run_ranks(work, 4)


def test_shared_experts_run_while_rows_are_on_their_way():
    """Follows the order of messages and of the shared experts of one layer, forward and backward."""
    wanted = oracle_of("deepseek_v3")

    def work() -> list[str]:
        parallel = parallelize(copy.deepcopy(wanted.model), plans_of(wanted)["expert_4"])
        parallel.forward_backward(wanted.batch)  # tells that they follow the experts
        events, shared = [], [layer.mlp.shared_experts for layer in parallel.layers[1:]]

        def noted(name: str, run: Callable) -> Callable:
            def noting(*args):
                events.append(name)
                return run(*args)

            return noting

        for module in shared:
            module.forward.original = noted("shared", module.forward.original)
            module.down_proj.register_full_backward_hook(lambda *unused: events.append("shared back"))
        with (
            patch.object(collectives, "_start_rows", noted("start", collectives._start_rows)),
            patch.object(collectives, "_wait", noted("wait", collectives._wait)),
        ):
            parallel.forward_backward(wanted.batch)
        return events

    for events in run_ranks(work, 4):
        for name in ("shared", "shared back"):
            around = [events[at - 1 : at + 2] for at, event in enumerate(events) if event == name]
            assert around == [["start", name, "wait"]] * 3, events


# ---- Errors that must be seen ----


def replaced(owner: object, name: str, value: object) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: patch.object(owner, name, value)


def to_a_wrong_expert(choices: torch.Tensor, count: int, group: object, compress: object) -> experts.Routing:
    routing = ROUTE(choices, count, group, compress)
    wrong = routing.experts.clone()
    if len(wrong):
        wrong[0] = (wrong[0] + 1) % (count // group.size())
    return replace(routing, experts=wrong)


def with_weights_twice(self: ParallelExperts, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor):
    return RUN(self, hidden, choices, weights * weights)


def of_own_rank(self: RouterStatistics) -> None:
    self.complete = True


@contextlib.contextmanager
def with_divided_expert_gradients() -> Iterator[None]:
    add = ShardedUnits.add

    def dividing(self, module, mesh, sharding, *, of_experts=False, **options):
        add(self, module, mesh, sharding, of_experts=of_experts, **options)
        if of_experts and sharding != "replicate":
            module.set_gradient_divide_factor(2.0)

    with patch.object(ShardedUnits, "add", dividing):
        yield


ROUTE, RUN, CLUSTERS = experts.route, ParallelExperts._run, ParallelExperts._clusters
MUTATIONS = {
    "a token at the wrong expert": (replaced(experts, "route", to_a_wrong_expert), "expert_2", "loss"),
    "weights of choices twice": (replaced(ParallelExperts, "_run", with_weights_twice), "expert_4", "loss"),
    "routers' loss of the first micro-batch": (
        replaced(executor.Executor, "_count_choices", lambda self, statistics, forward: None),
        "micro_batches",
        "loss",
    ),
    "routers' loss of the own rank": (replaced(RouterStatistics, "sum_over_ranks", of_own_rank), "expert_2", "loss"),
    "an expert's gradient divided": (with_divided_expert_gradients, "expert_2", "experts"),
    "copies count in the routers' loss": (
        replaced(RouterStatistics, "add", lambda self, logits, weights: ADD(self, logits, weights.sign())),
        "tensor",
        "loss",
    ),
}
ADD = RouterStatistics.add


@pytest.mark.slow
def test_every_injected_error_is_seen():
    wanted = oracle_of("mixtral")

    def work() -> dict[str, str]:
        found, world = {}, WorldMesh("cpu")
        for name, (inject, plan, _) in MUTATIONS.items():
            with inject():
                found[name] = complaint(wanted, PLANS[plan], world)
        return found

    results = run_ranks(work, 4)
    for name, (_, _, seen_in) in MUTATIONS.items():
        complaints = {found[name] for found in results} - {""}
        assert complaints, f"nothing was seen of: {name}"
        assert any(seen_in in text for text in complaints), (name, complaints)
