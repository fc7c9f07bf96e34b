"""The store: one SQLite file a project, with everything that was tried and its outcome.

Deals in rows keyed by content hashes, so that stores of different machines merge. Knows nothing about how programs are
written or judged. Each `put_…` is one transaction: a process killed at any moment loses nothing it finished (a machine
that loses power may lose the last ones, and never half of one).

Tables: ``specs``, ``programs``, ``patches``, ``conditions``, ``evaluations`` and ``steps``. The steps are the tree of
trajectories: an edge leads from a parent program through an action and a patch to an evaluation and, where accepted, a
child program. ``replies`` holds what language models answered, ``attempts`` which patch (if any) came of each answer.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qimeng.errors import StoreError
from qimeng.interfaces.records import PatchRecord, action_from_data
from qimeng.interfaces.results import Evaluation
from qimeng.program.program import Program
from qimeng.store.database import TABLES, open_database
from qimeng.store.migration import planned
from qimeng.store.rows import (
    ACCIDENT,
    Conditions,
    StoredAttempt,
    StoredStep,
    attempt_key,
    conditions_from_json,
    content_hash,
    evaluation_key,
    reply_key,
    step_key,
    step_row,
)


class Store:
    """An open store.

    Args:
        path: the SQLite file, made if it is not there; ``":memory:"`` for one that ends with the process.

    A store of an older version is brought up to date: its programs are made again, and get the names that this version
    gives them. Rows whose program cannot be made again stay as they are, and a warning says how many those are; see
    `name_anew`.

    Attributes:
        goes_on: whether rows that cannot be written (the disk is full, say) are left out. False raises instead.
        lost: why rows were left out; empty where none was.

    Raises:
        StoreError: the file is no store, or was written by a newer version of the library. Writing raises it where the
            file cannot be written.
    """

    goes_on = False

    def __init__(self, path: str | Path = ":memory:"):
        self.path, self.lost = str(path), ""
        self._pid = -1
        self._connection: sqlite3.Connection | None = None
        self._db  # noqa: B018  opens the file, so that a bad one is refused here

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None or self._pid != os.getpid():  # a connection must not cross a fork
            self._connection, self._pid = open_database(self.path), os.getpid()
        return self._connection

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        if self.path == ":memory:":
            raise StoreError("a store in memory cannot be copied to another process; give it a file")
        return Store, (self.path,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return self

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---- writing: a row that is there already stays as it is
    def put_spec(self, digest: str, name: str, body: str = "") -> None:
        """Keep a specification: its digest, its name and a text that describes it."""
        self._insert("specs", (digest, name, body))

    def put_program(self, digest: str, body: str, source: str) -> None:
        """Keep a program: `qimeng.interfaces.records.program_to_json` and its source."""
        self._insert("programs", (digest, body, source))

    def put_patch(self, patch: PatchRecord) -> str:
        """Keep a patch, all alternatives included, and return its digest."""
        body = patch.to_json()
        self._insert("patches", (content_hash(body), body))
        return content_hash(body)

    def put_evaluation(
        self, conditions: Conditions, subject: str, evaluation: Evaluation, purpose: str = "step"
    ) -> str:
        """Keep what was found out about `subject` and return the evaluation's digest.

        A failure that may be an accident of the moment (`Evaluation.lasting`) is kept as one, whatever the purpose, so
        that `subject` is judged again when it is next asked for.

        Raises:
            StoreError: an estimated time under measured conditions, or the other way round.
        """
        if evaluation.timing is not None and evaluation.timing.estimated != conditions.estimated:
            raise StoreError("estimated and measured times are never stored under the same conditions")
        if not evaluation.lasting:
            purpose = ACCIDENT
        digest = evaluation_key(conditions, subject, purpose)
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR IGNORE INTO conditions VALUES (?, ?)",
                (conditions.digest, json.dumps(asdict(conditions), sort_keys=True)),
            )
            self._db.execute(
                "INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?, ?, ?)",
                (digest, conditions.digest, purpose, subject, evaluation.to_json()),
            )
        return digest

    def put_step(self, conditions: Conditions, step: StoredStep) -> None:
        """Keep one edge of the tree, accepted or not."""
        self._insert("steps", (step_key(conditions.digest, step), *step_row(conditions.digest, step)))

    def put_reply(self, question: str, model: str, messages: str, body: str) -> str:
        """Keep what `model` answered (`body`) to `messages`, both JSON, and return the answer's digest.

        No key or other secret may be in any of it.

        Args:
            question: hash of all that the answer depends on.
            model: its name.
            messages: what it was asked.
            body: what it answered.
        """
        digest = reply_key(question, body)
        self._insert("replies", (digest, question, model, messages, body))
        return digest

    def put_attempt(self, attempt: StoredAttempt) -> None:
        """Record the outcome of an answer."""
        action = json.dumps(asdict(attempt.action), sort_keys=True)
        parts = (attempt.parent, action, attempt.reply, attempt.patch, attempt.alternative, attempt.failure)
        self._insert("attempts", (attempt_key(parts), *parts))

    def name_anew(self, spec: str, start: Program) -> int:
        """Give what an older version tried of a spec its new names, and return how many rows got one.

        Opening an old store does so where the store has the spec's text; here the start program stands for it.

        Args:
            spec: digest of the spec.
            start: the program that every search of it begins with.
        """
        rows = self._db.execute("SELECT c.digest, c.body FROM unnamed u JOIN conditions c ON c.digest = u.conditions")
        only = [digest for digest, body in rows if conditions_from_json(body).spec == spec]
        if not only:
            return 0
        plan = planned(self._db, only, start)
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            plan.apply(self._db)
            self._db.executemany("DELETE FROM unnamed WHERE conditions = ?", [(digest,) for digest in only])
        return len(plan.statements)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction, all or nothing."""
        try:
            with self._db:
                yield
        except sqlite3.DatabaseError as error:  # a full disk, a file that was taken away, rights
            self.lost = f"{self.path} cannot be written ({error})"
            if not self.goes_on:
                raise StoreError(
                    f"{self.lost}: make room or choose another place, then run the same command again; what was stored "
                    "is used"
                ) from None

    def _insert(self, table: str, row: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * len(row))
        with self._writing():
            self._db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)

    # ---- reading
    def evaluation(self, conditions: Conditions, subject: str, purpose: str = "step") -> Evaluation | None:
        """What is known about `subject`; None where it was never judged under these conditions."""
        return self.evaluation_of(evaluation_key(conditions, subject, purpose))

    def evaluation_of(self, digest: str) -> Evaluation | None:
        """The evaluation with this digest."""
        row = self._db.execute("SELECT body FROM evaluations WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else Evaluation.from_json(row[0])

    def evaluations(self) -> Iterator[tuple[Conditions, str, str, Evaluation]]:
        """(conditions, purpose, subject, evaluation) of everything that was judged, in the order of their digests."""
        rows = self._db.execute(
            "SELECT c.body, e.purpose, e.subject, e.body FROM evaluations e "
            "JOIN conditions c ON c.digest = e.conditions ORDER BY e.digest"
        ).fetchall()
        for conditions, purpose, subject, body in rows:
            yield conditions_from_json(conditions), purpose, subject, Evaluation.from_json(body)

    def conditions(self) -> tuple[Conditions, ...]:
        """Every set of conditions under which something was judged, in the order of their digests."""
        return tuple(
            conditions_from_json(body) for (body,) in self._db.execute("SELECT body FROM conditions ORDER BY digest")
        )

    def steps(self, conditions: Conditions | None = None, parent: str | None = None) -> tuple[StoredStep, ...]:
        """Edges of the tree, in the order of their digests: all, those under `conditions`, those from `parent`."""
        where, values = [], []
        if conditions is not None:
            where, values = ["conditions = ?"], [conditions.digest]
        if parent is not None:
            where, values = [*where, "parent = ?"], [*values, parent]
        text = "SELECT parent, action, patch, evaluation, accepted, child FROM steps"
        text += (" WHERE " + " AND ".join(where) if where else "") + " ORDER BY digest"
        return tuple(
            StoredStep(p, action_from_data(json.loads(a)), patch, e, bool(accepted), child)
            for p, a, patch, e, accepted, child in self._db.execute(text, values)
        )

    def spec(self, digest: str) -> tuple[str, str] | None:
        """(name, text that describes it) of a specification."""
        row = self._db.execute("SELECT name, body FROM specs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else (row[0], row[1])

    def patch(self, digest: str) -> PatchRecord | None:
        """The patch with this digest."""
        row = self._db.execute("SELECT body FROM patches WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else PatchRecord.from_json(row[0])

    def program(self, digest: str) -> tuple[str, str] | None:
        """(JSON for `qimeng.interfaces.records.program_from_json`, source) of a program."""
        row = self._db.execute("SELECT body, source FROM programs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else (row[0], row[1])

    def answer(self, question: str) -> str | None:
        """What was answered to `question`; where merged stores know several answers, always the same one."""
        text = "SELECT body FROM replies WHERE question = ? ORDER BY digest LIMIT 1"
        row = self._db.execute(text, (question,)).fetchone()
        return None if row is None else str(row[0])

    def reply(self, digest: str) -> tuple[str, str, str] | None:
        """(model, messages, answer) of an answer of a language model; messages and answer are JSON."""
        row = self._db.execute("SELECT model, messages, body FROM replies WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else (row[0], row[1], row[2])

    def attempts(self, patch: str | None = None) -> tuple[StoredAttempt, ...]:
        """What came of models' answers, in the order of their digests: all, or those that `patch` was made of."""
        text = "SELECT parent, action, reply, patch, alternative, failure FROM attempts"
        text += (" WHERE patch = ?" if patch is not None else "") + " ORDER BY digest"
        return tuple(
            StoredAttempt(parent, action_from_data(json.loads(action)), *rest)
            for parent, action, *rest in self._db.execute(text, () if patch is None else (patch,))
        )

    def counts(self) -> dict[str, int]:
        """Number of rows of each table."""
        return {t: self._db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in TABLES}

    def merge(self, other: Store) -> None:
        """Add the rows of `other` that are not here; where both know a digest, this store's row stays.

        Raises:
            StoreError: `other` was written by another version of the library.
        """
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            for table in (*TABLES, "unnamed"):
                rows = other._db.execute(f"SELECT * FROM {table}")  # read as they are written: sources are many
                marks = ", ".join("?" * len(rows.description))
                self._db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)


__all__ = ["Store"]
