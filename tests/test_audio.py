# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that classify recordings of any length, whose rows a rank computes whole, against one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from equivalence import reference, single_stage
from family_runs import recordings
from galvatron_hf.data.loader import join_batches
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.layers.rng import numpy_stream
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import LayerStrategy
from plans import pipelined
from ranks import run_ranks
from test_heads import EVALUATED, predictions
from test_parallelize import check_cases
from tiny_configurations import LABELS, tiny_model


S, AUDIO = LayerStrategy, "audio-classification"
LAYERS = (S(), S(sharding="zero2"), S(sharding="replicate", recompute="full"), S(shard_degree=2, recompute="full"))
PLAN = single_stage(LAYERS, 4, micro_batches=2)
# FSDP2 alone leaves the format of weights as it is.
IN_FP64 = single_stage((S(), S(sharding="zero2"), S(recompute="full"), S(shard_degree=2)), 4, micro_batches=2)


def case_of(model_type: str, rows: int = 6, masked: bool = True, **changes: Any):
    """Returns a case in fp64: in fp32 one process is 1e-5 from that in the gradients of convolutions, whose sums have
    thousands of samples.
    """
    model, batch = tiny_model(model_type, task=AUDIO, **changes).double(), recordings(rows)
    batch["input_values"] = batch["input_values"].double()
    if not masked:
        del batch["attention_mask"]
    return reference(model, batch), IN_FP64


def test_recordings_under_shards_and_recompute():
    cases = {
        "wav2vec2": case_of("wav2vec2"),
        "fewer rows than ranks, no mask": case_of("hubert", rows=2, masked=False),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_more_families_of_recordings():
    names = ("wavlm", "unispeech-sat", "data2vec-audio")
    check_cases(4, {name: case_of(name) for name in names}, evaluation=False)


class Recordings(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int = 1):
        draw = torch.Generator().manual_seed(seed)
        self.rows = [torch.randn(2000 + 200 * (index % 5), generator=draw) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_values": self.rows[index], "labels": index % LABELS}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    values = [row["input_values"] for row in rows]
    mask = [torch.ones(len(one), dtype=torch.long) for one in values]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_values": pad(values, True), "attention_mask": pad(mask, True), "labels": labels}


@pytest.mark.slow
def test_trainer_with_recordings():
    """Losses, updates, evaluation and predictions of plain Trainer; batches have different lengths."""
    data = dict(data_collator=lambda: collate, eval_dataset=lambda: Recordings(10, seed=2))
    case = dict(build=lambda: tiny_model("wav2vec2", task=AUDIO), train=lambda: Recordings(27), trainer=data)
    options = EVALUATED | dict(gradient_accumulation_steps=1, per_device_train_batch_size=2)
    oracle.check_cases({"recordings": oracle.Case(**case, plan=PLAN, options=options, after=predictions)})


def test_batches_of_a_step_with_other_lengths_are_refused():
    """Padding changes what convolutions compute, which no mask hides."""
    batches = [{"input_values": torch.zeros(2, length)} for length in (10, 12)]
    with pytest.raises(
        ValueError, match="'input_values' has the shapes .*which cannot be joined; let the collator pad"
    ):
        join_batches(batches, 0)


def test_plans_that_recordings_have_not_say_why():
    model = tiny_model("wav2vec2", task=AUDIO)
    adapter = adapter_for(model)
    with pytest.raises(ValueError, match="its positions are those of recordings of any length"):
        check_model(model, adapter, pipelined([(0,), (1,)], (S(),) * 4))
    with pytest.raises(ValueError, match="its positions are those of recordings of any length"):
        check_model(model, adapter, single_stage((S(tensor=2),) * 4, 2))


def test_layers_left_out_at_random_are_refused():
    with pytest.raises(ValueError, match="leaves out layers at random.*set it to 0.0"):
        adapter_for(tiny_model("wav2vec2", task=AUDIO, layerdrop=0.1))


def test_a_loss_that_the_family_does_not_compute_is_refused():
    with pytest.raises(ValueError, match="computes no loss of the labels that its problem_type and num_labels ask"):
        adapter_for(tiny_model("wav2vec2", task=AUDIO, num_labels=1))


def test_norms_by_the_statistics_of_a_batch_are_refused():
    with pytest.raises(ValueError, match="norms by the statistics of a whole batch in its .*batch_norm"):
        adapter_for(tiny_model("wav2vec2-conformer", task=AUDIO))


def test_masks_of_spec_augment_follow_the_step_and_leave_numpys_generator_alone():
    """A step that is computed again draws the same masks; another step draws others."""
    model = tiny_model("wav2vec2", task=AUDIO, apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=2)

    def work() -> list[float]:
        parallel, found = parallelize(copy.deepcopy(model), single_stage((S(),) * 4, 1)), []
        state = np.random.get_state()[1].copy()
        for step in (1, 2, 1):
            parallel.streams.step = step
            found.append(float(parallel.forward_backward(recordings())))
        assert (np.random.get_state()[1] == state).all()
        return found

    first, second, again = run_ranks(work, 1)[0]
    assert first == again != second


def test_a_stream_of_numpy_depends_on_its_key_and_leaves_the_generator_alone():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    drawn = []
    for key in ((1, 2), (1, 3), (1, 2)):
        with numpy_stream(*key):
            drawn.append(np.random.rand())
    assert drawn[0] == drawn[2] != drawn[1]
    assert (np.random.get_state()[1] == before).all()
