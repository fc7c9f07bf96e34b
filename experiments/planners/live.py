"""The programs that replays ended with, timed live: what the stored answers were worth.

Deals in the best program of each replay, each of which is verified once more, as `plan_and_code` does with its winner.
Knows nothing about how it was found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments.planners.replay import Method, ReplayRow
from qimeng.bench.row import Environment, RowError, append_line, whole_lines
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Asked, Timing
from qimeng.planner.data.programs import programs_of
from qimeng.planner.data.tree import Tree


@dataclass(frozen=True)
class LiveRow:
    """One program, timed live.

    Attributes:
        spec: digest of the spec.
        name: what it is called.
        program: digest of the program, as `ReplayRow.best` has it.
        device: where it was timed.
        right: whether it passed the final verification.
        candidate: its times; None where it was not right.
        eager: PyTorch's, in turns with it.
        error: why it was refused.
        environment: where it was timed.
    """

    spec: str
    name: str
    program: str
    device: str
    right: bool
    candidate: Timing | None = None
    eager: Timing | None = None
    error: str | None = None
    environment: Environment = field(default_factory=Environment)

    @property
    def speedup(self) -> float:
        """Eager's time over the program's; 1 where the program is not right or slower, since eager is kept then."""
        if self.candidate is None or self.eager is None or not self.candidate.device_ms:
            return 1.0
        return max(1.0, self.eager.device_ms / self.candidate.device_ms)

    def to_json(self) -> str:
        """One line; `from_json` gives an equal row back."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> LiveRow:
        """The row that `to_json` wrote.

        Raises:
            RowError: the text is no such row.
        """
        try:
            data = json.loads(text)
            times = {key: data[key] and Timing(**data[key]) for key in ("candidate", "eager")}
            return cls(**{**data, **times, "environment": Environment(**data["environment"])})
        except (ValueError, KeyError, TypeError) as error:
            raise RowError(f"not a row of a live timing: {text[:80]!r} ({type(error).__name__}: {error})") from error


def time_live(
    trees: Iterable[Tree],
    rows: Sequence[ReplayRow],
    make: Callable[[Tree], Task],
    environment: Environment,
    done: Sequence[LiveRow] = (),
) -> Iterator[LiveRow]:
    """Verify and time the best program of every replay, one that several ended with only once.

    The programs come from the trees: to replay once more would need the planners, and might end elsewhere on another
    machine, where a language model's logits are rounded differently.

    Args:
        trees: that were replayed.
        rows: of the replays.
        make: a task with a live judge; it is closed here.
        environment: where this runs.
        done: rows that are there already; one whose program the tree did not hold counts for nothing.

    Yields:
        New rows, as they are made.
    """
    known = {(d.spec, d.program) for d in done if d.device}
    for tree in trees:
        spec = tree.conditions.spec
        wanted = dict.fromkeys(r.best for r in rows if r.spec == spec and r.best and (spec, r.best) not in known)
        if not wanted:
            continue
        task = make(tree)
        programs = programs_of(tree.today(task.start), task.start)
        for digest in wanted:
            if digest not in programs:
                yield LiveRow(spec, tree.name, digest, "", False, error="the tree does not hold this program")
                continue
            found = task.evaluator.evaluate(programs[digest], asked=Asked.FINAL)
            yield LiveRow(
                spec,
                tree.name,
                digest,
                task.context.device.name,
                found.ok,
                found.timing if found.ok else None,
                found.eager,
                found.error,
                environment,
            )
        task.evaluator.close()


def live_gains(rows: Sequence[ReplayRow], live: Sequence[LiveRow]) -> dict[Method, tuple[float, int]]:
    """Method to the geometric mean of the live speedups of its final programs, and how many were timed."""
    known = {(r.spec, r.program): r.speedup for r in live if r.device}
    found: dict[Method, list[float]] = {}
    for row in rows:
        if (row.spec, row.best) in known:
            found.setdefault(row.method, []).append(math.log(known[row.spec, row.best]))
    return {m: (math.exp(sum(logs) / len(logs)), len(logs)) for m, logs in found.items()}


def read_live(path: Path | str) -> tuple[LiveRow, ...]:
    """The rows of a file.

    Raises:
        RowError: no such file, or a line in it is no such row.
    """
    return tuple(LiveRow.from_json(line) for line in whole_lines(path))


def append_live(path: Path | str, row: LiveRow) -> None:
    """Add `row` at the end of the file, durably."""
    append_line(path, row.to_json())


__all__ = ["LiveRow", "append_live", "live_gains", "read_live", "time_live"]
