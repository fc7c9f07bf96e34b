"""The kind that lowers all regions of a large program in one step.

Deals in regions on PyTorch. Knows nothing about schedules' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from qimeng.actions.base import Context, GraphRewrite, Kind
from qimeng.actions.large import MANY, is_large, unlike
from qimeng.actions.registry import register
from qimeng.errors import CoderError, IllegalAction
from qimeng.family import Unsupported, covering, is_covered
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Coder, Patch, Prints, Request
from qimeng.program.program import Implementation, Program
from qimeng.program.schedule import Schedule


class LowerAll(Kind):
    """Replace PyTorch calls by generated kernels in every region that a family covers, each unlike region once.

    The kernels that make the program wrong, or take longer than what they replace, are left out again.

    args: none.
    rewrite: ``v = f(x); w = g(v); …`` -> ``f_kernel[grid](x, v); g_kernel[grid](v, w); …``
    """

    name = "lower_all"

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One, for a large program."""
        if is_large(program):
            yield Action(self.name)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where a large program has two such regions or more, and the coder prints kernels without a model."""
        if not context.coder.schedules:
            raise IllegalAction("lower_all is for coders that print kernels from schedules")
        if not is_large(program):
            raise IllegalAction(f"lower_all is for programs of {MANY} operators or more; lower one region at a time")
        waiting = waiting_regions(program, context)
        if len(waiting) < 2:
            raise IllegalAction(
                f"{len(waiting)} unlike region(s) on PyTorch can be lowered; lower_all needs at least 2"
            )

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The graph stays."""
        return GraphRewrite(each=waiting_regions(program, context))


def waiting_regions(program: Program, context: Context) -> tuple[Region, ...]:
    """One of each unlike region on PyTorch that a family covers and the coder can implement."""
    waiting = (r for r in unlike(program) if program.implementation(r).language == "torch")
    return tuple(r for r in waiting if is_covered(r) and context.coder.can_implement(r) is None)


def each_lowered(request: Request, rewrite: GraphRewrite, coder: Coder) -> Patch:
    """The patch with a kernel for each of `rewrite.each`, of those that `coder` writes for it.

    Several kernels are judged together, so that none is measured beside others: where they come from schedules, it is
    the one that the region's family takes unmeasured, else the first. A region that the coder has no kernel for stays
    as it is.

    Raises:
        CoderError: it wrote none, and the graph stays as it is; the message is that of the last region.
    """
    if request.failed is not None:
        raise CoderError("every part of this action was tried")
    written = []
    request = replace(request, program=request.program.with_rewrites(rewrite.rewrites))
    problem: CoderError | IllegalAction = CoderError("no region is left to lower")
    for region in rewrite.each:
        try:
            written.append((region.id, _lowered(region, request, coder)))
        except (CoderError, IllegalAction) as error:
            problem = error
    if not written and not rewrite.rewrites:
        raise problem
    note = ", ".join(filter(None, (rewrite.note, f"{len(written)} kernels" if written else "")))
    return Patch(note=note, rewrites=rewrite.rewrites, others=tuple(written))


def _lowered(region: Region, request: Request, coder: Coder) -> Implementation:
    """The kernel that the family of `region` takes unmeasured, or the first that `coder` writes."""
    wanted: Schedule | None = None
    with suppress(Unsupported):
        family, plan = covering(region)
        wanted = family.unmeasured(plan, request.device, request.mode)
        if isinstance(coder, Prints):
            return coder.print(region, wanted)  # alone: others would not be used
    made = coder.write(replace(request, action=Action("lowering", (region.id,)))).alternatives
    return next((each for each in made if each.schedule == wanted), made[0])


register(LowerAll())


__all__ = ["LowerAll", "each_lowered", "waiting_regions"]
