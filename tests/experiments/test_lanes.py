"""Commands that share the GPUs of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import lanes
from experiments.lanes import Lane, lanes_of, run_lanes
from qimeng.errors import QimengError


def test_each_command_sees_gpus_of_its_own(tmp_path: Path) -> None:
    show = "sleep 0.2; echo $CUDA_VISIBLE_DEVICES"
    some = [Lane("both", 2, 60, show), Lane("none", 0, 60, show), Lane("left", 1, 60, show), Lane("right", 1, 60, show)]
    assert run_lanes(some, 60, tmp_path / "logs", (4, 7)) == dict.fromkeys(("both", "none", "left", "right"), 0)
    seen = {lane.name: (tmp_path / "logs" / f"{lane.name}.log").read_text().strip() for lane in some}
    assert seen["both"] == "4,7" and seen["none"] == "" and {seen["left"], seen["right"]} == {"4", "7"}


def test_gpus_go_on_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails, one that its limit ends though it ignores Ctrl-C, one whose log cannot be written."""
    monkeypatch.setattr(lanes, "LEAST_S", 0.0)
    monkeypatch.setattr(lanes, "GRACE_S", 0.2)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    some = [
        Lane("fails", 1, 60, "exit 3"),
        Lane("deaf", 1, 0.3, "trap '' INT; while true; do sleep 0.1; done"),
        Lane("no/folder", 1, 60, "true"),
        Lane("last", 1, 60, "true"),
    ]
    assert run_lanes(some, 60, tmp_path, (0,)) == {"fails": 3, "deaf": None, "last": 0}


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert run_lanes([Lane("late", 0, 60, "touch begun")], 1.0, tmp_path, ()) == {"late": None}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["moe | 1 | 60", "moe | one | 60 | true"])
def test_a_line_that_is_none_is_named(text: str) -> None:
    with pytest.raises(QimengError, match="line 2 is not"):
        lanes_of(f"# moe\n{text}")


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(QimengError, match="wide needs 2 GPUs, and there are 1"):
        run_lanes([Lane("wide", 2, 60, "true")], 60, tmp_path, (0,))
