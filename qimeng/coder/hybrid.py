"""The hybrid coder: a template where one works, else a language model.

Deals in which coder writes which patch. Knows nothing about templates, prompts or models.
"""

from __future__ import annotations

from qimeng.actions import ScheduleKind, kind_named, rewritten
from qimeng.coder.llm.chat import HasChat
from qimeng.coder.template.coder import TemplateCoder
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region
from qimeng.interfaces import Coder, Patch, Reprints, Request
from qimeng.program.program import Program

GAIN = 1.02
"""A step that makes the program this many times faster is a gain; less may be noise."""


class HybridCoder(Coder, HasChat, Reprints):
    """`template` where it works, `writer` where it does not or where the template's sweep of a region stalls.

    - A kernel without a schedule belongs to the writer, which alone can change it. Lowering gives it back to the
      template.
    - A sweep stalls if the last `patience` steps on the region's schedule brought no gain.
    - The coder that wrote a patch repairs it. If the template has nothing left to try, the writer repairs.
    - If the writer has no answer, the template writes the patch if it can.

    Args:
        writer: writes text; a `qimeng.coder.llm.coder.LLMCoder`.
        template: prints schedules.
        patience: steps without gain after which a sweep stalls.
    """

    free_hand = True
    schedules = True

    def __init__(self, writer: Coder, template: TemplateCoder | None = None, patience: int = 3):
        self.writer, self.template, self.patience = writer, template or TemplateCoder(), patience
        self.memory = writer.memory
        self.languages = tuple(dict.fromkeys((*self.template.languages, *writer.languages)))
        self.chat = writer.chat if isinstance(writer, HasChat) else None

    def __repr__(self) -> str:
        return f"HybridCoder({self.writer!r})"

    def write(self, request: Request) -> Patch:
        """The patch, from the coder that should write it.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: neither could write it.
        """
        rewrite = rewritten(request, self)
        if rewrite.to_write is None:
            return rewrite.patch()
        able = self._template_can(rewrite.to_write, request)
        if able and not self._is_text(request) and not self._stalled(request):
            try:
                return self.template.write(request)
            except (CoderError, IllegalAction):  # nothing is left to try, or no schedule fits
                return self.writer.write(request)
        try:
            return self.writer.write(request)
        except CoderError as error:
            if not able or request.failed is not None:
                raise
            try:
                return self.template.write(request)
            except (CoderError, IllegalAction):
                raise error from None  # the question stays open

    def _template_can(self, region: Region, request: Request) -> bool:
        tunes = isinstance(kind_named(request.action.kind), ScheduleKind)
        if tunes and request.program.schedule(region) is None:
            return False
        return self.template.can_implement(region) is None

    def _is_text(self, request: Request) -> bool:
        """Whether it is a written kernel's repair."""
        failed = request.failed.alternatives if request.failed is not None else ()
        return any(i.generated and i.schedule is None for i in failed)

    def _stalled(self, request: Request) -> bool:
        """Whether the last steps on the schedule of the region brought nothing."""
        if not isinstance(kind_named(request.action.kind), ScheduleKind):
            return False
        idle, best = 0, None
        for step in request.history:
            ms = step.evaluation.ms if step.accepted and step.evaluation is not None else None
            gained = ms is not None and (best is None or ms * GAIN <= best)
            if request.action.regions[0] in step.action.regions:
                tuned = isinstance(kind_named(step.action.kind), ScheduleKind)
                idle = 0 if gained or not tuned else idle + 1
            best = ms if ms is not None and (best is None or ms < best) else best
        return idle >= self.patience

    # -- what legality asks

    def can_implement(self, region: Region) -> str | None:
        """None where one of the two can write kernels for `region`."""
        return self.template.can_implement(region) and self.writer.can_implement(region)

    def reprint(self, program: Program, graph: OpGraph) -> Program:
        """The template's; see `TemplateCoder.reprint`."""
        return self.template.reprint(program, graph)


__all__ = ["GAIN", "HybridCoder"]
