"""Bundles: several computations that were explored one by one, side by side as one large program.

A bundle has dozens of clusters of operators, and its programs are put together from what was found of each
(`qimeng.planner.data.parts`). So trees of small programs say how to plan under a budget that is far below the number of
regions. Deals in trees. Knows nothing about planners.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from qimeng.actions import Context
from qimeng.actions.large import MANY
from qimeng.device import row_name
from qimeng.envs.steps.setup import make_device
from qimeng.errors import QimengError
from qimeng.graph.side_by_side import side_by_side
from qimeng.interfaces import Coder, Evaluation
from qimeng.planner.data.composed import LEAST_KNOWN, known_share
from qimeng.planner.data.first_steps import after_first_steps
from qimeng.planner.data.parts import COMPOSED, Captured, Parts
from qimeng.planner.data.tree import Tree
from qimeng.program.program import Program
from qimeng.store import content_hash

SIZES = (60, 100)
"""Computations of a bundle: drawn between the two."""

WIDTH = 2
"""A bundle's computations are drawn from so many times their number that take about as long as each other: where one
takes most of the time, there is little to plan."""


def plannable(captured: Iterable[Captured], parts: Parts, coder: Coder) -> Iterator[Captured]:
    """Those of which most is known as a part of a bundle, where regions are clusters (`LEAST_KNOWN`).

    Args:
        captured: trees of one device and mode.
        parts: what they tell of regions.
        coder: says what can be lowered.
    """
    for tree, start in captured:
        context = Context(make_device(row_name(tree.conditions.device)), coder, tree.mode)
        copies = side_by_side([start.graph] * (1 + MANY // len(start.regions)))
        with suppress(QimengError):
            if known_share(parts, after_first_steps(Program.start(copies), context), coder) >= LEAST_KNOWN:
                yield tree, start


def bundles(
    captured: Sequence[Captured], parts: Parts, count: int, seed: int = 0, sizes: tuple[int, int] = SIZES
) -> Iterator[Captured]:
    """Bundles of computations of one dtype that take about as long, drawn at random; one may stand in a bundle twice.

    Those of which a region was never timed are left out.

    Args:
        captured: trees of one device and mode.
        parts: what they tell of regions.
        count: bundles.
        seed: of what is drawn.
        sizes: computations of a bundle, at least and at most.
    """
    timed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for place, (tree, start) in enumerate(captured):
        found = parts.start(start)
        if found is not None and found.ms:
            timed[tree.dtype].append((found.ms, place))
    known = {dtype: [captured[place] for _, place in sorted(found)] for dtype, found in sorted(timed.items())}
    rng = random.Random(f"{seed} bundles")
    for number in range(count if known else 0):
        alike = known[rng.choices(list(known), [len(found) for found in known.values()])[0]]
        size = rng.randint(*sizes)
        first = rng.randint(0, max(0, len(alike) - WIDTH * size))
        near = alike[first : first + WIDTH * size]
        chosen = [rng.choice(near) for _ in range(size)]
        start = Program.start(side_by_side([program.graph for _, program in chosen]))
        found = parts.start(start)
        if found is not None:
            yield _tree(number, seed, chosen, start, found), start


def _tree(number: int, seed: int, chosen: Sequence[Captured], start: Program, first: Evaluation) -> Tree:
    """The tree of a bundle: without a text, and without a step."""
    like = chosen[0][0]
    spec = content_hash("\n".join(tree.conditions.spec for tree, _ in chosen))
    return replace(
        like,
        name=f"{seed}-{number}-bundle",
        source="",
        family="bundle",
        seed=seed,
        index=number,
        conditions=replace(like.conditions, spec=spec),
        evaluations=((COMPOSED, start.digest, first),),
        patches={},
        edges=(),
        weights="",
    )


__all__ = ["SIZES", "bundles", "plannable"]
