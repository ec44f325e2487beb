# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps of training on GPUs that are not there: prints a JSON line for each case on standard input, see `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import devices  # noqa: E402  (before torch)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.data_loader import DataLoaderShard  # noqa: E402
from transformers import DataCollatorForSeq2Seq, LlamaConfig, Trainer, masking_utils  # noqa: E402

import encoder_decoder_models  # noqa: E402
import tiny_models  # noqa: E402
from galvatron_hf import (  # noqa: E402
    GalvatronTrainer,
    GalvatronTrainingArguments,
    ParallelPlan,
    parallelize,
)
from galvatron_hf.parallel import model_runner  # noqa: E402
from galvatron_hf.parallel.activation import micro_batch  # noqa: E402
from galvatron_hf.parallel.activation.documents import DocumentBounds  # noqa: E402
from galvatron_hf.parallel.comm import objects  # noqa: E402
from galvatron_hf.parallel.comm.meeting import Meetings  # noqa: E402
from galvatron_hf.parallel.layers import experts  # noqa: E402
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer  # noqa: E402
from galvatron_hf.parallel.model import ParallelModel  # noqa: E402
from galvatron_hf.parallel.pipeline import trace  # noqa: E402
from galvatron_hf.parallel.router_loss import RouterStatistics  # noqa: E402
from galvatron_hf.plan import LayerStrategy, Precision  # noqa: E402
from galvatron_hf.plan.deal import EXECUTIONS, Deal  # noqa: E402
from galvatron_hf.plan.dealing import deal_out  # noqa: E402
from galvatron_hf.profiler.trace.counted_model import CountedModel  # noqa: E402
from galvatron_hf.profiler.trace.small_models import empty_model  # noqa: E402
from galvatron_hf.trainer import mixin  # noqa: E402
from galvatron_hf.trainer.data import step_packer  # noqa: E402
from galvatron_hf.utils.device import HostCopy  # noqa: E402
from tiny_models import word_tokenizer  # noqa: E402


ROWS, LENGTH, TARGET_LENGTH = 8, 32, 16
# Heads of eight, as the kernel of packed attention needs them; by `head_dim` in other families.
WIDER = {"gpt2": {"n_head": 4}, "deepseek_v3": {}}


def batch_of(kind: str, parallel) -> Any:
    """Returns a global batch on the device: padded rows, the same with a mask, or packed documents."""
    if kind == "packed":
        return packed(parallel)
    if kind == "shared":
        return shared(parallel)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long, device=devices.DEVICE)
    if len(parallel.adapter.stacks) > 1:
        targets = torch.ones(ROWS, TARGET_LENGTH, dtype=torch.long, device=devices.DEVICE)
        batch = {"input_ids": ids, "decoder_input_ids": targets, "labels": targets}
        return batch | ({"attention_mask": torch.ones_like(ids, device=devices.HOST)} if kind == "masked" else {})
    if kind == "masked":  # its mask is on the host, as Trainer's loop leaves it
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids, device=devices.HOST)}
    return {"input_ids": ids, "labels": ids}


def packed(parallel) -> list[dict[str, Any]]:
    """Returns a micro-batch for each of the plan's, of two documents a pack."""
    packs, multiple = parallel.resolved.packs, parallel.resolved.pack_multiple
    cuts = tuple(range(0, (packs + 1) * 4 * multiple, 4 * multiple))
    bounds = tuple(sorted({*cuts, *(cut + 3 for cut in cuts[:-1])}))
    ids = torch.ones(1, cuts[-1], dtype=torch.long, device=devices.DEVICE)
    documents = Deal.of_documents(bounds=bounds, cuts=cuts)
    pairs = parallel.packing.pairs
    if pairs is not None:
        both = {pairs.source: documents, pairs.target: documents}
        part = {"input_ids": ids, pairs.ids: ids, "labels": ids, "documents": both}
        return [part] * parallel.plan.micro_batch_count
    part = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "shift_labels": ids, "documents": documents}
    return [part] * parallel.plan.micro_batch_count


def shared(parallel) -> list[dict[str, Any]]:
    """Returns a micro-batch for each of the plan's: documents that all packs share, one for each execution, one that
    the first two share, and one of each pack.
    """
    packs, multiple = parallel.resolved.packs, parallel.resolved.pack_multiple
    lengths = [8 * packs * multiple] * 4 + [4 * multiple] * packs
    together = [(index, range(packs), execution) for index, execution in enumerate(EXECUTIONS)] + [(3, (1, 0), "ring")]
    whole = [(4 + pack,) for pack in range(packs)]
    missing = [0] * packs
    documents = deal_out(lengths, whole, together, missing, range(len(lengths)))
    ids = torch.ones(1, documents.tokens, dtype=torch.long, device=devices.DEVICE)
    part = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "shift_labels": ids, "documents": documents}
    return [part] * parallel.plan.micro_batch_count


def _offsets_for_each_layer():
    def on(self, device):
        return torch.tensor(self.offsets, dtype=torch.int32, device=device)

    return mock.patch.object(DocumentBounds, "on", on)


def _norm_from_the_host():
    original = ParallelModel.sum_with_grad_norm

    def summed(self, *values):
        torch.tensor([0.0, *values], device=self.device)
        return original(self, *values)

    return mock.patch.object(ParallelModel, "sum_with_grad_norm", summed)


def _spans_that_wait():
    def mark(self):
        torch.cuda.synchronize()
        return time.time()

    return mock.patch.object(trace.EventClock, "mark", mark)


def _gradient_read_in_each_layer():
    original = ParallelLayer._compute

    def read(gradient):
        gradient.abs().max().item()

    def compute(self, batch, hidden, arguments):
        hidden.register_hook(read)
        return original(self, batch, hidden, arguments)

    return mock.patch.object(ParallelLayer, "_compute", compute)


def _one_more_sum_on_rank_1():
    original = ParallelModel.forward_backward

    def forward_backward(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        if dist.get_rank() == 1:
            dist.all_reduce(loss)
        return loss

    return mock.patch.object(ParallelModel, "forward_backward", forward_backward)


def _mask_read_on_the_device():
    return mock.patch.object(model_runner, "mask_on_device", lambda mask, device: (mask.to(device), None))


def _objects_stay_on_the_device():
    return mock.patch.object(objects, "_on_host", lambda value: value)


def _counts_read_again_in_the_recompute():
    return mock.patch.object(experts.ParallelExperts, "_routing", experts.ParallelExperts._new_routing)


def _choices_counted_on_the_host():
    original = RouterStatistics.add

    def add(self, logits, weights):
        original(self, logits, weights)
        self.sums[-1].item()

    return mock.patch.object(RouterStatistics, "add", add)


# Faults that a dry run has to see, most of them how the code once was.
FAULTS = {
    "none": contextlib.nullcontext,
    "offsets for each layer": _offsets_for_each_layer,
    "norm from the host": _norm_from_the_host,
    "spans that wait": _spans_that_wait,
    "gradient read in each layer": _gradient_read_in_each_layer,
    "one more sum": _one_more_sum_on_rank_1,
    "mask read on the device": _mask_read_on_the_device,
    "objects stay on the device": _objects_stay_on_the_device,
    "counts read again in the recompute": _counts_read_again_in_the_recompute,
    "choices counted on the host": _choices_counted_on_the_host,
}


@contextlib.contextmanager
def masks() -> Iterator[None]:
    """Has transformers take masks without memory for true ones, and has those on the host hide tokens."""
    with mock.patch.object(masking_utils, "is_tracing", lambda *tensors: False):
        with mock.patch.object(micro_batch, "has_padding", lambda mask: True):
            yield


def rows_of(pairs: int, ranks: int) -> list[int]:
    """Returns how many of `pairs` choices go to each of `ranks` ranks: half of them to all alike, others to rank 0."""
    alike = pairs // (2 * ranks)
    return [pairs - alike * (ranks - 1)] + [alike] * (ranks - 1)


@contextlib.contextmanager
def routed_rows() -> Iterator[None]:
    """Has tensors without memory routed as true ones are, and gives the host the numbers for which it waits: to each
    rank come as many rows from every rank.
    """
    route = experts.route

    def routed(choices, count, group, compress=None):
        class Numbers(HostCopy):
            def tolist(self) -> list:
                super().tolist()
                sent = rows_of(choices.numel(), group.size())
                return [sent, [sent[group.rank()]] * group.size()]

        with mock.patch.object(experts, "HostCopy", Numbers):
            return route(choices, count, group, compress)

    with mock.patch.object(experts, "route", routed), mock.patch.object(experts, "FakeTensor", ()):
        yield


def build(case: dict[str, Any]):
    """Returns the model of a case on the device."""
    known, name = tiny_models.ALL_FAMILIES | encoder_decoder_models.ENCODER_DECODERS, case["family"]
    options = WIDER.get(name, {"head_dim": 8} if name in tiny_models.ALL_FAMILIES else {}) | case.get("options", {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device(devices.DEVICE))
        for module in (tiny_models, encoder_decoder_models):
            stack.enter_context(mock.patch.object(module, "randomise"))
        return known[name].build(**options)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Trains steps of a plan as one rank of it, and returns what the last one has done.

    Args:
        case (`dict`): `plan` (JSON), `rank`, `family` of tiny_models.py with `options`, `batch` ("padded", "masked",
            "packed" or "shared"), `steps`, `traced`, whether the timeline is on, and `fault`, one of `FAULTS`.
    """
    plan = ParallelPlan.from_json(json.dumps(case["plan"]))
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(devices.rank_with_gpu(case["rank"], plan.world_size))
        for context in (masks, routed_rows, FAULTS[case.get("fault", "none")]):
            stack.enter_context(context())
        parallel = parallelize(build(case), plan)
        parallel.model.train()
        parallel.timeline.on = case.get("traced", False)
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-4, fused=True)
        for _ in range(case["steps"]):
            batch = batch_of(case["batch"], parallel)
            seen.clear()
            loss = parallel.forward_backward(batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        elsewhere = [name for name, one in parallel.model.named_parameters() if one.device.type != devices.DEVICE]
        return {
            "waits": list(seen.waits),
            "order": seen.order,
            "members": seen.members,
            "issued": list(seen.issued),
            "elsewhere": elsewhere + ([] if loss.device.type == devices.DEVICE else ["loss"]),
            "pickled": objects._on_host({"losses": [loss]})["losses"][0].device.type,
        }


# ---- Trainer's own loop ----


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return dict.fromkeys(("input_ids", "labels"), [5] * (6 + index % 5))


class OnTheDevice(GalvatronTrainingArguments):
    @property
    def device(self) -> torch.device:
        super().device  # makes accelerate's state
        return torch.device(devices.DEVICE, 0)


@contextlib.contextmanager
def alone_and_with_true_data() -> Iterator[None]:
    """Plays what a world of one process and tensors without memory cannot: exchanges of objects, the watchdog, and the
    reading of data, which is on the host.
    """

    def gathered(found: list, value: Any, group=None) -> None:
        found[:] = [value] * len(found)

    def on_true_tensors(work: Callable) -> Callable:
        def call(*args, **kwargs):
            with devices.unset_fake_temporarily():
                return work(*args, **kwargs)

        return call

    read = DataLoaderShard.__iter__

    replaced = (
        (Meetings, "meet", lambda self, call: None),
        (mixin, "watched", lambda *args: contextlib.nullcontext()),
        (dist, "all_gather_object", gathered),
        (dist, "broadcast_object_list", lambda *args, **kwargs: None),
        (Trainer, "_move_model_to_device", lambda self, model, device: model),  # it is there
        (DataLoaderShard, "__iter__", on_true_tensors(lambda self: iter(list(read(self))))),
        (step_packer, "limit_lengths", on_true_tensors(step_packer.limit_lengths)),
        (step_packer, "pack", on_true_tensors(step_packer.pack)),
        (step_packer.Sequences, "from_batches", on_true_tensors(step_packer.Sequences.from_batches)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Trains `case["steps"]` steps in Trainer's loop as rank 0 of a plan; returns the waits. Neither evaluation nor
    saving is played: both read values.
    """
    plan = ParallelPlan.from_json(json.dumps(case["plan"]))
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(plan.world_size), MASTER_ADDR="localhost", MASTER_PORT="0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        seen = stack.enter_context(devices.rank_with_gpu(0, plan.world_size))
        stack.enter_context(alone_and_with_true_data())
        stack.enter_context(masks())
        stack.enter_context(routed_rows())
        model = build(case)
        arguments = OnTheDevice(
            output_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            use_cpu=True,  # accelerate looks for no GPU
            max_steps=case["steps"],
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_strategy="no",
            logging_steps=100,
            disable_tqdm=True,
            report_to=[],
            parallel_plan=plan,
            packing="static" if case["batch"] == "packed" else "none",
            full_determinism=True,  # documents are not timed
        )
        collator = DataCollatorForSeq2Seq(word_tokenizer())
        GalvatronTrainer(model=model, args=arguments, train_dataset=Rows(), data_collator=collator).train()
        return {"waits": list(seen.waits)}


# ---- The profiler's counts ----


def count(case: dict[str, Any]) -> dict[str, Any]:
    """Counts the bytes of a head and of a packed layer in bf16 with the operators of each device."""
    config, length = LlamaConfig(**case["config"]), case["length"]
    found: dict[str, Any] = {}
    devices.without_work()
    for device in (devices.HOST, devices.DEVICE):
        for packed in (False, True):
            counts = CountedModel(empty_model(config), torch.bfloat16, length, packed, device)
            (layer,), ends = counts.layers(LayerStrategy(), 2 * length, length), counts.ends(1, length)
            parts = {"layer": layer, "head": ends["head"]}
            found[f"{device} {packed}"] = {
                name: {"saved_bytes": part.saved_bytes, "forward_peak_bytes": part.forward_peak_bytes}
                for name, part in parts.items()
            }
    return found


# ---- benchmarks/gpu.py ----


def step_of_gpu_script(case: dict[str, Any]) -> dict[str, Any]:
    """Takes a step of a section of benchmarks/gpu.py, at the size that a GPU of 140 GiB gets, in each way that is not
    compiled; returns the waits by way.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import gpu
    import gpu_steps

    found = {}
    device = torch.device(devices.DEVICE, 0)
    memory = mock.patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=150e9))
    for way in gpu_steps.ways(case["section"], 1):
        if way.strategy is None or way.compiled or way.liger or way.float8:
            continue
        with memory, devices.rank_with_gpu(0, 1) as seen, masks():
            batch = gpu._batch(case["section"], False, device, gpu_steps.Batch)
            plan = dataclasses.replace(way.plan(1, batch.layers), precision=Precision(compute="bf16"))
            parallel = parallelize(gpu_steps.build(batch.config(), device), plan)
            optimizer = torch.optim.AdamW(parallel.model.parameters(), fused=True)
            ids = torch.ones(batch.rows, batch.length, dtype=torch.long, device=device)
            rows: Any = {"input_ids": ids, "labels": ids}
            seen.waits.clear()
            parallel.forward_backward(packed(parallel) if way.packing == "static" else rows)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            found[way.name] = list(seen.waits)
    return found


WORKS = {"train": train, "count": count, "gpu script": step_of_gpu_script}

if __name__ == "__main__":
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(WORKS.get(given.get("work"), run)(given)), flush=True)
