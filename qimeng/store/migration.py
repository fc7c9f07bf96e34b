"""Migrates stores that name programs by an older rule.

Deals in digests. Until version 2 a store named programs by the hash of their printed text. Steps and results do not
depend on that, and every patch is stored. So the programs are rebuilt and renamed. Knows nothing about opening files.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qimeng.errors import QimengError, ReplayError
from qimeng.interfaces.records import PatchRecord, action_from_data, program_from_json
from qimeng.interfaces.results import Evaluation
from qimeng.program.program import Program
from qimeng.store.rows import (
    Conditions,
    StoredStep,
    attempt_key,
    conditions_from_json,
    evaluation_key,
    step_key,
    subject_of,
)


@dataclass(frozen=True)
class Tried:
    """What was tried of one spec under one set of conditions, under old names.

    Attributes:
        conditions: of all of it.
        evaluations: (purpose, subject, evaluation) of everything judged.
        patches: digest of each patch to its record; those that cannot be read any more are left out.
        edges: steps, accepted or not.
        programs: programs that can be made without their patches, by their old digests.
    """

    conditions: Conditions
    evaluations: tuple[tuple[str, str, Evaluation], ...]
    patches: Mapping[str, PatchRecord]
    edges: tuple[StoredStep, ...]
    programs: Mapping[str, Program] = field(default_factory=dict)


@dataclass(frozen=True)
class Renamed:
    """New names.

    Attributes:
        subjects: old digest of everything that was judged, tried on or reached, to the new one.
        edges: each edge that can still be applied, to the same under new names.
    """

    subjects: Mapping[str, str]
    edges: Mapping[StoredStep, StoredStep]

    def subject(self, old: str) -> str | None:
        """The new name; a final verification's has words after the digest, which stay."""
        digest, *words = old.split(" ")
        new = self.subjects.get(digest)
        return None if new is None else " ".join((new, *words))


def renamed(tried: Tried, start: Program) -> Renamed:
    """The names that this version gives the programs of `tried`, its edges applied one after another.

    Args:
        tried: what was tried.
        start: the start program as this version captures it.
    """
    firsts: list[str | None] = [*_firsts(tried, start)] or [None]
    found = [_renamed(tried, start, first) for first in firsts]
    return max(found, key=lambda r: (len(r.edges), len(set(r.subjects.values()))))


def _renamed(tried: Tried, start: Program, first: str | None) -> Renamed:
    """The new names, where `first` is the old one of `start`."""
    programs = dict(tried.programs)
    if first is not None:
        programs.setdefault(first, start)
    subjects = {old: program.digest for old, program in programs.items()}
    judged = {evaluation_key(tried.conditions, s, p): (s, p, e.chosen) for p, s, e in tried.evaluations}
    leading: dict[str, list[StoredStep]] = {}
    for edge in tried.edges:
        leading.setdefault(edge.parent, []).append(edge)
    waiting, edges = deque(programs), dict[StoredStep, StoredStep]()
    while waiting:
        here = waiting.popleft()
        for edge in leading.get(here, ()):
            try:
                edges[edge], child = _applied(tried, edge, programs[here], judged, subjects)
            except (ReplayError, KeyError, IndexError):  # it can no longer be applied
                continue
            if edge.child is not None and child is not None and edge.child not in programs:
                programs[edge.child], subjects[edge.child] = child, child.digest
                waiting.append(edge.child)
    return Renamed(subjects, edges)


def _firsts(tried: Tried, start: Program) -> list[str]:
    """What may be the old name of the start program: of those judged, it has the same regions, none of them generated.

    A program that a library computes, or that is launched as a CUDA graph, looks alike.
    """
    regions, parents = {r.id for r in start.regions}, {e.parent for e in tried.edges}
    found = [
        subject
        for _, subject, evaluation in tried.evaluations
        if subject in parents and not evaluation.generated_share and set(evaluation.region_ms) == regions
    ]
    return list(dict.fromkeys(found))


def _applied(
    tried: Tried, edge: StoredStep, parent: Program, judged: Mapping[str, Any], subjects: dict[str, str]
) -> tuple[StoredStep, Program | None]:
    """The edge under new names, and the program it leads to; what was judged on the way is added to `subjects`.

    Raises:
        ReplayError, KeyError, IndexError: the patch does not fit any more, or cannot be read.
    """
    evaluation = child = None
    if edge.patch is not None:
        subject, purpose, chosen = judged.get(edge.evaluation or "", (None, "", 0))
        patch = tried.patches[edge.patch].patch(parent.graph)
        child = patch.apply(parent, chosen) if edge.accepted else None
        if subject is not None:
            subjects[subject] = subject_of(parent, patch)
            evaluation = evaluation_key(tried.conditions, subjects[subject], purpose)
    new = replace(edge, parent=parent.digest, evaluation=evaluation, child=child.digest if child else None)
    return new, child


# ---- a store


@dataclass(frozen=True)
class Migration:
    """Changes of a store's rows, worked out before it is locked.

    Attributes:
        statements: SQL with its values.
        left: rows that keep their old names.
        total: rows that name a program.
        waiting: digests of the conditions whose spec the store has no text of.
    """

    statements: tuple[tuple[str, tuple[Any, ...]], ...]
    left: int
    total: int
    waiting: tuple[str, ...] = ()

    def apply(self, db: sqlite3.Connection) -> None:
        """Change the rows, within the caller's transaction."""
        for text, values in self.statements:
            db.execute(text, values)

    def remark(self, path: str) -> str:
        """What a user should know: one sentence, or nothing where every row has its new name."""
        if not self.left:
            return ""
        return (
            f"{path} was written by an older version: {self.left} of {self.total} rows name programs that cannot be "
            "rebuilt from it; these can still be read, and answer again once their computation is optimized with it"
        )


def planned(db: sqlite3.Connection, only: Collection[str] | None = None, start: Program | None = None) -> Migration:
    """How the rows of a store, which has all tables, get the names that this version gives programs.

    Args:
        db: the store.
        only: digests of the conditions whose rows are renamed; by default all.
        start: what was tried under these conditions began with it; by default it is captured from the spec's text.
    """
    every = _Rows(db)
    statements: list[tuple[str, tuple[Any, ...]]] = []
    names: dict[str, str] = {}
    waiting: list[str] = []
    for digest in every.conditions if only is None else only:
        found = every.renamed(digest, start)
        if found is None:
            waiting.append(digest)
            continue
        names.update(found.subjects)
        conditions = every.conditions[digest]
        for key, (purpose, subject, _) in every.evaluations.get(digest, {}).items():
            new = found.subject(subject)
            if new is not None:
                row = (evaluation_key(conditions, new, purpose), new, key)
                statements.append(("UPDATE OR IGNORE evaluations SET digest = ?, subject = ? WHERE digest = ?", row))
        for key, edge in every.steps.get(digest, {}).items():
            if edge in found.edges:
                e = found.edges[edge]
                values = (step_key(digest, e), e.parent, e.evaluation, e.child, key)
                text = "UPDATE OR IGNORE steps SET digest = ?, parent = ?, evaluation = ?, child = ? WHERE digest = ?"
                statements.append((text, values))
    programs = [d for (d,) in db.execute("SELECT digest FROM programs")]
    for old in programs:
        if old in names:
            statements.append(("UPDATE OR IGNORE programs SET digest = ? WHERE digest = ?", (names[old], old)))
    attempts = db.execute("SELECT digest, parent, action, reply, patch, alternative, failure FROM attempts").fetchall()
    for key, parent, *rest in attempts:
        if parent in names:
            row = (attempt_key((names[parent], *rest)), names[parent], key)
            statements.append(("UPDATE OR IGNORE attempts SET digest = ?, parent = ? WHERE digest = ?", row))
    total = every.count + len(programs) + len(attempts)
    return Migration(tuple(statements), total - len(statements), total, tuple(waiting))


class _Rows:
    """The rows of an old store, by the conditions that they belong to."""

    def __init__(self, db: sqlite3.Connection):
        self.db = db
        self.conditions = {
            d: conditions_from_json(body) for d, body in db.execute("SELECT digest, body FROM conditions")
        }
        self.evaluations: dict[str, dict[str, tuple[str, str, Evaluation]]] = {}
        for key, c, purpose, subject, body in db.execute(
            "SELECT digest, conditions, purpose, subject, body FROM evaluations ORDER BY digest"
        ):
            self.evaluations.setdefault(c, {})[key] = purpose, subject, Evaluation.from_json(body)
        self.steps: dict[str, dict[str, StoredStep]] = {}
        for key, c, parent, action, patch, evaluation, accepted, child in db.execute(
            "SELECT digest, conditions, parent, action, patch, evaluation, accepted, child FROM steps ORDER BY digest"
        ):
            edge = StoredStep(parent, action_from_data(json.loads(action)), patch, evaluation, bool(accepted), child)
            self.steps.setdefault(c, {})[key] = edge
        self.count = sum(len(rows) for table in (self.evaluations, self.steps) for rows in table.values())

    def renamed(self, conditions: str, start: Program | None) -> Renamed | None:
        """The new names of what was tried under `conditions`; None where the start program cannot be made again."""
        start = start or self._start(self.conditions[conditions])
        if start is None:
            return None
        judged = tuple(self.evaluations.get(conditions, {}).values())
        edges = tuple(self.steps.get(conditions, {}).values())
        patches = dict[str, PatchRecord]()
        for edge in edges:
            row = self.db.execute("SELECT body FROM patches WHERE digest = ?", (edge.patch,)).fetchone()
            if row is not None and edge.patch is not None:
                try:
                    patches[edge.patch] = PatchRecord.from_json(row[0])
                except ReplayError:  # another version wrote it, and this one cannot read it
                    continue
        ends = {s for _, s, _ in judged} | {e.parent for e in edges} | {e.child for e in edges if e.child}
        programs = dict[str, Program]()
        for digest in sorted(ends):
            row = self.db.execute("SELECT body FROM programs WHERE digest = ?", (digest,)).fetchone()
            if row is not None:
                try:
                    programs[digest] = program_from_json(row[0], start.graph)
                except ReplayError:
                    continue
        return renamed(Tried(self.conditions[conditions], judged, patches, edges, programs), start)

    def _start(self, conditions: Conditions) -> Program | None:
        """The start program, where the store holds the text of its spec and that can still be captured."""
        import torch

        from qimeng.program.verify import capture_spec
        from qimeng.spec import KernelSpec

        row = self.db.execute("SELECT name, body FROM specs WHERE digest = ?", (conditions.spec,)).fetchone()
        try:
            about = json.loads(row[1]) if row is not None else None
            if not about or not about.get("source"):
                return None
            more = {"dtype": about["dtype"], "mode": about["mode"], "weights": about.get("weights", "")}
            spec = KernelSpec.from_source(about["source"], row[0], **more)
            device = "cpu" if conditions.estimated or not torch.cuda.is_available() else "cuda"
            return Program.start(capture_spec(spec, device=device)) if spec.digest == conditions.spec else None
        except (QimengError, ValueError, KeyError, TypeError, AttributeError):  # another text than `put_drawn` writes
            return None


__all__ = ["Migration", "Renamed", "Tried", "planned", "renamed"]
