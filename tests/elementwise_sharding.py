# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Spares the ranks of the tests a search that DTensor makes at an optimizer's first step.

DTensor asks for every new layout of an operand which of all placements, on all dimensions of the mesh, costs least to
reach: 39 ms of an `add` on a mesh of three dimensions, a quarter of the CPU seconds of a short training run. For an
elementwise operation on operands of one shape and one placement the answer is that placement.
`test_elementwise_sharding.py` holds this against DTensor's own answer. Tests marked `dtensor_search` and launched jobs
take DTensor's search (conftest.py).
"""

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator


searched = ShardingPropagator.propagate_op_sharding_non_cached


def elementwise_sharding(propagator: ShardingPropagator, schema: OpSchema) -> OutputSharding | None:
    """Returns the placement of an elementwise result, or None where DTensor has to search for it."""
    specs = [
        value for value in (*schema.args_schema, *schema.kwargs_schema.values()) if isinstance(value, DTensorSpec)
    ]
    if torch.Tag.pointwise not in schema.op.tags or len(schema.op._schema.returns) != 1 or not specs:
        return None
    first = specs[0]
    alike = all(spec.shape == first.shape and _place(spec) == _place(first) for spec in specs)
    if not alike or any(placement.is_partial() for placement in first.placements):
        return None
    meta = propagator._propagate_tensor_meta_non_cached(schema)
    return OutputSharding(first.shallow_copy_with_tensor_meta(meta))


def _place(spec: DTensorSpec) -> tuple:
    return spec.mesh, spec.placements, spec.use_strided_shard_as_shard_order


def use(shortcut: bool) -> None:
    """Takes the shortcut in this process and its forks, or DTensor's search."""

    def propagate(propagator: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        return elementwise_sharding(propagator, schema) or searched(propagator, schema)

    ShardingPropagator.propagate_op_sharding_non_cached = propagate if shortcut else searched
