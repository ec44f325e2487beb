# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Numbers the ranks of a micro-batch so that those that share documents are on one node."""

from __future__ import annotations

from collections.abc import Sequence


Pairs = Sequence[tuple[int, tuple[int, ...]]]  # documents with the ranks that hold them


def on_nodes(pairs: Pairs, ranks: int, node_ranks: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the documents of a micro-batch with other numbers of their ranks: ranks are alike, so any order of them
    takes as long. Ranks that share documents, directly or through others, become neighbours; those of as few
    documents as possible are on several nodes.

    Args:
        pairs: documents with the ranks that hold them.
        ranks (`int`): number of ranks; `node_ranks` neighbours each are on a node.
    """
    groups = sorted((held for _, held in pairs if len(held) > 1), key=len)
    component = {rank: (rank,) for rank in range(ranks)}
    for group in groups:  # small groups first, so that they stay together where a component is cut
        joined = tuple(dict.fromkeys(rank for member in group for rank in component[member]))
        component.update(dict.fromkeys(joined, joined))
    components = sorted(set(component.values()), key=lambda one: (-len(one), one))
    rooms = [min(node_ranks, ranks - first) for first in range(0, ranks, node_ranks)]
    places: list[list[int]] = [[] for _ in rooms]
    for members in components:
        # The fullest node with room for all, or as many of the emptiest nodes as needed.
        fitting = [node for node, room in enumerate(rooms) if room >= len(members)]
        order = sorted(fitting, key=lambda node: (rooms[node], node)) or sorted(
            range(len(rooms)), key=lambda node: (-rooms[node], node)
        )
        left = list(members)
        for node in order:
            taken, left = left[: rooms[node]], left[rooms[node] :]
            places[node] += taken
            rooms[node] -= len(taken)
            if not left:
                break
    number = {rank: new for new, rank in enumerate(rank for node in places for rank in node)}
    return tuple((document, tuple(number[rank] for rank in held)) for document, held in pairs)
