"""Where the seconds of a budget go: a row with the parts of each step, and a profile of the main thread."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from experiments.first_minute import main
from experiments.profile_main import profiled

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


def wait_here() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        time.sleep(0.01)


def test_a_profile_counts_stacks(tmp_path: Path) -> None:
    with profiled(tmp_path / "stacks", every_s=0.005):
        wait_here()
    lines = [line.rsplit(" ", 1) for line in (tmp_path / "stacks").read_text().splitlines()]
    counts = [int(count) for _, count in lines]
    assert counts == sorted(counts, reverse=True) and sum(counts) > 3
    assert any("experiments/test_first_minute.py:wait_here" in stack.split(";") for stack, _ in lines)
    with profiled(None):
        pass


def test_a_problem_of_a_suite_is_told_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "softmax.py").write_text(PROBLEM)
    where = ["--suite", f"folder:{tmp_path}", "--seconds", "300", "--dtype", "float32", "--planner", "lower-only"]
    main(["softmax", *where, "--profile", str(tmp_path / "profiles")])
    row = json.loads(capsys.readouterr().out)
    assert row["network"] == "softmax" and row["steps"] and all("gate" in step for step in row["steps"])
    assert (tmp_path / "profiles" / "softmax.stacks").read_text()
