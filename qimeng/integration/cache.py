"""Results of earlier optimizations on disk, so that a second process has its programs in seconds.

Deals in folders under ``$QIMENG_CACHE`` (by default ``~/.cache/qimeng``). Knows nothing about how results are found.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qimeng.envs.steps.result import Result
from qimeng.errors import QimengError
from qimeng.planner.lm.disk_cache import cache_folder


class ResultCache:
    """Results by what they were found for.

    Args:
        folder: where they lie; by default ``programs`` in the cache folder of the library.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = cache_folder() / "programs" if folder is None else Path(folder)

    def get(self, key: str) -> Result | None:
        """The result that was put under `key`; None where there is none that can be read."""
        try:
            return Result.load(self.folder / key)
        except QimengError:
            return None

    def put(self, key: str, result: Result) -> None:
        """Keep a result. A folder that cannot be written to is left as it is: the next process searches again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=self.folder, prefix=".new_"))
            result.save(made)
            if not (self.folder / key).exists():
                made.rename(self.folder / key)
            else:
                shutil.rmtree(made)
        except OSError:
            return


def cache_key(parts: Sequence[object]) -> str:
    """A name for what these texts and numbers say."""
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=12).hexdigest()


__all__ = ["ResultCache", "cache_key"]
