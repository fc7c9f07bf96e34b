"""What a kind of optimization is, and where kinds are registered.

Deals in the vocabulary's frame: proposals, legality, and the pure rewrite of a schedule. Knows nothing about kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from qimeng.actions.guard import FAMILIES, guarded
from qimeng.device import Device
from qimeng.errors import IllegalAction, KindFault, QimengError
from qimeng.graph.ops import family
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Coder, Facts, Patch
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule

GROUP = "qimeng.actions"
"""Entry-point group through which other packages add kinds."""

MAX_ALTERNATIVES = 8
"""Most configurations that one step may try."""


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


class Kind(ABC):
    """One kind of optimization.

    A subclass documents itself: one sentence, its arguments, and ``rewrite: before -> after``.

    Attributes:
        name: unique name, the first word of the action's text.
        options: the categorical choices (`Action.param`); ``("",)`` where there is nothing to choose.
    """

    name: str
    options: tuple[str, ...] = ("",)

    @abstractmethod
    def check(self, program: Program, action: Action, context: Context) -> None:
        """Raise `IllegalAction`, with the numbers, where `action` does not apply."""

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Actions that may apply: by default each option on each region."""
        for region in program.regions:
            for option in self.options:
                yield Action(self.name, (region.id,), option)

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """The schedules that carry the action out, best guess first, at most `MAX_ALTERNATIVES`; a pure function.

        Kinds that change the graph rather than a schedule leave this alone.
        """
        return ()

    def apply(self, program: Program, action: Action, context: Context) -> Patch | None:
        """The change of the graph that carries the action out; None where a coder writes it."""
        return None


class ScheduleKind(Kind):
    """A kind that rewrites the schedule of one region that already has one.

    A coder with a free hand carries it out on a kernel without a schedule as well: the action is then an intent in
    words, and nothing but its family can be checked.
    """

    family: str | None = None

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the rewrite gives at least one schedule that fits the device."""
        if self._is_text(program, action, context):
            return
        region, schedule, facts = self._target(program, action, context)
        found = self.rewrite(schedule, facts, context.device, action.param)
        if not found:
            raise IllegalAction(f"{action}: nothing to change in {schedule}")
        problems = [check_schedule(region, s, context) for s in found]
        if all(problems):
            raise IllegalAction(f"{action}: {problems[0]}")

    def _is_text(self, program: Program, action: Action, context: Context) -> bool:
        """Whether the action is an intent for a kernel that was written without a schedule."""
        region = find_region(program, action)
        if not context.coder.free_hand or program.schedule(region) is not None:
            return False
        nest = "gemm" if any(family(n) == "gemm" for n in region.ops) else "tile"
        return program.implementation(region).generated and self.family in (None, nest)

    def _target(self, program: Program, action: Action, context: Context) -> tuple[Region, Schedule, Facts]:
        region = find_region(program, action)
        schedule, facts = program.schedule(region), context.coder.facts(region)
        if schedule is None or facts is None:
            raise IllegalAction(f"{action}: the region has no schedule; lower it first")
        if self.family is not None and schedule.family != self.family:
            raise IllegalAction(f"{action}: for the {self.family} family, this region is {schedule.family}")
        return region, schedule, facts


def check_schedule(region: Region, schedule: Schedule, context: Context) -> str | None:
    """None where `schedule` fits the device, else why not, with the numbers."""
    device = context.device
    shared = context.coder.shared_bytes(region, schedule)
    if shared > device.shared_per_block:
        return f"needs {shared} B of shared memory, {device.name} allows {device.shared_per_block} B a block"
    if schedule.warps * device.warp_size > 1024:
        return f"{schedule.warps} warps are {schedule.warps * device.warp_size} threads, a block has at most 1024"
    tile = schedule.family == "tile"  # is computed piece by piece; a product's accumulator is held as a whole
    elements = schedule.block_p * schedule.block_r if tile else schedule.block_m * schedule.block_n
    per_thread = elements // (schedule.warps * device.warp_size)
    if per_thread > (256 if tile else 255):
        held = f"a tile of {elements} elements is {per_thread} a thread at {schedule.warps} warps"
        return f"{held}; a thread has 255 registers"
    return None


def find_region(program: Program, action: Action, number: int = 0) -> Region:
    """The region that `action` names.

    Raises:
        IllegalAction: it names none, or one that the program does not have.
    """
    if len(action.regions) <= number:
        raise IllegalAction(f"{action.kind} needs {number + 1} region(s), got {len(action.regions)}")
    try:
        return program.region(action.regions[number])
    except KeyError as error:
        raise IllegalAction(str(error.args[0])) from None


_KINDS: dict[str, Kind] = {}
_entered: set[EntryPoint] = set()
_loaded: list[bool] = []


def register(kind: Kind) -> Kind:
    """Add a kind to the vocabulary.

    Raises:
        ValueError: a kind of that name is registered already, the name is not an identifier, the options are no tuple
            of texts, or the family is unknown.
    """
    name, options, nest = getattr(kind, "name", None), kind.options, getattr(kind, "family", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a kind's name must be an identifier, {type(kind).__qualname__} has {name!r}")
    if not isinstance(options, tuple) or not options or not all(isinstance(o, str) for o in options):
        raise ValueError(f"the kind {name!r} has options {options!r}; they must be a tuple of texts, ('',) for none")
    if nest is not None and nest not in FAMILIES:
        raise ValueError(
            f"the kind {name!r} is for the family {nest!r}; known: {', '.join(FAMILIES)}, or None for both"
        )
    if kind.name in _KINDS:
        raise ValueError(f"a kind called {kind.name!r} is registered already ({type(_KINDS[kind.name]).__module__})")
    _KINDS[kind.name] = guarded(kind)
    return kind


def unregister(name: str) -> None:
    """Take a kind out of the vocabulary again (for tests and notebooks)."""
    _KINDS.pop(name, None)


def kinds() -> dict[str, Kind]:
    """Every registered kind by name; kinds of installed packages (entry points) are loaded at the first call.

    Raises:
        QimengError: an installed package's kind cannot be loaded or registered; the message names the package.
    """
    if not _loaded:
        for point in entry_points(group=GROUP):
            if point in _entered:
                continue
            _entered.add(point)
            try:
                found = point.load()
                register(found() if isinstance(found, type) else found)
            except Exception as error:  # loading runs the other package's code
                _entered.discard(point)
                package = point.dist.name if point.dist else point.value
                raise QimengError(
                    f"the kind of action {point.name!r} of the installed package {package} cannot be used "
                    f"({type(error).__name__}: {error}); mend or uninstall that package"
                ) from error
        _loaded.append(True)
    return dict(_KINDS)


def kind_named(name: str) -> Kind:
    """The kind called `name`.

    Raises:
        IllegalAction: there is none; the message lists the names.
    """
    try:
        return kinds()[name]
    except KeyError:
        raise IllegalAction(f"unknown kind of action {name!r}; known: {', '.join(sorted(kinds()))}") from None


def check_action(program: Program, action: Action, context: Context) -> None:
    """Raise `IllegalAction`, with the numbers, where `action` does not apply to `program`."""
    kind_named(action.kind).check(program, action, context)


def legal_actions(program: Program, context: Context, faults: dict[str, str] | None = None) -> tuple[Action, ...]:
    """Every action that applies, `stop` included; what is offered here can be coded.

    Args:
        program: what they apply to.
        context: device, coder and mode.
        faults: where given, the message of each kind that fails by itself is put in; the first action that shows it
            is offered, so that a step tells it.
    """
    found: dict[Action, None] = {}
    for kind in kinds().values():
        try:
            proposed = tuple(kind.proposals(program, context))
        except KindFault as fault:
            if faults is not None:
                faults[kind.name] = str(fault)
            continue
        for action in proposed:
            try:
                kind.check(program, action, context)
            except KindFault as fault:
                if faults is not None:
                    faults[kind.name] = str(fault)
                    found[action] = None
                break
            except IllegalAction:
                continue
            found[action] = None
    return tuple(found)


def action_text(action: Action, program: Program) -> str:
    """The action as a planner reads it: kind, choice, and what the regions compute.

    Regions are named by what they are, not by id, so that a text means the same in every program.
    """
    parts = []
    for region_id in action.regions:
        region = program.region(region_id)
        shapes = ", ".join("x".join(map(str, program.graph.meta(v).shape)) or "scalar" for v in region.outputs)
        parts.append(f"{region_id} {region.label()} [{shapes}]")
    head = f"{action.kind} {action.param}".strip()
    return f"{head}: {' with '.join(parts)}" if parts else head
