"""The template coder: the embedded default, which needs no model and no network.

Deals in requests and patches: a region's family gives the schedules and prints each. Knows no family by name, and
nothing about whether the result is right or fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.actions import Context, ScheduleKind, each_lowered, kind_named, rewritten
from qimeng.coder.template.reprint import reprinted
from qimeng.errors import CoderError, IllegalAction
from qimeng.family import (
    MAX_ALTERNATIVES,
    Unsupported,
    covering,
    family_of,
    is_built_in,
    plan_of,
    refusal,
    rivals,
    uncovered,
)
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region
from qimeng.interfaces import Coder, Patch, Prints, Reprints, Request
from qimeng.program.origin import note_printed
from qimeng.program.program import Implementation, Program
from qimeng.program.schedule import Schedule


class TemplateCoder(Coder, Prints, Reprints):
    """Prints kernels from schedules; an action changes the schedule, the patch is what changed.

    Args:
        languages: what it prints; actions `language` lead from one to another. Kernels begin in Triton.

    Raises:
        ValueError: an unknown language.
    """

    schedules = True

    def __init__(self, languages: Sequence[str] = ("triton",)):
        if unknown := [name for name in languages if name not in ("triton", "cuda")]:
            raise ValueError(f"the template coder does not print {unknown[0]!r}; known: triton, cuda")
        self.languages = tuple(languages)

    def can_implement(self, region: Region) -> str | None:
        """None where a family covers `region`, else the reason."""
        return uncovered(region)

    def write(self, request: Request) -> Patch:
        """The patch for `request.action`: a new implementation, or several to choose from.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: on repair, nothing is left to try (a template has no second version of the same schedule).
        """
        rewrite, kind = rewritten(request, self), kind_named(request.action.kind)
        if rewrite.each:
            return each_lowered(request, rewrite, self)
        if rewrite.to_write is None:
            return rewrite.patch()
        if isinstance(kind, ScheduleKind):
            return rewrite.patch(*self._tuned(rewrite.to_write, kind, request))
        printed = self._lowered(rewrite.to_write, request)
        return rewrite.patch(printed, f"{rewrite.to_write.label()} as {printed[0].schedule}")

    def _lowered(self, region: Region, request: Request) -> tuple[Implementation, ...]:
        """The region under its plain schedule, and under others, of rival families too, where that is no safe guess."""
        device, mode = request.device, request.mode
        family, plan = covering(region)
        schedule = family.default(plan, device, mode)
        guesses = family.guesses(plan, schedule, device, mode)
        fitting = [s for s in guesses if refusal(family, plan, s, device) is None]
        plain = [(other, its, other.default(its, device, mode)) for other, its in rivals(region, family)]
        others = [s for other, its, s in plain if refusal(other, its, s, device) is None]
        return self._printed(region, [schedule, *fitting[: MAX_ALTERNATIVES - 1 - len(others)], *others])

    def _tuned(self, region: Region, kind: ScheduleKind, request: Request) -> tuple[tuple[Implementation, ...], str]:
        """The configurations that the action leads to, and the present one, so that a step is never a step back."""
        if request.failed is not None:
            raise CoderError("every configuration of this action was tried")
        action, context = request.action, Context(request.device, self, request.mode)
        fitting = kind.schedules(request.program, action, context)[:MAX_ALTERNATIVES]
        try:
            printed = self._printed(region, fitting)
        except Unsupported as error:
            raise IllegalAction(f"{action}: {error}") from None
        present = request.program.implementation(region)
        note = f"{action.kind} {action.param}: {printed[0].schedule}"
        return (*printed[: MAX_ALTERNATIVES - 1], present), note

    def _printed(self, region: Region, schedules: Sequence[Schedule]) -> tuple[Implementation, ...]:
        """The implementations under those of `schedules` that the family prints.

        Raises:
            Unsupported: it prints none.
        """
        printed, reason = [], Unsupported("no schedule")
        for s in schedules:
            try:
                printed.append(self.print(region, s))
            except Unsupported as error:
                reason = error
        if not printed:
            raise reason
        return tuple(printed)

    def print(self, region: Region, schedule: Schedule) -> Implementation:
        """The implementation of `region` under `schedule`; that a family of this package printed it is written down.

        Raises:
            Unsupported: the family does not cover the region, or not under this schedule.
        """
        family = family_of(schedule)
        printed = family.print(plan_of(family, region), schedule, f"k{region.signature[:8]}")
        return note_printed(region, printed) if is_built_in(family) else printed

    def reprint(self, program: Program, graph: OpGraph) -> Program:
        """The same program for a graph of other sizes: same regions, same schedules.

        Regions whose schedule does not carry over get their default one; implementations that this coder did not
        write stay on PyTorch.

        Raises:
            CoderError: the graphs have different operators.
        """
        return reprinted(program, graph, self.print)


def with_cuda() -> TemplateCoder:
    """The template coder that prints CUDA C++ as well as Triton, where an action `language` asks for it."""
    return TemplateCoder(("triton", "cuda"))


__all__ = ["TemplateCoder", "with_cuda"]
