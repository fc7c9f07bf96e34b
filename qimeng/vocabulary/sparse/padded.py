"""Single elements of a weight, padded so that every column of the result has as many (ELL).

The first elements of all columns lie side by side, then the second ones: a step of the loop loads neighbours. They are
made once of the elements by columns. How many steps there are depends on the weight's values alone: weights of which
one column is long take as many for all. Deals in kernel text and in the host's. Knows nothing about how the left
operand is made.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.loop import indent
from qimeng.vocabulary.sparse.elements import AT, FIRST, VALUES
from qimeng.vocabulary.sparse.kept import Kept
from qimeng.vocabulary.sparse.turned import INSIDE, Turned

PADDED_AT, PADDED_VALUES, STEPS = "p_at", "p_values", "p_steps"
"""Variables of the entry function, and the kernel's number of steps."""


def by_steps(left: Turned, columns: int, width: int) -> list[str]:
    """Lines that leave a tile in `acc`: one element of each of its columns a step.

    Args:
        left: the left operand.
        columns: of the result.
        width: columns of a tile.
    """
    mask = f", mask=b_column < {columns}" if columns % width else ""
    other, none = (", other=-1", ", other=0.0") if mask else ("", "")
    step = [
        f"b_k = tl.load({PADDED_AT}_ptr + i * {columns} + b_column{mask}{other})",
        f"{INSIDE} = b_k >= 0",
        *left.fetch("a0", "b_k"),
        f"b0 = tl.load({PADDED_VALUES}_ptr + i * {columns} + b_column{mask}{none})",
        "acc += a0.to(tl.float32) * b0.to(tl.float32)",
    ]
    return [
        "b_column = col0 + tl.arange(0, BN)[None, :]",
        "acc = tl.zeros([BM, BN], tl.float32)",
        f"for i in range(0, {STEPS}):",
        *indent(step),
    ]


def prepare_text(kept: Kept, prefix: str) -> str:
    """The function that pads; -1 is the depth of nothing.

    Tensors without data have no longest column: of those it is the average.
    """
    columns, average = kept.shape[0], max(1, kept.count // kept.shape[0])
    lines = [
        f'"""The elements of {columns} columns, each with as many as the longest."""',
        f"counts = {FIRST}[1:] - {FIRST}[:-1]",
        f"steps = {average} if counts.is_meta else max(1, int(counts.max()))",
        f"number = torch.arange({kept.count}, dtype={FIRST}.dtype, device={FIRST}.device)",
        f"column = torch.searchsorted({FIRST}[1:].contiguous(), number, right=True)",
        f"place = (number - {FIRST}[column]).long(), column",
        f"at = torch.full((steps, {columns}), -1, dtype={AT}.dtype, device={AT}.device)",
        f"values = torch.zeros((steps, {columns}), dtype={VALUES}.dtype, device={VALUES}.device)",
        f"return at.index_put_(place, {AT}), values.index_put_(place, {VALUES}.view(-1))",
    ]
    return "\n".join([f"def {prefix}_prepare({FIRST}, {AT}, {VALUES}):", *indent(lines)]) + "\n"


__all__ = ["PADDED_AT", "PADDED_VALUES", "STEPS", "by_steps", "prepare_text"]
