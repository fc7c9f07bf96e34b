"""Variables that walk several axes from one flat index.

Deals in axes and lines of kernel text. Knows nothing about operands or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.ir import Nest, coalesce, is_wide
from qimeng.coder.template.triton.emitter import Walk

Tables = Sequence[dict[int, int]]


def spread(
    nest: Nest,
    atoms: Dim,
    tables: Tables,
    index: str,
    side: str = "",
    stem: str = "",
    used: Set[int] | None = None,
) -> tuple[list[str], list[Walk]]:
    """Variables that walk `atoms`, from one flat index over all of them.

    Args:
        nest: the nest.
        atoms: axes, outermost first.
        tables: strides of the accesses that will use the variables.
        index: the flat index.
        side: the tile's side it lies along; empty for a scalar.
        stem: beginning of the names of new variables, by default the index itself.
        used: axes whose positions are needed one by one (see `coalesce`).

    Returns:
        Lines that define the variables, and the walks.
    """
    groups = coalesce(nest, atoms, tables, used)
    stem, suffix = stem or index, ".to(tl.int64)" if is_wide(nest, tables) else ""
    lines, walks = [], []
    inner = 1
    for i, group in reversed(list(enumerate(groups))):
        extent = nest.axes.extent(group)
        text = index if inner == 1 else f"{index} // {inner}"
        text = f"{text} % {extent}" if i else text
        text = f"({text}){suffix}" if suffix else text
        name = index if text == index else f"{stem}_{i}"
        if name != text:
            lines.append(f"{name} = {text}")
        walks.append(Walk(name, tuple(group), extent, side))
        inner *= extent
    return lines, walks[::-1]


__all__ = ["Tables", "spread"]
