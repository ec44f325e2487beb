# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Messages between any two ranks of a layer, and pieces of any sizes between all of them.

No rank waits for another in a circle. All transfers of a stage have one total order (action of the schedule, layer,
ring, hop), which follows from the plan and the deal of the micro-batch. Every rank issues a subsequence of that order
and waits only for what it has issued before. A hop's send and its receive are one batch. So the earliest unfinished
transfer always has both its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from galvatron_hf.parallel.comm.collective_log import record
from galvatron_hf.parallel.comm.collectives import all_to_all_pieces


@dataclass(kw_only=True)
class Transfer:
    """Holds what arrives, and what must stay until it has left. Nothing reads `received` before [`Transfer.wait`]."""

    received: torch.Tensor
    sent: torch.Tensor
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> torch.Tensor:
        """Returns what has arrived."""
        for work in self.works:
            work.wait()
        self.works.clear()
        return self.received


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Sends tensors between the data ranks of a layer. `group` numbers them by their index."""

    group: ProcessGroup

    def start(self, tensor: torch.Tensor, shape: Sequence[int], *, to: int, source: int) -> Transfer:
        """Starts to send a tensor to one rank, and to receive one of `shape` and its type from another. Nothing is
        sent or received of an empty one.
        """
        sent, received = tensor.contiguous(), tensor.new_empty(shape)
        messages = []
        if sent.numel():
            record("send", sent, self.group)
            messages.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        if received.numel():
            messages.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(messages) if messages else []
        return Transfer(received=received, sent=sent, works=works)

    def exchange(self, pieces: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Sends consecutive pieces of a flat tensor to all ranks; see
        [`~galvatron_hf.parallel.comm.collectives.all_to_all_pieces`]. The backward is the way back.
        """
        return _Exchange.apply(pieces, tuple(received), tuple(sent), self.group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pieces, received, sent, group):
        ctx.args = sent, received, group
        return all_to_all_pieces(pieces, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return all_to_all_pieces(gradient, *ctx.args), None, None, None
