"""Tables of evaluation rates on clusters.

Deals in rows as plain data and in Markdown. Knows nothing about how rows are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from qimeng.bench.markdown import markdown, number, percent

Rows = Sequence[Mapping[str, Any]]

LOCAL, ONE, TWO = "local", "cluster 1", "cluster 2"
"""Names of arms."""


def cluster_rate(rows: Rows) -> str:
    """A line for each arm: how many evaluations, what they cost, and how they agree with the first arm's."""
    arms = {row["arm"]["name"]: row for row in rows if row["what"] == "arm"}
    answers = {name: _answers(rows, name) for name in arms}
    head = ["pool", "GPUs", "judges", "evaluations", "in, s", "an hour and a GPU", "seconds each (median)"]
    head += ["of it not judging, ms", "lock idle", "measuring", "same verdict", "times apart (median)", "p90"]
    table = [head]
    for name, arm in arms.items():
        mine, base = answers[name], answers.get(LOCAL, {})
        same, apart = _agreement(base, mine) if name != LOCAL else ("", [])
        locks = list(arm["lock"].values())
        table.append(
            [
                name,
                str(arm["arm"]["gpus"]),
                str(arm["judges"]),
                str(arm["evaluations"]),
                number(arm["window_s"], 0),
                number(an_hour(arm), 0),
                number(_median(a["seconds"] for a in mine.values()), 2),
                number(_median(1e3 * (a["seconds"] - a["judged_s"]) for a in mine.values()), 1),
                percent(_mean([lock["idle"] for lock in locks])),
                percent(_mean([lock["measuring"] for lock in locks])),
                same,
                percent(_median(apart), 1),
                percent(sorted(apart)[int(0.9 * len(apart))] if apart else None, 1),
            ]
        )
    return "\n\n".join([_where(rows), markdown(table), *_sentences(rows, arms)])


def cluster_scaling(rows: Rows) -> str:
    """A line for each simulated run: its rate beside that of one simulated GPU, and what was asked again."""
    found = [row for row in rows if row["what"] == "simulated"]
    one = {r["times"]["source"]: r["an_hour_a_gpu"] for r in found if r["scenario"]["gpus"] == 1}
    head = ["simulated run", "GPUs", "an hour and a GPU", "efficiency", "lock idle", "measuring", "asked again"]
    table = [[*head, "calls lost", "answers", "of"]]
    for row in found:
        base = one.get(row["times"]["source"])
        again = ", ".join(f"{count} for a {whose}'s fault" for whose, count in sorted(row["again"].items()))
        table.append(
            [
                row["scenario"]["name"],
                str(row["scenario"]["gpus"]),
                number(row["an_hour_a_gpu"], 0),
                percent(row["an_hour_a_gpu"] / base if base else None),
                percent(row["idle"]),
                percent(row["measuring"]),
                again or "none",
                str(row["lost"]),
                str(row["answers"]),
                str(row["requests"]),
            ]
        )
    sources = []
    for times in {row["times"]["source"]: row["times"] for row in found}.values():
        real = f"; measured there on one GPU: {number(times['an_hour'], 0)} an hour" if times["an_hour"] else ""
        sources.append(
            f"Simulated, with the seconds of `{times['source']}`, {times['judges']} judges a GPU and "
            f"{number(1e3 * times['call_s'], 1)} ms of the driver for each request{real}."
        )
    return "\n\n".join([*sources, markdown(table)])


def an_hour(arm: Mapping[str, Any]) -> float | None:
    """Evaluations an hour and a GPU of an arm's row."""
    return 3600 * arm["evaluations"] / arm["window_s"] / arm["arm"]["gpus"] if arm["window_s"] else None


def _sentences(rows: Rows, arms: Mapping[str, Any]) -> list[str]:
    found = []
    one, two = arms.get(ONE), arms.get(TWO)
    if one and two:
        by_rate = (an_hour(two) or 0.0) / rate if (rate := an_hour(one)) else None
        found.append(f"Two GPUs over one, by GPU: {percent(by_rate)} of the rate.")
    ways = {row["pool"]: row for row in rows if row["what"] == "way"}
    if ways.keys() >= {"local", "cluster"}:
        here, there = ways["local"]["median_ms"], ways["cluster"]["median_ms"]
        found.append(
            f"A request that needs no judging takes {number(here, 1)} ms in a process of this machine and "
            f"{number(there, 1)} ms through the cluster: {number(there - here, 1)} ms more."
        )
    return found


def _answers(rows: Rows, arm: str) -> dict[str, Mapping[str, Any]]:
    """The evaluations of an arm, by request."""
    return {row["request"]: row for row in rows if row["what"] == "evaluation" and row["arm"]["name"] == arm}


def _agreement(base: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, list[float]]:
    """On how many requests that both answered the verdicts are the same; how far apart their times are."""
    both = [(base[key], other[key]) for key in base.keys() & other.keys()]
    same = sum((a["gate"], a["failure"]) == (b["gate"], b["failure"]) for a, b in both)
    times = [abs(math.log(a["ms"] / b["ms"])) for a, b in both if a["ms"] and b["ms"]]
    return f"{same} of {len(both)}", times


def _where(rows: Rows) -> str:
    places = {(r["environment"]["device"], r["environment"]["driver"], r["environment"]["commit"][:7]) for r in rows}
    modes = sorted({f"{row['dtype']}, mode {row['mode']}" for row in rows if row["what"] == "evaluation"})
    return "; ".join([*(f"{device}, driver {d}, commit {c}" for device, d, c in sorted(places)), *modes])


def _median(values: Any) -> float | None:
    found = list(values)
    return median(found) if found else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


CLUSTERS: dict[str, Callable[[Rows], str]] = {"clusterrate": cluster_rate, "clusterscaling": cluster_scaling}
"""Name of a table to the function that makes it of rows."""

__all__ = ["CLUSTERS", "an_hour", "cluster_rate", "cluster_scaling"]
