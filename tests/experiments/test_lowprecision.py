"""The measurement of layers with declared weights: its cases, and what it says without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import lowprecision
from qimeng import KernelSpec, plan_and_code
from qimeng.device import current_device

ROOT = Path(__file__).parents[2]


def test_the_cases_have_few_and_many_rows_of_every_form() -> None:
    assert len(lowprecision.CASES) >= 12
    for weights in ("int8", "int4"):
        rows = {r for w, r, _ in lowprecision.CASES.values() if w == weights}
        assert {1, 8, 64, 2048} <= rows
    assert {layer for _, _, layer in lowprecision.CASES.values()} == set(lowprecision.LAYERS)


@pytest.mark.skipif(current_device() is not None, reason="there is a GPU")
def test_it_asks_for_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.lowprecision", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "this needs a GPU" in done.stderr


def test_what_the_judge_found_is_a_row() -> None:
    layer = nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    spec = KernelSpec.from_module(layer, (torch.randn(8, 128, dtype=torch.bfloat16),), weights="int8")
    row = lowprecision.judged(plan_and_code(spec, planner="heuristic", seconds=20, evaluations=2, device="h100"))
    assert json.loads(json.dumps(row)).keys() == row.keys() and "weights int8 as declared" in row["headline"]
    assert row["steps"][0][0].startswith("dequantize") and row["accuracy"]["max_error"] <= row["accuracy"]["max_budget"]
