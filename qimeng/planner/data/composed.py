"""Networks that nobody ran: each of their regions was timed in another one.

Programs of a network are put together from its regions (`qimeng.planner.data.parts`), so a drawn network whose regions
are known needs no device. Deals in trees. Knows nothing about how regions were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from qimeng.actions import Context
from qimeng.device import row_name
from qimeng.envs.steps.setup import make_coder, make_device
from qimeng.errors import QimengError
from qimeng.interfaces import Coder, Evaluation
from qimeng.planner.data.first_steps import after_first_steps
from qimeng.planner.data.generate import Drawn
from qimeng.planner.data.overlap import reserved
from qimeng.planner.data.parts import COMPOSED, Captured, Parts, parts_of
from qimeng.planner.data.signature import structure
from qimeng.planner.data.tree import Tree
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec

LEAST_KNOWN = 0.95
"""Share of a network's time, after algebra and clusters, that regions with a known lowering take at least."""


@dataclass(frozen=True)
class Composition:
    """A drawn network, and how much of it is known.

    Attributes:
        drawn: the network.
        tree: with the sum of its regions; None where one was never timed.
        share: of its time, the part that regions take for which a lowering is known.
    """

    drawn: Drawn
    tree: Tree | None
    share: float = 0.0


def compositions(
    known: Sequence[Captured], drawn: Iterable[Drawn], coder: str | Coder = "template"
) -> Iterator[Composition]:
    """Each of `drawn` that can be captured and is no problem that planners are judged on.

    Args:
        known: trees with the names of today's programs, of one device, and their start programs.
        drawn: networks.
        coder: says what can be lowered.
    """
    written, device = make_coder(coder), make_device(row_name(known[0][0].conditions.device))
    parts = {mode: parts_of([k for k in known if k[0].mode == mode]) for mode in {tree.mode for tree, _ in known}}
    like = {tree.mode: tree for tree, _ in known}
    for one in drawn:
        mode = one.spec.mode
        try:
            start = Program.start(capture_spec(one.spec))
            if mode not in parts or structure(start.graph) in reserved():
                continue
            context = Context(device, written, mode)
            after = after_first_steps(start, context)
        except QimengError:
            continue
        first = parts[mode].start(start)
        tree = None if first is None else _tree(one, like[mode], start, first)
        yield Composition(one, tree, known_share(parts[mode], after, written))


def known_share(parts: Parts, program: Program, coder: Coder) -> float:
    """Share of the time on PyTorch of regions that can be lowered; 0 where one was not timed."""
    total = found = 0.0
    for region in program.called:
        ms = parts.on_torch(region)
        if ms is None:
            return 0.0
        if coder.can_implement(region) is not None:
            continue
        total += ms
        found += ms if ("lowering", "") in parts.tried(region, program.implementation(region).digest) else 0.0
    return found / total if total else 0.0


def _tree(drawn: Drawn, like: Tree, start: Program, first: Evaluation) -> Tree:
    """The tree of a network, without a step."""
    spec = drawn.spec
    return Tree(
        spec.name,
        spec.source,
        spec.dtype,
        spec.mode,
        drawn.family,
        drawn.seed,
        drawn.index,
        replace(like.conditions, spec=spec.digest),
        ((COMPOSED, start.digest, first),),
        {},
        (),
    )


__all__ = ["LEAST_KNOWN", "Composition", "compositions", "known_share"]
