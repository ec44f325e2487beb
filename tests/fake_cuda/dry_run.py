# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps of training on GPUs that are not there: prints a JSON line for each case on standard input, see `run`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import devices  # noqa: E402  (before torch)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tiny_models  # noqa: E402
from galvatron_hf import ParallelPlan, parallelize  # noqa: E402
from galvatron_hf.parallel.activation.documents import DocumentBounds, Documents  # noqa: E402
from galvatron_hf.parallel.comm import objects  # noqa: E402
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer  # noqa: E402
from galvatron_hf.parallel.model import ParallelModel  # noqa: E402
from galvatron_hf.parallel.pipeline import trace  # noqa: E402


ROWS, LENGTH = 8, 32
WIDER = {"gpt2": {"n_head": 4}}  # heads of eight, as the kernel of packed attention needs them; others by `head_dim`


def batch_of(kind: str, parallel) -> Any:
    """Returns a global batch on the device: padded rows, the same with a mask, or packed documents."""
    if kind == "packed":
        return packed(parallel)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long, device=devices.DEVICE)
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if kind == "masked" else {})


def packed(parallel) -> list[dict[str, Any]]:
    """Returns a micro-batch for each of the plan's, of two documents a pack."""
    packs, multiple = parallel.resolved.packs, parallel.resolved.pack_multiple
    cuts = tuple(range(0, (packs + 1) * 4 * multiple, 4 * multiple))
    bounds = tuple(sorted({*cuts, *(cut + 3 for cut in cuts[:-1])}))
    ids = torch.ones(1, cuts[-1], dtype=torch.long, device=devices.DEVICE)
    documents = Documents(bounds=bounds, cuts=cuts)
    part = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "shift_labels": ids, "documents": documents}
    return [part] * parallel.plan.micro_batch_count


def _offsets_for_each_layer():
    def on(self, device):
        return torch.tensor(self, dtype=torch.int32, device=device)

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


def _objects_stay_on_the_device():
    return mock.patch.object(objects, "_on_host", lambda value: value)


# Faults that a dry run has to see, most of them how the code once was.
FAULTS = {
    "none": contextlib.nullcontext,
    "offsets for each layer": _offsets_for_each_layer,
    "norm from the host": _norm_from_the_host,
    "spans that wait": _spans_that_wait,
    "gradient read in each layer": _gradient_read_in_each_layer,
    "one more sum": _one_more_sum_on_rank_1,
    "objects stay on the device": _objects_stay_on_the_device,
}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Trains steps of a plan as one rank of it, and returns what the last one has done.

    Args:
        case (`dict`): `plan` (JSON), `rank`, `family` of tiny_models.py, `batch` ("padded", "masked" or "packed"),
            `steps`, `traced`, whether the timeline is on, and `fault`, one of `FAULTS`.
    """
    plan = ParallelPlan.from_json(json.dumps(case["plan"]))
    with devices.rank_with_gpu(case["rank"], plan.world_size) as seen, FAULTS[case.get("fault", "none")]():
        with torch.device(devices.DEVICE), mock.patch.object(tiny_models, "_randomise"):
            model = tiny_models.FAMILIES[case["family"]].build(**WIDER.get(case["family"], {"head_dim": 8}))
        parallel = parallelize(model, plan)
        parallel.model.train()
        parallel.timeline.on = case.get("traced", False)
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-4, fused=True)
        for _ in range(case["steps"]):
            batch = batch_of(case["batch"], parallel)
            seen.waits.clear()
            seen.order.clear()
            loss = parallel.forward_backward(batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        elsewhere = [name for name, one in parallel.model.named_parameters() if one.device.type != devices.DEVICE]
        return {
            "waits": list(seen.waits),
            "order": seen.order,
            "members": seen.members,
            "elsewhere": elsewhere + ([] if loss.device.type == devices.DEVICE else ["loss"]),
            "pickled": objects._on_host({"losses": [loss]})["losses"][0].device.type,
        }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
