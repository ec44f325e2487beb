# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The hidden states that pass from layer to layer and from stage to stage, each with its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from galvatron_hf.parallel.activation.micro_batch import TokenStream
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.plan.layout import Layout


@dataclass(frozen=True)
class LayerState:
    """Holds this rank's hidden states by the name of the stack that makes them: those of the stack whose layers run,
    and the output of a stack that they read. Tensors have the shape [rows, positions, ...].
    """

    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]

    @classmethod
    def in_layout(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> LayerState:
        return cls(dict(tensors), dict.fromkeys(tensors, layout))

    def redistribute(self, layout: Layout, *, streams: Mapping[str, TokenStream], mesh: StageMesh) -> LayerState:
        """Moves every tensor to `layout`, one after the other in the order of the names; collective."""
        return LayerState.in_layout(
            layout,
            {
                name: redistribute(tensor, self.layouts[name], layout, grid=streams[name].grid, mesh=mesh)
                for name, tensor in self.tensors.items()
            },
        )
