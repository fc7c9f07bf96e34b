"""Explored trees as a published dataset: tables of plain rows that `datasets` loads, with a card.

Deals in trees, rows of JSON and files. Each table is a configuration: `specs`, `trees`, `steps` (an action with its
patch and verdict), `patches` (the text of kernels), `evaluations` (everything that was judged). `trees.xz` has the same
trees as `qimeng train` and `qimeng collect merge` read them.

No spec with the structure of a benchmark's problem is written (`qimeng.planner.data.overlap.reserved`), and none whose
text was left out of its tree, since nobody could check it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qimeng.device import row_name
from qimeng.errors import QimengError
from qimeng.interfaces import Evaluation
from qimeng.planner.data.overlap import Signatures, reserved, signatures_of
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_file import put_trees, read_trees
from qimeng.planner.data.tree_store import trees_of
from qimeng.store import Store

TABLES = {
    "specs": "what is computed: a PyTorch module as text, with its inputs",
    "trees": "what was explored of one spec on one device, with versions",
    "steps": "an action on a program, the patch that a coder wrote, and the verdict",
    "patches": "the kernels that a patch offers, as text, with the record that applies it again",
    "evaluations": "everything that was judged, with all that was found",
}
"""Name of each table and what a row is."""

Columns = dict[str, str | list[str]]
"""Name of each column to its type, or to those of the strings of which each item of a list consists."""

_VERDICT: Columns = {
    "right": "bool",
    "gate": "string",
    "failure": "string",
    "error": "string",
    "chosen": "int64",
    "ms": "float64",
    "spread": "float64",
    "eager_ms": "float64",
    "speedup": "float64",
    "generated_share": "float64",
    "estimated": "bool",
}

COLUMNS: dict[str, Columns] = {
    "specs": {
        **dict.fromkeys(("spec", "name", "family", "dtype", "mode", "weights"), "string"),
        **dict.fromkeys(("seed", "index"), "int64"),
        **dict.fromkeys(("structure", "whole", "source"), "string"),
    },
    "trees": {
        **dict.fromkeys(("tree", "spec", "device", "mode"), "string"),
        "estimated": "bool",
        "versions": ["name", "version"],
        **dict.fromkeys(("programs", "steps", "evaluations"), "int64"),
    },
    "steps": {
        **dict.fromkeys(("tree", "spec", "parent", "kind"), "string"),
        "regions": "list",
        **dict.fromkeys(("param", "patch"), "string"),
        "accepted": "bool",
        "child": "string",
        "parent_ms": "float64",
        **_VERDICT,
    },
    "patches": {
        **dict.fromkeys(("patch", "target", "note", "launch"), "string"),
        "alternatives": ["language", "source", "entry", "schedule"],
        "record": "string",
    },
    "evaluations": {
        **dict.fromkeys(("tree", "purpose", "program"), "string"),
        **_VERDICT,
        "evaluation": "string",
    },
}
"""What `datasets` is told of each table, since a column may be empty where it begins."""

STORE = "store.sqlite"
"""The store in the folder of a collection."""


@dataclass(frozen=True)
class Exported:
    """What a dataset holds, and what was left out.

    Attributes:
        rows: rows of each table.
        devices: device to trees, with "estimated" where times are a model's.
        versions: each (name, version) under which something was judged, with trees.
        reserved: trees left out because their spec has the structure of a benchmark's problem.
        unknown: trees left out because their spec cannot be looked at, by reason.
    """

    rows: Mapping[str, int]
    devices: Mapping[str, int]
    versions: Mapping[str, int]
    reserved: int
    unknown: Mapping[str, int]


def read_sources(sources: Iterable[Path]) -> Iterator[Tree]:
    """The trees of files (`qimeng collect export`), stores and folders of collections.

    Raises:
        TreeError: a source is none of these.
    """
    for path in sources:
        store = path / STORE if path.is_dir() else path
        if store.suffix == ".sqlite":
            if not store.is_file():
                raise TreeError(f"{path} holds no collection ({STORE} is missing)")
            with Store(store) as opened:
                yield from trees_of(opened)
        else:
            yield from read_trees(path)


def export_dataset(trees: Iterable[Tree], out: Path, licence: str = "apache-2.0") -> Exported:
    """Write `trees` as tables, `trees.xz` and a card into the folder `out`.

    Args:
        trees: equal ones are written once.
        out: made where it does not exist; files of an earlier export are replaced.
        licence: of the specs' texts and of the patches, as Hugging Face's hub calls it.

    Raises:
        TreeError: nothing is left to write.
    """
    kept: dict[str, tuple[Tree, Signatures]] = {}
    left_out, unknown = 0, Counter[str]()
    known: dict[str, Signatures | str] = {}
    for tree in trees:
        digest = tree.conditions.spec
        if digest not in known:
            known[digest] = _signatures(tree)
        found = known[digest]
        if isinstance(found, str):
            unknown[found] += 1
        elif found.structure in reserved():
            left_out += 1
        else:
            kept.setdefault(tree.digest, (tree, found))
    if not kept:
        raise TreeError(
            f"nothing is left to write: {left_out} trees are of benchmarks' problems, {unknown.total()} cannot be "
            "checked; export trees of drawn specs, with their texts"
        )
    out.mkdir(parents=True, exist_ok=True)
    order = sorted(kept, key=lambda digest: (kept[digest][0].name, digest))
    some = {digest: kept[digest] for digest in order}
    rows = {name: _write(out / f"{name}.jsonl.gz", make(some)) for name, make in _ROWS.items()}
    put_trees([tree for tree, _ in some.values()], out / "trees.xz")
    conditions = [tree.conditions for tree, _ in some.values()]
    found_in = Exported(
        rows,
        Counter(row_name(c.device) + (", estimated" if c.estimated else "") for c in conditions),
        Counter(f"{name} {version}" for c in conditions for name, version in c.versions),
        left_out,
        unknown,
    )
    (out / "README.md").write_text(card(found_in, licence))
    return found_in


def _signatures(tree: Tree) -> Signatures | str:
    """Of the tree's spec; or why there are none."""
    if not tree.source:
        return "the text of their spec is not in them"
    try:
        return signatures_of(tree.spec())
    except QimengError:
        return "this version does not capture their spec"


Some = Mapping[str, tuple[Tree, Signatures]]
"""Trees by digest, with the signatures of their specs."""


def _specs(some: Some) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for tree, signatures in some.values():
        if tree.conditions.spec not in seen:
            seen.add(tree.conditions.spec)
            about = {
                name: getattr(tree, name) for name in ("name", "family", "dtype", "mode", "weights", "seed", "index")
            }
            yield {"spec": tree.conditions.spec, **about, **asdict(signatures), "source": tree.source}


def _trees(some: Some) -> Iterator[dict[str, Any]]:
    for digest, (tree, _) in some.items():
        c = tree.conditions
        yield {
            "tree": digest,
            "spec": c.spec,
            "device": row_name(c.device),
            "mode": c.mode,
            "estimated": c.estimated,
            "versions": [{"name": name, "version": version} for name, version in c.versions],
            "programs": tree.programs,
            "steps": len(tree.edges),
            "evaluations": len(tree.evaluations),
        }


def _steps(some: Some) -> Iterator[dict[str, Any]]:
    for digest, (tree, _) in some.items():
        for edge in tree.edges:
            found = tree.keyed.get(edge.evaluation or "")
            yield {
                "tree": digest,
                "spec": tree.conditions.spec,
                "parent": edge.parent,
                "kind": edge.action.kind,
                "regions": list(edge.action.regions),
                "param": edge.action.param,
                "patch": edge.patch,
                "accepted": edge.accepted,
                "child": edge.child,
                "parent_ms": tree.times.get(edge.parent),
                **_verdict(found),
            }


def _patches(some: Some) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for tree, _ in some.values():
        for digest, record in tree.patches.items():
            if digest in seen:
                continue
            seen.add(digest)
            alternatives = [
                {"language": a.language, "source": a.source, "entry": a.entry, "schedule": str(a.schedule or "")}
                for a in record.alternatives
            ]
            about = {"patch": digest, "target": record.target, "note": record.note, "launch": record.launch}
            yield {**about, "alternatives": alternatives, "record": record.to_json()}


def _evaluations(some: Some) -> Iterator[dict[str, Any]]:
    for digest, (tree, _) in some.items():
        for purpose, subject, found in tree.evaluations:
            yield {
                "tree": digest,
                "purpose": purpose,
                "program": subject,
                **_verdict(found),
                "evaluation": found.to_json(),
            }


def _verdict(found: Evaluation | None) -> dict[str, Any]:
    """What was found, flat; all None where nothing was judged. Times are device milliseconds."""
    return {
        "right": None if found is None else found.ok,
        "gate": None if found is None else found.gate.value,
        "failure": None if found is None else found.failure,
        "error": None if found is None else found.error,
        "chosen": None if found is None else found.chosen,
        "ms": None if found is None else found.ms,
        "spread": found.timing.spread if found is not None and found.timing else None,
        "eager_ms": found.eager.device_ms if found is not None and found.eager else None,
        "speedup": None if found is None else found.speedup,
        "generated_share": None if found is None else found.generated_share,
        "estimated": found.timing.estimated if found is not None and found.timing else None,
    }


_ROWS = {
    "specs": _specs,
    "trees": _trees,
    "steps": _steps,
    "patches": _patches,
    "evaluations": _evaluations,
}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a table; equal rows give an equal file. How many rows there are."""
    count = 0
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, sort_keys=True) + "\n").encode())
            count += 1
    return count


def _features(columns: Columns) -> str:
    """The columns of a table, as the card's head lists them."""
    lines = []
    for name, kind in columns.items():
        lines.append(f"  - name: {name}")
        if isinstance(kind, list):
            lines += ["    list:", *(f"    - name: {part}\n      dtype: string" for part in kind)]
        else:
            lines.append("    list: string" if kind == "list" else f"    dtype: {kind}")
    return "\n".join(lines)


def card(found: Exported, licence: str) -> str:
    """The card: README.md with the head that Hugging Face's hub and `datasets` read."""
    configurations = "\n".join(f"- config_name: {name}\n  data_files: {name}.jsonl.gz" for name in TABLES)
    features = "\n".join(f"- config_name: {name}\n  features:\n{_features(c)}" for name, c in COLUMNS.items())
    tables = "\n".join(f"| `{name}` | {found.rows[name]} | {about} |" for name, about in TABLES.items())

    def listed(counts: Mapping[str, int]) -> str:
        return "\n".join(f"- {name}: {n} trees" for name, n in sorted(counts.items())) or "- none are known"

    unknown = "".join(f" {n} trees are left out because {why}." for why, n in sorted(found.unknown.items()))
    return f"""---
license: {licence}
pretty_name: Trajectories of GPU kernels by qimeng
tags: [code, gpu, triton, cuda, reinforcement-learning]
configs:
{configurations}
dataset_info:
{features}
---
# Trajectories of GPU kernels
Programs for GPUs that were improved step by step with the Python library qimeng: each step is an action, the patch that
a coder wrote for it, and the verdict of a judge that checked the program against float64 and timed it.

```python
from datasets import load_dataset

steps = load_dataset("path/of/this/folder", "steps", split="train")
```

| table | rows | a row is |
|---|---|---|
{tables}

Programs, patches and specs are named by hashes of their content. `steps.patch` leads to `patches`, `steps.child` and
`steps.parent` are programs, `evaluations.program` is what was judged. Times are device milliseconds (median; `spread`
is the interquartile range over it). `speedup` is over PyTorch eager. `trees.xz` has the same trees for `qimeng train`.

## Devices
{listed(found.devices)}

## Versions
{listed(found.versions)}

## Licences
Specs were drawn by qimeng's generator, and patches were written by its coders: {licence}. No text of a
benchmark is in it.

## Benchmarks
Every spec was captured and compared with the structures of the problems of the benchmarks that qimeng's planners are
judged on (`qimeng/planner/data/reserved.json`: operators and wiring, whatever the shapes). {found.reserved} trees had
one of them and are left out.{unknown}
"""


__all__ = ["COLUMNS", "TABLES", "Exported", "card", "export_dataset", "read_sources"]
