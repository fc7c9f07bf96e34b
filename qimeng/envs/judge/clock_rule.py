"""Compares a reported time with the judge's clock: confirmed, refuted, or undecided.

Deals in milliseconds of batches. A busy machine delays some batches, a cheat all of them, so the shortest of each kind
counts. A time can be confirmed after any number of batches, but it is refuted only by `ROUNDS` of each kind: before
that, the candidate's may have been delayed by chance. A result that noise could explain is undecided. Knows nothing
about how batches are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

ROUNDS = 6
"""Batches of a candidate, and half as many as of empty calls, that refute a time. If a batch is as likely to be delayed
as an empty one is, all six take longer than half of the empty ones by chance in one of 64 checks. (A program that is
refused for its time was timed and checked three times.)"""

SHARE = {"cuda": 0.8, "cpu": 0.7}
"""Minimum share of the judge's time that a reported time must reach. It is lower on a CPU, whose cores run other
processes too."""
RATIO = 0.5
"""Minimum ratio of the reported time to the judge's time, relative to the same ratio for eager. In a batch, parameters
stay in the cache, which they do not between events. So the two times differ, but for both programs alike. What the
device waits for the host between eager's events is left out of eager's ratio: calls of a batch that are queued do not
wait, and a program of fewer launches does not either."""
SLACK_MS = {"cuda": 0.02, "cpu": 0.05}
"""Milliseconds by which the shortest of a few batches may be longer by chance."""
CALL_MS = {"cuda": 0.001, "cpu": 0.015}
"""Milliseconds that a call may take longer in a batch, because another process wrote its inputs."""
LAUNCH_MS = 0.05
"""Milliseconds of a call that may be the host's where calls are not queued: a few launches on a busy machine."""
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
        eager_waits: whether eager's were not, since it waits for its own results: the host is part of its time alone.
    """

    calls: int
    nothing: tuple[float, ...] = ()
    eager: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    queued: bool = False
    eager_waits: bool = False

    def with_round(
        self, nothing: tuple[float, ...], eager: float, candidate: float, queued: bool, eager_waits: bool = False
    ) -> Readings:
        """These readings and one more batch of eager and of the candidate. Readings of another method are dropped."""
        if (queued, eager_waits) != (self.queued, self.eager_waits):
            return Readings(self.calls, nothing, (eager,), (candidate,), queued, eager_waits)
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


def decide(found: Readings, told_ms: float, eager_ms: float, kind: str, late_ms: float = 0.0) -> Ruling:
    """Whether a call of the candidate takes `told_ms`, where one of eager takes `eager_ms`.

    A time that seems refuted may be confirmed by more batches: ask again until there are `ROUNDS`.

    Args:
        found: what the clock says.
        told_ms: of the candidate, by its own process.
        eager_ms: of eager, by a process without candidates.
        kind: ``"cuda"`` or ``"cpu"``.
        late_ms: how much of `eager_ms` the device may have waited for the host.
    """
    shortest, usual = min(found.nothing), median(found.nothing)
    slack = SLACK_MS[kind] / found.calls + CALL_MS[kind]
    eager = (min(found.eager) - shortest) / found.calls
    # where calls are not queued, the host is part of the batch, as it is of eager's
    eager_queued = found.queued and not found.eager_waits
    eager_host = max(eager - eager_ms, 0.0) if kind == "cuda" and not eager_queued else 0.0
    host = 0.0 if found.queued else eager_host
    most = (min(found.candidate) - shortest) / found.calls - slack - host
    least = (min(found.candidate) - usual) / found.calls - slack - host
    seen = f"the judge's clock says {most + slack:.4g} ms a call"
    claim = f"the worker reports {told_ms:.4g} ms"
    busy_ms = max(eager_ms - late_ms, 0.0) if eager_queued else eager_ms
    share = _share(busy_ms / max(eager - eager_host, slack), kind)
    if unlike := _eager_unlike(eager - eager_host, told_ms, eager_ms, slack, kind):
        return Ruling(None, unlike)
    if told_ms < share * least:
        if kind == "cuda" and not found.queued and least - told_ms < LAUNCH_MS:
            return Ruling(None, f"{claim} a call, {seen}: the difference may be the host's, which launches them")
        return Ruling(False, f"{claim} a call, but {seen}")
    if told_ms < share * most:
        return Ruling(None, f"{claim} a call, {seen}: the difference may be chance")
    if noise := _noise(found, max(told_ms, eager_ms), slack):
        return Ruling(None, noise)
    if most + slack < LEAST * told_ms - slack:
        return Ruling(None, f"{seen}, {claim}: the machine is too busy to decide")
    return Ruling(True, seen)


def _share(relation: float, kind: str) -> float:
    """Share of the judge's time that a reported time must reach, by the relation of the two for eager."""
    if kind == "cuda":
        return max(SHARE[kind], RATIO * relation)
    return SHARE[kind] * min(max(relation, WORST_RELATION), 1.0)


def _noise(found: Readings, ms: float, slack: float) -> str:
    """Why the clock cannot confirm a time now: its times of empty calls are not steady."""
    first, second, *_ = sorted(found.nothing)
    noise = (second - first) / found.calls
    steady = noise <= NOISE * ms + slack
    return "" if steady else f"empty calls differ by {noise:.3g} ms: the machine is too busy to decide"


def _eager_unlike(eager: float, told_ms: float, eager_ms: float, slack: float, kind: str) -> str:
    """Why the clock cannot be used now: its time of eager is unlike the one that eager's own process reports."""
    if LEAST * eager_ms - slack <= eager <= eager_ms / SHARE[kind] + slack + NOISE * told_ms:
        return ""
    return (
        f"the judge's clock says {eager:.4g} ms for a call of PyTorch eager, its own process {eager_ms:.4g} ms: "
        "the machine is too busy to decide"
    )


__all__ = ["ROUNDS", "Readings", "Ruling", "decide"]
