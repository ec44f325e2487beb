# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Draws the pictures of `docs/concepts`, one SVG for each kind of parallelism. `make reference` runs it.

    python docs/make_diagrams.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape


FOLDER = Path(__file__).parent / "concepts" / "diagrams"
RANKS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # a colour for each rank
PALE = ("#dbe6f1", "#fce3cb", "#dcefd9", "#ecdfe9")
GREY, INK = "#e8e8e8", "#222222"


@dataclass
class Drawing:
    """Collects the elements of a picture of `width` x `height` pixels."""

    width: int
    height: int
    title: str
    elements: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 12) -> None:
        """Draws a rectangle with a text in its middle."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{INK}" '
            'stroke-width="0.8"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, size=size)

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "middle", bold: bool = False) -> None:
        """Draws a line of text."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{INK}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        """Draws an arrow from the first point to the second."""
        start = ' marker-start="url(#head)"' if both else ""
        self.elements.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.2" '
            f'marker-end="url(#head)"{start}/>'
        )

    def vertical(self, x: float, y: float, text: str) -> None:
        """Draws a line of text that runs upwards."""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="12" text-anchor="middle" fill="{INK}" '
            f'transform="rotate(-90 {x:g} {y:g})">{escape(text)}</text>'
        )

    def band(self, x: float, y: float, width: float, text: str) -> None:
        """Draws a collective: a band over the ranks that call it."""
        self.box(x, y, width, 24, "#fff3b0", text)

    def svg(self) -> str:
        """Returns the picture as SVG."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        lines = [
            "<!-- docs/make_diagrams.py draws this picture. -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" role="img">',
            f"<title>{escape(self.title)}</title>",
            head,
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _columns(drawing: Drawing, count: int, top: float, left: float = 20, width: float = 135) -> Iterator[float]:
    """Yields the left edge of each rank's column, and writes its name above it."""
    for rank in range(count):
        x = left + rank * (width + 15)
        drawing.text(x + width / 2, top, f"rank {rank}", bold=True)
        yield x


def data() -> Drawing:
    """Draws four ranks with whole copies of the weights and rows of their own."""
    one = Drawing(620, 218, "Data parallelism: every rank has all weights and a quarter of the rows")
    for rank, x in enumerate(_columns(one, 4, 20)):
        one.box(x, 30, 135, 28, PALE[rank], f"rows {2 * rank} and {2 * rank + 1}")
        one.arrow(x + 67, 58, x + 67, 76)
        one.box(x, 78, 135, 40, GREY, "all weights")
        one.arrow(x + 67, 118, x + 67, 136)
        one.text(x + 67, 152, "gradient of its rows", 11)
        one.arrow(x + 67, 157, x + 67, 174)
    one.band(20, 176, 585, "all-reduce: every rank gets the sum of all gradients")
    return one


def sharded() -> Drawing:
    """Draws what each of four ranks holds under replicate, zero2 and zero3."""
    one = Drawing(620, 290, "What a rank holds under replicate, zero2 and zero3")
    held = {"replicate": (1, 1, 1), "zero2": (1, 0, 0), "zero3": (0, 0, 0)}
    for row, (name, whole) in enumerate(held.items()):
        y = 34 + 84 * row
        one.text(14, y + 34, name, 13, anchor="start", bold=True)
        for rank in range(4):
            x = 105 + 128 * rank
            if row == 0:
                one.text(x + 58, 20, f"rank {rank}", bold=True)
            for line, (part, is_whole) in enumerate(zip(("weights", "gradients", "optimizer"), whole)):
                top = y + 21 * line
                one.box(x, top, 116, 18, "#ffffff")
                shard = (x, 116) if is_whole else (x + 29 * rank, 29)
                one.box(shard[0], top, shard[1], 18, GREY if is_whole else RANKS[rank])
                if is_whole or rank in (0, 1):
                    one.text(x + (58 if is_whole else 84), top + 13, part, 10)
                else:
                    one.text(x + 30, top + 13, part, 10)
    return one


def tensor() -> Drawing:
    """Draws the two matrices of an MLP, cut over two ranks."""
    one = Drawing(620, 236, "Tensor parallelism: one matrix is cut by output features, the next by input features")
    for rank, y in enumerate((34, 132)):
        one.text(14, y + 36, f"rank {rank}", anchor="start", bold=True)
        one.box(70, y + 12, 70, 46, GREY, "x")
        one.arrow(140, y + 35, 166, y + 35)
        one.box(168, y, 84, 70, "#ffffff", "")
        one.box(168 + 42 * rank, y, 42, 70, PALE[rank], "")
        one.text(189 + 42 * rank, y + 39, f"A{rank}")
        one.arrow(252, y + 35, 278, y + 35)
        one.box(280, y + 12, 74, 46, PALE[rank], f"h{rank} = f(x A{rank})", 10)
        one.arrow(354, y + 35, 380, y + 35)
        one.box(382, y, 70, 70, "#ffffff", "")
        one.box(382, y + 35 * rank, 70, 35, PALE[rank], f"B{rank}")
        one.arrow(452, y + 35, 478, y + 35)
    one.box(480, 34, 34, 168, "#fff3b0")
    one.vertical(501, 118, "all-reduce")
    one.arrow(514, 118, 538, 118)
    one.text(582, 122, "h0 B0 + h1 B1", 10)
    one.text(210, 22, "first matrix", 11)
    one.text(417, 22, "second matrix", 11)
    one.text(310, 226, "the white half of each matrix is on the other rank", 11)
    return one


def megatron_sp() -> Drawing:
    """Draws the path of two ranks through a layer with positions split between the regions."""
    one = Drawing(680, 176, "Megatron sequence parallelism: positions are split where weights are not")
    parts = (
        ("norm", "positions", 98),
        ("all-gather", "", 26),
        ("attention", "heads", 104),
        ("reduce-scatter", "", 26),
        ("norm", "positions", 98),
        ("all-gather", "", 26),
        ("MLP", "features", 104),
        ("reduce-scatter", "", 26),
    )
    x = 66.0
    for name, split, width in parts:
        if split:
            for rank, y in enumerate((30, 94)):
                one.box(x, y, width, 46, PALE[rank], name)
                one.text(x + width / 2, y + 42, f"half of the {split}", 9)
        else:
            one.box(x + 2, 30, 22, 110, "#fff3b0")
            one.vertical(x + 17, 85, name)
        x += width + 6
    for rank, y in enumerate((57, 121)):
        one.text(10, y, f"rank {rank}", anchor="start", bold=True)
    one.text(340, 164, "An all-reduce becomes a gather before the matrices and a scatter after them: equal bytes.", 11)
    return one


def _grid(one: Drawing, x: float, y: float, owner: Callable[[int, int], int], title: str) -> None:
    """Draws a table of four blocks of positions (rows) by four heads (columns), coloured by the rank that has them."""
    one.text(x + 64, y - 24, title, 12, bold=True)
    one.text(x + 64, y - 8, "heads", 10)
    for row in range(4):
        for column in range(4):
            one.box(x + 32 * column, y + 28 * row, 32, 28, PALE[owner(row, column)], str(owner(row, column)))


def ulysses() -> Drawing:
    """Draws positions and heads of two, outside and inside attention."""
    one = Drawing(620, 196, "Ulysses: an all-to-all exchanges positions for heads")
    _grid(one, 80, 52, lambda row, column: row, "outside attention")
    one.arrow(226, 108, 262, 108)
    one.text(244, 98, "all-to-all", 11)
    _grid(one, 276, 52, lambda row, column: column, "inside attention")
    one.arrow(422, 108, 458, 108)
    one.text(440, 98, "all-to-all", 11)
    _grid(one, 472, 52, lambda row, column: row, "after attention")
    one.text(66, 112, "positions", 10, anchor="end")
    one.text(310, 186, "The number in a cell is the rank that has these positions of this head.", 11)
    return one


def context() -> Drawing:
    """Draws a document of eight chunks on four ranks, and the ring that keys and values take."""
    one = Drawing(620, 200, "Context parallelism: ranks share a document, keys and values go round")
    one.text(310, 18, "a document in eight chunks; the number is the rank that holds a chunk", 11)
    for chunk, rank in enumerate((0, 1, 2, 3, 3, 2, 1, 0)):
        one.box(70 + 60 * chunk, 28, 60, 28, PALE[rank], str(rank))
    for rank in range(4):
        x = 40 + 146 * rank
        one.box(x, 92, 104, 46, PALE[rank])
        one.text(x + 52, 111, f"rank {rank}", bold=True)
        one.text(x + 52, 128, f"chunks {rank} and {7 - rank}", 10)
        if rank < 3:
            one.arrow(x + 104, 115, x + 144, 115)
    one.elements.append(
        f'<path d="M 530 138 L 530 164 L 92 164 L 92 140" fill="none" stroke="{INK}" stroke-width="1.2" '
        'marker-end="url(#head)"/>'
    )
    one.text(310, 184, "a block of keys and values goes to the next rank while the block before is computed", 11)
    return one


def order_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Returns the forwards ("F") and backwards ("B") of a stage with their micro-batches, in the order of 1F1B."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order = [("F", index) for index in range(warm_up)]
    for index in range(micro_batches):
        if warm_up + index < micro_batches:
            order.append(("F", warm_up + index))
        order.append(("B", index))
    return order


def times_1f1b(stages: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Returns what each stage does with its start: a forward takes 1, a backward 2."""
    orders = [order_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}
    done: list[list[tuple[str, int, int]]] = [[] for _ in range(stages)]
    free = [0] * stages
    while any(orders):
        for stage in range(stages):
            if not orders[stage]:
                continue
            kind, index = orders[stage][0]
            needs = ("F", stage - 1, index) if kind == "F" else ("B", stage + 1, index)
            first = stage == 0 if kind == "F" else stage == stages - 1
            if not first and needs not in ends:
                continue
            start = max(free[stage], 0 if first else ends[needs])
            free[stage] = ends[kind, stage, index] = start + (1 if kind == "F" else 2)
            done[stage].append((kind, index, start))
            orders[stage].pop(0)
    return done


def pipeline() -> Drawing:
    """Draws the 1F1B schedule of three stages and four micro-batches."""
    stages, micro_batches, unit = 3, 4, 32
    one = Drawing(640, 176, "A pipeline of three stages with four micro-batches under 1F1B")
    one.text(350, 20, "time", 11)
    one.arrow(372, 16, 430, 16)
    for stage, work in enumerate(times_1f1b(stages, micro_batches)):
        y = 32 + 34 * stage
        one.text(10, y + 19, f"stage {stage}", anchor="start", bold=True)
        one.box(68, y, 18 * unit - 18, 28, "#ffffff")
        for kind, index, start in work:
            fill = PALE[0] if kind == "F" else PALE[1]
            one.box(68 + start * (unit - 1), y, (1 if kind == "F" else 2) * (unit - 1), 28, fill, f"{kind}{index}")
    one.box(68, 144, 18, 18, PALE[0])
    one.text(92, 157, "forward of a micro-batch", 11, anchor="start")
    one.box(258, 144, 18, 18, PALE[1])
    one.text(282, 157, "backward", 11, anchor="start")
    one.box(364, 144, 18, 18, "#ffffff")
    one.text(388, 157, "the stage waits (the bubble)", 11, anchor="start")
    return one


def expert() -> Drawing:
    """Draws tokens that travel to the ranks of their experts and back."""
    one = Drawing(620, 216, "Expert parallelism: tokens travel to the ranks that hold their experts")
    for rank in range(2):
        x = 60 + 290 * rank
        one.text(x + 105, 18, f"rank {rank}", bold=True)
        one.box(x, 26, 210, 30, PALE[rank], "tokens and their choices", 11)
        one.arrow(x + 105, 56, x + 105, 74)
        one.arrow(x + 105, 100, x + 105, 116)
        for expert_index in range(2):
            one.box(x + 108 * expert_index, 118, 102, 34, RANKS[rank], f"expert {2 * rank + expert_index}")
        one.arrow(x + 105, 152, x + 105, 168)
    one.band(60, 75, 500, "all-to-all: each token to the ranks of its experts")
    one.band(60, 170, 500, "all-to-all: results back to the ranks of the tokens")
    return one


def recompute() -> Drawing:
    """Draws what is kept of a layer from its forward to its backward, without and with recompute."""
    one = Drawing(620, 186, "Recompute keeps the input of a layer and computes the rest again")
    for row, (name, kept) in enumerate((('"none"', range(5)), ('"full"', range(1)))):
        y = 34 + 62 * row
        one.text(10, y + 22, name, 12, anchor="start", bold=True)
        for index, part in enumerate(("input", "norm", "attention", "norm", "MLP")):
            one.box(80 + 104 * index, y, 98, 36, PALE[2] if index in kept else "#ffffff", part)
    one.box(80, 152, 18, 18, PALE[2])
    one.text(104, 165, "kept until the backward", 11, anchor="start")
    one.box(280, 152, 18, 18, "#ffffff")
    one.text(304, 165, "freed, and computed again before the layer's backward", 11, anchor="start")
    return one


DIAGRAMS: Sequence[Callable[[], Drawing]] = (
    data, sharded, tensor, megatron_sp, ulysses, context, pipeline, expert, recompute,
)  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in DIAGRAMS:
        (FOLDER / f"{draw.__name__.replace('_', '-')}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
