"""The published dataset: rows that lead to one another, a card that `datasets` reads, and no benchmark's problem."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qimeng.cli import app
from qimeng.interfaces import Evaluation
from qimeng.interfaces.records import PatchRecord
from qimeng.planner.data import dataset
from qimeng.planner.data.dataset import COLUMNS, TABLES, export_dataset, read_sources
from qimeng.planner.data.overlap import signatures_of
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_file import put_trees, read_trees

TREES = Path(__file__).with_name("h200_estimated.jsonl.xz")
HELD_OUT = Path(__file__).resolve().parents[3] / "benchmarks" / "trees" / "heldout.xz"


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    return list(read_trees(TREES))[:3]


def rows(folder: Path, table: str) -> Iterator[dict[str, Any]]:
    with gzip.open(folder / f"{table}.jsonl.gz", "rt") as file:
        yield from map(json.loads, file)


def test_rows_lead_to_one_another(trees: list[Tree], tmp_path: Path) -> None:
    found = export_dataset([*trees, trees[0]], tmp_path)
    read = {table: list(rows(tmp_path, table)) for table in TABLES}
    assert {table: len(some) for table, some in read.items()} == dict(found.rows)
    assert found.rows["trees"] == 3 and found.rows["steps"] == sum(len(t.edges) for t in trees)
    for table, some in read.items():
        assert all(row.keys() == COLUMNS[table].keys() for row in some), table
    specs, patches = {row["spec"] for row in read["specs"]}, {row["patch"]: row for row in read["patches"]}
    judged = {(row["tree"], row["program"]) for row in read["evaluations"]}
    for step in read["steps"]:
        assert step["spec"] in specs and (step["patch"] is None or step["patch"] in patches)
        assert step["right"] is None or (step["tree"], step["child"]) in judged or not step["accepted"]
    for row in patches.values():
        record = PatchRecord.from_json(row["record"])
        assert [a["source"] for a in row["alternatives"]] == [a.source for a in record.alternatives]
    for row in read["evaluations"]:
        evaluation = Evaluation.from_json(row["evaluation"])
        assert (row["right"], row["ms"], row["failure"]) == (evaluation.ok, evaluation.ms, evaluation.failure)
    assert sorted(t.digest for t in read_trees(tmp_path / "trees.xz")) == sorted(t.digest for t in trees)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n") and "- h200, estimated: 3 trees" in card
    assert "0 trees had\none of them" in card


def test_an_export_depends_on_the_trees_alone(trees: list[Tree], tmp_path: Path) -> None:
    for name, some in (("one", trees), ("other", trees[::-1])):
        export_dataset(some, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name


def test_no_problem_of_a_benchmark_is_written(
    trees: list[Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = frozenset({signatures_of(trees[0].spec()).structure})
    monkeypatch.setattr(dataset, "reserved", lambda: known)
    hidden = replace(trees[1], source="", conditions=replace(trees[1].conditions, spec="0"))
    found = export_dataset([trees[0], hidden, trees[2]], tmp_path)
    assert found.reserved == 1 and dict(found.unknown) == {"the text of their spec is not in them": 1}
    assert {row["spec"] for row in rows(tmp_path, "specs")} == {trees[2].conditions.spec}
    with pytest.raises(TreeError, match="1 trees are of benchmarks' problems"):
        export_dataset(trees[:1], tmp_path / "none")


def test_the_command_writes_what_is_not_a_benchmarks(trees: list[Tree], tmp_path: Path) -> None:
    benchmark = next(t for t in read_trees(HELD_OUT) if t.family == "kernelbench")
    put_trees([trees[0], benchmark], tmp_path / "some.xz")
    done = CliRunner().invoke(app, ["collect", "dataset", str(tmp_path / "some.xz"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "1 specs" in done.output.replace("\n", " ") and "1 trees, because the text" in done.output
    with pytest.raises(TreeError, match="holds no collection"):
        list(read_sources([tmp_path]))


def test_datasets_loads_it(trees: list[Tree], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = export_dataset(trees, tmp_path / "out")
    for table, columns in COLUMNS.items():
        read = datasets.load_dataset(str(tmp_path / "out"), table, split="train", cache_dir=str(tmp_path / "cache"))
        assert read.num_rows == found.rows[table] and set(read.column_names) == set(columns)
        assert not any(f.dtype == "null" for f in read.features.values() if hasattr(f, "dtype"))
