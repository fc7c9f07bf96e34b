"""Rows that begin anywhere in memory, read and written in whole 16-byte vectors.

A vector access needs an aligned address, and the rows of a tensor with an odd row length begin at any. So each row's
tiles begin at its first aligned element (``head`` elements in) and end at its last aligned one (``main`` elements
later); what is left at both ends, fewer than two vectors, is a small tile of its own, the row's `edge`, which the first
of the programs that share a row reads, reduces into a partial result of its own, and writes. Deals in which nests have
such rows and in the edge's text. Knows nothing about forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qimeng.coder.template.nest.ir import VECTOR_BYTES
from qimeng.coder.template.nest.rows import RowPlan
from qimeng.coder.template.triton.emitter import Emitter, Walk
from qimeng.graph.opgraph import itemsize


@dataclass(frozen=True)
class Edges:
    """How the rows of a nest are aligned.

    Attributes:
        vector: elements of a vector; of the tensors' element sizes, the smallest decides.
        steps: row axis to the elements, modulo `vector`, by which a row begins later than the one before along it.
        columns: elements of a row.
    """

    vector: int
    steps: dict[int, int]
    columns: int

    def rows(self, walks: Sequence[Walk]) -> list[str]:
        """Lines that give `head` and `main` of the row that `walks` are at."""
        v = self.vector
        start = " + ".join(f"{w.base or w.name} * {step}" for w in walks if (step := self.steps.get(w.atoms[-1], 0)))
        return [
            f"head = tl.cast(({v} - ({start}) % {v}) % {v}, tl.int32)",
            f"main = tl.multiple_of(({self.columns} - head) // {v} * {v}, {v})",
        ]

    def lanes(self) -> list[str]:
        """Lines that give the edge's columns: a vector for the row's head and one for its tail, each partly masked."""
        v = self.vector
        return [
            f"e_lane = tl.arange(0, {2 * v})[None, :]",
            f"e = tl.where(e_lane < {v}, e_lane, e_lane - {v} + head + main)",
            f"e_mask = tl.where(e_lane < {v}, e_lane < head, e < {self.columns})",
        ]

    def emitter(self, like: Emitter) -> Emitter:
        """An emitter of the edge for the same rows."""
        walks = [replace(w, name="e", base="", lane="") if w.side == "r" else w for w in like.walks]
        return Emitter(like.nest, walks, like.wide, {"r": "e_mask"}, letter=f"{like.letter}e", fast=like.fast)

    def narrow(self, lines: Sequence[str]) -> list[str]:
        """Lines that were written for a tile, for the edge."""
        return [re.sub(r"\bRB\b", str(2 * self.vector), line) for line in lines]


def edges_of(plan: RowPlan) -> Edges | None:
    """How to align the rows; None where they are aligned, or where tensors would need different alignments.

    A tensor that all rows share (a weight) begins where it begins: it is kept in registers from row to row instead.
    """
    if len(plan.columns) != 1 or plan.contiguous != "r" or any(e.access for e in plan.nest.exprs):
        return None
    nest = plan.nest
    (columns, extent), rows = plan.columns[0], [group[-1] for group, _ in plan.rows]
    tensors = [
        (nest.load_strides(e), e.dtype) for e in nest.exprs if e.op == "load" and not nest.sources[e.param].scalar
    ]
    tensors += [(nest.output_strides(i), o[3]) for i, o in enumerate(nest.outputs)]
    tiles = [(s, d) for s, d in tensors if columns[-1] in s]
    if not tiles or any(s[columns[-1]] != 1 or not any(a in s for a in rows) for s, _ in tiles):
        return None
    vector = VECTOR_BYTES // min(itemsize(d) for _, d in tiles)
    steps = [{a: s.get(a, 0) % vector for a in rows} for s, _ in tiles]
    if any(s != steps[0] for s in steps) or not any(steps[0].values()) or not 4 * vector <= extent < 1 << 31:
        return None
    return Edges(vector, steps[0], extent)


__all__ = ["Edges", "edges_of"]
