"""What passes between the roles at one step: the action, the request to the coder, its patch, what the planner sees.

Deals in plain data. Knows nothing about how a kernel is written, checked, timed or chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from qimeng.interfaces.results import Evaluation
from qimeng.program.content import digest_of

if TYPE_CHECKING:
    from qimeng.device import Device
    from qimeng.graph.region import Region
    from qimeng.graph.rewrites import Rewrite
    from qimeng.program.program import Implementation, Program


@dataclass(frozen=True, order=True)
class Action:
    """One macro optimization: an intent that neither mutates nor measures.

    Attributes:
        kind: name of a registered kind (``"fusion"``).
        regions: ids of the regions it touches; empty for ``stop``.
        param: the choice among the kind's options (``"taller"``), or an empty string.
    """

    kind: str
    regions: tuple[str, ...] = ()
    param: str = ""

    def __str__(self) -> str:
        return " ".join((self.kind, *([self.param] if self.param else []), *self.regions))


@dataclass(frozen=True)
class Patch:
    """The rewrite a coder returns.

    Attributes:
        regions: the program's new partition where the action changes it; None where it stays.
        target: id of the region (in the new partition) that gets a new implementation; None for a change of the
            graph alone.
        alternatives: the implementations to choose from (a sweep, at most 8); the evaluator keeps the fastest.
        note: one sentence about what was done, for people and for the report.
        rewrites: of the graph, made before anything else.
        launch: how the program is launched from now on (`Program.launch`); None where that stays.
        others: ids of further regions with their new implementations, where one step writes many kernels.
    """

    regions: tuple[Region, ...] | None = None
    target: str | None = None
    alternatives: tuple[Implementation, ...] = ()
    note: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    launch: str | None = None
    others: tuple[tuple[str, Implementation], ...] = ()

    @property
    def computes_otherwise(self) -> bool:
        """Whether more than the partition changes, so that the program has to be judged."""
        return bool(self.alternatives or self.others or self.rewrites or self.launch is not None)

    def apply(self, program: Program, chosen: int = 0) -> Program:
        """The program with this patch and alternative number `chosen`; asked again, the same object."""
        return _applied(self, program, chosen)

    def diff(self, program: Program, chosen: int = 0) -> str:
        """A unified diff of the program's source."""
        import difflib

        before, after = program.source.splitlines(True), self.apply(program, chosen).source.splitlines(True)
        return "".join(difflib.unified_diff(before, after, "before.py", "after.py"))

    def only(self, chosen: int) -> Patch:
        """The patch reduced to one alternative, as a recipe stores it."""
        return replace(self, alternatives=(self.alternatives[chosen],) if self.alternatives else ())

    def digest(self, chosen: int = 0) -> str:
        """Content hash of the rewrites, the new partition and the implementation."""
        regions = None if self.regions is None else [[r.nodes, r.outputs] for r in self.regions]
        written = self.alternatives[chosen].digest if self.alternatives else None
        more: list[Any] = [list(self.rewrites)] if self.rewrites else []
        more += [self.launch] if self.launch is not None else []
        more += [[[region, i.digest] for region, i in self.others]] if self.others else []
        return digest_of("patch", self.target, regions, written, *more)


@lru_cache(256)
def _applied(patch: Patch, program: Program, chosen: int) -> Program:
    """What `Patch.apply` returns: one step of a search asks several times, walks of a stored tree again and again."""
    new = program.with_rewrites(patch.rewrites)
    new = new if patch.launch is None else new.with_launch(patch.launch)
    new = new if patch.regions is None else new.with_regions(patch.regions)
    if patch.target is not None and patch.alternatives:
        new = new.with_implementation(patch.target, patch.alternatives[chosen])
    for region, implementation in patch.others:
        new = new.with_implementation(region, implementation)
    return new


@dataclass(frozen=True)
class Step:
    """One step of a trajectory: what was tried and its outcome."""

    action: Action
    evaluation: Evaluation | None
    accepted: bool
    patch_digest: str = ""


@dataclass(frozen=True)
class Request:
    """What a coder is asked for.

    Attributes:
        program: the program as it stands.
        action: what to do to it.
        device: for which device.
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``.
        failed: on repair, the patch that was refused.
        reason: on repair, the gate's message.
        refused: on repair, which of the refused patch's alternatives `reason` is about.
        history: the steps taken so far, refused ones included.
        evaluation: of the program as it stands; None where it was not judged.
        instruction: what the user wants done about it, in words; coders without a language model ignore it.
        seconds_left: wall-clock seconds that the run has left; a coder waits no longer than this.
    """

    program: Program
    action: Action
    device: Device
    mode: str = "default"
    failed: Patch | None = None
    reason: str | None = None
    refused: int = 0
    history: tuple[Step, ...] = ()
    evaluation: Evaluation | None = None
    instruction: str = ""
    seconds_left: float = math.inf


@dataclass(frozen=True)
class Observation:
    """What a planner sees.

    Attributes:
        program: the program as it stands (planners read its structure, never its kernels).
        actions: the legal actions, most promising region first, at most 256; `stop` is always among them.
        evaluation: of the present program; None before the first.
        best_ms: device milliseconds of the best program so far.
        eager_ms: device milliseconds of PyTorch eager.
        history: the steps so far.
        device: the device optimized for.
        mode: precision mode.
        steps_left: steps that the budget still allows.
    """

    program: Program
    actions: tuple[Action, ...]
    evaluation: Evaluation | None
    best_ms: float | None
    eager_ms: float | None
    history: tuple[Step, ...]
    device: Device
    mode: str = "default"
    steps_left: int = 0


__all__ = ["Action", "Observation", "Patch", "Request", "Step"]
