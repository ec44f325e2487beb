# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The rows that a step will have, known before they are read, are those that loaders give."""

import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, RandomSampler, Sampler

from galvatron_hf.trainer.data.dataset_rows import DatasetRows


def loader_of(sampler=None, drop_last: bool = False, shuffle: bool = False) -> DataLoader:
    """Returns a loader of batches of 4 of 27 rows, which are their own indices."""
    loader = DataLoader(range(27), batch_size=4, sampler=sampler, shuffle=shuffle, drop_last=drop_last)
    return prepare_data_loader(loader, put_on_device=False, use_seedable_sampler=True, data_seed=3)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_steps_hold_what_the_loader_gives(shuffle, drop_last):
    """Runs two epochs of steps of two batches; the last step is smaller, or smaller still if rows are dropped."""
    loader = loader_of(shuffle=shuffle, drop_last=drop_last)
    rows, step = DatasetRows(loader, accumulation=2), 0
    assert rows.known and not rows.may_learn
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = [batch.tolist() for batch in loader]
        assert sum(map(len, batches)) == (24 if drop_last else 27)
        for start in range(0, len(batches), 2):
            assert rows.of_step(step) == sum(batches[start : start + 2], [])
            step += 1


class Own(Sampler):
    def __iter__(self):
        return iter(range(27))

    def __len__(self) -> int:
        return 27


def test_orders_that_are_not_known():
    """PyTorch's random sampler draws when it is asked; one of the user's own may go by what was learned."""
    drawing = DataLoader(range(27), batch_size=4, sampler=RandomSampler(range(27)))
    assert not DatasetRows(drawing, 1).known and not DatasetRows(drawing, 1).may_learn
    own = DatasetRows(DataLoader(range(27), batch_size=4, sampler=Own()), 1)
    assert not own.known and own.may_learn
