"""The measurement of layers whose weights have zeros: its cases, what it says without a GPU, a run at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import sparse
from qimeng.device import current_device
from tests.experiments.scripts import run


def test_the_cases_have_all_shares_of_every_form() -> None:
    found = sparse.cases(tiny=False)
    assert len({c.name for c in found}) == len(found)
    expected = {(f, p) for f in sparse.FORMS for p in sparse.PERCENT} | {("2:4", 50)}
    assert {(c.form, c.percent) for c in found} == expected and "2:4 16x4096x4096" in {c.name for c in found}


def test_the_layer_has_as_many_blocks_as_declared() -> None:
    case = sparse.Case("bsr:16", 10, 8, 128, 64)
    layer, x = sparse.layer_of(case, "cpu")
    blocks = layer.weight.view(4, 16, 8, 16).abs().amax((1, 3))
    assert int((blocks > 0).sum()) == 3 and x.shape == (8, 128)


@pytest.mark.skipif(current_device() is not None, reason="there is a GPU")
def test_it_asks_for_a_gpu(tmp_path: Path) -> None:
    done = run("sparse", tmp_path / "rows.jsonl")
    assert done.returncode != 0 and "this needs a GPU" in done.stderr


@pytest.mark.slow
def test_it_runs_at_small_sizes_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = run("sparse", path, "--tiny", "--only", "bsr:16:5")
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["case"] == "bsr:16:5 8x128x128" and {"eager", "torch csr"} <= row["over"].keys()
    assert row["best_schedule"].startswith("sparse(")
    far = row["largest_difference_over_rms"]
    assert far.keys() == row["turns_ms"].keys() and max(far.values()) < 64 * torch.finfo(torch.float32).eps


@pytest.mark.slow
def test_two_of_four_run_at_small_sizes_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = run("sparse", path, "--tiny", "--only", "2:4")
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, path.read_text().splitlines())
    assert "torch semi-structured" in row["not_timed"] and "cuSPARSELt" in row["libraries"]["torch semi-structured"]
    assert "fp16 or bf16" in row["refused"], "in fp32 on the CPU"


def test_no_case_is_begun_after_the_limit(tmp_path: Path) -> None:
    done = run("sparse", tmp_path / "rows.jsonl", "--tiny", "--seconds", "0")
    assert done.returncode == 0 and "stopped after 0 s, before bsr:16:5" in done.stdout
