# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Small machines and models with random figures, and every plan that there is for them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from galvatron_hf.planner.build_problem import PlanProblem, UnsolvedProblem
from galvatron_hf.planner.cost.cost_model import CostModels, strategy_of_kind
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, estimate_solution, priced_shape
from galvatron_hf.planner.option_costs import OptionCosts
from galvatron_hf.planner.solver.problem import Solution
from galvatron_hf.planner.space import Limits, context_degrees, layer_strategies, vocabulary_strategies
from galvatron_hf.profiler.profiles.hardware import KINDS, HardwareProfile, Link
from galvatron_hf.profiler.profiles.layers import EndProfile, ExpertsProfile, ExpertTimes, LayerProfile, TimeFit, Times
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`."""
    return [1 << exponent for exponent in range(max(most, 0).bit_length())]


def random_hardware(seed: int, *, world_size: int, memory_bytes: int) -> HardwareProfile:
    """Returns a profile of one node with links of every kind, size and stride, each of its own speed."""
    draw = np.random.default_rng(seed)
    links = [
        Link(
            kind=kind,
            ranks=ranks,
            stride=stride,
            latency_ms=float(draw.uniform(0.01, 0.5)),
            bytes_per_s=float(draw.uniform(1e6, 1e8)),
        )
        for kind in KINDS
        for ranks in ([2] if kind == "send" else powers(world_size)[1:])
        for stride in powers(world_size // ranks)
    ]
    return HardwareProfile(
        name="random",
        nodes=1,
        devices_per_node=world_size,
        memory_bytes=memory_bytes,
        flops_per_s={"fp32": 1e12},
        links=tuple(links),
        overlap_slowdown=[None, 1.0, 1.2][seed % 3],
        exposed_sync=[1.0, 0.4][seed % 2],
        step_ms=[0.0, 7.0][seed % 2],
        hides_gathers=bool(seed % 2),
    )


def random_times(draw: np.random.Generator, degrees: Sequence[int], scale: float) -> dict[int, Times]:
    """Returns times by tensor degree."""
    found = {}
    for tensor in degrees:
        forward, backward = (
            TimeFit(
                per_token=float(draw.uniform(0.5, 1.5)) * scale * factor / tensor,
                per_square=float(draw.uniform(0.0, 0.01)),
                fixed=float(draw.uniform(0.0, 0.5)),
            )
            for factor in (1, 2)
        )
        outside, last = (float(draw.uniform(0.0, 0.2)) * scale / tensor for _ in range(2))
        found[tensor] = Times(
            forward=forward,
            backward=backward,
            forward_outside_tp=outside,
            forward_after_last_saved=last,
            recompute_fixed=0.25,
        )
    return found


def random_model(
    seed: int, *, layers: int, kinds: int = 1, tied: bool = False, degree: int = 2, experts: bool = False
) -> ModelProfile:
    """Returns a profile of a model with 8 features, for tensor and Ulysses degrees up to `degree`. With `experts` the
    last kind of layer has four, for expert degrees up to 4, and their routers a loss.
    """
    draw = np.random.default_rng(seed)
    degrees = powers(degree)
    strategies = [
        (tensor, megatron_sp, ulysses)
        for tensor in degrees
        for ulysses in degrees
        for megatron_sp in ([False, True] if tensor > 1 else [False])
        if tensor * ulysses <= degree
    ]

    def end(rows: int) -> EndProfile:
        return EndProfile(
            weights=(WeightShape(shape=(rows, 8), cut=0),),
            times=random_times(draw, degrees, 0.2),
            saved_bytes={tensor: float(draw.integers(8, 64)) for tensor in degrees},
            working_bytes={tensor: float(draw.integers(8, 256)) for tensor in degrees},
        )

    profiles = [
        LayerProfile(
            weights=(WeightShape(shape=(32, 8), cut=0), WeightShape(shape=(8, 32), cut=1), WeightShape(shape=(8,))),
            times=random_times(draw, degrees, 1.0),
            saved_bytes={key: float(draw.integers(100, 300)) / key[0] for key in strategies},
            working_bytes={key: float(draw.integers(0, 100)) for key in strategies},
        )
        for _ in range(kinds)
    ]
    if experts:
        weights = (*profiles[-1].weights, WeightShape(shape=(4, 16, 8), cut=0, of_experts=True))
        profiles[-1] = replace(profiles[-1], weights=weights, experts=random_experts(draw))
    return ModelProfile(
        name="random",
        hidden=8,
        heads=4,
        kv_heads=2,
        head_dim=2,
        dtype="fp32",
        kinds=tuple(profiles),
        layers=tuple(int(kind) for kind in draw.integers(0, kinds, layers)),
        embedding=end(64),
        head=end(64),
        tied=tied,
        optimizer_ms_per_element=float(draw.uniform(0, 0.01)),
        optimizer_ms_per_weight=float(draw.uniform(0, 0.1)),
        adding_ms_per_element=float(draw.uniform(0, 0.01)),
        calibration_factors=dict(
            zip(CALIBRATION_FACTORS, draw.uniform(0.5, 2, len(CALIBRATION_FACTORS)).tolist(), strict=True)
        )
        if seed % 2
        else {},
        collective_launch_ms=float(draw.uniform(0, 0.1)) if seed % 2 else 0.0,
        weights_launch_ms=0.05 if seed % 2 else 0.0,
        router_loss=experts,
        shares_documents=True,
        expert_imbalance={2: 1.25} if experts and seed % 2 else {},
    )


def random_experts(draw: np.random.Generator) -> ExpertsProfile:
    """Returns costs of four experts under degrees 1, 2 and 4."""

    def times() -> ExpertTimes:
        fits = (TimeFit(per_token=float(draw.uniform(0.1, 0.5)), fixed=float(draw.uniform(0, 0.2))) for _ in range(2))
        saved, working = (float(draw.integers(10, 60)) for _ in range(2))
        return ExpertTimes(
            **dict(zip(("forward", "backward"), fits, strict=True)),
            saved_bytes=saved,
            working_bytes=working,
            received_forward=float(draw.uniform(0, 0.1)),
            received_backward=float(draw.uniform(0, 0.2)),
            received_saved_bytes=saved / 2,
            received_working_bytes=working / 2,
        )

    return ExpertsProfile(count=4, top_k=2, degrees={degree: times() for degree in (1, 2, 4)})


def workload(rows: int, length: int = 8, packed: bool = False) -> Workload:
    return Workload(rows=rows, length=length, precision=Precision(), packed=packed)


def every_plan(
    hardware: HardwareProfile, model: ModelProfile, rows: int, limits: Limits, packed: bool = False
) -> Iterator[ParallelPlan]:
    """Enumerates all plans of the space: any number of micro-batches, any cut, up to three equal virtual stages. All
    layers have one context degree, which is 1 unless rows are `packed`.
    """
    world, layers = hardware.world_size, len(model.layers)
    most = min(limits.virtual_stages, 3)
    for pipeline, virtual in itertools.product(range(1, 1 + min(world, layers)), range(1, 1 + most)):
        share = layers // virtual
        uniform = model.layers == model.layers[:share] * virtual
        if world % pipeline:
            continue
        if limits.pipeline and pipeline not in limits.pipeline or virtual > 1 and (pipeline == 1 or not uniform):
            continue
        ranks = world // pipeline
        degrees = context_degrees(ranks, model, packed, limits)
        alike: list[list[LayerStrategy]] = [
            [one for one, _ in layer_strategies(ranks, model, limits, context)] for context in degrees
        ]
        vocabulary: list[VocabularyStrategy] = vocabulary_strategies(ranks, model, limits)
        for cut in itertools.combinations(range(1, share), pipeline - 1):
            bounds = (0, *cut, share)
            stages = tuple(
                Stage(
                    ranks=tuple(range(index * ranks, (index + 1) * ranks)),
                    layers=(number * share + bounds[index], number * share + bounds[index + 1]),
                )
                for number in range(virtual)
                for index in range(pipeline)
            )
            of_layers = itertools.chain(*(itertools.product(strategies, repeat=share) for strategies in alike))
            chosen = itertools.product(of_layers, vocabulary, vocabulary)
            for (of_layers, embedding, head), count in itertools.product(chosen, range(1, rows + 1)):
                if model.tied and (embedding.tensor != head.tensor or (pipeline == 1 and embedding != head)):
                    continue
                if virtual > 1 and (count < pipeline or count % (count // pipeline)):
                    continue  # rounds would have unequal numbers of micro-batches
                plan = ParallelPlan(
                    world_size=world,
                    stacks=model.stack_sizes,
                    micro_batches=count,
                    schedule="interleaved" if virtual > 1 else "1f1b",
                    stages=stages,
                    layers=tuple(
                        strategy_of_kind(one, model.kinds[kind])
                        for one, kind in zip(of_layers * virtual, model.layers, strict=True)
                    ),
                    embedding=embedding,
                    head=head,
                    precision=Precision(),
                )
                yield plan
                if model.router_loss and pipeline > 1 and virtual == 1:
                    yield replace(plan, schedule="gpipe")


def every_estimate(
    hardware: HardwareProfile, model: ModelProfile, work: Workload, limits: Limits
) -> Iterator[Estimate]:
    """Estimates all plans of the space, and builds one problem with all strategies for the plans of one shape.

    [`estimate_plan`] builds a problem for each plan, which takes ten times as long. Tied ends have one tensor degree,
    so that each degree has its own problem.
    """
    problems: dict[tuple[StepShape, int], PlanProblem] = {}
    for plan in every_plan(hardware, model, work.rows, limits, work.packed):
        shape = priced_shape(hardware, model, work, plan)
        key = shape, plan.embedding.tensor if model.tied else 0
        if key not in problems:
            costs = CostModels(hardware, model, work).of_plan(plan, shape)
            strategies = layer_strategies(costs.ranks, model, limits, shape.context)
            strategies = [one for one, data in strategies if data <= shape.rows]
            ends = vocabulary_strategies(costs.ranks, model, limits)
            ends = [end for end in ends if not model.tied or end.tensor == plan.embedding.tensor]
            options = OptionCosts(costs, shape.pipeline, strategies, ends, ends)
            problems[key] = UnsolvedProblem(options, shape).build(hardware.memory_bytes, prune=False)
        problem = problems[key]
        one_unit = model.tied and shape.pipeline == 1
        solution = Solution(
            bounds=(0, *(stage.layers[1] for stage in plan.stages[: shape.pipeline])),
            options=tuple(problem.strategies.index(layer) for layer in plan.layers[: problem.problem.layers]),
            start=problem.embeddings.index(plan.embedding),
            finish=0 if one_unit else problem.heads.index(plan.head),
        )
        yield estimate_solution(problem, solution, work, plan)
