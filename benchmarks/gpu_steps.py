# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times training steps of plain Trainer and GalvatronTrainer on the same rows in one process, and predicts them."""

import gc
import importlib.util
import os
import re
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from gpu_models import PEAK_FLOPS, RandomRows, StepFlops, arguments, build, collator, llama
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import is_liger_kernel_available

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.plan import Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.measure.hardware import profile_hardware
from galvatron_hf.profiler.measure.model import profile_model


WARM_UP, COUNTED = 4, 6  # steps; after them one in which waits are counted, and one that is profiled
LONGEST = 25  # kernels that are named
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of a rank in a step, and a model for them; `layers` are fewer than the model's own on small GPUs."""

    size: str
    layers: int
    rows: int
    length: int
    shortest: int | None = None

    def config(self) -> LlamaConfig:
        return llama(self.size, self.length, self.layers)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: plain Trainer, or GalvatronTrainer under one strategy for all layers."""

    name: str
    strategy: dict[str, Any] | None = None  # None for plain Trainer
    pipeline: dict[str, Any] | None = None
    compiled: bool = False
    packing: str = "none"
    profiled: bool = False
    float8: bool = False
    liger: bool = False

    def plan(self, ranks: int, layers: int) -> ParallelPlan:
        precision = Precision(compute="fp8") if self.float8 else None
        return ParallelPlan.uniform(
            ranks, layers, precision=precision, **(self.pipeline or {}), **(self.strategy or {})
        )

    def runs_here(self, device: torch.device, compiled: bool) -> bool:
        """Returns whether the device and the installed packages can do it; `compiled` whether anything is compiled."""
        if self.liger and not (device.type == "cuda" and is_liger_kernel_available()):
            return False
        if self.float8 and (importlib.util.find_spec("torchao") is None or device.type != "cuda"):
            return False
        return compiled or not self.compiled


PLAIN = Way(name="plain Trainer", profiled=True)
AGAIN = Way(name="plain Trainer again (A/A)")


def ways(kind: str, ranks: int) -> list[Way]:
    """Returns the ways that are compared in the section `kind`, in their order."""
    zero3, replicate = {}, {"sharding": "replicate"}
    made = [
        PLAIN,
        Way(name="zero3", strategy=zero3),
        Way(name="zero3, compiled", strategy=zero3, compiled=True, profiled=True),
        Way(name="replicate, compiled", strategy=replicate, compiled=True),
    ]
    if kind == "1B":
        made[1] = Way(name="zero3", strategy=zero3, profiled=True)
        made.insert(2, Way(name="zero3, recompute", strategy={"recompute": "full"}))
    if kind == "ragged":
        made = [
            PLAIN,
            Way(name="zero3, packed", strategy=zero3, packing="static", profiled=True),
            Way(name="replicate, packed", strategy=replicate, packing="static"),
            Way(name="zero3, packed, compiled", strategy=zero3, packing="static", compiled=True),
        ]
    if kind == "narrow":
        made = [
            PLAIN,
            Way(name="replicate", strategy=replicate),
            Way(name="zero3", strategy=zero3, profiled=True),
            Way(name="zero3, recompute", strategy={"recompute": "full"}),
        ]
    if kind == "8B":
        made.insert(1, Way(name="plain Trainer, compiled", compiled=True))
        made.append(Way(name="replicate, compiled, fp8", strategy=replicate, compiled=True, float8=True))
    if ranks % 2 == 0 and kind in ("1B", "8B"):
        made += [
            Way(name="tensor 2, Megatron-SP, compiled", strategy={"tensor": 2, "megatron_sp": True}, compiled=True),
            Way(name="Ulysses 2, compiled", strategy={"ulysses": 2}, compiled=True),
            Way(name="1F1B, 4 micro-batches", strategy=zero3, pipeline={"pipeline": 2, "micro_batches": 4}),
        ]
    # Liger comes last: it replaces classes of transformers, and models that are made later have its modules.
    return [*made, AGAIN, *([Way(name="zero3, Liger", strategy=zero3, liger=True)] if kind == "8B" else [])]


class Watch(TrainerCallback):
    """Times the steps of a run on the device. Then watches one for the host's waits and one for its kernels."""

    def __init__(self, device: torch.device, profiled: bool):
        self.device, self.profiled = device, profiled
        self.marks: list[Any] = []
        self.host: list[float] = []
        self.waits: list[str] = []
        self.kernels: dict[str, float] = {}
        self.longest: list[str] = []
        self._caught: Any = None
        self._profile: Any = None

    @property
    def steps(self) -> int:
        return WARM_UP + COUNTED + 2

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        cuda, step = self.device.type == "cuda", state.global_step
        if step == WARM_UP:
            self.warm_up_seconds = time.perf_counter() - self.began
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
        if WARM_UP <= step <= WARM_UP + COUNTED:
            self.host.append(time.perf_counter())
            mark = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
            if cuda:
                mark.record()
            self.marks.append(mark)
        if step == WARM_UP + COUNTED:
            self.peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
            if cuda:
                self._caught = warnings.catch_warnings(record=True)
                self.found = self._caught.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
        if step == WARM_UP + COUNTED + 1:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
                self._caught.__exit__(None, None, None)
                self.waits = [_place(one) for one in self.found if "synchronizing" in str(one.message)]
            if cuda and self.profiled:
                torch.cuda.synchronize(self.device)
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.start()
                self._profile_began = time.perf_counter()
        if step == self.steps and self._profile is not None:
            torch.cuda.synchronize(self.device)
            taken = 1e3 * (time.perf_counter() - self._profile_began)
            self._profile.stop()
            self.kernels, self.longest = shares(self._profile, taken)
            self._profile = None

    def milliseconds(self) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type == "cuda":
            return [one.elapsed_time(other) for one, other in pairs]
        return [1e3 * (other - one) for one, other in pairs]


def _place(warning: warnings.WarningMessage) -> str:
    parts = warning.filename.split(os.sep)
    return f"{os.sep.join(parts[-3:])}:{warning.lineno}"


# Kinds of kernels by their names, the first that fits.
KINDS = {
    "communication": r"nccl",
    "optimizer and norm": r"multi_tensor|FusedAdam|adamw",
    "attention": r"flash|fmha|sdpa|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|_mm_",
    "compiled elementwise": r"triton",
    "copies and casts": r"Memcpy|Memset|copy|CatArray|split_with_sizes|chunk_cat",
    "other elementwise": r"",
}


def shares(profiled: profile, wall_ms: float) -> tuple[dict[str, float], list[str]]:
    """Returns the milliseconds of a step by kind of kernel, and of the device's idle time; and the kernels that take
    most.
    """
    found: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    spans = []
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.name, re.IGNORECASE))
            found[kind] += 1e-3 * event.device_time_total
            by_name[event.name] += 1e-3 * event.device_time_total
            spans.append((event.time_range.start, event.time_range.end))
    busy, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    longest = sorted(by_name.items(), key=lambda pair: -pair[1])[:LONGEST]
    idle = max(0.0, wall_ms - 1e-3 * busy)
    return {**found, "idle": idle}, [f"{ms:.1f} ms {name[:120]}" for name, ms in longest]


def run(way: Way, batch: Batch, device: torch.device, ranks: int) -> dict[str, Any]:
    """Trains some steps in one way and returns what was measured on this rank."""
    config = batch.config()
    watch = Watch(device, way.profiled)
    count = watch.steps * batch.rows * ranks
    data = RandomRows(count, batch.length, config.vocab_size, batch.shortest)
    with tempfile.TemporaryDirectory() as folder:
        common = arguments(folder, device.type, batch.rows, watch.steps, bf16=True, optim="adamw_torch_fused")
        common |= {"torch_compile": way.compiled, "learning_rate": 1e-4, "use_liger_kernel": way.liger}
        if way.strategy is None:
            trainer_class, args = Trainer, TrainingArguments(**common)
        else:
            plan = way.plan(ranks, batch.layers)
            trainer_class = GalvatronTrainer
            args = GalvatronTrainingArguments(**common, parallel_plan=plan, packing=way.packing)
        given = dict(train_dataset=data, data_collator=collator(), callbacks=[watch])
        trainer = trainer_class(build(config, device), args, **given)
        loss = trainer.train().training_loss
    milliseconds = watch.milliseconds()
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return _row(way, batch, watch, milliseconds, loss, data.tokens() / watch.steps, ranks, device)


def _row(
    way: Way,
    batch: Batch,
    watch: Watch,
    milliseconds: list[float],
    loss: float,
    tokens: float,
    ranks: int,
    device: torch.device,
) -> dict[str, Any]:
    ms = statistics.median(milliseconds)
    row = {
        "way": way.name,
        "ms": ms,
        "lowest ms": min(milliseconds),
        "highest ms": max(milliseconds),
        "tokens/s a rank": 1e3 * tokens / ranks / ms,
        "mean loss": loss,
        "first steps, s": watch.warm_up_seconds,
        "host waits a step": len(watch.waits),
        "waits at": sorted(set(watch.waits)),
        "kernels, ms": watch.kernels,
        "longest kernels": watch.longest,
    }
    if device.type == "cuda":
        row["peak GiB"] = watch.peak / GIB
    peak = next((value for name, value in PEAK_FLOPS.items() if name in device_name(device)), None)
    if batch.shortest is None:
        flops = StepFlops.of(batch.config(), batch.rows * batch.length, batch.length)
        row |= {"TFLOP/s a rank": 1e-9 * flops.all / ms, "head's share of FLOPs": flops.head / flops.all}
        if peak is not None:
            row["MFU"] = 1e3 * flops.all / ms / peak
            row["MFU, causal half of attention"] = 1e3 * (flops.all - flops.attention / 2) / ms / peak
    return row


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def compare(kind: str, batch: Batch, device: torch.device, ranks: int, compiled: bool) -> list[dict[str, Any]]:
    """Trains in all ways of a section, one after the other, or in those that are not compiled."""
    found = []
    for way in (way for way in ways(kind, ranks) if way.runs_here(device, compiled)):
        try:
            found.append(run(way, batch, device, ranks))
        except torch.OutOfMemoryError as error:
            found.append({"way": way.name, "error": f"out of memory: {str(error).splitlines()[0]}"})
            gc.collect()
            torch.cuda.empty_cache()
        except Exception as error:  # the other ways are measured all the same
            if ranks > 1:
                raise
            found.append({"way": way.name, "error": " ".join(f"{type(error).__name__}: {error}".split())[:400]})
    return found


def predict(batch: Batch, device: torch.device, ranks: int, degrees: int) -> list[dict[str, Any]]:
    """Profiles the machine and the model, and predicts the steps of all ways of one stage that are not compiled.

    Args:
        degrees (`int`): largest tensor degree of the model's profile, which decides how long it takes.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(batch.config())
    began = time.perf_counter()
    hardware = profile_hardware(device=device)
    middle = time.perf_counter()
    tokens = batch.rows * batch.length
    options = dict(dtype="bf16", device=device, tokens=tokens, length=batch.length, packed=False)
    profiled = profile_model(model, **options, max_degree=degrees)
    ended = time.perf_counter()
    found = [
        {"way": "profile of the machine", "seconds": middle - began},
        {"way": f"profile of the model, degrees up to {degrees}", "seconds": ended - middle},
    ]
    workload = Workload(rows=batch.rows * ranks, length=batch.length, precision=Precision(compute="bf16"))
    for way in ways("1B", ranks):
        if way.strategy is not None and not way.compiled and way.pipeline is None:
            estimate = estimate_plan(hardware, profiled, workload, way.plan(ranks, batch.layers))
            found.append({"way": way.name, "predicted ms": estimate.step_ms})
            found[-1]["predicted GiB"] = max(estimate.memory_bytes) / GIB
    found.append({"way": "update of an element", "predicted ns": 1e6 * profiled.optimizer_ms_per_element})
    return found
