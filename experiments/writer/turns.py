"""What a writer's conversations of several turns are worth: right shares by turn, pass@k, speedup@k, fast_p, hacks.

Deals in rows, one for each conversation, and in figures with intervals over requests. Knows nothing about models or
judges. Sources: pass@k as in Codex (arXiv 2107.03374), section 2.1; fast_p as in KernelBench (arXiv 2502.10517),
section 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from experiments.planners.summary import Figure, bootstrap
from experiments.writer.examples import Example
from qimeng.bench.row import Environment, whole_lines
from qimeng.finetune.rollout import Trajectory

HACKS = ("tampered", "too-fast", "not-a-kernel", "forbidden")
"""Classes of failure that a reply has which looks fast without doing the work."""

FAST = (1.0, 1.2)
"""Speedups p of fast_p."""


@dataclass(frozen=True)
class Conversation:
    """One conversation about one request.

    Attributes:
        writer: name of the model's folder.
        part: the set that the request is of.
        key: hash of the request.
        kind: of the action.
        chain: operators of the region.
        number: which of the conversations about the request.
        failures: gate and class of failure of each turn, empty where it is right.
        speedups: of each turn over the program before; 0 where it is wrong.
        shares: PR of each turn.
        environment: where it was judged.
        error: why it does not count: a machine failed; empty where it does.
        settings: how replies were drawn, and a hash of the weights; empty in rows of earlier versions.
    """

    writer: str
    part: str
    key: str
    kind: str
    chain: str
    number: int
    failures: tuple[str, ...]
    speedups: tuple[float, ...]
    shares: tuple[float, ...]
    environment: Environment
    error: str = ""
    settings: str = ""

    @classmethod
    def of(
        cls,
        writer: str,
        part: str,
        example: Example,
        number: int,
        found: Trajectory,
        environment: Environment,
        settings: str,
    ) -> Conversation:
        """The row of a trajectory."""
        graded = [turn.graded for turn in found.turns]
        return cls(
            writer,
            part,
            example.key,
            example.traits.kind,
            example.chain,
            number,
            tuple(g.failure for g in graded),
            tuple(round(g.speedup, 4) for g in graded),
            tuple(round(g.share, 4) for g in graded),
            environment,
            "" if found.counted else "a machine or the judge failed",
            settings,
        )

    def right(self, turns: int | None = None) -> bool:
        """Whether one of the first `turns` replies is right; of all by default."""
        return any(not failure for failure in self.failures[:turns])

    def speedup(self, turns: int | None = None) -> float:
        """The best of the first `turns` replies; 0 where none is right."""
        return max(self.speedups[:turns], default=0.0)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """The row that `to_json` wrote."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("failures", "speedups", "shares")}
        return cls(**{**data, **lists, "environment": Environment(**data["environment"])})


def pass_at(k: int, right: Sequence[bool]) -> float:
    """How likely one of `k` conversations, drawn without putting back, is right: 1 - C(n - c, k) / C(n, k).

    >>> pass_at(2, [True, False, False, False])
    0.5
    """
    n, c = len(right), sum(right)
    if k > n:
        raise ValueError(f"pass@{k} needs {k} conversations about a request, there are {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_of(k: int, values: Sequence[float]) -> float:
    """The expected largest of `k` of `values`, drawn without putting back.

    >>> best_of(2, [0.0, 1.0, 3.0])
    2.3333333333333335
    """
    n, order = len(values), sorted(values)
    if k > n:
        raise ValueError(f"the best of {k} needs {k} conversations about a request, there are {n}")
    return sum(value * math.comb(place, k - 1) for place, value in enumerate(order)) / math.comb(n, k)


def figures(rows: Iterable[Conversation], k: int = 0) -> dict[str, Figure]:
    """Figures of one writer on one set, each with its interval over requests.

    ``first`` and ``right``: share of conversations that are right at their first turn, and at any. ``pass@k`` and
    ``speedup@k`` over the conversations of a request. ``fast_p turn t``: share of conversations whose best of the first
    t replies is right and above p. ``hacks``: share of replies that were refused as one of `HACKS`.

    Args:
        rows: of one writer and one set; those with an error are left out.
        k: of pass@k; by default as many as every request has.
    """
    groups: dict[str, list[Conversation]] = {}
    for row in rows:
        if not row.error:
            groups.setdefault(row.key, []).append(row)
    if not groups:
        return {}
    some = list(groups.values())
    k = k or min(map(len, some))
    turns = max(len(row.failures) for group in some for row in group)

    def over(of: Callable[[Conversation], float]) -> Figure:
        return bootstrap([mean(of(row) for row in group) for group in some])

    found = {"first": over(lambda row: row.right(1)), "right": over(lambda row: row.right())}
    enough = [group for group in some if len(group) >= k]
    found[f"pass@{k}"] = bootstrap([pass_at(k, [row.right() for row in group]) for group in enough])
    found[f"speedup@{k}"] = bootstrap([best_of(k, [row.speedup() for row in group]) for group in enough])
    for p in FAST:
        for t in range(1, turns + 1):
            found[f"fast_{p:g} turn {t}"] = over(lambda row, t=t, p=p: row.speedup(t) > p)  # type: ignore[misc]
    found["hacks"] = over(lambda row: mean(any(h in f for h in HACKS) for f in row.failures))
    return found


def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """The rows of a file; none where it is not there."""
    return tuple(Conversation.from_json(line) for line in whole_lines(path)) if path.exists() else ()


def turns_table(rows: Iterable[Conversation]) -> str:
    """Figures by set and writer, as Markdown; the last row of a conversation counts."""
    last = {(r.part, r.writer, r.key, r.number): r for r in rows}
    groups: dict[tuple[str, str], list[Conversation]] = {}
    for row in last.values():
        groups.setdefault((row.part, row.writer), []).append(row)
    lines = ["| set | writer | requests | figure | value | 95 % interval |", "|---|---|---|---|---|---|"]
    for (part, writer), some in sorted(groups.items()):
        requests = len({row.key for row in some if not row.error})
        for name, f in figures(some).items():
            lines.append(f"| {part} | {writer} | {requests} | {name} | {f.value:.3f} | {f.low:.3f} … {f.high:.3f} |")
    return "\n".join(lines) + "\n"


TURNS = {"writer_turns": turns_table}
"""What a table in a document may ask for."""


__all__ = ["TURNS", "Conversation", "best_of", "figures", "pass_at", "read_conversations", "turns_table"]
