"""A state as a planner reads it: a short text, and a vector of numbers.

Deals in shapes, shares of time and outcomes. Knows nothing about kernels: no Triton is shown. Families and operators
have no list here: a family of another package says what its regions are called (`qimeng.family.Family.word`), and the
vector has the hash of the word (`qimeng.envs.gym.words`), so that its length stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qimeng.actions import action_text
from qimeng.envs.gym.words import WIDTH, mean_vector, vector
from qimeng.envs.steps.time_shares import bound_ms, ceilings, region_times
from qimeng.family import word_of
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import flops
from qimeng.graph.region import Region
from qimeng.interfaces import Observation, Step

TEXTS = 2
"""Version of the texts, higher whenever the same state or action reads otherwise: policies that learnt to read older
texts are then refused. Another word for a family or an operator that is new is no other version. 2 since actions say
what they may save at most."""

LAST_STEPS = 4
"""Steps of the history that the text shows."""

SHOWN_REGIONS = 24
"""Regions that the text lists, those with the most time first."""

REGION_SLOTS = 8
"""Regions that the feature vector describes, those with the most time first."""


@dataclass(frozen=True)
class Feature:
    """One number of the vector: what it is, its range and its unit."""

    name: str
    low: float
    high: float
    unit: str


def _table() -> tuple[Feature, ...]:
    found = [
        Feature("speedup", -8, 8, "log2 of eager's device time over the present program's; 0 where not known"),
        Feature("best speedup", -8, 8, "log2 of eager's device time over the best program's"),
        Feature("headroom", -8, 16, "log2 of the present time over the sum of the regions' roofline bounds"),
        Feature("time", 0, 32, "log2 of 1 + present device nanoseconds"),
        Feature("regions", 0, 16, "log2 of 1 + number of regions"),
        Feature("generated regions", 0, 1, "fraction of the regions"),
        Feature("generated time", 0, 1, "fraction of the device time"),
        Feature("steps left", 0, 16, "log2 of 1 + steps"),
        Feature("judged", 0, 16, "log2 of 1 + steps so far that were judged"),
        Feature("refusals", 0, 1, "refused steps in a row, over 8"),
        Feature("mode high", 0, 1, "1 in mode high"),
        Feature("mode highest", 0, 1, "1 in mode highest"),
        Feature("bandwidth", 0, 16, "log2 of GB/s"),
        Feature("half rate", 0, 16, "log2 of TFLOP/s"),
        Feature("multiprocessors", 0, 16, "log2 of their number"),
    ]
    for i in range(REGION_SLOTS):
        found += [
            Feature(f"region {i} share", 0, 1, "fraction of the device time"),
            Feature(f"region {i} roofline", 0, 1, "roofline bound over device time"),
            Feature(f"region {i} intensity", -16, 16, "log2 of FLOP a byte"),
            Feature(f"region {i} operators", 0, 16, "log2 of 1 + operators"),
            Feature(f"region {i} generated", 0, 1, "1 for a generated kernel"),
            Feature(f"region {i} present", 0, 1, "1 where there is such a region"),
            *(Feature(f"region {i} word {j}", -1, 1, "vector of its family's word") for j in range(WIDTH)),
            *(Feature(f"region {i} operators {j}", -1, 1, "mean of its operators' vectors") for j in range(WIDTH)),
        ]
    return tuple(found)


FEATURES = _table()
"""The vector's entries in order; slots without a region are 0."""


def features(observation: Observation) -> np.ndarray:
    """The state as `FEATURES`, float32, each clipped to its range."""
    o, program, device = observation, observation.program, observation.device
    times = region_times(program, o.evaluation, device)
    total = sum(times.values())
    bound = sum(bound_ms(r, device, o.mode) for r in program.regions)
    present = o.evaluation.ms if o.evaluation else None
    refused = next((i for i, s in enumerate(reversed(o.history)) if s.accepted), len(o.history))
    values = [
        _ratio(o.eager_ms, present),
        _ratio(o.eager_ms, o.best_ms),
        _ratio(present, bound),
        math.log2(1 + (present or 0.0) * 1e6),
        math.log2(1 + len(program.regions)),
        _fraction(sum(program.implementation(r).generated for r in program.regions), len(program.regions)),
        (o.evaluation.generated_share if o.evaluation else None) or 0.0,
        math.log2(1 + max(o.steps_left, 0)),
        math.log2(1 + sum(s.evaluation is not None for s in o.history)),
        min(refused, 8) / 8,
        float(o.mode == "high"),
        float(o.mode == "highest"),
        math.log2(device.bandwidth_gbs),
        math.log2(device.half_tflops),
        math.log2(device.sms),
    ]
    for region in sorted(program.regions, key=lambda r: (-times[r.id], r.id))[:REGION_SLOTS]:
        work = sum(flops(program.graph, n) for n in region.ops)
        values += [
            _fraction(times[region.id], total),
            _fraction(bound_ms(region, device, o.mode), times[region.id]),
            _ratio(work, region.bytes_moved()),
            math.log2(1 + len(region.ops)),
            float(program.implementation(region).generated),
            1.0,
            *vector(word_of(region)),
            *mean_vector(node.packet for node in region.ops),
        ]
    values += [0.0] * (len(FEATURES) - len(values))
    low, high = feature_bounds()
    return np.clip(np.asarray(values, dtype=np.float32), low, high)


def feature_bounds() -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each feature, float32."""
    low = np.asarray([f.low for f in FEATURES], dtype=np.float32)
    return low, np.asarray([f.high for f in FEATURES], dtype=np.float32)


def render_text(observation: Observation) -> str:
    """The state in a few lines of ASCII: device, times, regions by time, the last steps."""
    o, program, device = observation, observation.program, observation.device
    times = region_times(program, o.evaluation, device)
    total = sum(times.values())
    measured = o.evaluation is not None and all(r.id in o.evaluation.region_ms for r in program.called)
    lines = [
        f"device {device.name}: {device.sms} SMs, {device.bandwidth_gbs:g} GB/s, {device.fp32_tflops:g} fp32 TFLOP/s, "
        f"{device.half_tflops:g} half TFLOP/s; mode {o.mode}; {o.steps_left} steps left",
        f"time {_ms(o.evaluation.ms if o.evaluation else None)}, best {_ms(o.best_ms)}, eager {_ms(o.eager_ms)}",
        f"regions ({'by time' if measured else 'by roofline bound'}):",
    ]
    ranked = sorted(program.regions, key=lambda r: (-times[r.id], r.id))
    for region in ranked[:SHOWN_REGIONS]:
        implementation = program.implementation(region)
        how = str(implementation.schedule) if implementation.schedule is not None else implementation.language
        bound = bound_ms(region, device, o.mode)
        lines.append(
            f"{region.id} {word_of(region)} {region.label()} {shapes_text(region)} | {how} | "
            f"{_fraction(times[region.id], total):.0%} {_ms(times[region.id])}, bound {_ms(bound)}"
        )
    if len(ranked) > SHOWN_REGIONS:
        lines.append(f"and {len(ranked) - SHOWN_REGIONS} smaller ones")
    if o.history:
        lines.append("last steps:")
        lines += [step_text(s) for s in o.history[-LAST_STEPS:]]
    return "\n".join(lines).encode("ascii", "replace").decode()


def action_texts(observation: Observation) -> tuple[str, ...]:
    """The text of each of `observation.actions`, ASCII, in order: what it is, what it may save at most, and where.

    What it may save is a share of the program's time (`ceilings`): so close to the action, a planner need not look it
    up among the regions.
    """
    o = observation
    found = []
    for action, gain in zip(o.actions, ceilings(o.actions, o.program, o.evaluation, o.device, o.mode), strict=True):
        head, colon, where = action_text(action, o.program).partition(": ")
        text = f"{head}, bound -{_percent(1 - 1 / gain)}: {where}" if colon else head
        found.append(text.encode("ascii", "replace").decode())
    return tuple(found)


def _percent(share: float) -> str:
    """A share of at least 0 with the digits that matter.

    >>> [_percent(s) for s in (0.9963, 0.8004, 0.0213, 0.0013, 0.0)]
    ['100%', '80%', '2%', '0.1%', '0%']
    """
    percent = 100 * max(share, 0.0)
    return f"{percent:.0f}%" if percent >= 9.5 or percent < 0.05 else f"{percent:.1g}%"


def step_text(step: Step) -> str:
    """A step and what came of it, on one line."""
    if step.evaluation is None:
        return f"{step.action}: accepted, graph only" if step.accepted else f"{step.action}: not tried"
    if step.accepted:
        return f"{step.action}: accepted, {_ms(step.evaluation.ms)}"
    reason = (step.evaluation.error or "").split("\n")[0][:120]
    return f"{step.action}: refused at gate {step.evaluation.gate.value}, {reason}"


def shapes_text(region: Region) -> str:
    """Inputs and outputs as ``[8x16 f32, 16 f32 -> 8x16 f32]``."""

    def text(values: tuple[Value, ...]) -> str:
        metas = [region.graph.meta(v) for v in values]
        return ", ".join(f"{'x'.join(map(str, m.shape)) or 'scalar'} {_short(m.dtype)}" for m in metas)

    return f"[{text(region.inputs)} -> {text(region.outputs)}]"


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "i")


def _ms(ms: float | None) -> str:
    return "unknown" if ms is None else f"{ms:.4g} ms"


def _ratio(a: float | None, b: float | None) -> float:
    return math.log2(a / b) if a and b else 0.0


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


__all__ = [
    "FEATURES",
    "LAST_STEPS",
    "REGION_SLOTS",
    "TEXTS",
    "Feature",
    "action_texts",
    "feature_bounds",
    "features",
    "render_text",
    "shapes_text",
    "step_text",
]
