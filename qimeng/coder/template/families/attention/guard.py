"""Kernels before an attention that leaves blocks of keys out: which ones hold none that is seen, and whether it may.

A weight of 0 times an infinity or NaN is NaN, in PyTorch as well: where a batch element's values are not all finite, no
block is left out. Deals in kernel text. Knows nothing about the product's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.tiles import Tiles, zeros
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.sizes import power_of_two

CHUNK = 128
"""Keys that one program looks at."""


@dataclass(frozen=True)
class Flags:
    """The flags of a batch element.

    Attributes:
        chunks: how many there are.
        width: the least power of two that is as large.
    """

    chunks: int
    width: int


def flags_of(plan: AttentionPlan) -> Flags:
    """How many flags each batch element has."""
    chunks = -(-plan.shape[2] // CHUNK)
    return Flags(chunks, power_of_two(chunks))


def guard_body(tiles: Tiles) -> list[str]:
    """The lines of the kernel that writes one flag: 1 where a value is an infinity or no number."""
    plan, chunks = tiles.plan, flags_of(tiles.plan).chunks
    lines = ["t = tl.program_id(0)", f"z = t // {chunks}", "cn = tl.arange(0, BV)[None, :]"]
    lines += [f"vn = t % {chunks} * {CHUNK} + tl.arange(0, {CHUNK})[:, None]"]
    more, down = tiles.key_walk("vn", "p")
    masks = {"p": f"(vn < {tiles.keys})"} if tiles.keys % CHUNK else {}
    masks |= {"r": f"(cn < {tiles.columns})"} if tiles.columns != tiles.block_v else {}
    em = tiles.emitter(down, tiles.at_columns, masks=masks, letter="g")
    value = em.value(plan.values)
    inside = em.mask("pr")
    lines += [*tiles.head, *more, *zeros(em.lines, str(CHUNK), "BV"), *em.lines]
    lines.append(f"wild = tl.where(tl.abs({value}) < float('inf'), 0, 1)")
    if inside:
        lines.append(f"wild = tl.where({inside}, wild, 0)")
    return [*lines, "tl.store(flags_ptr + t, tl.max(tl.max(wild, axis=1), axis=0))"]


def seen_batch(plan: AttentionPlan) -> Dim:
    """The batch axes along which the conditions change."""
    return tuple(a for a in plan.batch if a in plan.bounds.read_along)


def seen_body(tiles: Tiles) -> list[str]:
    """The lines of the kernel that writes, for one tile of queries and one step of keys, whether any is seen."""
    bounds = tiles.plan.bounds
    lines, texts, (rows, keys) = looked_at(tiles, bounds.conditions, seen_batch(tiles.plan))
    every = " & ".join(filter(None, [*texts, rows, keys]))
    lines.append(f"any = tl.where({every}, 1, 0) + tl.zeros([BM, BN], tl.int32)")
    return [*lines, "tl.store(seen_ptr + t, tl.max(tl.max(any, axis=1), axis=0))"]


def looked_at(
    tiles: Tiles, conditions: Sequence[tuple[Expr, bool]], batch: Dim
) -> tuple[list[str], list[str], tuple[str, str]]:
    """Lines that look at one tile of queries and one step of keys, program by program.

    Args:
        tiles: the kernel's tiles.
        conditions: what is read, each with its value where a key is seen.
        batch: the batch axes along which they change.

    Returns:
        The lines; the text of each condition; the masks of queries and of keys, empty where none overhang.
    """
    blocks, steps = tiles.row_blocks, tiles.steps
    more, walks = tiles.batch_walk(batch)
    lines = ["t = tl.program_id(0)", f"z = t // {blocks * steps}"]
    lines += [f"rm = t // {steps} % {blocks} * BM + tl.arange(0, BM)[:, None]"]
    lines += [f"rn = t % {steps} * BN + tl.arange(0, BN)[None, :]"]
    down, across = tiles.row_walk(), tiles.key_walk("rn", "r")
    masks = {"p": f"(rm < {tiles.rows})"} if tiles.row_mask else {}
    masks |= {"r": f"(rn < {tiles.keys})"} if tiles.overhangs else {}
    em = tiles.emitter_over([*walks, *down[1], *across[1]], masks, "e")
    texts = [em.value(c) if seen else f"({em.value(c)} == 0)" for c, seen in conditions]
    lines += [*more, *down[0], *across[0], *zeros(em.lines, "BM", "BN"), *em.lines]
    return lines, texts, (masks.get("p", ""), masks.get("r", ""))


__all__ = ["CHUNK", "Flags", "flags_of", "guard_body", "looked_at", "seen_batch", "seen_body"]
