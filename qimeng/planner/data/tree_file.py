"""Explored trees as one small file, which training and CI read without the store.

Deals in lines of JSON, compressed by xz: a head, then one line for each spec under its conditions, with what is needed
to make the spec again, every evaluation, every patch and every edge.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qimeng.device import row_name
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_store import trees_of
from qimeng.store import Store

FORMAT, VERSION = "qimeng trees", 2

READ = (1, VERSION)
"""Versions of the file that are read; since version 2 a tree says by which rule its programs are named."""


@dataclass(frozen=True)
class Written:
    """What a file of trees holds.

    Attributes:
        specs: different specs.
        trees: trees; a spec explored on two devices has two.
        programs: programs, over all trees.
        evaluations: programs judged, failures included.
        edges: steps.
        size: bytes of the file.
    """

    specs: int
    trees: int
    programs: int
    evaluations: int
    edges: int
    size: int


def write_trees(
    store: Store,
    path: Path | str,
    keep: Callable[[Tree], bool] = lambda tree: True,
    without_source: Collection[str] = (),
) -> Written:
    """Write every tree of `store` that `keep` wants to `path`, in an order that depends on the trees alone.

    Trees whose spec has no source in the store (those of modules and functions) are left out.

    Args:
        store: where the trees are.
        path: file to write.
        keep: whether a tree is wanted.
        without_source: families of specs whose text is left out: that of a benchmark's problems, say, which is not
            ours to pass on. `Tree.with_source` puts it back.

    Raises:
        TreeError: nothing is left to write, or no tree is of a family that is to lose its text.
    """
    found = list(trees_of(store))
    chosen = [replace(t, source="") if t.family in without_source else t for t in found if keep(t)]
    if not chosen:
        devices = ", ".join(sorted({row_name(t.conditions.device) for t in found}))
        raise TreeError(
            f"{store.path} holds no tree that is wanted: its {len(found)} trees are of {devices}"
            if found
            else f"{store.path} holds no tree of a spec with a source: collect some with `qimeng collect`"
        )
    there = sorted({t.family for t in found})
    if missing := sorted(set(without_source) - set(there)):
        raise TreeError(
            f"{store.path} holds no tree of family {missing[0]!r} to leave out the source of; it has {', '.join(there)}"
        )
    return put_trees(chosen, path)


def put_trees(trees: Sequence[Tree], path: Path | str) -> Written:
    """Write `trees` to `path`, in an order that depends on them alone.

    Args:
        trees: at least one.
        path: file to write.
    """
    chosen = sorted(trees, key=lambda t: (t.seed or 0, t.index or 0, t.name, t.conditions.digest))
    counts = Written(
        specs=len({t.conditions.spec for t in chosen}),
        trees=len(chosen),
        programs=sum(t.programs for t in chosen),
        evaluations=sum(len(t.evaluations) for t in chosen),
        edges=sum(len(t.edges) for t in chosen),
        size=0,
    )
    head = {"format": FORMAT, "version": VERSION, **asdict(counts)}
    lines = [_json(head), *(_json(tree.to_data()) for tree in chosen)]
    data = lzma.compress(("\n".join(lines) + "\n").encode(), preset=9)
    Path(path).write_bytes(data)
    return replace(counts, size=len(data))


def read_trees(path: Path | str) -> Iterator[Tree]:
    """The trees of a file, one after another.

    Raises:
        TreeError: the file is not there, holds something else, or was written by another version.
    """
    lines = _lines(path)
    _head(next(lines, ""), path)
    for line in lines:
        yield Tree.from_data(json.loads(line))


def describe(path: Path | str) -> Written:
    """What a file holds, from its head.

    Raises:
        TreeError: as for `read_trees`.
    """
    head = _head(next(_lines(path), ""), path)
    counts = {k: int(v) for k, v in head.items() if k not in ("format", "version")}
    return Written(**{**counts, "size": Path(path).stat().st_size})


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _lines(path: Path | str) -> Iterator[str]:
    try:
        with lzma.open(path, "rt") as text:
            yield from text
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TreeError(f"{path} cannot be read as trees: {error}") from None


def _head(line: str, path: Path | str) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TreeError(f"{path} holds no trees")
    if head["version"] not in READ:
        raise TreeError(f"{path} has version {head['version']} of trees, this library reads up to version {VERSION}")
    return head


__all__ = ["Written", "describe", "put_trees", "read_trees", "write_trees"]
