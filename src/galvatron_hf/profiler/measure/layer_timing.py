# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times a model's layers, ends and update on every rank at once, as near to how training runs them as parts can be."""

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
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, Part, layer_kinds, one_of_each
from galvatron_hf.profiler.trace.tracing import CountedModel
from galvatron_hf.utils.compat import tensor_norms
from galvatron_hf.utils.progress import progress_bar


LEAST_TOKENS = 128
ADAM_WEIGHTS = 32
MOST_COPIES, UNCACHED_ELEMENTS = 4, 1 << 24
ADAM_ELEMENTS = 1 << 12, UNCACHED_ELEMENTS  # of all these weights
REPETITIONS = range(3, 16)  # as many as there is time for

Key = tuple  # what is timed: ("layer", kind, tensor, tokens, length), ("head", tensor, tokens)...


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Something to time.

    Attributes:
        key (`tuple`): what it is.
        run (`Callable`): gives milliseconds: of forward and backward, and, of a layer's largest micro-batch, of what
            the forward does behind the last tensor that it saves; of "adam", of an update and of a sum of gradients.
    """

    key: Key
    run: Callable[[], tuple[float, ...]]


class _Clock:
    """Milliseconds of this device, which may be a share of a core.

    Where one thread computes on a CPU, the CPU's time is taken, and stretched by what the whole profile took: a quota
    stops a process for most of its period at once, and other ranks take turns with it, so the time on the wall of
    something short means nothing.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.shared = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._cpu = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.process_time() if self.shared else time.perf_counter())

    def mark(self) -> torch.cuda.Event | float:
        """This moment of the device; no GPU is waited for."""
        if self.device.type != "cuda":
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, mark: torch.cuda.Event | float, later: torch.cuda.Event | float) -> float:
        """Milliseconds; a GPU has to be through."""
        return later - mark if self.device.type != "cuda" else mark.elapsed_time(later)

    def __enter__(self) -> _Clock:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *unused) -> None:
        self._wall += time.perf_counter() - self._began[0]
        self._cpu += time.process_time() - self._began[1]

    @property
    def stretch(self) -> float:
        """What its milliseconds are multiplied by."""
        return max(1.0, self._wall / self._cpu) if self.shared and self._cpu else 1.0


class PartTimer:
    """Times everything on this rank; the slowest rank's times come out."""

    def __init__(
        self,
        model: PreTrainedModel,
        counted: CountedModel,
        device: torch.device,
        tokens: int,
        length: int,
        max_degree: int,
    ):
        self.counted, self.device, self.clock = counted, device, _Clock(device)
        self.degrees, self.end_degrees = counted.tensor_degrees(max_degree), counted.end_degrees(max_degree)
        self.tokens, self.length = tokens, length
        self._mesh: DeviceMesh | None = None
        self.copies = _copies(counted.small, layer_kinds(model))
        self.small = one_of_each(model, self.copies)

    def run(self, seconds: float, progress: bool) -> tuple[dict[Key, tuple[float, ...]], float]:
        """What the jobs give, by key, and how much longer than the CPU's time it is."""
        self._shrink(seconds)
        jobs = self._jobs()
        samples: dict[Key, list[tuple[float, ...]]] = {job.key: [] for job in jobs}
        for job in jobs:
            job.run()  # the first one sets things up
        gather_objects(None)  # ranks begin together
        began = time.perf_counter()
        with progress_bar(REPETITIONS.start * len(jobs), progress and is_rank_0()) as step, self.clock:
            for repetition in range(REPETITIONS.stop):
                each = (time.perf_counter() - began) / max(1, repetition)
                if repetition >= REPETITIONS.start and time.perf_counter() + each > began + seconds:
                    break
                for job in jobs:
                    samples[job.key].append(job.run())
                    step(f"timing {job.key[0]}s")
        stretch = self.clock.stretch
        own = {
            key: tuple(stretch * statistics.median(times) for times in zip(*found)) for key, found in samples.items()
        }
        ranks = gather_objects((own, stretch))
        slowest = {key: tuple(np.max([rank[key] for rank, _ in ranks], axis=0).tolist()) for key in own}
        return slowest, max(stretch for _, stretch in ranks)

    def _shrink(self, seconds: float) -> None:
        """Halves the largest micro-batch until all of it can be timed; collective, and alike on every rank."""
        length = min(self.length, LEAST_TOKENS, self.tokens)
        few = min(LEAST_TOKENS, self.tokens) // length * length
        parts = self._parts(LayerStrategy())
        jobs = [*self._layer_jobs(parts, 1, few, length), *self._end_jobs(parts, 1, few)]
        for job in jobs:
            job.run()
        with self.clock:
            once = sum(sum(job.run()[:2]) for job in jobs) * 1e-3
        once *= self.clock.stretch
        once = max(gather_objects(once))
        shares = sum(1 / degree for degree in self.degrees)
        rows = sum(tokens for tokens, _ in self.points())
        while REPETITIONS.start * once * shares * rows / few > seconds and self.tokens >= 2 * LEAST_TOKENS:
            self.tokens //= 2
            self.length = min(self.length, self.tokens)
            rows = sum(tokens for tokens, _ in self.points())

    def points(self) -> list[tuple[int, int]]:
        """Tokens and length of the documents in each micro-batch to time; tensor and chunk sizes divide them."""
        found = []
        for tokens in (self.tokens, self.tokens // 4, max(self.tokens // 16, min(self.tokens, LEAST_TOKENS // 4))):
            longest = min(self.length, tokens)
            for length in (longest, max(1, longest // 4)):
                found.append((tokens // length * length, length))
        return [point for point in dict.fromkeys(found) if min(point) >= 1]

    def _parts(self, strategy: LayerStrategy, vocabulary: int = 1) -> IsolatedLayers:
        parts = IsolatedLayers.of(self.small, strategy, vocabulary, self.counted.packed, self.copies)
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
        for tensor in self.end_degrees:
            parts = self._parts(LayerStrategy(), tensor)
            for tokens in dict.fromkeys(tokens for tokens, _ in self.points()):
                jobs += self._end_jobs(parts, tensor, tokens)
        return self._spread([*jobs, *map(self._optimizer_job, ADAM_ELEMENTS)])

    def _spread(self, jobs: list[_Job]) -> list[_Job]:
        """Ends and the optimizer behind layers, which leave nothing of theirs in a cache."""
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
        """The micro-batch in which a checkpoint's bookkeeping is timed.

        The smallest, of which it is most; on a GPU the largest, as it is done while kernels run.
        """
        return self.points()[0 if self.device.type == "cuda" else -1]

    def _end_jobs(self, parts: IsolatedLayers, tensor: int, tokens: int) -> list[_Job]:
        packs = parts.rank.resolved.packs
        length = max(1, min(self.length, tokens // packs))  # a model may have positions for no more
        batch = parts.micro_batch(packs * max(1, tokens // packs // length) * length, length)
        pair = {"embedding": parts.embedding(batch), "head": parts.head(batch)}
        return [self._job((name, tensor, tokens), part) for name, part in pair.items()]

    def _job(self, key: Key, part: Part, copies: int = 1, last: bool = False) -> _Job:
        def run() -> tuple[float, ...]:
            began = self.clock.now()
            output, behind = self._marked(part) if last else (part.run(), None)
            between = self.clock.now()
            gradient = torch.ones_like(output)
            ready = self.clock.now()
            output.backward(gradient)
            ended = self.clock.now()
            part.forget_gradients()
            times = (between - began) / copies, (ended - ready) / copies
            return times if behind is None else (*times, self.clock.between(*behind))

        return _Job(key=key, run=run)

    def _marked(self, part: Part) -> tuple[torch.Tensor, tuple]:
        """The forward's output, and the moments of the last tensor that it saved and of its end."""
        saved = self.clock.mark()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved = self.clock.mark()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = part.run()
        return output, (saved, self.clock.mark())

    def _optimizer_job(self, elements: int) -> _Job:
        """The norm of gradients, their clipping and an update, and a sum of gradients; of DTensors where ranks are
        several."""
        weights = [
            self._at_rest(torch.zeros(elements // ADAM_WEIGHTS, device=self.device)) for _ in range(ADAM_WEIGHTS)
        ]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)  # Trainer's default

        def run() -> tuple[float, float]:
            began = self.clock.now()
            gradients = [local_tensor(weight.grad) for weight in weights]
            norm = tensor_norms(gradients).norm()
            for gradient in gradients:
                gradient.mul_((1e-3 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            updated = self.clock.now()
            with torch.no_grad():
                for gradient, weight in zip(gradients, weights, strict=True):
                    gradient.add_(local_tensor(weight))
            return updated - began, self.clock.now() - updated

        return _Job(key=("adam", elements), run=run)

    def _at_rest(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        if not dist.is_initialized():
            return torch.nn.Parameter(tensor)
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return torch.nn.Parameter(DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False))


def optimizer_ms(found: dict[Key, tuple[float, ...]]) -> tuple[float, float]:
    """Milliseconds for each element, and for each weight, of an update."""
    few, many = (found["adam", elements][0] for elements in ADAM_ELEMENTS)
    each = max(0.0, (many - few) / (ADAM_ELEMENTS[1] - ADAM_ELEMENTS[0]))
    return each, max(0.0, few - each * ADAM_ELEMENTS[0]) / ADAM_WEIGHTS


def adding_ms(found: dict[Key, tuple[float, ...]]) -> float:
    """Milliseconds for each element of gradients that are added to others."""
    few, many = (found["adam", elements][1] for elements in ADAM_ELEMENTS)
    return max(0.0, (many - few) / (ADAM_ELEMENTS[1] - ADAM_ELEMENTS[0]))


def _copies(small: PreTrainedModel, kinds: Sequence[int]) -> int:
    """Layers of each kind that are timed one behind the other, so that none finds its weights in a cache."""
    layers = adapter_for(small).layers(small)
    smallest = min(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    wanted = -(-UNCACHED_ELEMENTS // smallest)
    return max(1, min(wanted, MOST_COPIES, *Counter(kinds).values()))
