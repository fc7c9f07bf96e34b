"""Single elements of a weight by their depth in each tile of columns (CSC), multiplied on the tensor cores.

Elements that meet the same activations lie one after the other, so that these come from the L1 cache but for the first
time. A step takes neighbours, puts each into its column of a matrix that is zero elsewhere, and multiplies the
activations with that. The order of a sum is that of the depth, the same in each run, and no atomics are needed. An
infinite activation times such a zero is no number, in columns that have no such element: a tile in which any sum is
none is computed again, one element after the other. Deals in kernel text and in the host's. Knows nothing about how the
left operand is made.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.loop import indent
from qimeng.vocabulary.sparse.elements import AT, FIRST, VALUES
from qimeng.vocabulary.sparse.kept import Kept
from qimeng.vocabulary.sparse.turned import INSIDE, Turned

SORTED_AT, SORTED_TO, SORTED_VALUES = "s_at", "s_to", "s_values"
"""Variables of the entry function: depths, columns in the tile, values, in the order in which they are multiplied."""


def by_depth(left: Turned, columns: int, width: int, precision: str) -> list[str]:
    """Lines that leave a tile in `acc`: BK elements of its columns a step.

    Args:
        left: the left operand.
        columns: of the result.
        width: columns of a tile.
        precision: of products, as an argument's text; empty for the default.
    """
    last = f"tl.minimum(col0 + BN, {columns})" if columns % width else "col0 + BN"
    step = [
        "b_i = i + tl.arange(0, BK)",
        "b_ok = b_i < high",
        f"{INSIDE} = b_ok[None, :]",
        f"b_k = tl.load({SORTED_AT}_ptr + b_i, mask=b_ok, other=0)[None, :]",
        *left.fetch("a0", "b_k"),
        f"b_to = tl.load({SORTED_TO}_ptr + b_i, mask=b_ok, other=-1)[:, None]",
        f"b_value = tl.load({SORTED_VALUES}_ptr + b_i, mask=b_ok, other=0.0)[:, None]",
        "b0 = tl.where(b_to == tl.arange(0, BN)[None, :], b_value, 0.0).to(b_value.dtype)",
        f"acc = tl.dot(a0, b0, acc{precision})",
    ]
    again = [
        f"b_k = tl.load({SORTED_AT}_ptr + i)",
        f"{INSIDE} = b_k >= 0",
        *left.fetch("a0", "b_k"),
        f"b_value = tl.load({SORTED_VALUES}_ptr + i).to(tl.float32)",
        f"b_mine = tl.load({SORTED_TO}_ptr + i) == tl.arange(0, BN)[None, :]",
        "acc = tl.where(b_mine, acc + a0.to(tl.float32) * b_value, acc)",
    ]
    return [
        f"low = tl.load({FIRST}_ptr + col0)",
        f"high = tl.load({FIRST}_ptr + {last})",
        "acc = tl.zeros([BM, BN], tl.float32)",
        "for i in range(low, high, BK):",
        *indent(step),
        "if tl.max(tl.max((acc != acc).to(tl.int32), axis=1), axis=0) > 0:",
        *indent(["acc = tl.zeros([BM, BN], tl.float32)", "for i in range(low, high):", *indent(again)]),
    ]


def sort_text(kept: Kept, width: int, prefix: str) -> str:
    """The function that puts the elements of each tile of `width` columns in the order of their depth."""
    depth = kept.shape[1]
    lines = [
        f'"""The elements of each {width} columns by their depth; in which of the columns each is."""',
        f"number = torch.arange({kept.count}, dtype={FIRST}.dtype, device={FIRST}.device)",
        f"column = torch.searchsorted({FIRST}[1:].contiguous(), number, right=True)",
        f"order = torch.argsort(column // {width} * {depth} + {AT}, stable=True)",
        f"to = (column % {width}).to({AT}.dtype)",
        f"return {AT}[order], to[order], {VALUES}.view(-1)[order]",
    ]
    return "\n".join([f"def {prefix}_prepare({FIRST}, {AT}, {VALUES}):", *indent(lines)]) + "\n"


__all__ = ["SORTED_AT", "SORTED_TO", "SORTED_VALUES", "by_depth", "sort_text"]
