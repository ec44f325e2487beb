# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes what a ring of context ranks adds to the time and the memory of a layer (arXiv 2310.01889). In causal
attention every rank has equal work at every hop, because it holds two chunks of each document, one from either end.
"""

from __future__ import annotations

from collections.abc import Callable

from galvatron_hf.plan.ring_traffic import RING_GRADIENT_BYTES, RingTraffic


# Time of attention in chunks over that of whole documents with the same pairs of tokens; see its source below.
CUTTING_FACTOR = 1.06
ASSUMED = {
    "attention of shared documents": f"{CUTTING_FACTOR} times the time of whole ones: on a CPU 1.02-1.06 with 4,096 "
    "tokens of a document on each rank, and up to 1.21 with 2,048; no GPU was measured",
    "copies around rings": "as many as the code of a ring makes, at the rate of adding gradients; not measured alone",
}

# Of the queries of a rank at one hop: how often they meet a chunk whose keys they see, and what the memory reads and
# writes of each number that is added to another, in copies of it (which read and write it once).
PARTS_OF_HOP = 1.25
SCALED_AND_ADDED, ADDED = 3.5, 1.5

Overlapped = Callable[[float, float], float]  # milliseconds of compute and communication at the same time


def exposed_ms(
    degree: int,
    forward_ms: float,
    backward_ms: float,
    block_ms: float,
    gradient_ms: float,
    overlapped: Overlapped,
) -> tuple[float, float]:
    """Returns by how much the messages of a ring lengthen attention in the forward and in the backward. A message is
    under way while the next hop is computed; but the last gradient comes home after the last hop.

    Args:
        degree (`int`): Ranks of the ring, which are also its hops.
        forward_ms, backward_ms (`float`): Attention of all hops.
        block_ms, gradient_ms (`float`): Time to send a block of keys and values, and its gradient.
        overlapped (`Callable`): Gives the time of compute and messages at the same time.
    """
    if degree == 1:
        return 0.0, 0.0

    def exposed(hop_ms: float, sent_ms: float) -> float:
        return overlapped(hop_ms, sent_ms) - hop_ms

    forward_hop, backward_hop = forward_ms / degree, backward_ms / degree
    forward = (degree - 1) * exposed(forward_hop, block_ms)
    middle = (degree - 2) * exposed(backward_hop, block_ms + gradient_ms)
    ends = exposed(backward_hop, block_ms) + exposed(backward_hop, gradient_ms)
    return forward, ends + middle + gradient_ms


def copied_bytes(traffic: RingTraffic, query_heads: int) -> tuple[float, float]:
    """Returns how many bytes a rank copies around the kernels of a ring in forward and backward. Results of each part
    of a hop are scaled and added up in float32, and so are gradients; a hop's gradient of a block begins with zeros.
    """
    if traffic.degree == 1:
        return 0.0, 0.0
    queries, gradient = _query_bytes(traffic, query_heads), traffic.gradient_bytes
    forward = traffic.block_bytes + traffic.degree * PARTS_OF_HOP * SCALED_AND_ADDED * queries
    of_hop = PARTS_OF_HOP * ADDED * (queries + gradient) + (0.5 + ADDED) * gradient
    return forward, traffic.block_bytes + traffic.degree * of_hop


def working_bytes(traffic: RingTraffic, query_heads: int) -> int:
    """Returns the bytes that a ring needs at its peak, in the backward, if a rank has so many attention heads: two
    blocks of keys and values, one of which arrives; the gradient of queries in float32; and four gradients of blocks:
    of the rank's own, of the one at hand, of one that arrives and of one that leaves.
    """
    if traffic.degree == 1:
        return 0
    return 2 * traffic.block_bytes + 4 * traffic.gradient_bytes + _query_bytes(traffic, query_heads)


def _query_bytes(traffic: RingTraffic, query_heads: int) -> int:
    return traffic.tokens * query_heads * traffic.head_dim * RING_GRADIENT_BYTES
