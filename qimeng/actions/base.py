"""What a kind of optimization is: proposals, legality, and the rewrite of the graph or of a schedule.

Deals in the vocabulary's frame. Knows nothing about kernels or about any one family. Where kinds are registered:
`qimeng.actions.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.actions.large import is_large, unlike
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import AnyFamily, Unsupported, concerned, family_of, plan_of, refusal
from qimeng.graph.region import Region
from qimeng.graph.rewrites import Rewrite
from qimeng.interfaces import Action, Coder, Patch
from qimeng.program.program import Implementation, Program
from qimeng.program.schedule import Schedule


@dataclass(frozen=True)
class Context:
    """What legality depends on besides the program.

    Attributes:
        device: the GPU optimized for.
        coder: who would carry the action out.
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``.
    """

    device: Device
    coder: Coder
    mode: str = "default"


@dataclass(frozen=True)
class GraphRewrite:
    """What an action makes of a program, but for the kernels.

    Attributes:
        regions: the new partition; None where it stays.
        region: the region of that partition which gets a new implementation; None where only the graph changes.
        implementation: that implementation, where it is known already; None where a coder has to write it.
        note: one sentence about what was done.
        rewrites: of the graph; the regions follow from them.
        launch: how the program is launched from now on; None where that stays.
        each: regions that a coder lowers one by one (`qimeng.actions.lower_all.each_lowered`).
    """

    regions: tuple[Region, ...] | None = None
    region: Region | None = None
    implementation: Implementation | None = None
    note: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    launch: str | None = None
    each: tuple[Region, ...] = ()

    @property
    def to_write(self) -> Region | None:
        """The region that a coder has to write a kernel for; None where nothing is left to write."""
        return self.region if self.implementation is None else None

    def patch(self, written: Sequence[Implementation] = (), note: str = "") -> Patch:
        """The patch, with what a coder has written.

        Args:
            written: the implementations to choose from, where there was one to write.
            note: replaces the rewrite's own.
        """
        found = tuple(written) if self.implementation is None else (self.implementation,)
        target = self.region.id if self.region else None
        return Patch(self.regions, target, found, note or self.note, self.rewrites, self.launch)


@dataclass(frozen=True)
class Remainder:
    """What is left to compute once an action is carried out.

    Attributes:
        region: one with all that the action's kernel computes; it may have nodes of several present regions.
        work: share of its arithmetic that is left, above 0, at most 1.
    """

    region: Region
    work: float = 1.0


class Kind(ABC):
    """One kind of optimization.

    A subclass documents itself: one sentence, its arguments, and ``rewrite: before -> after``.

    Attributes:
        name: unique name, the first word of the action's text.
        options: the categorical choices (`Action.param`); ``("",)`` where there is nothing to choose.
        local: whether `check` of an action on one region depends only on what that region computes, its implementation,
            the graph and the context, so that the answer is kept for later steps and for equal regions. Set by the
            class that defines `check`; a subclass with a `check` of its own says so again.
        shared: whether what it does to a region happens to all equal ones, so that a large program
            (`qimeng.actions.large`) is offered it for one of them.
        measured: options whose gain only a measurement tells: they are not offered where times are estimated.
    """

    name: str
    options: tuple[str, ...] = ("",)
    local: bool = False
    shared: bool = False
    measured: Collection[str] = ()

    @abstractmethod
    def check(self, program: Program, action: Action, context: Context) -> None:
        """Raise `IllegalAction`, with the numbers, where `action` does not apply."""

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Actions that may apply: by default each option on each region, or each unlike one (`shared`)."""
        for region in proposed_on(self, program):
            for option in self.options:
                yield Action(self.name, (region.id,), option)

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Whether a planner by rules should take a legal action before it lowers anything; by default it should not."""
        return False

    def left_out(self, program: Program, action: Action, device: Device) -> str:
        """Why a planner by rules leaves a legal action aside that a declaration asks for; by default nothing is said.

        A result says so where no such action was tried.
        """
        return ""

    def target(self, program: Program, action: Action) -> Region:
        """The region that the action is about once it is carried out: by default the one that it names."""
        return find_region(program, action)

    def remains(self, program: Program, action: Action) -> Remainder | None:
        """What is left to compute once a legal action is carried out, where its regions do not say it.

        What an action may save at most, as planners read it, follows from this. By default from the regions that it
        names: None.
        """
        return None

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """What a legal action makes of the program, but for the kernels; a pure function.

        By default the graph stays, and a coder writes a kernel for the region.
        """
        return GraphRewrite(region=self.target(program, action))


def proposed_on(kind: Kind, program: Program) -> tuple[Region, ...]:
    """The regions that `kind` proposes actions on by default: all, or the unlike ones (`Kind.shared`)."""
    return unlike(program) if kind.shared and is_large(program) else program.regions


class ScheduleKind(Kind):
    """A kind that tunes one region's kernel, by rewriting its schedule.

    The region's family says which schedules an option leads to (`qimeng.family.Family.moves`). A kind of another
    package that tunes an existing family brings the rewrite itself.

    A coder with a free hand carries the action out on a kernel without a schedule as well: it is then an intent in
    words, and nothing but the kind of loop nest can be checked.

    Attributes:
        family: name of the one family that it is for; None for every family that has such a move, or, where the kind
            brings the rewrite, for every family.
    """

    family: str | None = None
    local = True
    shared = True

    def rewrite(self, schedule: Schedule, plan: Any, device: Device, param: str) -> Sequence[Schedule]:
        """The schedules that carry the action out, best guess first; a pure function.

        At most `qimeng.family.MAX_ALTERNATIVES` that fit are tried.

        Args:
            schedule: the present one.
            plan: the family's plan of the region (`qimeng.family.Family.plan`).
            device: for which device.
            param: the option.
        """
        move = family_of(schedule).moves.get(self.name)
        return () if move is None else move.schedules(plan, schedule, param, device)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the rewrite gives at least one schedule that fits the device."""
        region = find_region(program, action)
        schedule = program.schedule(region)
        if schedule is None:
            self._check_text(program, region, action, context)
            return
        family, device = family_of(schedule), context.device
        if not self.tunes(family):
            raise IllegalAction(f"{action}: kernels of the family {family.name!r} have no {self.name}")
        plan = _plan(family, region, action)
        if self._rewrites:
            found = self.rewrite(schedule, plan, device, action.param)
        else:
            move = family.moves[self.name]
            move.check(plan, schedule, action.param, device, context.mode)
            found = move.probe(plan, schedule, action.param, device)
        if not found:
            raise IllegalAction(f"{action}: nothing to change in {schedule}")
        problems = [refusal(family, plan, s, device) for s in found]
        if all(problems):
            raise IllegalAction(f"{action}: {problems[0]}")

    def tunes(self, family: AnyFamily) -> bool:
        """Whether kernels of `family` can be tuned so."""
        return self.family in (None, family.name) and (self._rewrites or self.name in family.moves)

    @property
    def _rewrites(self) -> bool:
        """Whether it brings the rewrite itself."""
        return type(self).rewrite is not ScheduleKind.rewrite

    def schedules(self, program: Program, action: Action, context: Context) -> tuple[Schedule, ...]:
        """The schedules that a legal action leads to and that fit the device, best guess first.

        Raises:
            IllegalAction: none fits.
        """
        region = find_region(program, action)
        schedule = program.schedule(region)
        if schedule is None:
            raise IllegalAction(f"{action}: the region has no schedule; lower it first")
        family = family_of(schedule)
        plan = _plan(family, region, action)
        found = self.rewrite(schedule, plan, context.device, action.param)
        fitting = [s for s in found if refusal(family, plan, s, context.device) is None]
        if not fitting:
            raise IllegalAction(f"{action}: no configuration fits the device")
        return tuple(fitting)

    def _check_text(self, program: Program, region: Region, action: Action, context: Context) -> None:
        """On a kernel without a schedule the action is an intent, for a coder that can change texts."""
        family = concerned(region)
        text = context.coder.free_hand and program.implementation(region).generated
        if not text or family is None or not self.tunes(family):
            raise IllegalAction(f"{action}: the region has no schedule; lower it first")


def _plan(family: AnyFamily, region: Region, action: Action) -> Any:
    try:
        return plan_of(family, region)
    except Unsupported as error:  # its schedule was made up, or is another version's
        raise IllegalAction(f"{action}: {error}") from None


def find_region(program: Program, action: Action, number: int = 0) -> Region:
    """The region that `action` names.

    Raises:
        IllegalAction: it names none, one that the program does not have, or one that is computed once.
    """
    if len(action.regions) <= number:
        raise IllegalAction(f"{action.kind} needs {number + 1} region(s), got {len(action.regions)}")
    try:
        region = program.region(action.regions[number])
    except KeyError as error:
        raise IllegalAction(str(error.args[0])) from None
    if program.is_settled(region):
        raise IllegalAction(f"{region.id} depends on parameters alone and is computed once: no call would gain")
    return region


__all__ = ["Context", "GraphRewrite", "Kind", "Remainder", "ScheduleKind", "find_region", "proposed_on"]
