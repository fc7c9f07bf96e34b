"""Stored winners before a later judge: which rows are taken, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import render
from experiments.trust.run_winners import winners
from qimeng.bench.row import read_rows

ROOT = Path(__file__).parents[3]
WHERE = {"device": "NVIDIA H200", "commit": "0123456", "driver": "", "torch": "2.11.0", "triton": "3.6.0", "python": ""}


def test_right_rows_with_a_recipe_are_winners():
    path = str(ROOT / "benchmarks" / "results" / "h200_bf16_1f0c161.jsonl")
    found = winners([path])
    assert 0 < len(found) == len({key for key, _ in found}) <= len(list(read_rows(path)))
    assert all(key == f"{row.id} bfloat16 default" and row.right for key, row in found)


def test_refusals_are_told_with_their_reason(tmp_path: Path) -> None:
    rows = [
        {"key": "1/1 float32 default", "gate": "passed", "error": "", "ms": 1.0, "row_ms": 2.0},
        {"key": "1/2 float32 default", "gate": "program", "error": "too far off", "ms": None, "row_ms": 1.0},
        {
            "key": "1/3 float32 default",
            "gate": "program",
            "error": "on inputs 'huge' and parameters: 3 GiB",
            "ms": None,
        },
        {"key": "1/4 float32 default", "gate": "", "error": "CUDA out of memory. Tried"},
        {"key": "1/1 float32 high", "gate": "passed", "error": "", "ms": 2.0, "row_ms": 2.0},
    ]
    text = "".join(json.dumps({**r, "what": "winner", "at": "", "environment": WHERE}) + "\n" for r in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    table = render("<!-- bench:recheck rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| float32 default | 4 | 1 | 2.000 | 2.000 |" in table and "| float32 high | 1 | 1 | 1.000 |" in table
    assert "| too far off | 1 | 1/2 |" in table and "| wrong on inputs 'huge' | 1 | 1/3 |" in table
    assert "| the device's memory ran out | 1 | 1/4 |" in table
