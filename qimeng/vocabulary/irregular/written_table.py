"""The kernel that fills a table of the rows written last, and its launch.

Deals in kernel text. Knows nothing about who reads the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from qimeng.vocabulary.irregular.written import Table

BLOCK = 256
"""Elements of a write that a program enters into a large table."""

WIDE = 1024
"""Entries that the one program of a small table sets to 0 at a time, and elements that it enters."""

ENTRIES, ELEMENTS = 16 * WIDE, 2 * WIDE
"""A table and a write so large have one program, which saves a launch; reasoned from what a launch takes, about 2
microseconds, and not measured."""


def filling(table: Table, name: str, entry: str, indices: Sequence[str]) -> tuple[str, list[str]]:
    """The kernel `entry`, and the lines that make the table `name` by it.

    Args:
        table: what is filled.
        name: variable of the table.
        entry: name of the kernel.
        indices: variables of the tensors that say where elements go.
    """
    alone = table.entries <= ENTRIES and table.elements <= ELEMENTS
    body = _entering(table)
    if alone:
        lines = [
            "lane = tl.arange(0, B)",
            f"for first in range(0, {table.entries}, B):",
            f"    tl.store(last_ptr + first + lane, lane * 0, mask=first + lane < {table.entries})",
            "tl.debug_barrier()",
            f"for first in range(0, {table.elements}, B):",
            "    e = first + lane.to(tl.int64)",
            *(f"    {line}" for line in body),
        ]
    else:
        lines = ["e = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)", *body]
    given = ", ".join([*(f"i{n}_ptr" for n in range(len(indices))), "last_ptr"])
    kernel = f"@triton.jit\ndef {entry}({given}, B: tl.constexpr):\n" + "".join(f"    {line}\n" for line in lines)
    made = "empty" if alone else "zeros"
    grid, options = (1, f"B={WIDE}, num_warps=8") if alone else (-(-table.elements // BLOCK), f"B={BLOCK}")
    return kernel, [
        f"{name} = torch.{made}({table.entries}, dtype=torch.int32, device={indices[0]}.device)",
        f"{entry}[({grid},)]({', '.join([*indices, name])}, {options})",
    ]


def _entering(table: Table) -> list[str]:
    """Lines that enter the elements `e`: the largest number of a position is that of the last one."""
    every, at = table.every, [_sum(table.beside)]
    lines = [f"kept = e < {table.elements}"]
    for d, size in enumerate(every):
        inner = prod(every[d + 1 :])
        part = "e" if inner == 1 else f"e // {inner}"
        lines.append(f"e{d} = {part} % {size}" if d else f"e{d} = {part}")
    for n, i in enumerate(table.indices):
        lines.append(f"i{n} = tl.load(i{n}_ptr + {_sum(i.stride)}, mask=kept, other=0).to(tl.int64)")
        if i.wraps:
            lines.append(f"i{n} = tl.where(i{n} < 0, i{n} + {i.size}, i{n})")
        lines.append(f"kept = kept & (i{n} >= 0) & (i{n} < {i.size})")
        at.append(_times(f"i{n}", i.step))
    place = " + ".join(text for text in at if text != "0")
    number = f"({_sum(table.counts)} + 1).to(tl.int32)"
    return [*lines, f'tl.atomic_max(last_ptr + {place}, {number}, mask=kept, sem="relaxed")']


def _sum(steps: Sequence[int]) -> str:
    """The sum of an element's positions, each times its step."""
    return " + ".join(_times(f"e{d}", step) for d, step in enumerate(steps) if step) or "0"


def _times(name: str, step: int) -> str:
    return name if step == 1 else f"{name} * {step}"


__all__ = ["filling"]
