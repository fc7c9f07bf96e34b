"""Examples and notebooks run as they stand, on the path that this machine has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_optimize_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("optimize_module").main(rows=64, width=256, seconds=20, folder=str(tmp_path))
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
    assert min(before.values()) > 0 and before.keys() == after.keys()  # scored at once
    assert after["_softmax"] > 2 * before["_softmax"]  # and learnt where it pays
    assert "after 24 states" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert not [c for c in cells if c["cell_type"] == "code" and (c["outputs"] or c["execution_count"])]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path: Path) -> None:
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), names)


def test_every_example_has_a_main_or_is_a_problem() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        assert "def main(" in text or "def get_inputs(" in text, path.name
