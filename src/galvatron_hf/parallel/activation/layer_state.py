# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The tensors that pass from layer to layer, each with its layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from galvatron_hf.models.adapter import HIDDEN
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.plan.layout import Grid, Layout, PackedRow


@dataclass(frozen=True)
class LayerState:
    """Holds this rank's hidden states (name "hidden") and the tensors that travel with them, such as an encoder's
    output. Tensors have the shape [rows, positions, ...].
    """

    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]

    @classmethod
    def in_layout(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> LayerState:
        return cls(dict(tensors), dict.fromkeys(tensors, layout))

    @property
    def hidden(self) -> Tensor:
        return self.tensors[HIDDEN]

    def replace(self, tensors: Iterable[Tensor]) -> LayerState:
        """Returns the same state with other tensors, in the order of the names."""
        return LayerState(dict(zip(self.tensors, tensors, strict=True)), self.layouts)

    def redistribute(self, layout: Layout, *, grid: Grid | PackedRow, mesh: StageMesh) -> LayerState:
        """Moves every tensor to `layout`, one after the other in the order of the names; collective."""
        return LayerState.in_layout(
            layout,
            {
                name: redistribute(tensor, self.layouts[name], layout, grid=grid, mesh=mesh)
                for name, tensor in self.tensors.items()
            },
        )
