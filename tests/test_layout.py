# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Moves between layouts, against plain slicing of the whole activation."""

import itertools

import pytest
import torch
import torch.distributed as dist

from collective_counts import count_collectives
from galvatron_hf.parallel.activation.redistribute import redistribute
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.layout import (
    AttentionHeads,
    Grid,
    Layout,
    PackedRow,
    Rectangle,
    block_size,
    block_sizes,
    second_cut,
    sent_tokens,
    vocabulary_layouts,
)
from meshes import stage_mesh
from ranks import run_ranks


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def strategies(ranks):
    """Yields every strategy that a stage of `ranks` allows."""
    for tensor, ulysses, context in itertools.product(divisors(ranks), repeat=3):
        if ranks % (tensor * ulysses * context) == 0:
            for megatron_sp in {False, tensor > 1}:
                yield LayerStrategy(tensor=tensor, megatron_sp=megatron_sp, ulysses=ulysses, context=context)


def layouts(ranks):
    return sorted({Layout.from_strategy(strategy, ranks) for strategy in strategies(ranks)}, key=repr)


def whole_activation(rows, length, hidden=3, dtype=torch.float64):
    return torch.arange(1, rows * length * hidden + 1).to(dtype).view(rows, length, hidden)


def part(whole, layout, index):
    """Returns a rank's part of the whole by fractions, without the code under test."""
    rows, length = whole.shape[:2]
    piece = index // layout.replicas
    row, position = piece // layout.positions, piece % layout.positions
    return whole[
        rows * row // layout.data : rows * (row + 1) // layout.data,
        length * position // layout.positions : length * (position + 1) // layout.positions,
    ]


def brute_force_block(src, dst, ranks):
    """Returns the smallest block size with which each rank's block has every cell of a fine grid that it needs."""
    whole = torch.arange(ranks * ranks).view(ranks, ranks)
    cells = [[set(part(whole, layout, i).flatten().tolist()) for i in range(ranks)] for layout in (src, dst)]
    for size in divisors(ranks):
        blocks = [range(i // size * size, i // size * size + size) for i in range(ranks)]
        if all(cells[1][i] <= set().union(*(cells[0][j] for j in blocks[i])) for i in range(ranks)):
            return size


def test_layout_of_a_strategy():
    assert Layout.from_strategy(LayerStrategy(), 8) == Layout(8, 1, 1)
    assert Layout.from_strategy(LayerStrategy(tensor=2), 8) == Layout(4, 1, 2)
    assert Layout.from_strategy(LayerStrategy(tensor=4, megatron_sp=True), 8) == Layout(2, 4, 1)
    assert Layout.from_strategy(LayerStrategy(tensor=2, ulysses=2), 8) == Layout(2, 2, 2)
    assert Layout.from_strategy(LayerStrategy(tensor=2, megatron_sp=True, ulysses=2, context=2), 8) == Layout(2, 4, 1)
    assert Layout.from_strategy(LayerStrategy(context=4), 8) == Layout(8, 1, 1)  # the deal says who shares documents
    with pytest.raises(ValueError, match="take groups of 3 ranks, which do not divide the 8 ranks"):
        Layout.from_strategy(LayerStrategy(tensor=3), 8)
    with pytest.raises(ValueError, match="at least 1"):
        Layout(0)


def test_tensor_ranks_are_innermost():
    rectangles = [Layout(2, 2, 2).rectangle(index, 6, 10) for index in range(8)]
    assert rectangles[0] == rectangles[1] == Rectangle(row_start=0, row_stop=3, position_start=0, position_stop=5)
    assert rectangles[2] == rectangles[3] == Rectangle(row_start=0, row_stop=3, position_start=5, position_stop=10)
    assert rectangles[6] == rectangles[7] == Rectangle(row_start=3, row_stop=6, position_start=5, position_stop=10)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12])
def test_block_is_the_smallest_that_holds_what_its_ranks_need(ranks):
    for src, dst in itertools.product(layouts(ranks), repeat=2):
        assert block_size(src, dst) == brute_force_block(src, dst, ranks), (src, dst)


def test_blocks_of_a_chain_cover_both_directions():
    # data -> tensor gathers, the way back slices; the tensor group is half the stage
    chain = [Layout(4, 1, 1), Layout(2, 1, 2), Layout(2, 2, 1), Layout(4, 1, 1)]
    assert block_sizes(chain) == (1, 2)
    assert block_sizes([Layout(4, 1, 1), Layout(1, 4, 1)]) == (4,)
    assert block_sizes([Layout(4, 1, 1)]) == ()
    with pytest.raises(ValueError, match="same stage"):
        block_size(Layout(4, 1, 1), Layout(8, 1, 1))


def test_vocabulary_layouts_split_rows_first():
    """By hand: rows over as many ranks as have one, positions over the others, tensor ranks hold copies."""
    assert Layout.from_vocabulary(1, 8, rows=8) == Layout.from_vocabulary(1, 8, rows=100) == Layout(8, 1, 1)
    assert Layout.from_vocabulary(1, 8, rows=7) == Layout(4, 2, 1)
    assert Layout.from_vocabulary(2, 8, rows=3) == Layout(2, 2, 2)
    assert Layout.from_vocabulary(4, 12, rows=1) == Layout.from_vocabulary(4, 12, rows=0) == Layout(1, 3, 4)
    assert Layout.from_vocabulary(1, 6, rows=4) == Layout(3, 2, 1)
    for tensor, ranks in ((1, 8), (2, 12), (6, 6)):
        assert set(vocabulary_layouts(tensor, ranks)) == {
            Layout.from_vocabulary(tensor, ranks, rows) for rows in range(2 * ranks)
        }


def test_ranks_send_the_least_that_is_possible():
    """All layouts of 8 ranks: together the ranks send what each lacks."""
    rows, length = 5, 11
    whole = torch.arange(rows * length).view(rows, length)
    for src, dst in itertools.product(layouts(8), repeat=2):
        lacking = 0
        for index in range(8):
            have, want = (set(part(whole, layout, index).flatten().tolist()) for layout in (src, dst))
            lacking += len(want - have)
        sent = sent_tokens(src, dst, Grid(rows, length))
        assert sum(sent) == lacking
        assert block_size(src, dst) > 1 or not any(sent)


def kept_by_ulysses_rank(heads: AttentionHeads, copies: int, ulysses: int, rank: int) -> list[int]:
    """Returns the key/value heads that a rank has after the exchange of `copies` of each: its even part of all."""
    repeated = [head for head in range(heads.key_value) for _ in range(copies)]
    share = len(repeated) // ulysses
    return repeated[rank * share : (rank + 1) * share]


@pytest.mark.parametrize("ulysses", [1, 2, 4, 8])
def test_every_ulysses_rank_gets_the_key_value_heads_of_its_queries(ulysses):
    """Grouped attention on a rank must see for each query the head that it has without parallelism."""

    def serves(heads: AttentionHeads, copies: int) -> bool:
        if heads.key_value * copies % ulysses or heads.query % (heads.key_value * copies):
            return False
        queries = heads.query // ulysses
        for rank in range(ulysses):
            got = kept_by_ulysses_rank(heads, copies, ulysses, rank)
            wanted = [(rank * queries + q) * heads.key_value // heads.query for q in range(queries)]
            if [got[q * len(got) // queries] for q in range(queries)] != wanted:
                return False
        return True

    for key_value, per_head, tensor in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 4)):
        query = key_value * per_head
        shared = key_value % tensor and tensor % key_value
        if query % tensor or shared or query // tensor % ulysses:
            continue
        heads = AttentionHeads.from_degrees(query=query, key_value=key_value, tensor=tensor, ulysses=ulysses)
        assert (heads.query, heads.key_value) == (query // tensor, max(1, key_value // tensor))
        assert serves(heads, heads.copies), (heads, ulysses)
        if ulysses % heads.key_value == 0 or heads.key_value % ulysses == 0:
            assert heads.copies == next(c for c in itertools.count(1) if serves(heads, c)), (heads, ulysses)
        assert heads.sent_key_value == heads.key_value * heads.copies


def test_weights_that_tensor_ranks_have_cut_are_cut_once_more():
    assert second_cut((12, 5), 2, 3) == 0  # 12 rows in 2 x 3 even pieces
    assert second_cut((12, 8), 2, 4) == 1  # not in 2 x 4, so columns
    assert second_cut((12, 5), 2, 4) is None  # nor can 4 ranks share 5 columns evenly
    assert second_cut((2, 5, 8), 2, 4) == 2
    assert second_cut((12,), 2, 3) == 0
    assert second_cut((12,), 2, 4) is None


def _check_all_pairs(stage, shapes):
    """Checks values, gradients and bytes of every pair; returns the bytes that this rank sent."""
    index, ranks = stage.index(dist.get_rank()), len(stage)
    mesh = stage_mesh(stage, divisors(ranks))
    volumes = {}
    for (rows, length), src, dst in itertools.product(shapes, layouts(ranks), layouts(ranks)):
        whole = whole_activation(rows, length)
        x = part(whole, src, index).clone().requires_grad_()
        with count_collectives() as forward:
            y = redistribute(x, src, dst, grid=Grid(rows, length), mesh=mesh)
        assert torch.equal(y, part(whole, dst, index)), (src, dst, rows, length)
        with count_collectives() as backward:
            # every replica carries the full gradient; it must arrive unsummed
            y.backward(-part(whole, dst, index))
        assert torch.equal(x.grad, -part(whole, src, index)), (src, dst, rows, length)
        for log, way in ((forward, (src, dst)), (backward, (dst, src))):
            assert log.count() == (block_size(*way) > 1)
            assert all(call.group_size == block_size(*way) for call in log.calls)
        # what the planner prices is what was sent
        assert forward.bytes() == sent_tokens(src, dst, Grid(rows, length))[index] * whole[0, 0].nbytes
        volumes[rows, length, src, dst] = forward.bytes()
    return volumes


def _least_volume(rows, length, src, dst):
    """Returns the bytes that must move: those that a rank wants and does not have."""
    whole = whole_activation(rows, length)
    wanted = 0
    for index in range(src.ranks):
        have, want = (set(part(whole, layout, index).flatten().tolist()) for layout in (src, dst))
        wanted += len(want - have) * whole.element_size()
    return wanted


@pytest.mark.parametrize(
    ("stage", "shapes"),
    [
        ((0, 1), [(4, 4), (5, 7), (1, 3)]),
        ((0, 1, 2, 3), [(8, 4), (5, 7), (3, 1), (1, 9)]),
        ((1, 0, 3, 2), [(5, 7)]),
        ((2, 0, 3, 1), [(5, 7)]),
        ((0, 1, 2, 3, 4, 5), [(7, 11), (2, 5)]),
        ((0, 1, 2, 3, 4, 5, 6, 7), [(9, 13), (3, 2)]),
    ],
)
def test_every_pair_of_layouts_is_exact_both_ways_at_the_least_volume(stage, shapes):
    volumes = run_ranks(_check_all_pairs, len(stage), stage, shapes)
    for case in volumes[0]:
        assert sum(volume[case] for volume in volumes) == _least_volume(*case), case


def _packed_part(whole, layout, index, cuts):
    """Returns a rank's positions of a packed row, found one by one."""
    packs, piece = len(cuts) - 1, index // layout.replicas
    data, position = piece // layout.positions, piece % layout.positions
    own = [p for p in range(cuts[-1]) if _pack_of(p, cuts) * layout.data // packs == data]
    first, count = (own[0] if own else cuts[data * packs // layout.data]), len(own)
    return whole[:, first + count * position // layout.positions : first + count * (position + 1) // layout.positions]


def _pack_of(position, cuts):
    return next(k for k in range(len(cuts) - 1) if cuts[k] <= position < cuts[k + 1])


def _check_packed_pairs(ranks, rows):
    index, mesh = dist.get_rank(), stage_mesh(range(ranks), divisors(ranks))
    for cuts, src, dst in itertools.product(rows, layouts(ranks), layouts(ranks)):
        whole, grid = whole_activation(1, cuts[-1]), PackedRow(cuts)
        x = _packed_part(whole, src, index, cuts).clone().requires_grad_()
        with count_collectives() as log:
            y = redistribute(x, src, dst, grid=grid, mesh=mesh)
        assert torch.equal(y, _packed_part(whole, dst, index, cuts)), (src, dst, cuts)
        y.backward(-_packed_part(whole, dst, index, cuts))
        assert torch.equal(x.grad, -_packed_part(whole, src, index, cuts)), (src, dst, cuts)
        assert all(call.group_size == block_size(src, dst, packed=True) for call in log.calls)


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (2, [(0, 3, 5), (0, 0, 4), (0, 7, 7)]),
        (4, [(0, 1, 9, 10, 12), (0, 11, 11, 11, 13), (0, 2, 4, 6, 8), (0, 1, 2, 3, 30)]),
        (6, [(0, 1, 2, 20, 21, 22, 23), (0, 9, 10, 11, 12, 13, 14)]),
        (8, [(0, 1, 2, 3, 4, 40, 41, 42, 43)]),
    ],
)
def test_every_pair_of_layouts_of_a_packed_row_is_exact_both_ways(ranks, rows):
    run_ranks(_check_packed_pairs, ranks, ranks, rows)


def test_packs_that_data_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match="A row of 3 packs cannot be split over 2 data ranks"):
        PackedRow((0, 1, 2, 3)).rectangle(Layout(2, 1, 1), 0)


def test_a_stage_inside_a_larger_world_uses_its_own_blocks():
    def work():
        stages = [(3, 1), (2, 0)]
        world = WorldMesh("cpu")
        meshes = [stage_mesh(stage, [1, 2], world) for stage in stages]
        mine = next(i for i, stage in enumerate(stages) if dist.get_rank() in stage)
        index = stages[mine].index(dist.get_rank())
        whole = whole_activation(3, 5) * (mine + 1)
        src, dst = Layout(2, 1, 1), Layout(1, 2, 1)
        y = redistribute(part(whole, src, index), src, dst, grid=Grid(3, 5), mesh=meshes[mine])
        return torch.equal(y, part(whole, dst, index)), meshes[mine].block(2).rank() == index

    assert run_ranks(work, 4) == [(True, True)] * 4


def test_replicas_share_the_sending():
    def work():
        mesh = stage_mesh(range(4), [4])
        index, src, dst = dist.get_rank(), Layout(2, 1, 2), Layout(1, 1, 4)
        with count_collectives() as log:
            redistribute(part(whole_activation(4, 5), src, index), src, dst, grid=Grid(4, 5), mesh=mesh)
        return log.bytes()

    assert run_ranks(work, 4) == [2 * 5 * 3 * 8] * 4


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def test_every_type_and_any_trailing_dimensions_move():
    def work():
        mesh = stage_mesh(range(2), [2])
        index, src, dst = dist.get_rank(), Layout(2, 1, 1), Layout(1, 2, 1)
        for dtype, tail in itertools.product(DTYPES, [(), (3,), (2, 3)]):
            whole = (torch.arange(15).view(3, 5, *[1] * len(tail)) % 13).expand(3, 5, *tail).to(dtype)
            x = part(whole, src, index)
            y = redistribute(x, src, dst, grid=Grid(3, 5), mesh=mesh)
            assert y.dtype == dtype
            # compared as bytes: not every type has a comparison
            want = part(whole, dst, index).contiguous()
            assert y.shape == want.shape and torch.equal(y.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))

    run_ranks(work, 2)


def test_moves_without_communication():
    def work():
        mesh = stage_mesh(range(2), [2])
        replicated = Layout(1, 1, 2)
        x = whole_activation(4, 6).requires_grad_()
        with count_collectives() as log:
            assert redistribute(x, replicated, replicated, grid=Grid(4, 6), mesh=mesh) is x
            y = redistribute(x, replicated, Layout(2, 1, 1), grid=Grid(4, 6), mesh=mesh)
        assert log.count() == 0
        # a copy: the whole must not be kept alive by the part
        assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
        assert y.is_contiguous() and y._base is None

    run_ranks(work, 2)


def test_wrong_use_is_refused():
    def work():
        mesh = stage_mesh(range(2), [])
        x = torch.zeros(2, 4, 3)
        with pytest.raises(ValueError, match="was not prepared"):
            redistribute(x, Layout(2, 1, 1), Layout(1, 1, 2), grid=Grid(4, 4), mesh=mesh)
        with pytest.raises(ValueError, match=r"which is \(3, 4\)"):
            redistribute(x, Layout(2, 1, 1), Layout(1, 1, 2), grid=Grid(6, 4), mesh=mesh)
        with pytest.raises(ValueError, match="divisor of 2"):
            stage_mesh(range(2), [3])

    run_ranks(work, 2)
