"""The measurement of irregular computations: its cases and graphs, what it says without a GPU, a run at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import graphs, irregular
from qimeng.device import current_device
from tests.experiments.scripts import run

GROUPS = {"gnn", "bag", "segment", "moe", "sort"}


def test_the_cases_have_names_of_their_own_and_every_group() -> None:
    found = irregular.cases(tiny=False)
    assert len({c.name for c in found}) == len(found) >= 20
    assert {c.group for c in found} == {c.group for c in irregular.cases(tiny=True)} == GROUPS
    assert {c.kind.split()[0] for c in found if c.group == "gnn"} == set(graphs.GRAPHS)
    assert {c.sizes["experts"] for c in found if c.group == "moe"} == {8, 16, 32, 64}


@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_graphs_have_edges_between_their_nodes(name: str) -> None:
    edges = graphs.GRAPHS[name](500, 8000)
    assert edges.shape == (2, 8000) and int(edges.min()) >= 0 and int(edges.max()) < 500
    assert torch.equal(edges, graphs.GRAPHS[name](500, 8000))
    largest = int(torch.bincount(edges[1]).max())
    assert largest == 16 if name == "banded" else largest > 160


@pytest.mark.filterwarnings("ignore:Sparse ")
def test_what_libraries_compute_is_the_same() -> None:
    with torch.no_grad():
        for case in irregular.cases(tiny=True):
            module, inputs, libraries = irregular.made(case, "cpu")
            for name, call in libraries.items():
                torch.testing.assert_close(call(), module(*inputs), msg=f"{case.name}: {name}")


@pytest.mark.skipif(current_device() is not None, reason="there is a GPU")
def test_it_asks_for_a_gpu(tmp_path: Path) -> None:
    done = run("irregular", tmp_path / "rows.jsonl")
    assert done.returncode != 0 and "this needs a GPU" in done.stderr


@pytest.mark.slow
def test_it_runs_at_small_sizes_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = run("irregular", path, "--tiny", "--only", "gnn")
    assert done.returncode == 0, done.stderr
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert [row["case"] for row in rows] == [c.name for c in irregular.cases(tiny=True) if c.group == "gnn"]
    for row in rows:
        assert {"eager", "torch.compile"} <= row["over"].keys()
        assert row["best_schedule"].startswith("irregular(")
        far = row["largest_difference_over_rms"]
        assert far.keys() == row["turns_ms"].keys() and max(far.values()) < 64 * torch.finfo(torch.float32).eps
