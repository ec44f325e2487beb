# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The components of the Trainer, each constructed and used without a Trainer."""

import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedModel, TrainerControl, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from equivalence import whole
from galvatron_hf.data.cost import GroupCost, SequenceCost
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.comm import mesh
from galvatron_hf.parallel.debug.blocked_collective import stack_of, waiting_in
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer import evaluation
from galvatron_hf.trainer.checkpoint.checkpoint_finder import CheckpointFinder
from galvatron_hf.trainer.checkpoint.checkpoint_writer import SaveError
from galvatron_hf.trainer.checkpoint.checkpointer import Checkpointer
from galvatron_hf.trainer.checkpoint.model_source import ModelSource
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.data.global_batches import GlobalBatches
from galvatron_hf.trainer.data.pack_planner import PackPlanner
from galvatron_hf.trainer.data.packing_rules import PackingRules
from galvatron_hf.trainer.data.sequence_cost import StepCost
from galvatron_hf.trainer.data.step_packer import StepPacker
from galvatron_hf.trainer.data.step_prefetch import StepPrefetch
from galvatron_hf.trainer.data.step_variants import StepVariant
from galvatron_hf.trainer.evaluation import Evaluator
from galvatron_hf.trainer.fault import watchdog
from galvatron_hf.trainer.fault.nonfinite_guard import SKIPPED_IN_A_ROW, NonFiniteError, NonfiniteGuard
from galvatron_hf.trainer.fault.stop_signal import StopSignal, keep_workers
from galvatron_hf.trainer.fault.watchdog import RankStatus, Watchdog, is_lost_connection, report
from galvatron_hf.trainer.hyperparameter_search import SharedStudy
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner
from galvatron_hf.trainer.step_state import StepState
from galvatron_hf.utils.device import HostCopy
from ranks import run_ranks
from tiny_configurations import tiny_model
from tiny_models import BATCHES, FAMILIES, LAYERS
from trainer_runs import arguments, on_ranks


COST = StepCost(
    sequence=SequenceCost(per_token=1.0, per_token_squared=0.0, per_sequence=0.0), overhead=0.0, measured=True
)


def parallel_model(world_size: int = 1, **strategy) -> ParallelModel:
    plan = ParallelPlan.uniform(world_size, LAYERS, **{"sharding": "replicate", **strategy})
    return parallelize(FAMILIES["llama"].build().train(), plan)


def count_items(batches: list[dict]) -> torch.Tensor:
    return torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()


# ---- Batches ----


class Stream(IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_a_step_is_packed_and_gives_the_loss_of_its_padded_batch(tmp_path):
    def work() -> tuple[float, float, list[int], StepState]:
        parallel = parallel_model(micro_batches=2)
        packer = StepPacker(
            parallel=parallel,
            args=arguments(tmp_path, packing="static"),
            rules=PackingRules(parallel=parallel, mode=lambda: "static", only_pads=lambda: True),
            known_lengths=lambda: None,
            dataset_rows=lambda: SimpleNamespace(known=False, may_learn=True),
            prepare=dict,
        )
        packer.cost = COST
        packer.begin()
        batch = BATCHES["right"]()
        found, placement = packer.read_step(iter([batch, batch]), 2, step=0, last=True)
        step = StepState(number=0, placement=placement)
        for one in found:
            step = step.with_batch(one, count_items(found))
        step = packer.pack(step)
        padded = packer.pack(replace(step, placement=None))
        losses = [float(parallel.forward_backward(one.batch, one.num_items)) for one in (step, padded)]
        packer.end()
        return *losses, [part["input_ids"].shape[1] for part in step.batch], padded.batch["input_ids"].shape

    packed, padded, tokens, shape = on_ranks(work, 1)[0]
    assert packed == pytest.approx(padded, rel=1e-5)
    assert sum(tokens) == 2 * int(BATCHES["right"]()["attention_mask"].sum()) < shape[0] * shape[1]


@pytest.mark.parametrize(
    "mode, only_pads, obstacle, packs",
    [
        ("none", True, None, False),
        ("auto", False, "reason", False),
        ("auto", True, "reason", False),
        ("auto", False, None, False),
        ("auto", True, None, True),
        ("static", False, None, True),
    ],
)
def test_packing_rules_decide_by_mode_collator_and_obstacle(mode, only_pads, obstacle, packs):
    model = FAMILIES["llama"].build()
    adapter = adapter_for(model)
    parallel = SimpleNamespace(
        family=type(model),
        config=model.config,
        adapter=adapter,
        packing=adapter.packing(model),
        plan=ParallelPlan.uniform(1, LAYERS),
    )
    rules = PackingRules(parallel=parallel, mode=lambda: mode, only_pads=lambda: only_pads, obstacle=lambda: obstacle)
    assert rules.packs() is packs


def test_packing_that_is_asked_for_is_refused_with_the_obstacle():
    rules = PackingRules(
        parallel=SimpleNamespace(plan=ParallelPlan.uniform(1, LAYERS)),
        mode=lambda: "static",
        only_pads=lambda: True,
        obstacle=lambda: "rows differ",
    )
    with pytest.raises(ValueError, match="packing='static' is not possible, because rows differ"):
        rules.packs()


def test_a_pack_planner_places_each_document_once_within_the_capacity():
    planner = PackPlanner(
        plan=ParallelPlan.uniform(2, LAYERS, sharding="replicate"),
        packs=2,
        multiple=8,
        bound=None,
        rows_of_block=2,
        longest_row=0,
        cost=COST,
        planner="longest_first",
        groups=GroupCost(sequence=COST.sequence, sharing={}),
    )
    lengths = np.array([9, 3, 7, 7, 1, 5])
    assert planner.capacity(lengths) == 24  # two rows of nine tokens, up to a multiple of eight
    for placement in (planner.place(lengths), planner.in_order(lengths)):
        packs = [pack for micro_batch in placement.micro_batches for pack in micro_batch]
        assert sorted(index for pack in packs for index in pack) == list(range(6))
        assert max(lengths[list(pack)].sum() for pack in packs) <= 24
    assert planner.imbalance(planner.place(lengths), lengths) == pytest.approx(1.0)  # 16 tokens on each rank


def test_prefetched_batches_are_taken_in_order_and_end_with_the_data():
    prefetch = StepPrefetch(lambda: None, "error")
    batches = iter([{"row": index} for index in range(3)])
    assert [batch["row"] for batch in prefetch.peek(batches, 2)] == [0, 1]
    assert [batch["row"] for batch in prefetch.take(batches, 2)] == [0, 1]
    assert [batch["row"] for batch in prefetch.take(batches, 2)] == [2]
    prefetch.end()


def test_loaders_join_the_batches_of_all_ranks():
    args = SimpleNamespace(
        world_size=3,
        accelerator_config=SimpleNamespace(split_batches=False),
        train_batch_size=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    batches = GlobalBatches(args)
    assert batches.sampler(LengthGroupedSampler(4, lengths=[1, 2, 3, 4])).batch_size == 12
    rows = list(range(14))
    whole = [torch.arange(6), torch.arange(6, 12), torch.arange(12, 14)]
    chosen = [[0, 3], [1], [13, 2, 4], [5]]
    loaders = {
        "batches": (DataLoader(rows, batch_size=2), whole),
        "dropped": (DataLoader(rows, batch_size=2, drop_last=True), whole[:2]),
        "stream": (DataLoader(Stream(14), batch_size=2), whole),
        "chosen": (DataLoader(rows, batch_sampler=chosen), [torch.tensor([0, 3, 1, 13, 2, 4]), torch.tensor([5])]),
    }
    for name, (loader, wanted) in loaders.items():
        found = list(batches.joined(loader))
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), name
        if name != "stream":
            assert len(batches.joined(loader)) == len(wanted)
    assert batches.joined(loaders["batches"][0]).batch_sampler.batch_size == 6
    with pytest.raises(ValueError, match="has no batch_size"):
        batches.joined(DataLoader(rows, batch_size=None))
    args.global_batch_size = 10
    with batches.of_training():
        assert [len(rows) for rows in batches.joined(loaders["batches"][0])] == [5, 5, 4]
        with pytest.raises(ValueError, match="per_device_train_batch_size=2"):
            batches.joined(DataLoader(rows, batch_size=3))
    args.accelerator_config.split_batches, args.global_batch_size = True, None
    assert batches.joined(loaders["batches"][0]) is loaders["batches"][0]


def test_a_step_state_collects_batches_and_reads_its_numbers():
    step = StepState(number=3).with_batch({"a": 1}, 5).with_batch({"a": 2}, 5)
    assert step.batches == ({"a": 1}, {"a": 2}) and step.num_items == 5
    step = replace(step, loss=torch.tensor(2.0))
    step = step.with_numbers(torch.tensor(0.5), torch.tensor([1.0], dtype=torch.float64))
    assert step.numbers.tolist() == [0.5, 2.0, 1.0]


# ---- Losses and evaluation ----


def test_an_evaluator_predicts_and_gathers_in_the_order_of_the_global_batch():
    def work() -> tuple[torch.Tensor, torch.Tensor, float]:
        parallel, batch = parallel_model(2), BATCHES["right"]()
        batch = {name: value[:3] for name, value in batch.items()}  # one row more than the other rank has
        evaluator = Evaluator(
            parallel=parallel,
            args=SimpleNamespace(
                world_size=2,
                label_smoothing_factor=0.0,
                device=torch.device("cpu"),
                eval_batch_size=2,
                include_for_metrics=["inputs"],
            ),
            label_names=lambda: ["labels"],
            prepare=dict,
            count_items=count_items,
            pack=lambda batch: None,
        )
        loss, logits, labels = evaluator.predict(batch, loss_only=False)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(tensor) for _ in range(2)]
            torch.distributed.all_gather(parts, tensor.contiguous())
            return torch.cat(parts)

        GradientState._reset_state()
        with mock.patch.object(evaluation, "gather", gather):
            losses = evaluator.gather(loss.repeat(2))  # Trainer repeats it by the rows of a rank's batch
            assert losses.tolist() == [float(loss)] * 4
            assert evaluator.gather(batch["input_ids"]) is batch["input_ids"]
            gathered = [evaluator.gather(x) for x in (logits, labels)]
        assert torch.equal(gathered[1], batch["labels"])
        plain = FAMILIES["llama"].build().eval()
        with torch.no_grad():
            whole = plain(**batch)
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(gathered[0][kept], whole.logits[kept], rtol=1e-4, atol=1e-5)
        return float(loss) - float(whole.loss)

    assert on_ranks(work, 2) == [pytest.approx(0.0, abs=1e-5)] * 2


# ---- Faults ----


def test_a_guard_skips_bad_steps_and_stops_after_many():
    def work() -> tuple[list[bool], int, bool, str]:
        parallel, batch = parallel_model(), BATCHES["right"]()
        rows = DatasetRows(DataLoader(range(8), batch_size=8), 1)
        guard = NonfiniteGuard(
            parallel=parallel,
            policy=lambda: "skip",
            compute=lambda step: parallel.forward_backward(step.batch),
            dataset_rows=lambda: rows,
        )
        step = StepState(number=0, batch=batch)
        found = [guard.skips(step, 1.0, 2.0)]
        with torch.no_grad():
            parallel.model.get_output_embeddings().weight[0, 0] = float("inf")
        found += [guard.skips(step, float("nan"), 2.0) for _ in range(SKIPPED_IN_A_ROW - 1)]
        empty = all(not weight.grad.any() for weight in parallel.model.parameters() if weight.grad is not None)
        try:
            guard.skips(step, float("nan"), 2.0)
        except NonFiniteError as error:
            return found, guard.skipped_steps, empty, str(error)

    found, skipped, empty, message = on_ranks(work, 1)[0]
    assert found == [False] + [True] * (SKIPPED_IN_A_ROW - 1) and skipped == SKIPPED_IN_A_ROW - 1 and empty
    assert "10 steps in a row were skipped" in message and "dataset 0" in message


def test_workers_of_a_loader_have_a_process_group_of_their_own_and_are_initialized_as_before():
    seen = []

    class Processes(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> list:
            return [os.getpgid(0) == os.getpid(), *seen]

    loader = DataLoader(Processes(), num_workers=1, batch_size=None, worker_init_fn=seen.append)
    keep_workers(loader)
    first = loader.worker_init_fn
    keep_workers(loader)  # as for each evaluation
    assert loader.worker_init_fn is first
    assert list(loader) == [[True, 0]]
    alone = DataLoader(Processes(), batch_size=None)
    keep_workers(alone)
    assert list(alone) == [[os.getpgid(0) == os.getpid()]] and alone.worker_init_fn is None


def test_a_stop_signal_is_voted_on_and_ends_training_once_all_agree():
    stop, control, before = StopSignal(), TrainerControl(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert stop.vote == 1.0 and stop.received is signal.SIGTERM
    stop.on_step_end(None, None, control)
    assert not control.should_training_stop  # the other ranks do not know yet
    stop.count_votes(1.0, step=1, rank=0)
    stop.on_step_end(None, None, control)
    assert control.should_training_stop and control.should_save
    stop.on_epoch_end(None, None, control)
    assert not control.should_save  # once


def test_a_watchdogs_report_names_the_cause_first():
    def status(rank: int, **more) -> RankStatus:
        found = dict(host="node", pid=rank, time=time.time(), doing=f"step {rank}", stack="line", alarmed=True)
        return RankStatus(rank=rank, **found | more)

    waits, fails = status(0, waits="all_reduce", lost=True), status(1, error="KeyError: 'x'")
    dead = status(2, alarmed=False)
    lines = report("Rank 0 lost a connection", [waits, fails, dead, None]).splitlines()
    assert lines[0] == "Rank 0 lost a connection."
    assert lines[1].startswith("Rank 1 failed first, in step 1 (process 1 on node): KeyError")
    assert any(line.startswith("Rank 2 does not answer") for line in lines)
    assert any(line.startswith("Rank 3 has never") for line in lines)
    assert lines[-1].startswith("Rank 0 waited in all_reduce")
    assert is_lost_connection(RuntimeError("Connection reset")) and not is_lost_connection(SaveError("gloo timeout"))


def test_a_watchdogs_report_counts_calls_where_all_hosts_wait_for_their_devices():
    def status(rank: int, calls: int) -> RankStatus:
        found = dict(host="node", pid=rank, time=time.time(), doing="step 4", alarmed=True, waits="its device")
        return RankStatus(rank=rank, calls={"ranks [0, 1]": calls, "ranks [0, 1, 2]": 3}, **found)

    text = report("Rank 0 has stood still for 8 s", [status(0, 7), status(1, 6), replace(status(2, 0), calls={})])
    assert "Rank 1 was late: ranks [0, 1] have called these numbers of collectives: rank 0 7, rank 1 6." in text
    assert "Rank 2 waited in its device" in text and "[0, 1, 2] have" not in text
    alike = report("Rank 0 has stood still for 8 s", [status(0, 7), status(1, 7)])
    assert "All ranks wait for each other" in alike


def test_a_host_that_reads_the_numbers_of_a_step_waits_in_its_device():
    class Values:
        is_cuda = False

        def tolist(self) -> list[float]:
            self.waits = waiting_in(stack_of(sys._getframe()))
            return [1.0, 2.0, 0.0]

    values = Values()
    assert HostCopy(values).tolist() == [1.0, 2.0, 0.0] and values.waits == "its device"


def test_groups_of_a_gpu_wait_longer_than_the_report_takes():
    with mock.patch.object(mesh, "set_default_group_timeout") as default:
        world = mesh.WorldMesh("cuda", timedelta(seconds=8))
    assert world._groups.timeout == timedelta(seconds=68) and default.call_args.args == (timedelta(seconds=68),)
    assert mesh.WorldMesh("cpu", timedelta(seconds=8))._groups.timeout == timedelta(seconds=8)


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_is_silent_and_has_not_ended_is_reported(monkeypatch, ends):
    """Rank 0 hears rank 1 on a backend that does not raise when a rank is lost."""
    for name, seconds in (("SILENCE_SECONDS", 1.0), ("PERIOD_SECONDS", 0.1), ("ANSWER_SECONDS", 0.5)):
        monkeypatch.setattr(watchdog, name, seconds)

    def work() -> list[str | None]:
        rank, told = dist.get_rank(), []
        dog = Watchdog(lambda: ("step 1", False), 60.0, "silence", {"all": dist.group.WORLD})
        dog._end = told.append
        dog.start()
        if rank == 1 and ends:
            dog.end()
        elif rank == 1:
            dog.over.set()  # as if it had died: nothing says that it has ended
        dist.barrier()
        dog.hears = rank == 0
        until = time.monotonic() + (60.0 if not ends else 2.5)
        while rank == 0 and not told and time.monotonic() < until:
            time.sleep(0.1)
        dist.barrier()
        dog.end()
        return told

    told = run_ranks(work, 2)[0]
    assert (told == []) == ends
    if not ends:
        assert told[0].startswith("Rank 1 has not been heard of for 1 s.")
        assert "Rank 1 does not answer: it died, or is stopped." in told[0]


# ---- Checkpoints ----


def checkpointer(parallel: ParallelModel, folder, **options) -> Checkpointer:
    def save_files(model: PreTrainedModel, folder: str, weights: dict[str, torch.Tensor]) -> None:
        assert not weights  # they are written in parts, beside the files
        model.config.save_pretrained(folder)

    args = arguments(folder, **options)
    return Checkpointer(parallel=parallel, args=args, save_files=save_files, make_optimizer=None)


def whole_state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the weights and the optimizer's state by name, unsharded; collective."""
    state = {}
    for name, parameter in parallel.model.named_parameters():
        tensors = {"weight": parameter.detach(), **optimizer.state[parameter]}
        state |= {f"{name} {kind}": whole(tensor) for kind, tensor in tensors.items()}
    return state


def test_a_checkpoint_is_saved_found_and_loaded_under_another_plan(tmp_path):
    def trained(parallel: ParallelModel) -> dict:
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-2, foreach=False)
        return dict(optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda step: 0.5**step))

    def work() -> tuple[bool, str, int]:
        parallel, state = parallel_model(2, tensor=2), TrainerState(global_step=1)
        objects = trained(parallel)
        parallel.forward_backward(BATCHES["right"]())
        objects["optimizer"].step()
        objects["scheduler"].step()
        saver = checkpointer(parallel, tmp_path, save_full_weights=False)
        saver.save(str(tmp_path), state=state, **objects)
        found = CheckpointFinder(torch.distributed.get_rank(), 2).newest(str(tmp_path))
        again = parallel_model(2, sharding="zero3")
        loaded = trained(again)
        loader = checkpointer(again, tmp_path)
        loader.load_weights(found)
        loader.load_optimizer_and_scheduler(found, **loaded)
        before, after = whole_state(parallel, objects["optimizer"]), whole_state(again, loaded["optimizer"])
        assert before.keys() == after.keys() and any(name.endswith("exp_avg_sq") for name in before)
        assert all(tensor.any() for tensor in before.values())
        same = all(torch.equal(before[name], after[name]) for name in before)
        return same, os.path.basename(found), loaded["scheduler"].state_dict()["last_epoch"]

    assert on_ranks(work, 2) == [(True, "checkpoint-1", 1)] * 2


@pytest.mark.parametrize("policy, failed", [("continue", 1), ("stop", None)])
def test_a_failed_save_is_counted_or_stops(tmp_path, policy, failed):
    def work() -> int | None:
        saver = checkpointer(parallel_model(), tmp_path, on_save_failure=policy)
        try:
            with saver.tolerating_failure(TrainerState()):
                raise SaveError("the disk is full")
        except SaveError:
            return None
        return saver.failed_saves

    assert on_ranks(work, 1) == [failed]


def test_a_damaged_checkpoint_is_refused_with_the_way_out(tmp_path):
    finder = CheckpointFinder(0, 1)
    assert finder.to_resume(None, str(tmp_path)) is None and finder.newest(str(tmp_path)) is None
    with pytest.raises(ValueError, match="has no complete checkpoint to resume from"):
        finder.to_resume(True, str(tmp_path))
    with pytest.raises(ValueError, match="is damaged .*there is no such folder.*; no checkpoint in .* is complete"):
        finder.require_complete(str(tmp_path / "checkpoint-3"))


def test_a_model_source_leaves_models_alone_and_gives_no_weights_to_those_that_have_them():
    model, source = FAMILIES["llama"].build(), ModelSource()
    assert source.with_model((model,), {}) == ((model,), {}) and source.weights(model) is None
    with torch.device("meta"):
        empty = type(model)(model.config)
    first = source.weights(empty)
    with source.resuming(True):
        assert type(source.weights(empty)) is not type(first)  # a checkpoint has them
    assert type(source.weights(empty)) is type(first)


# ---- Plans and searches ----


def test_an_auto_planner_reads_arguments_and_data(tmp_path):
    rows = [{"input_ids": list(range(length))} for length in (4, 8, 8, 4)]
    planner = AutoPlanner(
        args=arguments(tmp_path, gradient_checkpointing=True, per_device_train_batch_size=4),
        dataset=lambda: rows,
        packing=lambda: ("static", True),
        whole_batches=True,
    )
    limits, model = planner.limits(), FAMILIES["llama"].build()
    assert limits.recompute == ("full",) and limits.pipeline == (1,)
    workload = planner.workload(model)
    assert (workload.rows, workload.length, workload.mean_length) == (8, 8, 6)
    assert {layer.recompute for layer in planner.plan_without_search(model).layers} == {"full"}
    rows.clear()
    assert not len(planner.row_lengths())


def test_an_auto_planner_pads_rows_that_the_family_does_not_pack(tmp_path):
    rows = [{"input_ids": list(range(length))} for length in (4, 8, 8, 4)]
    mean_lengths = {}
    for task in ("sequence-classification", "token-classification"):
        planner = AutoPlanner(
            args=arguments(tmp_path, per_device_train_batch_size=4),
            dataset=lambda: rows,
            packing=lambda: ("auto", True),
        )
        mean_lengths[task] = planner.workload(tiny_model("bert", task=task)).mean_length
    assert mean_lengths == {"sequence-classification": 8, "token-classification": 6}


def test_an_auto_planner_pads_rows_whose_rotary_embeddings_depend_on_the_longest(tmp_path):
    rows = [{"input_ids": list(range(length))} for length in (4, 8, 8, 4)]
    planner = AutoPlanner(
        args=arguments(tmp_path, per_device_train_batch_size=4),
        dataset=lambda: rows,
        packing=lambda: ("auto", True),
    )
    scaled = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    models = FAMILIES["llama"].build(), FAMILIES["llama"].build(rope_parameters=scaled)
    assert [planner.workload(model).mean_length for model in models] == [6, 8]


def test_a_study_of_one_process_is_trainers_and_other_backends_are_refused():
    seen = []
    assert SharedStudy(0, 1).search(lambda *args: seen.append(args) or "best", 1, 2, 3, "min", "ray") == "best"
    assert seen == [(1, 2, 3, "min", "ray")]
    assert SharedStudy(0, 1).train(lambda: "trained", trial=None, searching=True) == "trained"
    with pytest.raises(ValueError, match="use backend='optuna' on several ranks"):
        SharedStudy(0, 2).search(None, None, None, 1, "min", "ray")


def test_a_pack_planner_chooses_the_fastest_way_for_each_step():
    """With recompute a token takes 1.5 times as long, and a rank holds three times as many: a step of long rows, which
    would need more micro-batches without, is recomputed, a step of short ones is not.
    """
    slow = SequenceCost(per_token=1.5, per_token_squared=0.0, per_sequence=0.0)
    variant = StepVariant(recompute="full", sequence=slow, capacity=3.0)
    assert StepVariant.from_json(variant.to_json()) == variant
    planner = PackPlanner(
        plan=ParallelPlan.uniform(2, LAYERS, sharding="replicate"),
        packs=2,
        multiple=8,
        bound=16,
        rows_of_block=2,
        longest_row=0,
        cost=replace(COST, overhead=10.0),
        planner="longest_first",
        groups=GroupCost(sequence=COST.sequence, sharing={}),
    )
    planner = replace(planner, variants=(planner._of_variant(variant),))
    assert planner.longest_document(np.array([9])) == 48
    for lengths, recompute in (([9, 7, 5, 8], None), ([9] * 6, "full"), ([40, 3], "full")):
        lengths = np.array(lengths)
        found, most = planner.place(lengths), 16 if recompute is None else 48
        assert found.recompute == recompute
        loads = [[int(lengths[list(pack)].sum()) for pack in packs] for packs in found.micro_batches]
        assert max(map(max, loads)) <= most
        seconds = sum(max(each) * (1.0 if recompute is None else 1.5) + 10.0 for each in loads)
        other = planner.variants[0] if recompute is None else planner
        if lengths.max() <= other.capacity(lengths):
            assert seconds <= other._seconds(other._place(lengths), lengths)
        assert planner.in_order(lengths).recompute == "full"
