"""The held-out specs that planners are compared on: which they are, by what rule, and how their trees are explored.

Deals in candidates, in an order that nobody chose, and in explorations. Knows nothing about what came of a comparison.

The rule, so that nobody picks:

- **generated**: specs of the families `UNSEEN`, which no planner may be trained on, in the order of the sequence
  `SEED`; left out are those that cannot be captured, have the structure of a KernelBench problem, or of one before.
- **kernelbench**: problems of levels 1 and 2 by turns, each level in the order of its files' content hashes; left out
  are those that cannot be captured, draw random numbers, have a product that algebra collapses, take over a quarter of
  an H200's memory to optimize, or have the structure of one before.
- Of each half the first `HALF` candidates count whose tree has at least `PROGRAMS` judged programs and a best-known
  gain of at least `GAIN` over eager: that is known once they are explored (`chosen`), so more are explored than count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from experiments.planners.replay import SEEDS, Method, judged, log_gain
from qimeng.bench.explore import Explorer, chance
from qimeng.bench.kernelbench import load_levels
from qimeng.bench.suite import Problem
from qimeng.bench.survey import ALONE, survey
from qimeng.device import DEVICES
from qimeng.envs.steps.state import Budget
from qimeng.errors import QimengError
from qimeng.planner.data.generate import FAMILIES, Bytes, Drawn, draw_many
from qimeng.planner.data.overlap import reserved
from qimeng.planner.data.signature import structure
from qimeng.planner.data.tree import Tree
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

UNSEEN = ("attention", "gated", "loss")
"""Families of drawn specs that planners are judged on, and so never trained on."""

SEEN = tuple(f for f in FAMILIES if f not in UNSEEN)
"""Families to train on: ``qimeng collect --families`` takes them."""

SEED = 1121
"""Of the sequence that the generated half is drawn from."""

SIZES = Bytes(1 << 20, 1 << 28)
"""Bytes of inputs and parameters of the generated half."""

KERNELBENCH = "kernelbench"
"""What the family of a problem of KernelBench is called; its `seed` is the level, its `index` the number."""

HALF, PROGRAMS, GAIN = 15, 100, 1.1

DRAWN, PROBLEMS = 24, 40
"""Candidates of the two halves: problems that only the library is good at are left out once they are explored."""


def generated(count: int = DRAWN) -> Iterator[Drawn]:
    """The first `count` candidates of the generated half."""
    seen = set(reserved())
    for drawn in draw_many(SEED, 1 << 20, 0, SIZES, UNSEEN):
        if count == 0:
            return
        found = _structure(drawn.spec)
        if found is not None and found not in seen:
            seen.add(found)
            count -= 1
            yield drawn


def kernelbench(root: Path | str, count: int = PROBLEMS) -> Iterator[Drawn]:
    """The first `count` candidates among the problems of a local checkout.

    Raises:
        SuiteError: `root` holds no checkout.
    """
    levels = [_usable(sorted(load_levels(root, str(level)), key=_shuffled)) for level in (1, 2)]
    seen: set[str] = set()
    for problem in filter(None, chain.from_iterable(zip_longest(*levels))):
        if count == 0:
            return
        spec = problem.spec()
        found = _structure(spec)
        if found is not None and found not in seen:
            seen.add(found)
            count -= 1
            level, number = problem.id.removeprefix("level").split("/")
            yield Drawn(spec, KERNELBENCH, int(level), int(number))


def _usable(problems: Iterable[Problem]) -> Iterator[Problem]:
    for problem in problems:
        facts = survey(problem)
        if facts.found is None or facts.found.random or facts.found.collapsed:
            continue
        if facts.memory_bytes <= ALONE * DEVICES["h200"].memory_bytes:
            yield problem


def _shuffled(problem: Problem) -> str:
    """An order that depends on the content of files alone."""
    return hashlib.blake2b(f"held out {problem.digest}".encode(), digest_size=8).hexdigest()


def _structure(spec: KernelSpec) -> str | None:
    try:
        return structure(capture_spec(spec, verify=False))
    except QimengError:
        return None


def explorers_of(methods: Sequence[Method], seeds: Sequence[int] = SEEDS) -> Iterator[Explorer]:
    """Every method from every seed, each with an equal share of two thirds of the evaluations, then chance.

    What one has judged costs the others nothing, so a method whose first choices others share gets further.
    """
    runs = [(m, seed) for seed in seeds for m in methods if m.draws or seed == seeds[0]]
    for method, seed in runs:
        yield Explorer(method.label, 2 / (3 * len(runs)), Budget.steps, method.make(seed))
    yield from chance()


def best_known(tree: Tree) -> float:
    """Eager's time over that of the fastest program of the tree."""
    return math.exp(max((log_gain(e) for purpose, _, e in tree.evaluations if purpose == "step"), default=0.0))


def chosen(trees: Iterable[Tree], order: Sequence[str], half: int = HALF) -> tuple[Tree, ...]:
    """The trees that count: of each half the first `half` in `order` (digests of specs) that are worth replaying."""
    place = {digest: i for i, digest in enumerate(order)}
    mine = sorted((t for t in trees if t.conditions.spec in place), key=lambda t: place[t.conditions.spec])
    worth = [t for t in mine if judged(t) >= PROGRAMS and best_known(t) >= GAIN]
    halves = [[t for t in worth if (t.family == KERNELBENCH) is is_problem] for is_problem in (False, True)]
    return tuple(t for part in halves for t in part[:half])


def check_untrained(training: Iterable[Tree], held_out: Iterable[Tree]) -> None:
    """Refuse training data that holds what planners are judged on.

    Raises:
        QimengError: a tree of an unseen family, or with the structure of a held-out spec.
    """
    structures = {_structure(tree.spec()) for tree in held_out}
    for tree in training:
        if tree.family in (*UNSEEN, KERNELBENCH) or _structure(tree.spec()) in structures:
            raise QimengError(f"the training data holds {tree.name} ({tree.family}), which planners are judged on")
