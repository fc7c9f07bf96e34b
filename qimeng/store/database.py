"""The SQLite file of a store: its tables, opening it, and versions.

Deals in tables and locks. Knows nothing about what the rows mean.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import warnings

from qimeng.errors import StoreError
from qimeng.store.migration import planned

SCHEMA_VERSION = 3
"""Version 2 added what language models were asked and answered, 3 names programs by content (`Program.digest`).

A store of version 1 or 2 is rewritten when it is opened.
"""

OLD = (1, 2)
"""Versions that `qimeng.store.migration` brings up to date."""

BUSY_S = 60.0
"""Seconds that a process waits for others that write."""

SCHEMA = """
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
CREATE TABLE IF NOT EXISTS unnamed (conditions TEXT PRIMARY KEY);
"""
TABLES = ("specs", "programs", "patches", "conditions", "evaluations", "steps", "replies", "attempts")


_renaming = threading.Lock()
"""Held while programs are made again: PyTorch exports one computation at a time."""


def open_database(path: str) -> sqlite3.Connection:
    """A connection to the store at `path`, made if it is not there and brought up to date if it is old.

    Raises:
        StoreError: the file is no store, or was written by a newer version of the library.
    """
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        _use_write_ahead_log(db)
        db.execute("PRAGMA synchronous = NORMAL")  # no fsync a write, for which two dozen processes would wait
        version = _version(db)
        if version != SCHEMA_VERSION:
            with db:
                db.execute("BEGIN IMMEDIATE")  # another process may be making the tables at this moment
                version = _make_tables(db, path)
        if version in OLD:
            _rename(db, path)
    except sqlite3.DatabaseError as error:
        full = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        what = "Make room on its disk" if full else "Move it away"
        raise StoreError(
            f"{path} cannot be opened as a store: {error}. {what}, or choose another file (--store)"
        ) from None
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


def _make_tables(db: sqlite3.Connection, path: str) -> int:
    """Make the tables that are not there, and return the version of what is in them."""
    version = _version(db)
    if version not in (0, *OLD, SCHEMA_VERSION):
        raise StoreError(f"{path} has store version {version}, this library writes version {SCHEMA_VERSION}")
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is an SQLite file, but not a store")
    if version != SCHEMA_VERSION:
        for statement in SCHEMA.split(";"):
            db.execute(statement)
    if version == 0:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return version


def _rename(db: sqlite3.Connection, path: str) -> None:
    """Give the rows of an old store their new names, unless another process has done so meanwhile."""
    with _renaming:
        if _version(db) not in OLD:
            return
        plan = planned(db)  # takes a second for each spec: the file is not locked as long
        with db:
            db.execute("BEGIN IMMEDIATE")
            if _version(db) not in OLD:
                return
            plan.apply(db)
            db.executemany("INSERT OR IGNORE INTO unnamed VALUES (?)", [(digest,) for digest in plan.waiting])
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    if remark := plan.remark(path):
        warnings.warn(remark, stacklevel=2)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


__all__ = ["BUSY_S", "SCHEMA_VERSION", "TABLES", "open_database"]
