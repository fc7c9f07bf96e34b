"""Compares a reported time with the judge's clock: confirmed, refuted, or undecided.

Deals in milliseconds of batches. A busy machine delays some batches, a cheat all of them, so the shortest of each kind
counts. A result that noise could explain is undecided. Knows nothing about how batches are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE = {"cuda": 0.8, "cpu": 0.7}
"""Minimum share of the judge's time that a reported time must reach. It is lower on a CPU, whose cores run other
processes too."""
RATIO = 0.5
"""Minimum ratio of the reported time to the judge's time, relative to the same ratio for eager. In a batch, parameters
stay in the cache, which they do not between events. So the two times differ, but for both programs alike."""
SLACK_MS = {"cuda": 0.02, "cpu": 0.05}
"""Milliseconds by which the shortest of a few batches may be longer by chance."""
CALL_MS = {"cuda": 0.001, "cpu": 0.015}
"""Milliseconds that a call may take longer in a batch, because another process wrote its inputs."""
WORST_RELATION = 0.6
"""Lower bound on a CPU for the ratio of eager's reported time to the judge's time."""
LEAST = 0.2
"""Minimum share of a reported time that the clock must see. If it sees less, the clock is unreliable."""
NOISE = 0.25
"""Share of a reported time by which two batches of empty calls may differ, for each call, or by which eager's time may
exceed its report."""


@dataclass(frozen=True)
class Readings:
    """Milliseconds of batches by the judge's clock.

    Attributes:
        calls: of each batch.
        nothing: with calls that do nothing.
        eager: with calls of eager.
        candidate: with calls of the candidate.
        queued: whether the calls were queued on the device beforehand, so that the host is no part of their time.
    """

    calls: int
    nothing: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    queued: bool = False

    def with_round(self, nothing: tuple[float, ...], eager: float, candidate: float, queued: bool) -> Readings:
        """These readings and one more batch of eager and of the candidate. Readings of another method are dropped."""
        if queued != self.queued:
            return Readings(self.calls, nothing, (eager,), (candidate,), queued)
        return replace(
            self,
            nothing=(*self.nothing, *nothing),
            eager=(*self.eager, eager),
            candidate=(*self.candidate, candidate),
        )


@dataclass(frozen=True)
class Ruling:
    """What comes of it.

    Attributes:
        ok: True if the time is confirmed, False if refuted, None if undecided.
        text: why, in words.
    """

    ok: bool | None
    text: str


def decide(found: Readings, told_ms: float, eager_ms: float, kind: str) -> Ruling:
    """Whether a call of the candidate takes `told_ms`, where one of eager takes `eager_ms`.

    Args:
        found: what the clock says.
        told_ms: of the candidate, by its own process.
        eager_ms: of eager, by a process without candidates.
        kind: ``"cuda"`` or ``"cpu"``.
    """
    idle = sorted(found.nothing)
    slack = SLACK_MS[kind] / found.calls + CALL_MS[kind]
    most = (min(found.candidate) - idle[0]) / found.calls - slack
    least = (min(found.candidate) - idle[-1]) / found.calls - slack
    eager = (min(found.eager) - idle[0]) / found.calls
    host = 0.0
    if kind == "cuda" and not found.queued:  # the host is part of the batch, as it is of eager's
        host = max(eager - eager_ms, 0.0)
    most, least = most - host, least - host
    seen = f"the judge's clock says {most + slack:.4g} ms a call"
    fit = _unfit(found, idle, told_ms, eager - host, eager_ms, slack, kind)
    relation = eager_ms / max(eager - host, slack)
    if kind == "cuda":
        needed = max(SHARE[kind], RATIO * relation) * most
    else:
        needed = SHARE[kind] * min(max(relation, WORST_RELATION), 1.0) * most
    if fit:
        return Ruling(None, fit)
    if told_ms >= needed:
        if most + slack < LEAST * told_ms - slack:
            return Ruling(None, f"{seen}, the worker reports {told_ms:.4g} ms: the machine is too busy to decide")
        return Ruling(True, seen)
    if told_ms < needed * max(least, 0.0) / most:
        return Ruling(False, f"the worker reports {told_ms:.4g} ms a call, but {seen}")
    return Ruling(None, f"the worker reports {told_ms:.4g} ms a call, {seen}: the difference may be chance")


def _unfit(
    found: Readings, idle: list[float], told_ms: float, eager: float, eager_ms: float, slack: float, kind: str
) -> str:
    """Why the clock cannot be used now: its times of empty calls or of eager are not steady."""
    noise = (idle[1] - idle[0]) / found.calls
    if noise > NOISE * max(told_ms, eager_ms) + slack:
        return f"empty calls differ by {noise:.3g} ms: the machine is too busy to decide"
    if not LEAST * eager_ms - slack <= eager <= eager_ms / SHARE[kind] + slack + NOISE * told_ms:
        return (
            f"the judge's clock says {eager:.4g} ms for a call of PyTorch eager, its own process {eager_ms:.4g} ms: "
            "the machine is too busy to decide"
        )
    return ""


__all__ = ["Readings", "Ruling", "decide"]
