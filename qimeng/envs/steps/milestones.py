"""Steps in a network are judged on their region; at milestones the whole program is judged.

Deals in the states since the last one that was judged as a whole. Their times are sums: each region counts with its
time on PyTorch in a whole program that was measured, times what its judge found of it beside PyTorch. A milestone
replaces the sum by a measurement. If the program is refused there, the step at fault is found by bisection and left
out, and the others are kept (`Session.settle`). Knows nothing about how a region or a program is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from qimeng.device import Device
from qimeng.envs.steps.state import State
from qimeng.envs.steps.time_shares import by_operator, carried, region_times
from qimeng.graph.region import Region
from qimeng.interfaces import Evaluation, Patch, Scope
from qimeng.library import LANGUAGE
from qimeng.program.program import Program

EVERY = 8
"""Accepted steps on regions after which the whole program is judged."""
CULPRITS = 3
"""Steps at fault that one milestone looks for; after that, all steps since the last milestone are left out."""


def is_on_region(program: Program, patch: Patch) -> bool:
    """Whether `patch` gives one region of several another implementation and leaves graph and launch as they are."""
    if patch.target is None or not patch.alternatives or patch.rewrites or patch.launch is not None:
        return False
    return len(patch.apply(program).called) > 1


def shared_out(program: Program, evaluation: Evaluation, device: Device) -> dict[str, float]:
    """Milliseconds of each region, which add up to those of the program where these are known."""
    times = region_times(program, evaluation, device)
    total = sum(times.values())
    scale = evaluation.ms / total if evaluation.ms and total else 1.0
    return {region: ms * scale for region, ms in times.items()}


def note_measured(torch_ms: dict[str, float], program: Program, evaluation: Evaluation, device: Device) -> None:
    """Enter what operators on PyTorch take in a program that was judged as a whole; what is known stays."""
    times = shared_out(program, evaluation, device)
    for region in program.called:
        if program.implementation(region).language == "torch":
            for name, ms in by_operator(region, times[region.id], device).items():
                torch_ms.setdefault(name, ms)


def summed(
    found: Evaluation, before: State, program: Program, target: Region, torch_ms: dict[str, float], device: Device
) -> Evaluation:
    """What the judge of one region found, as an evaluation of the whole program, whose time is a sum.

    Args:
        found: of the region alone.
        before: the state before the step.
        program: after it.
        target: the region that got another implementation; equal regions got it as well.
        torch_ms: milliseconds of each operator on PyTorch.
        device: the device.
    """
    assert before.evaluation is not None
    shared = replace(before.evaluation, region_ms=shared_out(before.program, before.evaluation, device))
    known = carried(before.program, program, shared, device)
    times = region_times(program, known, device)
    ratio = 1 / found.speedup if found.speedup else 1.0
    for region in program.called:
        if region.signature == target.signature:
            on_torch = sum(torch_ms.get(name, 0.0) for name in region.nodes)
            times[region.id] = (on_torch or times[region.id]) * ratio
    total = sum(times.values())
    made = {r.id: program.implementation(r) for r in program.called}
    own = sum(times[r] for r, m in made.items() if m.generated)
    library = sum(times[r] for r, m in made.items() if m.language == LANGUAGE)
    timing = None if found.timing is None else replace(found.timing, device_ms=total, wall_ms=None)
    return replace(
        found,
        timing=timing,
        eager=before.evaluation.eager,
        region_ms=times,
        generated_share=own / total if total else 0.0,
        library_share=library / total if total else 0.0,
        peak_bytes=None,
        eager_peak_bytes=None,
        prepare_ms=None,
        scope=Scope.SUM,
    )


def unsettled(state: State) -> tuple[State, ...]:
    """The states on the way to `state` since the last one that was judged as a whole; empty where it needs no judge."""
    if not state.is_sum:
        return ()
    path = state.path()
    last = max(i for i, s in enumerate(path) if s.judged)
    return path[last + 1 :]


def is_due(state: State) -> bool:
    """Whether enough steps were taken on regions since the last milestone."""
    way = unsettled(state)
    return sum(s.is_sum and s.record is not None and bool(s.record.patch.alternatives) for s in way) >= EVERY


def bisected(way: Sequence[State], wrong: Evaluation, judge: Callable[[Program], Evaluation]) -> tuple[int, Evaluation]:
    """Which of `way` is the first state that is wrong as a whole program, and its evaluation.

    Args:
        way: states, each a step on from the one before; before the first all is right.
        wrong: evaluation of the last one.
        judge: judges whole programs.
    """
    good, bad = -1, len(way) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        found = judge(way[middle].program)
        good, bad, wrong = (middle, bad, wrong) if found.ok else (good, middle, found)
    return bad, wrong


__all__ = [
    "CULPRITS",
    "EVERY",
    "bisected",
    "is_due",
    "is_on_region",
    "note_measured",
    "shared_out",
    "summed",
    "unsettled",
]
