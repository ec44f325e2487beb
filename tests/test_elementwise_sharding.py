# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The placements that the tests' ranks take for elementwise results are those that DTensor finds by its search."""

import copy

import pytest
import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from elementwise_sharding import elementwise_sharding, searched
from galvatron_hf.parallel.parallelize import parallelize
from plans import mixed_plans
from ranks import run_ranks
from test_parallelize import oracle_of


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(amsgrad=True)),
}


@pytest.mark.slow
def test_optimizers_on_meshes_of_one_to_three_dimensions():
    oracle = oracle_of("llama")

    def work() -> tuple[set[str], list[str]]:
        seen, different = set(), []

        def compare(propagator, schema):
            wanted, found = searched(propagator, schema), elementwise_sharding(propagator, schema)
            if found is not None:
                seen.add(str(schema.op))
                if found != wanted:
                    different.append(f"{schema}: {found} instead of {wanted}")
            return wanted

        ShardingPropagator.propagate_op_sharding_non_cached = compare
        parallel = parallelize(copy.deepcopy(oracle.model), mixed_plans()["mixed_b"])
        parallel.forward_backward(oracle.batch)
        for kind, options in OPTIMIZERS.values():
            optimizer = kind(parallel.model.parameters(), lr=0.1, foreach=False, **options)
            for _ in range(2):
                optimizer.step()
        return seen, different

    for seen, different in run_ranks(work, 4):
        assert not different, different[0]
        assert {"aten.add.Tensor", "aten.add_.Tensor", "aten.lerp_.Scalar", "aten.maximum.out"} <= seen
