# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times a model's layers, ends and optimizer update on every rank at once, under conditions close to training."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.objects import gather_objects, is_rank_0
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.measure.cpu_timing import DeviceClock
from galvatron_hf.profiler.measure.rounds import median_error, phase
from galvatron_hf.profiler.trace.counted_model import CountedModel
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, Part
from galvatron_hf.profiler.trace.isolated_rows import isolated_layers
from galvatron_hf.profiler.trace.small_models import layer_kinds, most_copies, one_of_each
from galvatron_hf.utils.compat import tensor_norms
from galvatron_hf.utils.progress import progress_bar


LEAST_TOKENS = 128
PROBED_TOKENS = {"cpu": 128, "cuda": 4096}  # of the layer whose time foretells that of a round; enough to be computed
ADAM_WEIGHTS = 32
MOST_COPIES, UNCACHED_ELEMENTS = 4, 1 << 24
ADAM_ELEMENTS = 1 << 12, 1 << 20  # fewest elements of these weights together, in the small and in the large job
FIRST_QUEUE_MS = 10.0  # of the host, for an optimizer job that has not run yet
GPU_ADAM_ELEMENTS, GPU_ADAM_SHARE = 1 << 27, 1 / 16  # of the large job on a GPU: most elements, share of the memory
ROUNDS = 3, 15  # fewest and most
FIRST_ROUNDS = 0.3  # share of the time for the fewest rounds; larger micro-batches are left out

Key = tuple  # identifies a job: ("layer", kind, tensor, tokens, length), ("head", tensor, tokens)...


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Holds one thing to time under a key; `run` runs the job once and returns times in milliseconds. These are
    forward and backward, and for a layer's largest micro-batch the forward after the last saved tensor. For "adam"
    they are an update and the addition of gradients.
    """

    key: Key
    run: Callable[[], tuple[float, ...]]


class LayerTimer:
    """Times all jobs on this rank, for tensor degrees up to `max_degree`; only the configuration of `model` is used.
    `counted` are counts of the same model. The largest micro-batch has `tokens` tokens in documents of `length`. The
    wanted `accuracy` is the standard error of the medians, relative to the medians, on average over the jobs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        counted: CountedModel,
        device: torch.device,
        tokens: int,
        length: int,
        max_degree: int,
        accuracy: float,
    ):
        self.counted, self.device, self.clock = counted, device, DeviceClock(device)
        self.accuracy = accuracy
        self.degrees, self.end_degrees = counted.tensor_degrees(max_degree), counted.end_degrees(max_degree)
        self.expert_degrees = counted.expert_degrees(max_degree)
        self.top_k = counted.top_k() if self.expert_degrees else []
        self.tokens, self.length = tokens, length
        self._mesh: DeviceMesh | None = None
        self.copies = most_copies(model, _copies(counted.small, layer_kinds(model)))
        self.small = one_of_each(model, self.copies)
        self.adam_elements = _adam_elements(sum(weight.numel() for weight in model.parameters()), device)

    def run(self, seconds: float, progress: bool) -> tuple[dict[Key, tuple[float, ...]], float]:
        """Times the jobs in rounds until medians are accurate, or for `seconds`; collective.
        Returns milliseconds by job on the slowest rank, and the largest ratio of wall time to CPU time.
        """
        once = self._shrink(FIRST_ROUNDS * seconds)
        at_least, at_most = ((1 + rounds) * once for rounds in ROUNDS)
        with phase("layers, embedding, head and optimizer", at_least, min(at_most, seconds + 2 * once), progress):
            samples = self._samples(self._jobs(), seconds, progress)
        ratio = self.clock.wall_per_cpu
        own = {key: tuple(ratio * statistics.median(times) for times in zip(*found)) for key, found in samples.items()}
        ranks = gather_objects((own, ratio))
        slowest = {key: tuple(np.max([rank[key] for rank, _ in ranks], axis=0).tolist()) for key in own}
        return slowest, max(ratio for _, ratio in ranks)

    def _samples(self, jobs: list[_Job], seconds: float, progress: bool) -> dict[Key, list[tuple[float, ...]]]:
        """Runs all jobs in each round; the ranks begin together and do equally many rounds."""
        samples: dict[Key, list[tuple[float, ...]]] = {job.key: [] for job in jobs}
        for job in jobs:
            job.run()  # the first run allocates
        gather_objects(None)
        began, error = time.perf_counter(), 1.0
        with progress_bar(ROUNDS[0] * len(jobs), progress and is_rank_0()) as step:
            for done in range(ROUNDS[1]):
                spent = max(gather_objects(time.perf_counter() - began))
                if done >= ROUNDS[0] and (error <= self.accuracy or spent + spent / done > seconds):
                    break
                with self.clock:  # not while this rank waits for the others
                    for job in jobs:
                        samples[job.key].append(job.run())
                        step(f"timing {job.key[0]}s")
                errors = [median_error([sum(times[:2]) for times in found]) for found in samples.values()]
                error = max(gather_objects(statistics.fmean(errors)))
        return samples

    def _shrink(self, seconds: float) -> float:
        """Halves the largest micro-batch until the fewest rounds fit; collective, with one result on all ranks.
        Returns the seconds of a round, approximately.
        """
        probed = PROBED_TOKENS[self.device.type]
        length = self.counted.of_image or min(self.length, probed, self.tokens)
        few = max(1, min(probed, self.tokens) // length) * length
        parts = self._parts(LayerStrategy())
        jobs = [*self._layer_jobs(parts, 1, few, length), *self._end_jobs(parts, 1, few)]
        for job in jobs:
            job.run()
        with self.clock:
            once = sum((self.copies if job.key[0] == "layer" else 1) * sum(job.run()[:2]) for job in jobs)
        once = max(gather_objects(1e-3 * once * self.clock.wall_per_cpu))

        def round_seconds() -> float:
            return once * sum(1 / degree for degree in self.degrees) * sum(size for size, _ in self.points()) / few

        while ROUNDS[0] * round_seconds() > seconds and self.tokens >= 2 * LEAST_TOKENS:
            self.tokens //= 2
            self.length = self.counted.of_image or min(self.length, self.tokens)
        return round_seconds()

    def points(self) -> list[tuple[int, int]]:
        """Returns (tokens, document length) of each micro-batch to time; tensor and chunk sizes divide them."""
        found, of_image = [], self.counted.of_image
        for tokens in (self.tokens, self.tokens // 4, max(self.tokens // 16, min(self.tokens, LEAST_TOKENS // 4))):
            if of_image is not None:
                found.append((max(1, tokens // of_image) * of_image, of_image))
                continue
            longest = min(self.length, tokens)
            for length in (longest, max(1, longest // 4)):
                found.append((tokens // length * length, length))
        return [point for point in dict.fromkeys(found) if min(point) >= 1]

    def tokens_of(self, kind: int, tokens: int, length: int) -> tuple[int, int]:
        """Returns the tokens of a kind of layer in a micro-batch, and those of a row: a second stack has others."""
        own = max(1, round(length * self.counted.length_ratios[kind]))
        return tokens // length * own, own

    def _parts(self, strategy: LayerStrategy, vocabulary: int = 1) -> IsolatedLayers:
        counted = self.counted
        options = dict(packed=counted.packed, copies=self.copies, length_ratio=counted.length_ratio)
        parts = isolated_layers(self.small, strategy, vocabulary, **options)
        parts.give_memory(self.device, self.counted.dtype)
        return parts

    def _jobs(self) -> list[_Job]:
        jobs = []
        for tensor in self.degrees:
            parts = self._parts(LayerStrategy(tensor=tensor))
            for tokens, length in self.points():
                jobs += self._layer_jobs(parts, tensor, tokens, length)
            if tensor == 1:
                jobs += [*self._outside_jobs(parts), *self._recompute_jobs()]
        for degree in self.expert_degrees:
            jobs += self._expert_jobs(self._parts(LayerStrategy(expert=degree)), degree)
        for tensor in self.end_degrees:
            parts = self._parts(LayerStrategy(), tensor)
            for tokens in dict.fromkeys(tokens for tokens, _ in self.points()):
                jobs += self._end_jobs(parts, tensor, tokens)
        return self._spread([*jobs, *map(self._optimizer_job, self.adam_elements)])

    def _spread(self, jobs: list[_Job]) -> list[_Job]:
        """Puts each end and optimizer job after a layer job, which evicts the caches."""
        layers = [job for job in jobs if job.key[0] == "layer"]
        others = [job for job in jobs if job.key[0] != "layer"]
        order = []
        for index in range(max(len(layers), len(others))):
            order += [layers[index % len(layers)]] * (index < len(layers)) + others[index : index + 1]
        return order

    def _layer_jobs(self, parts: IsolatedLayers, tensor: int, tokens: int, length: int) -> list[_Job]:
        layers = parts.layers(parts.micro_batch(tokens, length))
        keys = (("layer", kind, tensor, tokens, length) for kind in range(len(layers)))
        last = (tokens, length) == self.points()[0]
        return [self._job(key, part, self.copies, last) for key, part in zip(keys, layers, strict=True)]

    def _expert_jobs(self, parts: IsolatedLayers, degree: int) -> list[_Job]:
        """Returns the jobs of experts alone under one expert degree, of the largest and the smallest micro-batch. With
        the largest, twice as many choices arrive in another job.
        """
        jobs, sizes = [], [tokens for tokens, _ in self.points()]
        cases = [(max(sizes), 1), (min(sizes), 1), *([(max(sizes), 2)] if degree > 1 else [])]
        for kind, top_k in enumerate(self.top_k):
            for tokens, received in dict.fromkeys(cases) if top_k else ():
                part = parts.experts(kind, tokens, top_k)
                job = self._job(("experts", kind, degree, tokens, received), part)

                def run(inner=job.run, kind=kind, received=received) -> tuple[float, ...]:
                    parts.receive(kind, received)
                    return inner()

                jobs.append(_Job(key=job.key, run=run))
        return jobs

    def _outside_jobs(self, parts: IsolatedLayers) -> list[_Job]:
        jobs = []
        for kind, part in enumerate(parts.layers(parts.micro_batch(*self.points()[0]))):
            job = self._job(("outside", kind), part, self.copies)

            def run(inner: Callable = job.run) -> tuple[float, float]:
                with parts.without_regions():
                    return inner()

            jobs.append(_Job(key=job.key, run=run))
        return jobs

    def _recompute_jobs(self) -> list[_Job]:
        parts = self._parts(LayerStrategy(recompute="full"))
        layers = parts.layers(parts.micro_batch(*self.recompute_point))
        return [self._job(("recompute", kind), part, self.copies) for kind, part in enumerate(layers)]

    @property
    def recompute_point(self) -> tuple[int, int]:
        """Returns the micro-batch that times a checkpoint's bookkeeping: the smallest, of which it is the largest
        share. On a GPU it is the largest micro-batch, because the bookkeeping runs while kernels run.
        """
        return self.points()[0 if self.device.type == "cuda" else -1]

    def _end_jobs(self, parts: IsolatedLayers, tensor: int, tokens: int) -> list[_Job]:
        packs = parts.rank.resolved.packs
        length = max(1, min(self.length, tokens // packs))  # the model may have no more positions
        batch = parts.micro_batch(packs * max(1, tokens // packs // length) * length, length, 1.0)
        pair = {"embedding": parts.embedding(batch), "head": parts.head(batch)}
        return [self._job((name, tensor, tokens), part) for name, part in pair.items()]

    def _job(self, key: Key, part: Part, copies: int = 1, last: bool = False) -> _Job:
        def run() -> tuple[float, ...]:
            clock = self.clock
            began = clock.mark()
            output, marks = self._marked(part) if last else (part.run(), None)
            between = clock.mark()
            gradient = torch.ones_like(output)
            ready = clock.mark()
            if output.requires_grad:  # not that of a frozen embedding
                output.backward(gradient)
            ended = clock.mark()
            clock.now()  # waits for a GPU
            part.forget_gradients()
            times = clock.between(began, between) / copies, clock.between(ready, ended) / copies
            return times if marks is None else (*times, self.clock.between(*marks))

        return _Job(key=key, run=run)

    def _marked(self, part: Part) -> tuple[torch.Tensor, tuple]:
        """Returns the forward's output, and marks at the last saved tensor and at the end."""
        saved = self.clock.mark()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved = self.clock.mark()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = part.run()
        return output, (saved, self.clock.mark())

    def _optimizer_job(self, elements: int) -> _Job:
        """Returns the job of gradient norm, clipping, update, and adding gradients; with DTensors on several ranks."""
        weights = [
            self._sharded_param(torch.zeros(elements // ADAM_WEIGHTS, device=self.device)) for _ in range(ADAM_WEIGHTS)
        ]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)  # Trainer's default

        queued = FIRST_QUEUE_MS  # what the host took to queue the job last time

        def run() -> tuple[float, float]:
            nonlocal queued
            self.clock.occupy(2 * queued)
            host_began, began = time.perf_counter(), self.clock.mark()
            gradients = [local_tensor(weight.grad) for weight in weights]
            norm = tensor_norms(gradients).norm()
            for gradient in gradients:
                gradient.mul_((1e-3 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            updated = self.clock.mark()
            with torch.no_grad():
                for gradient, weight in zip(gradients, weights, strict=True):
                    gradient.add_(local_tensor(weight))
            added = self.clock.mark()
            queued = 1e3 * (time.perf_counter() - host_began)
            self.clock.now()
            return self.clock.between(began, updated), self.clock.between(updated, added)

        return _Job(key=("adam", elements), run=run)

    def _sharded_param(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        if not dist.is_initialized():
            return torch.nn.Parameter(tensor)
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return torch.nn.Parameter(DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False))


def _adam_elements(elements: int, device: torch.device) -> tuple[int, int]:
    """Returns the elements of the small and of the large optimizer job, for a model of so many elements."""
    few, many = ADAM_ELEMENTS
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        most = min(GPU_ADAM_ELEMENTS, int(GPU_ADAM_SHARE * memory) // 16)
        return most // 8 // ADAM_WEIGHTS * ADAM_WEIGHTS, most // ADAM_WEIGHTS * ADAM_WEIGHTS
    return few, min(UNCACHED_ELEMENTS, max(many, elements // ADAM_WEIGHTS * ADAM_WEIGHTS))


def optimizer_ms(found: dict[Key, tuple[float, ...]]) -> tuple[float, float]:
    """Returns the milliseconds of an update for each element and for each weight."""
    (elements, ms), _ = _adam(found, 0)
    each = _per_element(found, 0)
    return each, max(0.0, ms - each * elements) / ADAM_WEIGHTS


def adding_ms(found: dict[Key, tuple[float, ...]]) -> float:
    """Returns the milliseconds of adding gradients for each element."""
    return _per_element(found, 1)


def _per_element(found: dict[Key, tuple[float, ...]], which: int) -> float:
    (few, less_ms), (many, more_ms) = _adam(found, which)
    return max(0.0, (more_ms - less_ms) / (many - few))


def _adam(found: dict[Key, tuple[float, ...]], which: int) -> list[tuple[int, float]]:
    """Returns elements and milliseconds of the two optimizer jobs, the smaller job first."""
    return sorted((key[1], times[which]) for key, times in found.items() if key[0] == "adam")


def _copies(small: PreTrainedModel, kinds: Sequence[int]) -> int:
    """Returns how many layers of each kind are timed one after the other, so that no weights are cached."""
    layers = adapter_for(small).layers(small)
    smallest = min(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    wanted = -(-UNCACHED_ELEMENTS // smallest)
    return max(1, min(wanted, MOST_COPIES, *Counter(kinds).values()))
