"""Where the seconds of a budget go: a row with the parts of each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.first_minute import main

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

def get_inputs():
    return [torch.rand(64, 128)]

def get_init_inputs():
    return []
"""


def test_a_problem_of_a_suite_is_told_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "softmax.py").write_text(PROBLEM)
    where = ["--suite", f"folder:{tmp_path}", "--seconds", "300", "--dtype", "float32", "--planner", "lower-only"]
    main(["softmax", *where])
    row = json.loads(capsys.readouterr().out)
    assert row["network"] == "softmax" and row["steps"] and all("gate" in step for step in row["steps"])
