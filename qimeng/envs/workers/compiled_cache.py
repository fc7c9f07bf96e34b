"""Workers read kernels that were compiled ahead of time, but write only to their own cache.

Deals in Triton's cache folders, one for each compiled implementation. Only the compiling process could write it; a
worker reads those of its loaded program. So no candidate can replace another's kernel. Knows nothing about the content
of a cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager


class CompiledCache(FileCacheManager):
    """Triton's own cache, then those in `folders`, which are only read.

    Attributes:
        folders: cache folders of what the loaded program is made of.
    """

    folders: ClassVar[Sequence[str]] = ()

    def get_file(self, filename: str) -> str | None:
        """Path of a cached file; None where it is in no cache."""
        return next((found for cache in self._caches() if (found := cache.get_file(filename))), None)

    def has_file(self, filename: str) -> bool:
        """Whether the file is in some cache."""
        return any(cache.has_file(filename) for cache in self._caches())

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name to path of the files cached together; None where they are in no cache."""
        return next((found for cache in self._caches() if (found := cache.get_group(filename))), None)

    def _caches(self) -> list[FileCacheManager]:
        caches = []
        for folder in (knobs.cache.dir, *self.folders):
            cache = object.__new__(FileCacheManager)  # its constructor would make the folder
            cache.key, cache.lock_path, cache.cache_dir = self.key, None, os.path.join(folder, self.key)
            caches.append(cache)
        return caches


def read_compiled(folders: Sequence[str]) -> None:
    """From now on this process finds in `folders` what was compiled into them."""
    CompiledCache.folders = tuple(folders)
    knobs.cache.manager_class = CompiledCache


__all__ = ["CompiledCache", "read_compiled"]
