"""Rows of a measurement in a file: one line of JSON each, with where and when it was made.

Deals in rows with a key, under which a run that is started again finds what it has. Knows nothing about what is in
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qimeng.bench.row import Environment, RowError, append_line, whole_lines

Data = dict[str, Any]


class Journal:
    """A file of rows; made when the first is added.

    Args:
        path: the file.
        environment: where the rows of this run are made.
        seconds: after which no further work should begin.
        others: files whose rows count as there already.
    """

    def __init__(
        self,
        path: Path | str,
        environment: Environment,
        seconds: float = float("inf"),
        others: Iterable[Path] = (),
    ):
        self.path, self._environment = Path(path), asdict(environment)
        self._end = time.monotonic() + seconds
        files = [file for file in (self.path, *others) if file.exists()]
        self._keys = {row["key"] for file in files for row in read_journal(file)}

    @property
    def seconds_left(self) -> float:
        """Seconds until no further work should begin; negative after that."""
        return self._end - time.monotonic()

    def has(self, key: str) -> bool:
        """Whether there is a row with this key."""
        return key in self._keys

    def pending(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` without a row, in their order."""
        return [key for key in keys if key not in self._keys]

    def add(self, key: str, **data: Any) -> Data:
        """Add a row and flush it to disk.

        Raises:
            ValueError: the row names a field that every row has.
        """
        if clash := {"environment", "at"} & set(data):
            raise ValueError(f"every row has {', '.join(clash)} of its own")
        row = {"key": key, **data, "environment": self._environment, "at": datetime.now(UTC).isoformat("T", "seconds")}
        append_line(self.path, json.dumps(row, sort_keys=True))
        self._keys.add(key)
        return row


def read_journal(path: Path | str) -> list[Data]:
    """The rows of a file; where two have the same key, the later one.

    Raises:
        RowError: no such file, or a line of it is no row.
    """
    found: dict[str, Data] = {}
    for number, line in enumerate(whole_lines(path), 1):
        try:
            row = json.loads(line)
            found[row["key"]] = row
        except (ValueError, TypeError, KeyError) as error:
            raise RowError(f"{path}, line {number}: no row of a measurement ({error})") from error
    return list(found.values())


__all__ = ["Data", "Journal", "read_journal"]
