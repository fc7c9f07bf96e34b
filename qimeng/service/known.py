"""Answers that are known: by the content of what was asked, and of what judged it.

Deals in rows of an SQLite file, or of memory alone. The oldest are forgotten where there are too many. Knows nothing
about jobs or HTTP.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from qimeng.program.content import digest_of
from qimeng.service.errors import ServiceError
from qimeng.service.messages import Answer

_LOG = logging.getLogger(__name__)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, answer TEXT NOT NULL)"
)


class KnownAnswers:
    """Answers by the digest of their submission. For one thread at a time.

    A file that can no longer be written costs answers, not the service: that is logged.

    Args:
        path: file to keep them in, made where it is not there; None for memory alone.
        kept: how many.
        judge: what judges, such as device and versions: answers of another one do not count.

    Raises:
        ServiceError: the file is no such file, or cannot be opened.
    """

    def __init__(self, path: Path | None, kept: int, judge: Mapping[str, object]):
        self._kept, self._judge = kept, json.dumps(judge, sort_keys=True, default=str)
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(_SCHEMA)
            self._db.execute("SELECT key, answer FROM answers LIMIT 1")
        except (sqlite3.Error, OSError) as error:
            raise ServiceError(f"{path} cannot be used for answers: {error}; name another file") from error

    def get(self, digest: str) -> Answer | None:
        """The answer to a submission; None where it is not known."""
        try:
            row = self._db.execute("SELECT answer FROM answers WHERE key = ?", (self._key(digest),)).fetchone()
            return None if row is None else Answer.from_data(json.loads(row[0]))
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            _LOG.warning("a known answer cannot be read: %s", error)
            return None

    def put(self, digest: str, answer: Answer) -> None:
        """Keep an answer, in place of what was known."""
        row = self._key(digest), json.dumps(asdict(answer))
        try:
            self._db.execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", row)
            self._db.execute(
                "DELETE FROM answers WHERE number NOT IN (SELECT number FROM answers ORDER BY number DESC LIMIT ?)",
                (self._kept,),
            )
        except sqlite3.Error as error:
            _LOG.warning("an answer is not kept: %s", error)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _key(self, digest: str) -> str:
        return digest_of("answer", digest, self._judge, size=32)


__all__ = ["KnownAnswers"]
