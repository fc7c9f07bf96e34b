"""A collection on a cluster: each spec is explored into a store of its own, and the stores become one.

Deals in files that travel with a task. A store merges by content, so an evaluation that comes twice is one row. Knows
nothing about how a spec is explored (`qimeng.bench.explore`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from qimeng.bench.collect import STORE, Assignment, explore_one
from qimeng.bench.explore import Explored
from qimeng.cluster.supervisor import TASK_FOLDER
from qimeng.store import Store


def explore_away(assignment: Assignment, seconds: float, device: str = "", coder: str = "template") -> Explored:
    """At a GPU of a cluster: explore a spec into the folder of the task; see `qimeng.bench.collect.explore_one`."""
    return explore_one(assignment, Path(os.environ[TASK_FOLDER]) / STORE, seconds, device, coder)


def merge_files(store: Path, files: Mapping[str, bytes]) -> None:
    """Add what a task left in its folder to the store at `store`; nothing where it left no store.

    Args:
        store: path of the store, made where it is not there.
        files: by name; SQLite's journals beside the store belong to it, where the task was ended before it closed it.
    """
    if STORE not in files:
        return
    with tempfile.TemporaryDirectory(prefix="qimeng_merge_") as folder:
        for name, data in files.items():
            if name.startswith(STORE):
                (Path(folder) / name).write_bytes(data)
        with Store(store) as ours, Store(Path(folder) / STORE) as theirs:
            ours.merge(theirs)


__all__ = ["explore_away", "merge_files"]
