# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a checkpoint's files, it is loaded as data or refused in one line, and nothing is unpickled."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivalence import whole
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.weights.distributed_state import load_plain_state, save_state
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer.checkpoint.random_state import random_state, restore_random_state
from galvatron_hf.trainer.checkpoint.scheduler_state import SchedulerState
from plan_inputs import JSON_VALUES, QUICK
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Returns the files that one rank wrote after a step of AdamW, and its weights and moments by name."""
    folder = tmp_path_factory.mktemp("state") / "written"

    def work() -> dict[str, torch.Tensor]:
        model = FAMILIES["llama"].build()
        parallel = parallelize(model, ParallelPlan.uniform(1, len(model.model.layers)))
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=0.1)
        parallel.forward_backward(BATCHES["right"]())
        optimizer.step()
        save_state(parallel, optimizer, folder)
        return {name: whole(tensor.detach()) for name, tensor in tensors_of(parallel.model, optimizer).items()}

    return folder, run_ranks(work, 1)[0]


@pytest.fixture(scope="module")
def state(written) -> Path:
    return written[0]


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    moments = {f"{name} {kind}": value for name in named for kind, value in optimizer.state[named[name]].items()}
    return named | moments


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Loads a folder, and checks that all weights were read and that the optimizer has the model's weights."""
    model = FAMILIES["llama"].build()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_plain_state(model, optimizer, folder)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert held == [id(parameter) for parameter in model.parameters()]
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    for parameter, values in optimizer.state.items():
        assert all(value.shape in (parameter.shape, ()) for value in values.values() if torch.is_tensor(value))
    return tensors_of(model, optimizer)


def is_told_in_one_line(work, *args) -> bool:
    """Returns whether `work` raises ValueError, whose message is checked."""
    try:
        work(*args)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500, str(error)
        return True
    return False


def mutate(data: st.DataObject, raw: Any) -> None:
    """Replaces or removes a value somewhere in parsed JSON."""
    node = raw
    while True:
        keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        node = inner
    if data.draw(st.booleans()):
        node[key] = data.draw(JSON_VALUES)
    else:
        del node[key]


def test_what_was_written_is_read(written):
    folder, wanted = written
    seen = load(folder)
    assert seen.keys() == wanted.keys() and len(wanted) == 4 * len(list(FAMILIES["llama"].build().parameters()))
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@QUICK
@given(st.data())
def test_mutated_options_of_the_optimizer_change_no_weight(written, tmp_path_factory, data):
    state, wanted = written
    folder = tmp_path_factory.getbasetemp() / "options"
    if not folder.exists():
        shutil.copytree(state, folder)
    raw = json.loads((state / "optimizer.json").read_text())
    mutate(data, raw)
    (folder / "optimizer.json").write_text(json.dumps(raw))

    def read() -> None:
        seen = load(folder)
        assert all(torch.equal(seen[name], tensor) for name, tensor in wanted.items() if " " not in name)

    is_told_in_one_line(read)


@QUICK
@given(st.data())
def test_mutated_headers_of_tensors(state, tmp_path_factory, data):
    """Replaces shapes, offsets and types: what is loaded all the same has each weight."""
    folder = tmp_path_factory.getbasetemp() / "headers"
    if not folder.exists():
        shutil.copytree(state, folder)
    (file,) = folder.glob("*.safetensors")
    content = (state / file.name).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    if data.draw(st.booleans()):
        mutate(data, header)
    else:
        offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        mutate(data, offsets)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    is_told_in_one_line(load, folder)


@QUICK
@given(st.binary(max_size=200), st.integers(0, 2**63 - 1))
def test_any_bytes_for_tensors(state, tmp_path_factory, content, length):
    folder = tmp_path_factory.getbasetemp() / "bytes"
    if not folder.exists():
        shutil.copytree(state, folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(struct.pack("<Q", length) + content)
    assert is_told_in_one_line(load, folder)


def test_a_huge_shape_takes_no_memory(state, tmp_path):
    folder = shutil.copytree(state, tmp_path / "huge")
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    name = next(name for name in offsets if name.startswith("optimizer.exp_avg."))
    offsets[name]["saved_offsets"][0] = 2**45
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    assert is_told_in_one_line(load, folder)


@QUICK
@given(st.data())
def test_mutated_states_of_the_scheduler(data):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    names = [["weight"], ["bias"]]
    raw = SchedulerState.from_state_dict(scheduler.state_dict(), names).to_json()
    mutate(data, raw)

    def read() -> None:
        loaded = SchedulerState.from_json(raw).for_groups(scheduler.state_dict(), names)
        assert loaded.keys() == scheduler.state_dict().keys()  # no other attribute of the scheduler can be set

    is_told_in_one_line(read)


@QUICK
@given(st.data())
def test_mutated_states_of_the_generators_change_none(data):
    before = random_state()
    raw = json.loads(json.dumps(before))
    mutate(data, raw)
    refused = is_told_in_one_line(restore_random_state, raw)
    after = json.loads(json.dumps(random_state()))
    restore_random_state(before)
    assert after == (json.loads(json.dumps(before)) if refused else raw)


def test_the_generators_go_on_where_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.normal()
    saved = json.loads(json.dumps(random_state()))

    def draw() -> tuple:
        return random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(3).tolist()

    wanted = draw()
    restore_random_state(saved)
    assert draw() == wanted
