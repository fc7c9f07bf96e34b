"""compute-sanitizer's word on a program that has passed every gate.

Deals in an evaluation and the tools' reports on its program. Knows nothing about how a tool is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.screening.sanitizer import sanitize, unwatched
from qimeng.envs.workers.forkserver import plain_environment
from qimeng.interfaces import Evaluation, Gate
from qimeng.program.program import Program


def sanitized(program: Program, found: Evaluation, tools: Sequence[str], run: GpuRun, spec: bytes) -> Evaluation:
    """`found` with the reports of `tools` in its notes, or the refusal by one of them.

    Args:
        program: what was judged.
        found: its evaluation.
        tools: of `qimeng.envs.screening.sanitizer.TOOLS`.
        run: the evaluation, whose worker has ended.
        spec: the specification's bytes.
    """
    parts, own = run.parts, run.candidates[found.chosen].own.keys()
    if tools and (note := unwatched(program)):
        found = replace(found, notes=(*found.notes, note))
    for tool in tools:
        with parts.turns.turn("sanitize", run.clock):
            report = sanitize(
                tool,
                program.source,
                spec,
                str(parts.torch_device),
                parts.folder / "sanitizer",
                own,
                environment=plain_environment(),
            )
        if report.refuses:
            return Evaluation(Gate.PROGRAM, report.text, "sanitizer", notes=found.notes, sandbox=found.sandbox)
        found = replace(found, notes=(*found.notes, report.text), seconds=dict(run.clock.seconds))
    return found


__all__ = ["sanitized"]
