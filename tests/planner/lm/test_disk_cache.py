from __future__ import annotations

from pathlib import Path

import pytest

from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.lm import disk_cache as module
from qimeng.planner.lm.disk_cache import cache_folder, cached
from qimeng.planner.lm.stored import stored_tasks

TREES = Path(__file__).parent / "unseen_h200.xz"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIMENG_CACHE", str(tmp_path / "cache"))


def _files() -> list[Path]:
    return [p for p in cache_folder().rglob("*") if p.is_file()]


def test_it_is_made_once() -> None:
    made: list[int] = []
    results = [cached("a", lambda: made.append(1) or [1, 2]) for _ in range(2)]
    assert results == [[1, 2], [1, 2]] and made == [1]
    assert cached("b", lambda: 3) == 3


def test_a_failure_is_not_kept() -> None:
    with pytest.raises(KeyError):
        cached("a", lambda: {}["x"])
    assert cached("a", lambda: 1) == 1


def test_a_damaged_file_is_made_anew() -> None:
    cached("a", lambda: 1)
    (file,) = _files()
    file.write_bytes(file.read_bytes()[:-4])
    assert cached("a", lambda: 2) == 2
    assert cached("a", lambda: 3) == 2


def test_another_version_makes_it_anew_and_takes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cached("a", lambda: 1)
    monkeypatch.setattr(module, "version", lambda: "other")
    assert cached("a", lambda: 2) == 2
    assert [p.parent.name for p in _files()] == ["other"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QIMENG_CACHE", str(tmp_path / "file"))
    assert cached("a", lambda: 1) == 1


def test_trees_from_the_cache_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = list(read_trees(TREES))[:1]
    first = list(stored_tasks(trees))
    assert len(_files()) == len(first) == len(trees)
    monkeypatch.setattr("qimeng.planner.lm.stored.closed", None)  # not asked again
    again = list(stored_tasks(trees))
    assert [s.tree.digest for s in again] == [s.tree.digest for s in first]
    assert [s.task.start.digest for s in again] == [s.task.start.digest for s in first]
    assert [s.known for s in again] == [s.known for s in first]
