"""The template coder: the embedded default, which needs no model and no network.

Deals in requests and patches: which schedules an action leads to, and printing each. Knows nothing about whether the
result is right or fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.actions import Context, kind_named
from qimeng.actions.base import MAX_ALTERNATIVES, check_schedule, find_region
from qimeng.actions.graph_kinds import fused_partition, fused_region
from qimeng.coder.template.analysis import Analysis, analyse
from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.gemm import print_gemm
from qimeng.coder.template.gemm_plan import GemmPlan
from qimeng.coder.template.gemm_schedule import default_schedule as default_gemm
from qimeng.coder.template.gemm_schedule import precisions, schedule_for_precision, shared_bytes
from qimeng.coder.template.special import SPECIAL
from qimeng.coder.template.tile import print_tile
from qimeng.coder.template.tile_plan import TilePlan
from qimeng.coder.template.tile_plan import default_schedule as default_tile
from qimeng.device import Device
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region, partition, repartition, split
from qimeng.interfaces import Coder, Facts, Patch, Request
from qimeng.program.origin import note_printed
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.program.schedule import Schedule

FORMS = ("wave", "cooperative", "split", "resident")
"""Forms of a reduction that lowering tries beside the plain one (`loop` is that wherever there are rows enough)."""
GUESSES = 2
"""Schedules of each; twice as many of a product's precision."""


class TemplateCoder(Coder):
    """Prints kernels from schedules; an action changes the schedule, the patch is what changed."""

    def can_implement(self, region: Region) -> str | None:
        """None where a template covers `region`, else the reason."""
        try:
            analyse(region)
        except Unsupported as error:
            return str(error)
        return None

    def facts(self, region: Region) -> Facts | None:
        """The loop nest of `region` in numbers."""
        try:
            return analyse(region).facts
        except Unsupported:
            return None

    def shared_bytes(self, region: Region, schedule: Schedule) -> int:
        """Shared memory in bytes that a block needs; tiles in registers need little."""
        plan = analyse(region).plan
        if isinstance(plan, GemmPlan):
            return shared_bytes(plan, schedule)
        return schedule.block_p * schedule.warps * 4

    def write(self, request: Request) -> Patch:
        """The patch for `request.action`: a new partition, a new implementation, or several to choose from.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: on repair, nothing is left to try (a template has no second version of the same schedule).
        """
        action, program = request.action, request.program
        context = Context(request.device, self, request.mode)
        kind = kind_named(action.kind)
        kind.check(program, action, context)
        if action.kind == "fusion":
            return self._fuse(request)
        if action.kind == "unfuse":
            return Patch(regions=split(program.regions, action.regions[0]), note="one region an operator")
        region = find_region(program, action)
        if action.kind == "library":
            return Patch(target=region.id, alternatives=(torch_implementation(region),), note="back to the library")
        if action.kind == "lowering":
            return self._lower(program.regions, region, request, None)
        return self._reschedule(region, request, context)

    def _fuse(self, request: Request) -> Patch:
        program, action = request.program, request.action
        regions = fused_partition(program, action)
        fused = fused_region(program, action)
        parents = [program.implementation(find_region(program, action, i)) for i in (0, 1)]
        if not any(p.generated for p in parents):
            return Patch(regions=regions, note=f"{fused.label()} as one region")
        return self._lower(regions, fused, request, regions)

    def _lower(
        self, regions: Sequence[Region], region: Region, request: Request, new: tuple[Region, ...] | None
    ) -> Patch:
        """The region under its plain schedule, and under others where that one is no safe guess."""
        found, context = analyse(region), Context(request.device, self, request.mode)
        schedule = default_schedule(found, request.device, request.mode)
        others = [s for s in guesses(found, schedule, context) if check_schedule(region, s, context) is None]
        printed = self._printed(region, [schedule, *others[: MAX_ALTERNATIVES - 1]])
        return Patch(new, region.id, printed, f"{region.label()} as {printed[0].schedule}")

    def _reschedule(self, region: Region, request: Request, context: Context) -> Patch:
        """The configurations that the action leads to, and the present one, so that a step is never a step back."""
        schedule, found = request.program.schedule(region), analyse(region)
        assert schedule is not None  # the kind's check says so
        kind = kind_named(request.action.kind)
        if request.failed is not None:
            raise CoderError("every configuration of this action was tried")
        if request.action.kind == "precision" and isinstance(found.plan, GemmPlan):
            choices = schedule_for_precision(found.plan, schedule, request.action.param, request.device)
        else:
            choices = kind.rewrite(schedule, found.facts, request.device, request.action.param)
        fitting = [s for s in choices if check_schedule(region, s, context) is None][:MAX_ALTERNATIVES]
        if not fitting:
            raise IllegalAction(f"{request.action}: no configuration fits the device")
        try:
            printed = self._printed(region, fitting)
        except Unsupported as error:
            raise IllegalAction(f"{request.action}: {error}") from None
        present = request.program.implementation(region)
        printed = (*printed[: MAX_ALTERNATIVES - 1], present)
        return Patch(None, region.id, printed, f"{request.action.kind} {request.action.param}: {printed[0].schedule}")

    def _printed(self, region: Region, schedules: Sequence[Schedule]) -> tuple[Implementation, ...]:
        """The implementations under those of `schedules` that the template covers.

        Raises:
            Unsupported: it covers none.
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
        """The implementation of `region` under `schedule`; that a template printed it is written down."""
        return note_printed(region, self._print(region, schedule))

    @staticmethod
    def _print(region: Region, schedule: Schedule) -> Implementation:
        found = analyse(region)
        prefix = f"k{region.signature[:8]}"
        if isinstance(found.plan, TilePlan):
            return print_tile(found.nest, found.loads, found.plan, schedule, prefix, len(region.inputs))
        return print_gemm(found.region, found.nest, found.loads, found.plan, schedule, prefix)

    def reprint(self, program: Program, graph: OpGraph) -> Program:
        """The same program for a graph of other sizes: same regions, same schedules.

        Regions whose schedule does not carry over get their default one; implementations that this coder did not
        write stay on PyTorch.

        Raises:
            CoderError: the graphs have different operators.
        """
        if [n.target for n in program.graph.ops()] != [n.target for n in graph.ops()]:
            raise CoderError("the graph has other operators than the program")
        rename = dict(zip(program.graph.nodes, graph.nodes, strict=True))
        smaller = Program(graph, partition(graph))
        smaller = smaller.with_regions(repartition(graph, [{rename[n] for n in r.nodes} for r in program.regions]))
        by_nodes = {r.nodes: r for r in smaller.regions}
        for region in program.regions:
            schedule = program.schedule(region)
            twin = by_nodes.get(tuple(rename[n] for n in region.nodes))
            if schedule is None or twin is None:
                continue
            try:
                implementation = self.print(twin, _shrink(schedule, analyse(twin).facts))
            except Unsupported:
                continue
            smaller = smaller.with_implementation(twin.id, implementation)
        return smaller


def _shrink(schedule: Schedule, facts: Facts) -> Schedule:
    """`schedule` with row and column blocks no larger than a smaller problem needs.

    A cooperative row becomes one program's: others that run at the same time cannot be relied on in an interpreter.
    """
    if schedule.family != "tile":
        return schedule
    columns = 1 << max(facts.columns - 1, 0).bit_length()
    whole = schedule.form in ("resident", "cooperative")
    width = max(columns, 1) if whole else min(schedule.block_r, max(columns // 2, 8))
    rows = 1 << max(facts.rows - 1, 0).bit_length()
    return schedule.but(block_r=width, block_p=min(schedule.block_p, max(rows // 2, 1)))


def guesses(found: Analysis, schedule: Schedule, context: Context) -> list[Schedule]:
    """Schedules that may well be faster than the plain one, so that lowering measures them beside it.

    For a reduction whose rows are too long for one program's registers, the other forms: which one streams best hangs
    on the row's length and alignment and on what is computed. For a product of fp32 operands, the tensor cores at the
    precisions that the mode admits; for one of half operands, larger tiles, of packed operands where rows of memory are
    not aligned.
    """
    if isinstance(found.plan, TilePlan):
        if not found.plan.passes or schedule.form == "resident":
            return []
        split = kind_named("split")
        forms = [split.rewrite(schedule, found.facts, context.device, form) for form in FORMS]
        return [s for several in forms for s in several[:GUESSES]]
    device, plan = context.device, found.plan
    if plan.half:
        return list(schedule_for_precision(plan, schedule, schedule.precision, device)[: 2 * GUESSES])
    if device.tf32_tflops <= device.fp32_tflops:
        return []
    first, *others = precisions(plan, device, context.mode)
    several = [schedule_for_precision(plan, schedule, first, device)[: 2 * GUESSES]]
    several += [schedule_for_precision(plan, schedule, p, device)[:GUESSES] for p in others]
    return [s for schedules in several for s in schedules]


def default_schedule(found: Analysis, device: Device, mode: str) -> Schedule:
    """The plain schedule that lowering gives a region.

    Half types take special functions in few instructions from the start, where the GPU has the units: what those leave
    out is below the rounding of the result, and such kernels are bound by instructions rather than memory.
    """
    special = any(e.op in SPECIAL for e in found.nest.exprs)
    fast = special and found.nest.finest != "float32" and device.has("approximate")
    if isinstance(found.plan, TilePlan):
        return default_tile(found.plan, device).but(fast=fast)
    return default_gemm(found.plan, device, mode, found.facts.dtype).but(fast=fast)
