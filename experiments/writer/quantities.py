"""What a number in kernel code may be: an extent, a product of extents, the blocks that cover it, tiles, groups.

Each quantity has a role, which means the same in any region, and a text in this one: ``out[-1] / BN`` is
``(1000 + 63) // 64`` where the last extent of the output is 1000 and BN is 64. Deals in integers. Knows nothing about
code.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

TIMES = tuple(range(2, 17))
"""Factors beside tiles: rows of tiles visited together, parts of a depth."""

MOST = 4
"""Extents of a shape that have a role, from its end."""

FITTED = "n * "
"""What a role begins with whose factor was chosen so that it fits."""

Shapes = tuple[tuple[int, ...], ...]
"""Of a region's inputs and outputs; the last is an output's."""

Blocks = tuple[tuple[str, int], ...]
"""Names and sizes of blocks; ``kernel.NAME`` where they are another kernel's."""

Tiles = dict[int, list["Quantity"]]
"""Values to what has them."""

_ONE = re.compile(r"\w+\[-\d+\] / ")
"""The blocks of one extent."""


class Quantity(NamedTuple):
    """A quantity: what it is, by roles that mean the same in any region; its text in this one."""

    role: str
    text: str


def inverses(value: int, shapes: Shapes, groups: Sequence[int]) -> list[Quantity]:
    """All whose inverse is that of `value`: a mean's count of elements, or one less, of an unbiased variance."""
    one_less = [Quantity(f"{q.role} - 1", f"{q.text} - 1") for q in _counted(value + 1, shapes, groups)]
    return [Quantity(f"1 / {q.role}", f"1 / ({q.text})") for q in (*_counted(value, shapes, groups), *one_less)]


@lru_cache(1 << 14)
def integers(value: int, shapes: Shapes, groups: tuple[int, ...], own: Blocks, others: Blocks) -> tuple[Quantity, ...]:
    """All that has this value, what is simple first.

    Args:
        value: an integer.
        shapes: of the region.
        groups: numbers of groups that there may be.
        own: blocks of the kernel that the number is of.
        others: blocks of the other kernels.
    """
    if value < 2:
        return ()
    tiles, others_tiles = _tiles(shapes, own), _tiles(shapes, others)
    found = [*_counted(value, shapes, groups), *tiles.get(value, ()), *others_tiles.get(value, ())]
    found += _padded(shapes, own, others).get(value, ())
    for times in TIMES:
        for q in _parts(value, times, tiles):
            if q.role.count(" / ") == 2:  # parts of a depth, as many as fit
                found.append(Quantity(FITTED + q.role, f"{times} * ({q.text})"))
            elif _ONE.match(q.role):
                found.append(Quantity(f"{times} * {q.role}", f"{times} * ({q.text})"))
    for extent, role in _roles(shapes):
        found += [Quantity(f"{role} * {q.role}", f"{extent} * ({q.text})") for q in _parts(value, extent, tiles)]
    for times, (extent, role) in itertools.product(TIMES[:2], _roles(shapes)):
        for q in _parts(value, times * extent, tiles, others_tiles):
            if q.role.count(" / ") == 1:  # a buffer of some sums for each block of each row
                found.append(Quantity(f"{times} * {role} * {q.role}", f"{times} * {extent} * ({q.text})"))
    return tuple(found)


def _parts(value: int, times: int, *of: Tiles) -> list[Quantity]:
    """What `value` is so many times; nothing where that is no whole number above 1."""
    return [q for tiles in of for q in tiles.get(value // times, ())] if value % times == 0 and value > times else []


def _counted(value: int, shapes: Shapes, groups: Sequence[int]) -> Iterator[Quantity]:
    """Extents and products of that value, also dealt out to groups (of channels, say), or so many times as groups."""
    counts = _counts(shapes)
    yield from counts.get(value, ())
    for group in groups:
        for extent, role in _roles(shapes):
            if extent * group == value:
                yield Quantity(f"{role} * {group}", f"{extent} * {group}")
        for q in counts.get(value * group, ()):
            yield Quantity(f"{q.role} // {group}", f"{q.text} // {group}")


def _named(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    return [("out", shapes[-1]), *((f"in{i}", shape) for i, shape in enumerate(shapes[:-1]))] if shapes else []


@lru_cache(1 << 12)
def _roles(shapes: Shapes) -> tuple[tuple[int, str], ...]:
    """Extents with their roles: those of the last output and of the first input, and others that no earlier one has."""
    found: list[tuple[int, str]] = []
    for name, shape in _named(shapes):
        for i in range(1, min(len(shape), MOST) + 1):
            if name in ("out", "in0") or all(shape[-i] != extent for extent, _ in found):
                found.append((shape[-i], f"{name}[-{i}]"))
    return tuple((extent, role) for extent, role in found if extent > 1)


@lru_cache(1 << 12)
def _counts(shapes: Shapes) -> dict[int, list[Quantity]]:
    """An extent, the elements of a tensor or of the end of its shape, or of its start, a product of two extents."""
    found: dict[int, list[Quantity]] = {}

    def add(value: int, role: str, text: str) -> None:
        some = found.setdefault(value, [])
        if value > 1 and all(q.role != role for q in some):
            some.append(Quantity(role, text))

    roles = _roles(shapes)
    for extent, role in roles:
        add(extent, role, str(extent))
    for name, shape in _named(shapes):
        parts = [(name, shape)]  # the same role whatever the number of dimensions
        parts += [(f"{name}[-{n}:]", shape[-n:]) for n in range(2, len(shape))]
        parts += [(f"{name}[:-{n}]", shape[:-n]) for n in range(1, len(shape))]
        for role, part in parts:
            some = [n for n in part if n > 1] or [1]
            add(math.prod(some), role, " * ".join(map(str, some)))
    for (a, one), (b, other) in itertools.combinations(roles, 2):
        add(a * b, f"{one} * {other}", f"{a} * {b}")
    return found


@lru_cache(1 << 12)
def _tiles(shapes: Shapes, blocks: Blocks) -> dict[int, list[Quantity]]:
    """Blocks that cover an extent or a product; tiles of two blocks of one kernel that cover two extents."""
    found: dict[int, list[Quantity]] = {}
    for name, block in blocks:
        for value, some in _counts(shapes).items():
            if value > 1:
                covered = found.setdefault(-(-value // block), [])
                covered += [Quantity(f"{q.role} / {name}", f"({q.text} + {block - 1}) // {block}") for q in some]
    for (name, block), (other, size) in itertools.combinations(blocks, 2):
        if name.rpartition(".")[0] != other.rpartition(".")[0]:
            continue
        for (a, one), (b, two) in itertools.permutations(_roles(shapes), 2):
            text = f"({a} + {block - 1}) // {block} * (({b} + {size - 1}) // {size})"
            some = found.setdefault(-(-a // block) * -(-b // size), [])
            some.append(Quantity(f"{one} / {name} * {two} / {other}", text))
    return found


@lru_cache(1 << 12)
def _padded(shapes: Shapes, own: Blocks, others: Blocks) -> dict[int, list[Quantity]]:
    """An extent made longer to whole blocks, alone or twice (halves of a split operand), or in blocks itself."""
    found: dict[int, list[Quantity]] = {}
    for (extent, role), (name, block) in itertools.product(_roles(shapes), (*own, *others)):
        whole = -(-extent // block) * block
        if whole == extent:
            continue
        padded = Quantity(f"{role} to {name}", f"({extent} + {block - 1}) // {block} * {block}")
        found.setdefault(whole, []).append(padded)
        for times in TIMES[:2]:
            found.setdefault(times * whole, []).append(
                Quantity(f"{times} * {padded.role}", f"{times} * ({padded.text})")
            )
        for other, size in own:
            if other != name and whole % size == 0 and size > 1:
                found.setdefault(whole // size, []).append(
                    Quantity(f"({padded.role}) / {other}", f"{padded.text} // {size}")
                )
    return found


__all__ = ["FITTED", "Quantity", "integers", "inverses"]
