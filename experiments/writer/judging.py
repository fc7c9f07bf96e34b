"""What a writer's patches are worth: share that pass all gates at the first try, and after repair, beside baselines.

Deals in coders, held-out examples and rows, one for each request and coder, in processes on every GPU, resumable. Knows
nothing about how kernels are judged, or how a model was trained.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from experiments.writer.examples import Example
from qimeng.bench.markdown import percent
from qimeng.bench.pool import Place, Pool
from qimeng.bench.row import Environment, append_line, whole_lines
from qimeng.envs.steps.setup import make_task
from qimeng.errors import CoderError, IllegalAction, QimengError
from qimeng.interfaces import Coder, Evaluator, Request
from qimeng.interfaces.records import program_from_json
from qimeng.spec import KernelSpec

REPAIRS = 2

TOGETHER = 4
"""Requests of one spec that are judged by one process, one after another."""

LIMIT_S = 240.0
"""Seconds that these may take."""


@dataclass(frozen=True)
class Judged:
    """One request to one coder.

    Attributes:
        part: the set that the request is of: ``"shapes"`` or ``"chains"``.
        key: hash of the request.
        coder: name of the coder.
        kind: of the action.
        chain: operators of the region.
        passed: the try that passed all gates, from 1; 0 where none did.
        tries: gate and class of failure of each try, ``"passed"`` last where it did.
        seconds: of judging, and of writing where the answers were not ready.
        environment: where it was judged.
        error: why nothing could be judged; no row of that kind counts.
    """

    part: str
    key: str
    coder: str
    kind: str
    chain: str
    passed: int
    tries: tuple[str, ...]
    seconds: float
    environment: Environment
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Judged:
        """The row that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "tries": tuple(data["tries"]), "environment": Environment(**data["environment"])})


@dataclass(frozen=True)
class Batch:
    """Requests of one spec, with the names of the coders that each is put to."""

    part: str
    asked: tuple[tuple[Example, tuple[str, ...]], ...]


def batches(part: str, examples: Iterable[Example], coders: Sequence[str], done: Iterable[Judged]) -> list[Batch]:
    """What is still to be judged; what could not be judged is tried again.

    Args:
        part: what the rows call the set.
        examples: the requests.
        coders: names of coders.
        done: rows that are there.
    """
    known = {(r.part, r.key, r.coder) for r in done if r.error is None}

    def spec(e: Example) -> tuple[str, str, str]:
        return e.source, e.dtype, e.mode

    found = []
    for _, group in groupby(sorted(examples, key=spec), spec):
        left = [(e, tuple(n for n in coders if (part, e.key, n) not in known)) for e in group]
        left = [(e, names) for e, names in left if names]
        found += [Batch(part, tuple(left[i : i + TOGETHER])) for i in range(0, len(left), TOGETHER)]
    return found


def judge(
    some: Sequence[Batch],
    work: Callable[[Batch], Sequence[Judged]],
    out: Path,
    places: Sequence[Place] = (Place(),),
    seconds: float = math.inf,
    limit_s: float = LIMIT_S,
    on_row: Callable[[Judged], None] = lambda row: None,
) -> None:
    """Have `some` judged; a row for each request and coder, appended to `out`.

    Args:
        some: what is judged.
        work: `rows_of` with its coders, pickled.
        out: JSON lines.
        places: where, and how many at once.
        seconds: wall-clock limit; what is not judged by then is left to another run.
        limit_s: seconds that one batch may take; none of its rows is kept if it takes longer.
        on_row: told each row.
    """
    stop_at = time.monotonic() + seconds
    with Pool(places) as pool:
        for outcome in pool.run(some, work, limit_s=limit_s, stop_at=stop_at, start_before=stop_at):
            rows = outcome.result or ()
            if outcome.failure is not None and not outcome.interrupted:
                rows = [replace(r, error=outcome.failure) for r in _empty(outcome.task, Environment())]
            for row in rows:
                append_line(out, row.to_json())
                on_row(row)


def _empty(batch: Batch, environment: Environment) -> list[Judged]:
    """The rows of a batch before it is judged."""
    return [
        Judged(batch.part, e.key, name, e.traits.kind, e.chain, 0, (), 0.0, environment)
        for e, names in batch.asked
        for name in names
    ]


def rows_of(
    batch: Batch,
    coders: Callable[[], Mapping[str, Coder]],
    environment: Environment,
    device: str | None = None,
    repairs: int = REPAIRS,
) -> list[Judged]:
    """The rows of one batch, whose judge is made once.

    Args:
        batch: what is judged.
        coders: makes the coders, by name.
        environment: of the rows.
        device: name of a device to estimate for; the GPU of this machine by default.
        repairs: tries after the first.

    Raises:
        QimengError: there is no judge for the spec.
    """
    first, by_name = batch.asked[0][0], coders()
    spec = KernelSpec.from_source(first.source, "held-out", dtype=first.dtype, mode=first.mode)
    writer = next((c for c in by_name.values() if c.free_hand), "template")  # all are judged as a model is
    task, rows = make_task(spec, coder=writer, device=device), iter(_empty(batch, environment))
    found = []
    with closing(task.evaluator) as evaluator:
        for example, names in batch.asked:
            for name in names:
                row, began = next(rows), time.monotonic()
                try:
                    program = program_from_json(example.program, task.start.graph)
                    request = Request(program, example.action, task.context.device, example.mode)
                    tries = tuple(attempts(by_name[name], evaluator, request, repairs))
                except QimengError as error:
                    found.append(replace(row, error=f"{type(error).__name__}: {error}"[:300]))
                    continue
                passed = len(tries) if tries[-1] == "passed" else 0
                found.append(replace(row, passed=passed, tries=tries, seconds=round(time.monotonic() - began, 2)))
    return found


def attempts(coder: Coder, evaluator: Evaluator, request: Request, repairs: int) -> Iterator[str]:
    """What became of each try, until one passes: ``"passed"``, or the gate and the class of the failure."""
    for _ in range(1 + repairs):
        try:
            patch = coder.write(request)
        except (CoderError, IllegalAction) as error:
            yield f"write {getattr(error, 'kind', 'coder')}"
            continue
        found = evaluator.evaluate(request.program, patch)
        if found.ok:
            yield "passed"
            return
        yield f"{found.gate.value} {found.failure}"
        request = replace(request, failed=patch, reason=found.error, refused=found.chosen)


def read_rows(path: Path) -> tuple[Judged, ...]:
    """The rows of a file, which may hold those of the training as well; none where it is not there."""
    lines = whole_lines(path) if path.exists() else ()
    return tuple(Judged.from_json(line) for line in lines if "coder" in json.loads(line))


def table(rows: Iterable[Judged]) -> str:
    """Shares by set and coder, as Markdown; what could not be judged does not count."""
    counted = list({(r.part, r.key, r.coder): r for r in rows if r.error is None}.values())
    lines = ["| set | coder | requests | first try | after repair |", "|---|---|---|---|---|"]
    for part, coder in sorted({(r.part, r.coder) for r in counted}):
        some = [r for r in counted if (r.part, r.coder) == (part, coder)]
        first, any_try = (
            sum(map(test, some)) / len(some) for test in (lambda r: r.passed == 1, lambda r: r.passed > 0)
        )
        lines.append(f"| {part} | {coder} | {len(some)} | {percent(first)} | {percent(any_try)} |")
    return "\n".join(lines) + "\n"


WRITERS = {"writer": table}
"""What a table in a document may ask for."""


__all__ = ["WRITERS", "Batch", "Judged", "attempts", "batches", "judge", "read_rows", "rows_of", "table"]
