"""Adds untried orders of fusions to a stored tree, if the tree already knows their result.

Deals in programs and graph-only steps. A fusion of regions on PyTorch writes no kernel and is not judged, so its result
is known without a trial. Several orders of the same fusions lead to one program, and exploration takes one or two of
them. Without the others, a stored tree would prefer one order although all are equal. Knows nothing about evaluations:
none is added.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from qimeng.device import row_name
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action, Coder, Patch
from qimeng.interfaces.records import PatchRecord
from qimeng.planner.data.programs import programs_of
from qimeng.store import StoredStep, content_hash

if TYPE_CHECKING:
    from qimeng.actions import Context
    from qimeng.planner.data.tree import Tree
    from qimeng.program.program import Program

MOST = 256
"""Programs that are added to a tree at most."""

Beside = tuple[frozenset[str], tuple[Any, ...], str]


def closed(tree: Tree, start: Program, coder: str | Coder = "template", most: int = MOST) -> Tree:
    """`tree` with every fusion of the graph alone that leads on to a program from which something was tried.

    Args:
        tree: what was explored, with the names of today's programs (`Tree.today`).
        start: its start program.
        coder: says what is legal.
        most: programs that are added at most; those fewer fusions away from explored ones come first.

    Raises:
        DeviceError: an unknown device.
    """
    from qimeng.actions import Context
    from qimeng.envs.steps.setup import make_coder, make_device

    context = Context(make_device(row_name(tree.conditions.device)), make_coder(coder), tree.mode)
    programs = programs_of(tree, start)
    goals = _Goals((programs[d] for d in sorted(tree.telling) if d in programs), programs.values())
    waiting, left = deque(programs.values()), most
    leading: dict[str, list[tuple[Program, Action, Patch]]] = {}
    while waiting:
        here = waiting.popleft()
        tried = tree.explored.get(here.digest, ())
        for action, child in goals.fusions(here, context, new=left > 0):
            if action in tried:
                continue
            if child.digest not in programs:
                if not left:
                    continue
                left -= 1
                programs[child.digest] = child
                waiting.append(child)
            leading.setdefault(child.digest, []).append((here, action, Patch(regions=child.regions)))
    edges, patches = list[StoredStep](), dict[str, PatchRecord]()
    for digest in _reaching(tree, leading):
        for here, action, patch in leading.get(digest, ()):
            record = PatchRecord.of(patch)
            name = content_hash(json.dumps(json.loads(record.to_json()), sort_keys=True))
            patches[name] = record
            edges.append(StoredStep(here.digest, action, name, None, True, digest))
    return replace(tree, edges=(*tree.edges, *edges), patches={**tree.patches, **patches}) if edges else tree


def _reaching(tree: Tree, leading: dict[str, list[tuple[Program, Action, Patch]]]) -> list[str]:
    """Programs from which, by explored or added steps of the graph, something is reached that was tried."""
    before: dict[str, list[str]] = {}
    for edge in tree.edges:
        if edge.accepted and edge.child is not None:
            before.setdefault(edge.child, []).append(edge.parent)
    for child, ways in leading.items():
        before.setdefault(child, []).extend(here.digest for here, *_ in ways)
    found = dict.fromkeys(sorted(tree.telling))
    waiting = deque(found)
    while waiting:
        for parent in before.get(waiting.popleft(), ()):
            if parent not in found:
                found[parent] = None
                waiting.append(parent)
    return list(found)


class _Goals:
    """Programs that something was tried on, to be reached by fusions.

    Args:
        programs: those programs.
        known: programs that need not be made.
    """

    def __init__(self, programs: Iterable[Program], known: Iterable[Program]):
        self._by_others: dict[Beside, list[tuple[int, ...]]] = {}
        for program in programs:
            self._by_others.setdefault(_beside(program), []).append(_masks(program))
        self._made = {(_beside(p), frozenset(m)): p for p in known if _apart(m := _masks(p))}

    def fusions(self, here: Program, context: Context, new: bool = True) -> Iterator[tuple[Action, Program]]:
        """The legal fusions of regions on PyTorch after which a goal is still to be reached, and what they make.

        Args:
            here: what is fused.
            context: says what is legal.
            new: whether programs are made that are not known.
        """
        from qimeng.actions.graph_kinds import Fusion

        own, beside = _masks(here), _beside(here)
        goals = [g for g in self._by_others.get(beside, ()) if g != own and _within(own, g)]
        if not goals:
            return
        mask, kind = dict(zip((r.id for r in here.regions), own, strict=True)), Fusion()
        plain = {r.id for r in here.regions if here.implementation(r).language == "torch"}
        for action in kind.proposals(here, context):
            producer, consumer = (mask[r] for r in action.regions)
            again = action.param == "recompute"
            if not set(action.regions) <= plain or not any(_leads(producer, consumer, again, g) for g in goals):
                continue
            after = frozenset({*own} - {producer, consumer} | {producer | consumer})
            key = (beside, after) if _apart(own) and not again else None
            made = self._made.get(key) if key else None
            if made is None and not (new or key is None):
                continue
            if made is None:
                try:
                    kind.check(here, action, context)
                    made = kind.apply(here, action, context).patch().apply(here)
                except IllegalAction:
                    continue
                if key:
                    self._made[key] = made
            yield action, made


def _beside(program: Program) -> Beside:
    """What makes it another program than its partition on PyTorch: kernels, calls of a library, rewrites, launch."""
    written = (program.implementation(r) for r in program.regions)
    return frozenset(i.digest for i in written if i.language != "torch"), program.rewrites, program.launch


def _masks(program: Program) -> tuple[int, ...]:
    """The nodes of each region, one bit each."""
    number = {name: i for i, name in enumerate(program.graph.nodes)}
    return tuple(sum(1 << number[n] for n in r.nodes) for r in program.regions)


def _apart(regions: tuple[int, ...]) -> bool:
    """Whether no operator is computed twice: who computes what then says all about a partition."""
    return sum(regions) == reduce(or_, regions, 0)


def _within(regions: Iterable[int], goal: tuple[int, ...]) -> bool:
    """Whether each of `regions` lies within a region of `goal`."""
    return all(any(not r & ~g for g in goal) for r in regions)


def _leads(producer: int, consumer: int, recompute: bool, goal: tuple[int, ...]) -> bool:
    """Whether the goal has both in one region, and the producer in others besides where it is computed again."""
    holding = [g for g in goal if not producer & ~g]
    return (len(holding) > 1) == recompute and any(not consumer & ~g for g in holding)


__all__ = ["MOST", "closed"]
