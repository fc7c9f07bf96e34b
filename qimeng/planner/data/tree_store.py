"""Explored trees and the store: taking them out of it, and putting them in.

Deals in rows of the store. Times are rounded to 5 digits; errors of the numerics, resources and the judge's own seconds
are left out. Knows nothing about files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from qimeng.errors import ReplayError
from qimeng.interfaces import Evaluation, Timing
from qimeng.interfaces.records import PatchRecord
from qimeng.planner.data.tree import ABOUT, Tree
from qimeng.program.identity import IDENTITY
from qimeng.store import Conditions, Store

if TYPE_CHECKING:
    from qimeng.planner.data.generate import Drawn

DIGITS = 5
"""Significant digits of a time."""

ERROR = 240
"""Characters kept of the message of a failure."""


def put_drawn(store: Store, drawn: Drawn) -> None:
    """Keep a drawn spec in the store, with all that is needed to make it again."""
    s, where = drawn.spec, {"family": drawn.family, "seed": drawn.seed, "index": drawn.index}
    body = {"source": s.source, "dtype": s.dtype, "mode": s.mode, "weights": s.weights, **where}
    store.put_spec(s.digest, s.name, json.dumps(body, sort_keys=True))


def put_tree(store: Store, tree: Tree) -> None:
    """Add a tree to the store. Its evaluations are then known and not repeated.

    Raises:
        TreeError: it has programs under old names, and nothing of it can be applied any more (`Tree.today`).
    """
    tree = tree if tree.identity == IDENTITY else tree.today()
    body = {k: getattr(tree, k) for k in (*ABOUT, "weights") if k != "name"}
    store.put_spec(tree.conditions.spec, tree.name, json.dumps(body, sort_keys=True))
    store.merge(tree.store())


def trees_of(store: Store) -> Iterator[Tree]:
    """The trees of a store whose specs can be made again from it."""
    evaluations: dict[Conditions, list[tuple[str, str, Evaluation]]] = {}
    for conditions, purpose, subject, evaluation in store.evaluations():
        evaluations.setdefault(conditions, []).append((purpose, subject, compact(evaluation)))
    for conditions, judged in evaluations.items():
        body = store.spec(conditions.spec)
        if body is None or not body[1]:
            continue
        edges = store.steps(conditions)
        records = {d: _patch(store, d) for d in dict.fromkeys(e.patch for e in edges if e.patch is not None)}
        about = json.loads(body[1])
        yield Tree(
            name=body[0],
            source=about["source"],
            dtype=about["dtype"],
            mode=about["mode"],
            family=about.get("family", ""),
            seed=about.get("seed"),
            index=about.get("index"),
            conditions=conditions,
            evaluations=tuple(judged),
            patches={d: r for d, r in records.items() if r is not None},
            edges=tuple(e for e in edges if e.patch is None or records[e.patch] is not None),
            weights=about.get("weights", ""),
        )


def _patch(store: Store, digest: str) -> PatchRecord | None:
    """The patch; None where there is none, or another version wrote it and this one cannot read it."""
    try:
        return store.patch(digest)
    except ReplayError:
        return None


def compact(evaluation: Evaluation) -> Evaluation:
    """`evaluation` with what a planner learns from: outcome, times, the regions' times, what was chosen."""
    e = evaluation
    return Evaluation(
        gate=e.gate,
        error=None if e.error is None else e.error[:ERROR],
        failure=e.failure,
        timing=_rounded(e.timing),
        eager=_rounded(e.eager),
        chosen=e.chosen,
        region_ms={region: _round(ms) for region, ms in e.region_ms.items()},
        generated_share=None if e.generated_share is None else _round(e.generated_share),
        configurations=e.configurations,
    )


def _rounded(t: Timing | None) -> Timing | None:
    if t is None:
        return None
    wall = None if t.wall_ms is None else _round(t.wall_ms)
    return replace(t, device_ms=_round(t.device_ms), spread=_round(t.spread), wall_ms=wall)


def _round(x: float) -> float:
    """`x` with `DIGITS` significant digits.

    >>> _round(0.0123456789)
    0.012346
    """
    return float(f"{x:.{DIGITS}g}")


__all__ = ["compact", "put_drawn", "put_tree", "trees_of"]
