"""A collection: several processes explore generated specs into a store within a time budget.

Deals in which specs are still to do, in processes, and in a log with one row a spec. Knows nothing about how a spec is
explored (`qimeng.bench.explore`). A collection may be killed at any moment. Finished evaluations are in the store, and
the next run with the same folder resumes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from qimeng.bench.explore import Explored, explore, of_networks
from qimeng.bench.pool import Place, Pool
from qimeng.bench.region_sweep import Claims
from qimeng.bench.suite import Suite, problems_of
from qimeng.errors import QimengError, SpecError
from qimeng.planner.data.generate import NETWORKS, Bytes, Drawn, draw, draw_many
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.data.tree_store import put_drawn, put_tree
from qimeng.store import Store

STORE, LOG = "store.sqlite", "explored.jsonl"
"""Names of the two files of a collection's folder."""

REGIONS = "regions"
"""Folder in it with a file for each region of a network that was explored, or was being explored."""
LEAST_S = 20.0
"""Seconds of a collection that are worth starting a spec in: what is judged in them is kept."""


@dataclass(frozen=True)
class Plan:
    """What is collected.

    Attributes:
        seed: of the sequence of specs.
        count: how many specs.
        first: number of the first one: machines that share a seed take different stretches.
        sizes: bytes of inputs and parameters.
        families: only these; empty for all.
        evaluations: programs judged for each spec.
        seconds_each: wall-clock budget of a spec.
        total_seconds: none is started in the last `LEAST_S` of them. One that is cut off at the end is gone on with by
            the next collection in the same folder.
        overhead_seconds: what a spec may take beyond its budget before it is given up as hanging, and the whole
            collection beyond its own.
        places: where specs are explored, and how many at once.
        retry: explore specs again whose stored row is a failure.
        given: explore these instead of drawn ones (`specs_of`).
    """

    seed: int = 0
    count: int = 300
    first: int = 0
    sizes: Bytes = field(default_factory=Bytes)
    families: tuple[str, ...] = ()
    evaluations: int = 24
    seconds_each: float = 60.0
    total_seconds: float = 3600.0
    overhead_seconds: float = 60.0
    places: tuple[Place, ...] = (Place(),)
    retry: bool = False
    given: tuple[Drawn, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """One spec to explore: small, since it travels to a worker process, which draws the spec itself, unless given."""

    seed: int
    index: int
    sizes: Bytes
    families: tuple[str, ...]
    evaluations: int
    device: str = ""
    given: Drawn | None = None

    def draw(self) -> Drawn:
        """The spec."""
        return self.given or draw(self.seed, self.index, self.sizes, self.families)

    def row(self, drawn: Drawn | None = None, error: str | None = None) -> Explored:
        """A row without figures."""
        d = drawn or self.draw()
        return Explored(
            d.spec.digest, d.spec.name, d.family, d.seed, d.index, self.device, asked=self.evaluations, error=error
        )


Work = Callable[[Assignment], Explored]
"""Explores one spec."""


def explore_one(
    assignment: Assignment, store: Path, seconds: float, device: str = "", coder: str = "template"
) -> Explored:
    """Generate a spec, explore it into the store at `store`, and report the outcome.

    A spec that cannot be captured, or has the structure of a problem that planners are judged on, is not explored. Nor
    is a network all of whose regions others explore: it tells nothing new.
    """
    from qimeng.envs.steps.setup import make_task
    from qimeng.planner.data.overlap import reserved
    from qimeng.planner.data.signature import structure

    began, drawn = time.monotonic(), assignment.draw()
    row = assignment.row(drawn)
    with Store(store) as opened:
        put_drawn(opened, drawn)
        try:
            claims = Claims(store.parent / REGIONS) if drawn.family in NETWORKS else None
            if claims is not None and not _has_new_region(drawn, claims, device, coder):
                return replace(row, stopped="known")
            by_region = False if claims is None else None
            task = make_task(drawn.spec, coder=coder, device=device or None, store=opened, by_region=by_region)
        except QimengError as error:
            return replace(row, error=f"{type(error).__name__}: {error}"[:500])
        try:
            if task.start.fallback:
                return replace(row, error=task.reason[:500])
            if structure(task.start.graph) in reserved():
                return replace(row, error="reserved: a problem that planners are judged on has this structure")
            explorers = of_networks(claims) if task.by_region else None
            return explore(task, row, opened, seconds, began, explorers)
        finally:
            task.evaluator.close()


def _has_new_region(drawn: Drawn, claims: Claims, device: str, coder: str) -> bool:
    """Whether the network has a region that nobody explores yet, as far as its graph tells."""
    from qimeng.actions import Context
    from qimeng.envs.steps.setup import make_coder, make_device
    from qimeng.planner.data.first_steps import after_first_steps
    from qimeng.program.program import Program
    from qimeng.program.verify import capture_spec

    context = Context(make_device(device or None), make_coder(coder), drawn.spec.mode)
    start = Program.start(capture_spec(drawn.spec, verify=False))
    return claims.left(after_first_steps(start, context), context.coder)


def assignments(plan: Plan, log: Path, device: str) -> list[Assignment]:
    """The specs of `plan` that have no row in `log` for `device` with as many evaluations.

    A spec whose row is a failure counts as done, unless it is to be tried again.
    """
    rows = [r for r in read_log(log) if r.device == device and (r.error is None or not plan.retry)]
    done = {r.spec: r.asked for r in sorted(rows, key=lambda r: r.asked)}
    wanted = plan.given or draw_many(plan.seed, plan.count, plan.first, plan.sizes, plan.families)
    return [
        Assignment(d.seed, d.index, plan.sizes, plan.families, plan.evaluations, device, d if plan.given else None)
        for d in wanted
        if done.get(d.spec.digest, -1) < plan.evaluations
    ]


def specs_of(suite: Suite, only: str = "") -> tuple[Drawn, ...]:
    """The specs of a suite, whose name stands for a family.

    Args:
        suite: the suite.
        only: ids and patterns, comma-separated; empty for all.

    Raises:
        SuiteError: the suite fails, or a pattern fits nothing.
        SpecError: a spec cannot be made, or is of a live module, of which a store cannot keep the text.
    """
    found = []
    for number, problem in enumerate(problems_of(suite, only)):
        spec = problem.spec()
        if not spec.source:
            raise SpecError(
                f"{problem.id}: its tree needs the spec's text: make it with KernelSpec.from_file or from_source"
            )
        found.append(Drawn(spec, suite.name, 0, number))
    return tuple(found)


def collect(
    plan: Plan,
    out: Path,
    work: Work,
    device: str,
    on_row: Callable[[Explored], None] = lambda row: None,
    pool: Pool | None = None,
) -> tuple[Explored, ...]:
    """Explore what is not in the log yet and append each spec's row as soon as it is there.

    Args:
        plan: what is collected.
        out: folder of the store and the log.
        work: explores one spec, in a worker process.
        device: name of the device that `work` explores for.
        on_row: called when a row is stored.
        pool: has the workers, and is closed here; by default worker processes at the places of `plan`.

    Returns:
        The new rows, in the order they were finished.
    """
    out.mkdir(parents=True, exist_ok=True)
    log, rows = out / LOG, []
    end = time.monotonic() + plan.total_seconds
    with pool or Pool(plan.places) as pool:
        outcomes = pool.run(
            assignments(plan, log, device),
            work,
            limit_s=plan.seconds_each + plan.overhead_seconds,
            stop_at=end + plan.overhead_seconds,
            start_before=end - min(plan.seconds_each, LEAST_S),
        )
        for outcome in outcomes:
            if outcome.interrupted:
                continue
            row = outcome.result or outcome.task.row(error=outcome.failure)
            append_rows(log, [row])
            rows.append(row)
            on_row(row)
    return tuple(rows)


def read_log(log: Path) -> tuple[Explored, ...]:
    """The rows of a log; a half-written last line is left out, a log that is not there has none."""
    if not log.exists():
        return ()
    whole, _, _ = log.read_text().rpartition("\n")
    return tuple(Explored.from_json(line) for line in whole.splitlines())


def logged_specs(log: Path) -> int:
    """How many specs a log has rows of; one that was tried again, or with more evaluations, has several."""
    return len({row.spec for row in read_log(log)})


def append_rows(log: Path, rows: Iterable[Explored]) -> None:
    """Add `rows` at the end of the log and flush them to disk; a half-written last line is cut off first."""
    with open(log, "a+b") as out:
        out.seek(0)
        text = out.read()
        if text and not text.endswith(b"\n"):
            out.truncate(text.rfind(b"\n") + 1)
        out.write("".join(f"{row.to_json()}\n" for row in rows).encode())
        out.flush()
        os.fsync(out.fileno())


def merge(
    into: Path,
    sources: Sequence[Path],
    texts: Mapping[str, str] = MappingProxyType({}),
    on_refused: Callable[[Tree, QimengError], None] = lambda tree, error: None,
) -> dict[str, int]:
    """Add what other collections found to the one in `into`, which is made if it is not there.

    A tree of an older version gets the names that this version gives its programs (`Tree.today`).

    Args:
        into: folder of a collection.
        sources: folders of collections, and files of exported trees, which have no log.
        texts: digest of each spec whose text was left out of its tree to that text.
        on_refused: called with a tree of an older version that cannot be renamed; the others are added.

    Returns:
        Rows of each table of the store that were added, and of the log.

    Raises:
        QimengError: a folder holds no collection, a file no trees, or a tree no text and `texts` none for it.
    """
    folders, files = [s for s in sources if not s.is_file()], [s for s in sources if s.is_file()]
    for folder in folders:
        if not (folder / STORE).is_file():
            raise QimengError(f"{folder} holds no collection ({STORE} is missing)")
    trees = [t if t.source else t.with_source(texts.get(t.conditions.spec, "")) for f in files for t in read_trees(f)]
    into.mkdir(parents=True, exist_ok=True)
    with Store(into / STORE) as store:
        before = store.counts()
        for folder in folders:
            with Store(folder / STORE) as other:
                store.merge(other)
        for tree in trees:
            try:
                put_tree(store, tree)
            except (SpecError, TreeError) as error:
                on_refused(tree, error)
        added = {table: n - before[table] for table, n in store.counts().items()}
    known = {row.to_json() for row in read_log(into / LOG)}
    new = {row.to_json(): row for folder in folders for row in read_log(folder / LOG)}
    fresh = [row for text, row in new.items() if text not in known]
    append_rows(into / LOG, fresh)
    return {**added, "log": len(fresh)}


def read_texts(path: Path) -> dict[str, str]:
    """Digest of each spec to its text, from JSON lines that have them as `spec` and `source`.

    Raises:
        QimengError: the file cannot be read as such.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["spec"]: row["source"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QimengError(f"{path} holds no JSON lines with `spec` and `source`: {error}") from None


__all__ = [
    "LOG",
    "REGIONS",
    "STORE",
    "Assignment",
    "Plan",
    "append_rows",
    "assignments",
    "collect",
    "explore_one",
    "logged_specs",
    "merge",
    "put_drawn",
    "read_log",
    "read_texts",
    "specs_of",
]
