"""What TorchInductor compiled in another process is taken over where its folder is not to be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import codecache

from qimeng.envs.workers import inductor_files


def test_an_outcome_that_cannot_be_stored_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    write = codecache.write_atomic

    def write_some(path: str, *arguments: object, **named: object) -> None:
        if "theirs" in path:
            refused.append(path)
            raise PermissionError(13, "Permission denied", path)
        write(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(codecache, "write_atomic", write_some)
    for _ in range(2):
        inductor_files.take_over([])
    mine, theirs = tmp_path / "mine.best_config", tmp_path / "theirs.best_config"
    for path in (mine, theirs):
        codecache.write_atomic(str(path), b"64")
    assert mine.read_bytes() == b"64" and not theirs.exists() and refused == [str(theirs)]
