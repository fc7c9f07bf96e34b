"""What a writer's patches are worth: share that pass all gates at the first try, and after repair, beside baselines.

Deals in coders, held-out examples and rows, one for each request and coder, resumable. Knows nothing about how kernels
are judged, or how a model was trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from qimeng.actions.graph_kinds import fused_partition
from qimeng.bench.row import Environment, append_line, whole_lines
from qimeng.bench.writer.examples import Example
from qimeng.coder.llm.chat import Reply
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import target_region
from qimeng.coder.llm.similar import similarity, traits_of
from qimeng.envs.setup import make_task
from qimeng.errors import CoderError, IllegalAction, QimengError
from qimeng.interfaces import Coder, Evaluator, Patch, Request
from qimeng.recipe import program_from_json
from qimeng.spec import KernelSpec

REPAIRS = 2


class CopyCoder(Coder):
    """Answers with the code of the nearest example it knows; asked again, with the next one.

    Args:
        examples: what it copies from.
    """

    def __init__(self, examples: Sequence[Example]):
        self.examples = tuple(examples)

    def write(self, request: Request) -> Patch:
        """The patch of the nearest example that can be read for this region.

        Raises:
            CoderError: none can.
        """
        region, wanted = target_region(request), traits_of(request)
        tried = {a.source for a in request.failed.alternatives} if request.failed else set()
        for example in sorted(self.examples, key=lambda e: -similarity(wanted, e.traits)):
            try:
                found = read_reply(Reply(f"```python\n{example.answer}```"), region)
            except CoderError:
                continue
            if found.source not in tried:
                fused = request.action.kind == "fusion"
                return Patch(fused_partition(request.program, request.action) if fused else None, region.id, (found,))
        raise CoderError("no example can be copied")


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
        seconds: of writing and judging, the first answer aside where answers were written together.
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


def judge(
    part: str,
    examples: Iterable[Example],
    coders: Mapping[str, Coder],
    out: Path,
    environment: Environment,
    device: str | None = None,
    repairs: int = REPAIRS,
    stop_at: float = float("inf"),
    on_row: Callable[[Judged], None] = lambda row: None,
) -> None:
    """Put every example to every coder; a row each, appended to `out`. What is there already is not done again.

    Args:
        part: what the rows call the set.
        examples: the requests.
        coders: name to coder.
        out: JSON lines.
        environment: of the rows.
        device: name of a device to estimate for; the GPU of this machine by default.
        repairs: tries after the first.
        stop_at: the monotonic clock's time after which nothing is begun.
        on_row: told each row.
    """
    done = {(r.part, r.key, r.coder) for r in read_rows(out)}

    def spec(e: Example) -> tuple[str, str, str]:
        return e.source, e.dtype, e.mode

    for _, group in groupby(sorted(examples, key=spec), spec):
        left = [(e, n) for e in group for n in coders if (part, e.key, n) not in done]
        if not left or time.monotonic() > stop_at:
            continue
        for row in _of_spec(part, left, coders, environment, device, repairs):
            append_line(out, row.to_json())
            on_row(row)


def _of_spec(
    part: str,
    left: Sequence[tuple[Example, str]],
    coders: Mapping[str, Coder],
    environment: Environment,
    device: str | None,
    repairs: int,
) -> Iterator[Judged]:
    """The rows of one spec, whose judge is made once."""
    first = left[0][0]
    spec = KernelSpec.from_source(first.source, "held-out", dtype=first.dtype, mode=first.mode)
    task = make_task(spec, device=device)
    with closing(task.evaluator) as evaluator:
        for example, name in left:
            row = Judged(part, example.key, name, example.traits.kind, example.chain, 0, (), 0.0, environment)
            began = time.monotonic()
            try:
                program = program_from_json(example.program, task.start.graph)
                request = Request(program, example.action, task.context.device, example.mode)
                tries = tuple(attempts(coders[name], evaluator, request, repairs))
            except QimengError as error:
                yield replace(row, error=f"{type(error).__name__}: {error}"[:300])
                continue
            passed = len(tries) if tries[-1] == "passed" else 0
            yield replace(row, passed=passed, tries=tries, seconds=round(time.monotonic() - began, 2))


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


def read_rows(path: Path) -> Iterator[Judged]:
    """The rows of a file; none where it is not there."""
    if path.exists():
        for line in whole_lines(path):
            yield Judged.from_json(line)


def table(rows: Iterable[Judged]) -> str:
    """Shares by set and coder, as Markdown."""
    counted = [r for r in rows if r.error is None]
    lines = ["| set | coder | requests | first try | after repair |", "|---|---|---|---|---|"]
    for part, coder in sorted({(r.part, r.coder) for r in counted}):
        some = [r for r in counted if (r.part, r.coder) == (part, coder)]
        first, any_try = (
            sum(map(test, some)) / len(some) for test in (lambda r: r.passed == 1, lambda r: r.passed > 0)
        )
        lines.append(f"| {part} | {coder} | {len(some)} | {first:.0%} | {any_try:.0%} |")
    return "\n".join(lines) + "\n"


__all__ = ["CopyCoder", "Judged", "attempts", "judge", "read_rows", "table"]
