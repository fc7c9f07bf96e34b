"""The figures of a scoreboard, from stored rows.

Deals in rows only; every figure is computed here, so that a table, the command line and a test agree. Knows nothing
about how rows were made or how figures are printed. Measured and estimated times never meet in one summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from qimeng.bench.row import Row

THRESHOLDS = (1.0, 1.2, 2.0)
"""The p of KernelBench's fast_p; fast_0 is the share of right results."""

RIGHT_MARGIN = 0.98
"""A result below this speedup over eager is listed."""

MEMORY_MARGIN = 1.1
"""A result that needs more than this times eager's peak memory is listed."""


@dataclass(frozen=True)
class GroupSummary:
    """Speed of the right, timed results of one group.

    Attributes:
        group: its name, see `group_of`.
        problems: rows in the group.
        timed: rows that are right and have both times; the means are over these.
        over_eager: geometric mean of eager's time over ours.
        compile_over_eager: the same for torch.compile, over the rows where it was timed.
        compile_best_over_eager: the same for its fastest mode.
        over_compile: geometric mean of torch.compile's time over ours.
        over_compile_best: the same against torch.compile's fastest mode.
        over_compile_right: as `over_compile`, over the rows where torch.compile's result is as accurate as a
            candidate's has to be.
        roofline_over_eager: the geometric mean that a program at the roofline would have.
        roofline_fraction: median of the bound over our time.
        half_generated: share of all its problems with a right result that spends at least half of its GPU time in
            generated kernels.
        median_seconds: median wall seconds of a problem, baselines not counted.
        median_evaluations: median number of evaluations of a problem.
    """

    group: str
    problems: int
    timed: int
    over_eager: float | None
    compile_over_eager: float | None
    compile_best_over_eager: float | None
    over_compile: float | None
    over_compile_best: float | None
    over_compile_right: float | None
    roofline_over_eager: float | None
    roofline_fraction: float | None
    half_generated: float | None
    median_seconds: float | None
    median_evaluations: float | None


@dataclass(frozen=True)
class KindSummary:
    """What one kind of action did over all rows.

    Attributes:
        kind: its name.
        tried: steps of this kind.
        accepted: share of them whose program was right.
        gained: share of them that were right and faster by at least 1 %.
        median_gain: median of time before over time after, over the accepted steps that were timed.
        best_gain: the largest of these.
    """

    kind: str
    tried: int
    accepted: float
    gained: float
    median_gain: float | None
    best_gain: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of one run: rows with equal settings, one for each problem.

    Attributes:
        settings: planner, coder, search, mode, dtype and budget in words.
        planner: name of the planner.
        mode: precision mode.
        dtype: of inputs and parameters.
        environment: device and versions, each combination once.
        estimated: True where the times are an analytic model's.
        problems: number of rows.
        fast: p to share of problems that are right and more than p times faster than eager; 0 is the share of right
            ones. Over all problems, failures included.
        fast_compile: the same against torch.compile, for p of 1 and above, over the rows where it was timed.
        kernelbench_right: share that passes KernelBench's own rule, of those where it was checked.
        groups: speed by group.
        compile_modes: mode of torch.compile to its geometric mean over eager, over the rows where it was timed.
        half_generated: share of all problems with a right result that spends at least half of its GPU time in
            generated kernels.
        median_generated: median share of GPU time in generated kernels, over the right results.
        slowest: problem and speedup of the slowest right result against eager.
        too_slow: problems below `RIGHT_MARGIN` of eager.
        memory_heavy: problems with more than `MEMORY_MARGIN` of eager's peak memory, and the ratio.
        median_memory_ratio: median of peak memory over eager's.
        roofline_fraction: median of the roofline's bound over our time.
        failed: problem to the reason why there is no right result.
        kernelbench_wrong: problems that pass our rule and not KernelBench's.
        eager_unstable: problems on which eager run twice fails KernelBench's rule.
        exact_fails: problems on which the float64 result itself fails that rule.
        compiled_wrong: problems on which torch.compile's result is outside the budget of a candidate.
        degenerate: problem to the reason why a constant passes.
        random: problems with random operators, which stay on PyTorch.
        kinds: what each kind of action did.
        median_seconds: median wall seconds of a problem, baselines not counted.
        median_evaluations: median number of evaluations of a problem.
        seconds_split: part of the work to its median seconds.
    """

    settings: str
    planner: str
    mode: str
    dtype: str
    environment: str
    estimated: bool
    problems: int
    fast: dict[str, float]
    fast_compile: dict[str, float]
    kernelbench_right: float | None
    groups: tuple[GroupSummary, ...]
    compile_modes: dict[str, float]
    half_generated: float | None
    median_generated: float | None
    slowest: tuple[str, float] | None
    too_slow: tuple[str, ...]
    memory_heavy: dict[str, float]
    median_memory_ratio: float | None
    roofline_fraction: float | None
    failed: dict[str, str]
    kernelbench_wrong: tuple[str, ...]
    eager_unstable: tuple[str, ...]
    exact_fails: tuple[str, ...]
    compiled_wrong: tuple[str, ...]
    degenerate: dict[str, str]
    random: tuple[str, ...]
    kinds: tuple[KindSummary, ...]
    median_seconds: float | None
    median_evaluations: float | None
    seconds_split: dict[str, float]


def group_of(row: Row) -> str:
    """The scoreboard's group of a row: light families together; degenerate, collapsed and random ones apart.

    >>> from qimeng.bench.row import Settings
    >>> group_of(Row("a", "", "", Settings(), family="reduction"))
    'pointwise and reduction'
    """
    if not row.family:
        return "not captured"
    if row.degenerate:
        return "degenerate"
    if row.random:
        return "random operators"
    if row.collapsed:
        return f"{row.family}, collapsed"
    return "pointwise and reduction" if row.family in ("pointwise", "reduction") else row.family


def summarize(rows: Iterable[Row]) -> tuple[Summary, ...]:
    """One summary for each run (see `runs`), in order of first appearance."""
    return tuple(_summarize(label, estimated, part) for (label, _, estimated), part in runs(rows).items())


def runs(rows: Iterable[Row]) -> dict[tuple[str, str, bool], tuple[Row, ...]]:
    """Rows by settings' label, device and kind of time, in order of first appearance; the last one of each problem.

    A row without a device is a failure whose process died before it could say; it counts in the first run with the same
    settings, where that has no other row of the problem.
    """
    parts: dict[tuple[str, str, bool], dict[tuple[str, str], Row]] = {}
    homeless = []
    for row in rows:
        if row.environment.device:
            part = parts.setdefault((row.settings.label, row.environment.device, _is_estimate(row)), {})
            part.pop(row.problem, None)
            part[row.problem] = row
        else:
            homeless.append(row)
    for row in homeless:
        home = next((key for key in parts if key[0] == row.settings.label), (row.settings.label, "", False))
        parts.setdefault(home, {}).setdefault(row.problem, row)
    return {key: tuple(part.values()) for key, part in parts.items()}


def _is_estimate(row: Row) -> bool:
    return row.estimated or not row.environment.driver


def _summarize(label: str, estimated: bool, rows: Sequence[Row]) -> Summary:
    right = [r for r in rows if r.right]
    speeds = {r.id: r.speedup for r in right if r.speedup is not None}
    shares = [r.generated_share for r in right if r.generated_share is not None]
    checked = [r for r in rows if r.kernelbench is not None]
    names = list(dict.fromkeys(group_of(r) for r in rows))
    slowest = min(speeds, key=lambda name: speeds[name], default=None)
    memory = {r.id: r.memory_ratio for r in right if r.memory_ratio is not None}
    return Summary(
        settings=label,
        planner=rows[0].settings.planner,
        mode=rows[0].settings.mode,
        dtype=rows[0].settings.dtype,
        environment="; ".join(dict.fromkeys(_environment(r) for r in rows if r.environment.device)),
        estimated=estimated,
        problems=len(rows),
        fast={"fast_0": len(right) / len(rows), **_fast(rows, lambda r: r.speedup)},
        fast_compile=_fast([r for r in rows if r.compiled is not None], lambda r: r.over_compile),
        kernelbench_right=_share(checked, lambda r: bool(r.kernelbench)),
        groups=tuple(_group(name, [r for r in rows if group_of(r) == name]) for name in names),
        compile_modes=_compile_modes(right),
        half_generated=_half_generated(rows),
        median_generated=_median(shares),
        slowest=(slowest, speeds[slowest]) if slowest is not None else None,
        too_slow=tuple(name for name, s in speeds.items() if s < RIGHT_MARGIN),
        memory_heavy={name: ratio for name, ratio in memory.items() if ratio > MEMORY_MARGIN},
        median_memory_ratio=_median(memory.values()),
        roofline_fraction=_median(r.roofline_fraction for r in right),
        failed={r.id: r.error or "not right" for r in rows if not r.right},
        kernelbench_wrong=tuple(r.id for r in right if r.kernelbench is False),
        eager_unstable=tuple(r.id for r in rows if r.eager_unstable),
        exact_fails=tuple(r.id for r in rows if r.exact_fails),
        compiled_wrong=tuple(r.id for r in rows if r.compiled_wrong),
        degenerate={r.id: r.degenerate for r in rows if r.degenerate},
        random=tuple(r.id for r in rows if r.random),
        kinds=_kinds(rows),
        median_seconds=_median(r.optimize_seconds for r in rows),
        median_evaluations=_median(r.evaluations for r in rows if r.error is None),
        seconds_split=_split(rows),
    )


def _group(name: str, rows: Sequence[Row]) -> GroupSummary:
    timed = [r for r in rows if r.right and r.speedup is not None]
    floors = [
        r.eager.device_ms / r.floor_ms
        for r in timed
        if r.eager is not None and r.floor_ms is not None and r.floor_ms > 0
    ]
    return GroupSummary(
        group=name,
        problems=len(rows),
        timed=len(timed),
        over_eager=geometric_mean(r.speedup for r in timed),
        compile_over_eager=geometric_mean(r.compile_speedup for r in timed),
        compile_best_over_eager=geometric_mean(r.compile_best_speedup for r in timed),
        over_compile=geometric_mean(r.over_compile for r in timed),
        over_compile_best=geometric_mean(r.over_compile_best for r in timed),
        over_compile_right=geometric_mean(r.over_compile for r in timed if not r.compiled_wrong),
        roofline_over_eager=geometric_mean(floors),
        roofline_fraction=_median(r.roofline_fraction for r in timed),
        half_generated=_half_generated(rows),
        median_seconds=_median(r.optimize_seconds for r in rows),
        median_evaluations=_median(r.evaluations for r in rows if r.error is None),
    )


def _half_generated(rows: Sequence[Row]) -> float | None:
    shares = [r.generated_share for r in rows if r.right and r.generated_share is not None]
    return sum(share >= 0.5 for share in shares) / len(rows) if shares else None


def _compile_modes(rows: Sequence[Row]) -> dict[str, float]:
    modes = dict.fromkeys(mode for r in rows for mode in r.compiled_modes)
    means = {mode: geometric_mean(r.over_eager_in(mode) for r in rows) for mode in modes}
    return {mode: mean for mode, mean in means.items() if mean is not None}


def _fast(rows: Sequence[Row], speed: Callable[[Row], float | None]) -> dict[str, float]:
    """For each p the share of `rows` that are right and more than p times faster."""
    return {
        f"fast_{p:g}": sum(bool(r.right) and (speed(r) or 0.0) > p for r in rows) / len(rows)
        for p in THRESHOLDS
        if rows
    }


def _kinds(rows: Sequence[Row]) -> tuple[KindSummary, ...]:
    steps = [s for r in rows for s in r.steps if s.kind != "stop"]
    table = []
    for kind in dict.fromkeys(s.kind for s in steps):
        mine = [s for s in steps if s.kind == kind]
        gains = [s.gain for s in mine if s.accepted and s.gain is not None]
        table.append(
            KindSummary(
                kind,
                tried=len(mine),
                accepted=sum(s.accepted for s in mine) / len(mine),
                gained=sum(g >= 1.01 for g in gains) / len(mine),
                median_gain=_median(gains),
                best_gain=max(gains, default=None),
            )
        )
    return tuple(sorted(table, key=lambda k: -k.tried))


def _split(rows: Sequence[Row]) -> dict[str, float]:
    parts = dict.fromkeys(part for r in rows for part in r.seconds if part not in ("total", "optimize"))
    medians = {part: _median(r.seconds.get(part, 0.0) for r in rows if r.seconds) for part in parts}
    return {part: value for part, value in medians.items() if value is not None}


def _environment(row: Row) -> str:
    e = row.environment
    parts = [
        e.device or "no device",
        *(
            f"{name} {value}"
            for name, value in (("driver", e.driver), ("torch", e.torch), ("triton", e.triton))
            if value
        ),
        *(f"{name} {value}" for name, value in (("Python", e.python), ("commit", e.commit[:12])) if value),
    ]
    return ", ".join(parts)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of what is known; None where nothing is.

    >>> geometric_mean([1.0, None, 4.0])
    2.0
    """
    logs = [math.log(v) for v in values if v is not None and v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(median(known)) if known else None


def _share(rows: Sequence[Row], holds: Callable[[Row], bool]) -> float | None:
    return sum(holds(r) for r in rows) / len(rows) if rows else None


__all__ = ["GroupSummary", "KindSummary", "Summary", "geometric_mean", "group_of", "runs", "summarize"]
