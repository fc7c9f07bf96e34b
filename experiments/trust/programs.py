"""Programs of our own coder for drawn specs: what mutants are made of, and what other measurements evaluate.

Deals in seeds: the same seed and number give the same spec and the same program. Knows nothing about judges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Request
from qimeng.planner.data.generate import Bytes, draw
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

SCHEDULES = frozenset("tiling pipeline layout split persistence vectorization".split())
MOST_STEPS = 32
"""Steps of one kind; more than any drawn spec has regions."""
MOST_SCHEDULES = 3


@dataclass(frozen=True)
class Subject:
    """A spec with a program of the template coder.

    Attributes:
        spec: the spec.
        family: see `qimeng.planner.data.generate`.
        graph: its graph.
        program: with kernels for every region that the coder has a template for.
        steps: the actions that led to it, in words.
    """

    spec: KernelSpec
    family: str
    graph: OpGraph
    program: Program
    steps: tuple[str, ...]


def make_subject(
    seed: int, number: int, sizes: Bytes, device: Device, families: Sequence[str] = (), variant: int = 0
) -> Subject:
    """Spec `number` of the sequence `seed`, with a program by chance: fused, lowered, then rescheduled a little.

    Args:
        seed: of the sequence.
        number: in the sequence.
        sizes: bytes of its inputs and parameters.
        device: the device that kernels are printed for.
        families: drawn from these only; all by default.
        variant: number of the program among those for this spec.

    Raises:
        QimengError: the spec cannot be captured.
    """
    drawn = draw(seed, number, sizes, families)
    graph = capture_spec(drawn.spec, device="cuda" if device.measured else "cpu")
    walk = _Walk(Program.start(graph), drawn.spec.mode, device, random.Random(f"{seed}/{number}/program {variant}"))
    walk.take(frozenset({"fusion"}), MOST_STEPS, param="")
    walk.take(frozenset({"lowering"}), MOST_STEPS)
    walk.take(frozenset({"precision"}), walk.rng.randrange(2))
    walk.take(SCHEDULES, walk.rng.randrange(MOST_SCHEDULES + 1))
    return Subject(drawn.spec, drawn.family, graph, walk.program, tuple(walk.steps))


def programs_along(
    seed: int, number: int, sizes: Bytes, device: Device, families: Sequence[str] = (), variant: int = 0, steps: int = 8
) -> tuple[KernelSpec, tuple[Program, ...]]:
    """Spec `number` of the sequence `seed`, and every program with a kernel along a walk as a search takes it.

    Args:
        seed: names the sequence, as for `make_subject`.
        number: names the spec.
        sizes: how large its inputs and parameters are together.
        device: what kernels are printed for.
        families: the only ones to draw from, where any are named.
        variant: number of the walk among those for this spec.
        steps: that change a schedule, after all regions have kernels.

    Raises:
        QimengError: the spec cannot be captured.
    """
    drawn = draw(seed, number, sizes, families)
    graph = capture_spec(drawn.spec, device="cuda" if device.measured else "cpu")
    walk = _Walk(Program.start(graph), drawn.spec.mode, device, random.Random(f"{seed}/{number}/walk {variant}"))
    walk.take(frozenset({"fusion"}), MOST_STEPS, param="")
    walk.programs.clear()
    walk.take(frozenset({"lowering"}), MOST_STEPS)
    walk.take(SCHEDULES, steps)
    return drawn.spec, tuple(walk.programs)


class _Walk:
    """Random legal actions, whose patches are taken without asking a judge."""

    def __init__(self, program: Program, mode: str, device: Device, rng: random.Random):
        self.program, self.mode, self.device, self.rng = program, mode, device, rng
        self.coder = TemplateCoder()
        self.steps: list[str] = []
        self.programs: list[Program] = []

    def take(self, kinds: frozenset[str], count: int, param: str | None = None) -> None:
        """Up to `count` actions of these kinds (with this `param`), as long as any is legal."""
        for _ in range(count):
            context = Context(self.device, self.coder, self.mode)
            legal = [a for a in legal_actions(self.program, context) if a.kind in kinds]
            legal = [a for a in legal if param is None or a.param == param]
            if not legal:
                return
            action = self.rng.choice(legal)
            try:
                patch = self.coder.write(Request(self.program, action, self.device, self.mode))
            except (IllegalAction, CoderError):
                continue
            self.program = patch.apply(self.program, self.rng.randrange(max(1, len(patch.alternatives))))
            self.steps.append(f"{action.kind} {action.param}".strip())
            self.programs.append(self.program)


__all__ = ["Subject", "make_subject", "programs_along"]
