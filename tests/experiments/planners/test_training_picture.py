"""Pictures of learning curves: of which runs, and of which not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.planners.training_picture import draw_training, read_runs
from qimeng.errors import QimengError

CURVE = [
    {"steps": 0, "score": 0.5, "greedy": 0.4},
    {"steps": 64, "reward": -2.0, "length": 3.0, "seconds": 1.0},
    {"steps": 128, "reward": -1.0, "length": 3.0, "seconds": 2.0},
    {"steps": 128, "score": 0.7, "greedy": 0.6},
]


def run(name: str, curve: list[dict[str, float]], times: str = "h200, measured") -> dict[str, Any]:
    return {"run": name, "curve": curve, "times": times}


def test_a_run_is_a_line_in_every_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = tmp_path / "runs.jsonl"
    rows.write_text("".join(json.dumps(r) + "\n" for r in (run("seed0", CURVE), run("untrained", []))))
    draw_training(read_runs(rows), tmp_path / "a.svg")
    draw_training(read_runs(rows), tmp_path / "b.svg", ["seed0"])
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count("axes_3") and "<!-- seed0 -->" in drawn and "<!-- untrained -->" not in drawn
    assert (tmp_path / "b.svg").read_text().count("<!-- seed0 -->") == drawn.count("<!-- seed0 -->")
    draw_training([run("alone", CURVE[1:3])], tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_text().count("axes_2") == 0  # nothing was validated


def test_what_cannot_stand_in_one_picture_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = [run("a", CURVE), run("b", CURVE, "h100, ESTIMATED")]
    with pytest.raises(QimengError, match="one kind"):
        draw_training(both, tmp_path / "a.svg")
    with pytest.raises(QimengError, match="trained by PPO"):
        draw_training([run("a", [])], tmp_path / "a.svg")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{]\n")
    with pytest.raises(QimengError, match="no reports"):
        read_runs(bad)
