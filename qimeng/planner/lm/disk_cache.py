"""A disk cache for prepared trees: capturing a spec and closing its tree takes a second, reading both far less.

Deals in files, keyed by their input and the version that made them. A missing or unreadable file is made again, and a
read-only folder is ignored. The files are in ``$QIMENG_CACHE``, by default ``~/.cache/qimeng``. They hold pickled
objects, so do not use a folder that others can write to.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def cache_folder() -> Path:
    """Where qimeng keeps what it can make again."""
    named = os.environ.get("QIMENG_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qimeng"


def cached(name: str, make: Callable[[], T]) -> T:
    """The result of `make`, from the cache if this version of qimeng stored it there.

    Args:
        name: of what it is made from: the same name, the same result.
        make: returns something that can be pickled. What it raises is raised.
    """
    file = cache_folder() / "trees" / version() / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    with suppress(Exception):  # not there, cut off, or of classes that have changed all the same
        found: T = pickle.loads(gzip.decompress(file.read_bytes()))
        return found
    made = make()
    with suppress(OSError):
        _write(file, gzip.compress(pickle.dumps(made), compresslevel=1))
    return made


@cache
def version() -> str:
    """Names the sources of qimeng, and the versions of what it captures with."""
    import torch

    package = Path(__file__).parents[2]
    found = hashlib.blake2b(f"{sys.version} {torch.__version__}".encode(), digest_size=8)
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    return found.hexdigest()


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all; the first file of a version takes the place of those of others."""
    if not file.parent.exists():
        shutil.rmtree(file.parent.parent, ignore_errors=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(file)


__all__ = ["cache_folder", "cached", "version"]
