"""Bundles: several computations that were explored one by one, side by side as one large program.

A bundle has dozens of clusters of operators, and its programs are put together from what was found of each
(`qimeng.planner.data.parts`). So trees of small programs say how to plan under a budget that is far below the number of
regions. Deals in trees. Knows nothing about planners.
"""

from __future__ import annotations

import math
import random
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

RATIO = 10.0
"""A bundle's computations are drawn from those whose times are within such a factor: where one takes most of the time,
there is little to plan."""

LEAST_NEAR = 20
"""At least so many are drawn from, those next in time, however far apart."""


def plannable(captured: Iterable[Captured], parts: Parts, coder: Coder) -> Iterator[Captured]:
    """Those of which most is known as a part of a bundle, where regions are clusters (`LEAST_KNOWN`).

    Args:
        captured: trees of one device and mode.
        parts: what they tell of regions.
        coder: says what can be lowered.
    """
    for tree, start in captured:
        copies = side_by_side([start.graph] * (1 + MANY // len(start.regions)))
        with suppress(QimengError):
            clustered = after_first_steps(Program.start(copies), _context(tree, coder))
            if known_share(parts, clustered, coder) >= LEAST_KNOWN:
                yield tree, start


def bundles(
    captured: Sequence[Captured], parts: Parts, coder: Coder, count: int, seed: int = 0, sizes: tuple[int, int] = SIZES
) -> Iterator[Captured]:
    """Bundles of computations that take about as long, drawn at random; none stands in one again before all do.

    A bundle begins after the steps that come first (`first_steps`): with clusters, on PyTorch. Those of which a region
    was never timed are left out.

    Args:
        captured: trees of one device and mode.
        parts: what they tell of regions.
        coder: says what can be lowered.
        count: bundles.
        seed: of what is drawn.
        sizes: computations of a bundle, at least and at most.
    """
    found = [(parts.start(start), place) for place, (_, start) in enumerate(captured)]
    timed = sorted((first.ms, place) for first, place in found if first is not None and first.ms)
    rng = random.Random(f"{seed} bundles")
    for number in range(count if timed else 0):
        size, near = rng.randint(*sizes), _near(timed, rng.choice(timed)[0])
        chosen = [captured[place] for place in _drawn(near, size, rng)]
        begun = Program.start(side_by_side([program.graph for _, program in chosen]))
        start = after_first_steps(begun, _context(chosen[0][0], coder))
        first = parts.start(start)
        if first is not None:
            yield _tree(number, seed, chosen, start, first), start


def _context(tree: Tree, coder: Coder) -> Context:
    return Context(make_device(row_name(tree.conditions.device)), coder, tree.mode)


def _near(timed: Sequence[tuple[float, int]], ms: float) -> list[int]:
    """Places of those whose time is near `ms`, in order of their times."""
    apart = {place: abs(math.log(each / ms)) for each, place in timed}
    within = [place for _, place in timed if apart[place] <= math.log(RATIO) / 2]
    return within if len(within) >= LEAST_NEAR else sorted(apart, key=lambda place: apart[place])[:LEAST_NEAR]


def _drawn(places: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """So many of `places`: all of them in a random order, again and again."""
    found: list[int] = []
    while len(found) < size:
        found += rng.sample(places, min(size - len(found), len(places)))
    return found


def _tree(number: int, seed: int, chosen: Sequence[Captured], start: Program, first: Evaluation) -> Tree:
    """The tree of a bundle: without a text, and without a step."""
    like, dtypes = chosen[0][0], {tree.dtype for tree, _ in chosen}
    spec = content_hash("\n".join(tree.conditions.spec for tree, _ in chosen))
    return replace(
        like,
        name=f"{seed}-{number}-bundle",
        source="",
        family="bundle",
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        seed=seed,
        index=number,
        conditions=replace(like.conditions, spec=spec),
        evaluations=((COMPOSED, start.digest, first),),
        patches={},
        edges=(),
        weights="",
    )


__all__ = ["SIZES", "bundles", "plannable"]
