"""An example of an action on a tiny program: the code before and after, written by the template coder.

Deals in kinds and in the families' samples, which are no benchmark's problem. Works for any registered kind that the
template coder supports. Of the request it knows only the kind and the region's family.
"""

from __future__ import annotations

import difflib
from functools import lru_cache

import torch

from qimeng.actions import Context, Kind, check_action, kind_named, legal_actions
from qimeng.coder.llm.shown import shown_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.errors import CoderError, IllegalAction
from qimeng.family import AnyFamily, Sample, families
from qimeng.family.registry import BUILT_IN
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program

MAX_LINES = 160
"""An example longer than this costs more tokens than it explains."""

_CODER = TemplateCoder(("triton", "cuda"))


def example(
    action: Action, device: Device, mode: str = "default", family: AnyFamily | None = None
) -> tuple[str, str] | None:
    """The code before, and after as the template coder writes it (or as a diff, where that is shorter).

    None if the template coder supports this kind on none of the small programs, or only with very long code.

    Args:
        action: whose kind and choice are shown; another choice of the kind, where this one applies to none of them.
        device: what the code is for.
        mode: precision mode.
        family: of the region at hand, so that the example is of the same if it can; else of one that everybody knows.
    """
    return _example(kind_named(action.kind), action.param, device, mode, family)


@lru_cache(64)
def _example(kind: Kind, param: str, device: Device, mode: str, family: AnyFamily | None) -> tuple[str, str] | None:
    context = Context(device, _CODER, mode)
    other: tuple[str, str] | None = None
    every = [((f is not family, f.name not in BUILT_IN), sample) for f in families().values() for sample in f.samples()]
    for _, sample in sorted(every, key=lambda pair: pair[0]):
        for program in _states(sample, context):
            for action in kind.proposals(program, context):
                if other is not None and action.param != param:
                    continue
                shown = _carried_out(program, action, context)
                if shown is not None and action.param == param:
                    return shown
                other = other or shown
    return other


def _carried_out(program: Program, action: Action, context: Context) -> tuple[str, str] | None:
    try:
        check_action(program, action, context)
        request = Request(program, action, context.device, context.mode)
        patch = context.coder.write(request)
    except (CoderError, IllegalAction):
        return None
    if not patch.alternatives or patch.target is None:
        return None
    regions = [program.region(r) for r in action.regions]
    before = "\n".join(shown_source(program.implementation(r)) for r in regions)
    after = shown_source(patch.alternatives[0])
    diff = "".join(list(difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=2))[2:])
    if len(diff) < len(after):
        after = diff
    return (before, after) if len((before + after).splitlines()) <= MAX_LINES else None


@lru_cache(32)
def _states(sample: Sample, context: Context) -> tuple[Program, ...]:
    """A small program on PyTorch, with its first region lowered, and fused and lowered."""
    module, shapes = sample
    start = Program.start(capture(module, lambda: tuple(torch.empty(s) for s in shapes)))
    states = [start, _step(start, "lowering", context), _step(_step(start, "fusion", context), "lowering", context)]
    return tuple(s for i, s in enumerate(states) if s is not None and (i == 0 or s is not start))


def _step(program: Program, kind: str, context: Context) -> Program:
    action = next((a for a in legal_actions(program, context) if a.kind == kind), None)
    return program if action is None else context.coder.write(Request(program, action, context.device)).apply(program)


__all__ = ["example"]
