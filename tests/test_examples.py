"""Examples run as they stand, on the path that this machine has."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_optimize_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("optimize_module")
    monkeypatch.setattr(example, "plan_and_code", partial(example.plan_and_code, evaluations=4))
    example.main(rows=64, width=256, seconds=60, folder=str(tmp_path))
    assert "GPU time in generated kernels" in capsys.readouterr().out
    assert (tmp_path / "program.py").exists()


@pytest.mark.slow
def test_own_planner(capsys: pytest.CaptureFixture[str]) -> None:
    load("own_planner").main(rows=64, width=256, seconds=20)
    text = capsys.readouterr().out
    assert "accepted fusion" in text and "accepted lowering" in text


@pytest.mark.slow
def test_new_action(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = load("new_action").main()
    assert before.keys() == after.keys() == {"_softmax", "mul"} and min(before.values()) > 0  # scored at once
    assert after["_softmax"] > 0.5 > 10 * before["_softmax"]  # it has learnt where the kind pays,
    assert after["mul"] < before["mul"] / 2  # and where not
    assert "after 54 states" in capsys.readouterr().out


def test_every_example_has_a_main_or_is_a_problem() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        assert "def main(" in text or "def get_inputs(" in text, path.name
