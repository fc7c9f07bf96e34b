"""The store: one SQLite file a project, with everything that was ever tried and what came of it.

Deals in rows keyed by content hashes, so that stores of different machines merge. Knows nothing about how programs are
written or judged. Each `put_…` is one transaction: a process killed at any moment loses nothing it finished (a machine
that loses power may lose the last ones, and never half of one).

Tables: ``specs``, ``programs``, ``patches``, ``conditions``, ``evaluations`` and ``steps``. The steps are the tree of
trajectories: an edge leads from a parent program through an action and a patch to an evaluation and, where accepted, a
child program. ``replies`` holds what language models answered, ``attempts`` which patch (if any) came of each answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qimeng.errors import StoreError
from qimeng.interfaces.results import Evaluation
from qimeng.interfaces.steps import Action
from qimeng.recipe import PatchRecord, action_from_data

SCHEMA_VERSION = 2
"""Version 2 adds what language models were asked and answered; a store of version 1 is extended when it is opened."""

BUSY_S = 60.0
"""Seconds that a process waits for others that write."""

ACCIDENT = "accident"
"""Purpose under which failures are kept that may not be the program's: they are on record, and answer no question."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS specs (digest TEXT PRIMARY KEY, name TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS programs (digest TEXT PRIMARY KEY, body TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS patches (digest TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS conditions (digest TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
    digest TEXT PRIMARY KEY, conditions TEXT NOT NULL, purpose TEXT NOT NULL, subject TEXT NOT NULL,
    body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    digest TEXT PRIMARY KEY, conditions TEXT NOT NULL, parent TEXT NOT NULL, action TEXT NOT NULL, patch TEXT,
    evaluation TEXT, accepted INTEGER NOT NULL, child TEXT);
CREATE INDEX IF NOT EXISTS steps_by_parent ON steps (conditions, parent);
CREATE TABLE IF NOT EXISTS replies (
    digest TEXT PRIMARY KEY, question TEXT NOT NULL, model TEXT NOT NULL, messages TEXT NOT NULL,
    body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS replies_by_question ON replies (question);
CREATE TABLE IF NOT EXISTS attempts (
    digest TEXT PRIMARY KEY, parent TEXT NOT NULL, action TEXT NOT NULL, reply TEXT NOT NULL, patch TEXT,
    alternative INTEGER NOT NULL, failure TEXT);
CREATE INDEX IF NOT EXISTS attempts_by_patch ON attempts (patch);
"""
_TABLES = ("specs", "programs", "patches", "conditions", "evaluations", "steps", "replies", "attempts")


@dataclass(frozen=True)
class Conditions:
    """What an evaluation depends on besides the program; part of every key.

    Attributes:
        spec: digest of the specification.
        device: name of the device.
        mode: precision mode.
        estimated: True where times come from the analytic model, so that they never mix with measured ones.
        versions: (name, version) of the evaluator, torch, triton and the driver.
    """

    spec: str
    device: str
    mode: str = "default"
    estimated: bool = False
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Content hash."""
        return content_hash(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True)
class StoredStep:
    """One edge of the tree of trajectories.

    Attributes:
        parent: digest of the program that the action was applied to.
        action: what was tried.
        patch: digest of the patch; None where the coder wrote none.
        evaluation: digest of the evaluation; None where none was needed.
        accepted: whether the state advanced.
        child: digest of the resulting program; None where it was rolled back.
    """

    parent: str
    action: Action
    patch: str | None
    evaluation: str | None
    accepted: bool
    child: str | None


@dataclass(frozen=True)
class StoredAttempt:
    """What came of one answer of a language model.

    Attributes:
        parent: digest of the program that was to be changed.
        action: what the model was asked to do.
        reply: digest of the answer (`Store.reply`).
        patch: digest of the patch that was made of it, and of other answers to the same request; None where it could
            not be read. The steps with this patch say what the judge found.
        alternative: which of the patch's alternatives it is.
        failure: class of what was wrong with the answer; None where it could be read.
    """

    parent: str
    action: Action
    reply: str
    patch: str | None = None
    alternative: int = 0
    failure: str | None = None


class Store:
    """An open store.

    Args:
        path: the SQLite file, made if it is not there; ``":memory:"`` for one that ends with the process.

    Raises:
        StoreError: the file is no store, or was written by another version of the library.
    """

    def __init__(self, path: str | Path = ":memory:"):
        self.path = str(path)
        self._pid = -1
        self._connection: sqlite3.Connection | None = None
        self._db  # noqa: B018  opens the file, so that a bad one is refused here

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None or self._pid != os.getpid():  # a connection must not cross a fork
            self._connection, self._pid = _open(self.path), os.getpid()
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
        """Keep a program: `qimeng.recipe.program_to_json` and its source."""
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
        with self._db:
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
        action = json.dumps(asdict(step.action), sort_keys=True)
        parts = (conditions.digest, step.parent, action, step.patch, step.evaluation, int(step.accepted), step.child)
        self._insert("steps", (content_hash(json.dumps(parts)), *parts))

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
        """Keep what came of an answer."""
        action = json.dumps(asdict(attempt.action), sort_keys=True)
        parts = (attempt.parent, action, attempt.reply, attempt.patch, attempt.alternative, attempt.failure)
        self._insert("attempts", (content_hash(json.dumps(parts)), *parts))

    def _insert(self, table: str, row: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * len(row))
        with self._db:
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
            yield _conditions(conditions), purpose, subject, Evaluation.from_json(body)

    def conditions(self) -> tuple[Conditions, ...]:
        """Every set of conditions under which something was judged, in the order of their digests."""
        return tuple(_conditions(body) for (body,) in self._db.execute("SELECT body FROM conditions ORDER BY digest"))

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
        """(JSON for `qimeng.recipe.program_from_json`, source) of a program."""
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
        return {t: self._db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in _TABLES}

    def merge(self, other: Store) -> None:
        """Add the rows of `other` that are not here; where both know a digest, this store's row stays.

        Raises:
            StoreError: `other` was written by another version of the library.
        """
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                rows = other._db.execute(f"SELECT * FROM {table}")  # read as they are written: sources are many
                marks = ", ".join("?" * len(rows.description))
                self._db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)


def evaluation_key(conditions: Conditions, subject: str, purpose: str = "step") -> str:
    """Digest of an evaluation: what was judged, for what purpose, under which conditions."""
    return content_hash("\n".join((conditions.digest, purpose, subject)))


def reply_key(question: str, body: str) -> str:
    """Digest of an answer of a language model."""
    return content_hash(f"{question}\n{body}")


def content_hash(text: str) -> str:
    """Hash of `text`, 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _conditions(body: str) -> Conditions:
    data = json.loads(body)
    return Conditions(**{**data, "versions": tuple((n, v) for n, v in data["versions"])})


def _open(path: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        _use_write_ahead_log(db)
        db.execute("PRAGMA synchronous = NORMAL")  # no fsync a write, for which two dozen processes would wait
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            with db:
                db.execute("BEGIN IMMEDIATE")  # another process may be making the tables at this moment
                _make_tables(db, path)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} cannot be opened as a store: {error}") from None
    return db


def _use_write_ahead_log(db: sqlite3.Connection) -> None:
    """SQLite does not wait for others here by itself: it says at once that the file is locked."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _make_tables(db: sqlite3.Connection, path: str) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == SCHEMA_VERSION:
        return
    if version not in (0, 1):
        raise StoreError(f"{path} has store version {version}, this library writes version {SCHEMA_VERSION}")
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is a database of something else")
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


__all__ = [
    "ACCIDENT",
    "SCHEMA_VERSION",
    "Conditions",
    "Store",
    "StoredAttempt",
    "StoredStep",
    "content_hash",
    "evaluation_key",
    "reply_key",
]
