"""Chooses the sizes of a generated computation: inputs of the requested bytes, products of bounded work.

Deals in numbers for names. Knows nothing about operators.
"""

from __future__ import annotations

import random

from qimeng.planner.data.draft import Draft, elements

LEAST = 4
"""Sizes are not made smaller than this."""

GROWTH = 4
"""No value of `forward` has more elements than this times those of the inputs and parameters together."""

MULTIPLICATIONS = 1 << 38
"""Most multiplications of all matrix products together: about 10 ms in fp32 on an H200 (`baselines/`), at the size of
`FULL_BYTES`; in proportion below."""

FULL_BYTES = 1 << 30

MADE_BYTES = 4 << 30
"""Most bytes of all values of `forward` together: eager and the float64 reference hold them at once."""


def choose_sizes(draft: Draft, rng: random.Random, bytes_: int, itemsize: int) -> dict[str, int]:
    """Values for the names in `draft.pools`, so that inputs and parameters take about `bytes_` together.

    Those with a pool are drawn from it and halved, largest first, until at least `2 * LEAST` of what is left to choose
    fit; that one is then as large as it may be, rounded to a power of two or to 8, or left odd.

    Args:
        draft: the computation.
        rng: what is drawn from.
        bytes_: bytes of inputs and parameters.
        itemsize: bytes of one element.
    """
    sizes = {name: rng.choice(pool) if pool else 1 for name, pool in draft.pools.items()}
    free = [name for name, pool in draft.pools.items() if not pool]
    work = MULTIPLICATIONS * min(1.0, (bytes_ / FULL_BYTES) ** 0.5)
    total = bytes_ // itemsize
    made = MADE_BYTES // itemsize
    while _room(draft, sizes, free, total, made, work) < 2 * LEAST:
        largest = max((n for n in sizes if n not in free), key=lambda n: sizes[n], default="")
        if not largest or sizes[largest] <= LEAST:
            break
        sizes[largest] = max(LEAST, sizes[largest] // 2)
    room = max(1, _room(draft, sizes, free, total, made, work))
    for name in free:
        sizes[name] = _rounded(room, rng)
    return sizes


def _room(draft: Draft, sizes: dict[str, int], free: list[str], total: int, most: int, work: float) -> int:
    """How large the free size may be (0 where even 1 is too much); 1 or 0 where there is none."""

    def used(value: int) -> bool:
        now = {**sizes, **dict.fromkeys(free, value)}
        held = sum(elements(s, now) for s in [*(t.shape for t in draft.inputs), *draft.parameters])
        made = [elements(t.shape, now) for t in draft.values]
        done = sum(elements(p, now) for p in draft.products)
        return held <= total and max(made) <= GROWTH * total and sum(made) <= most and done <= work

    if not used(1):
        return 0
    if not free:
        return 2 * LEAST
    low, high = 1, 2
    while used(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if used(middle) else (low, middle)
    return low


def _rounded(value: int, rng: random.Random) -> int:
    way = rng.choice(("power", "power", "eight", "odd"))
    if way == "power":
        return 1 << (value.bit_length() - 1)
    if way == "eight" and value >= 8:
        return value // 8 * 8
    return value - 1 if value > 1 and value % 2 == 0 else value


__all__ = ["choose_sizes"]
