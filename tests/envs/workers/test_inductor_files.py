"""What TorchInductor compiled in another process is taken over where its folder is not to be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from qimeng.envs.workers import inductor_files


def test_an_outcome_that_cannot_be_stored_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.remote_cache import LocalCacheBackend

    monkeypatch.setattr(LocalCacheBackend, "_put", LocalCacheBackend._put)
    for _ in range(2):
        inductor_files.take_over([])
    backend, file = LocalCacheBackend(), str(tmp_path / "found.best_config")
    backend.put(file, b"64")
    assert backend.get(file) == b"64"

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(codecache, "write_atomic", refuse)
    backend.put(file, b"128")
    assert backend.get(file) == b"64"
