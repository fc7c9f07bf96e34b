"""The command that writes problems in both languages: rows without a GPU, by a judge that only estimates."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments import languages
from experiments.languages import side_by_side, table
from qimeng.backend import backend_named
from qimeng.bench.suite import Problem
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Evaluation, EvaluationRequest, Gate, Resources, SerialEvaluator, Timing

MISSING = backend_named("cuda").missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

SOFTMAX = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


def get_inputs():
    return [torch.rand(64, 256)]


def get_init_inputs():
    return []
"""
PRODUCT = SOFTMAX.replace("torch.softmax(x, 1)", "x @ x.t()")


class FakeClock(SerialEvaluator):
    """Every program is right; the second alternative is the fastest, and CUDA C++ takes half the time."""

    def answer(self, request: EvaluationRequest) -> Evaluation:
        program, patch = request.program, request.patch
        chosen = min(1, len(patch.alternatives) - 1) if patch is not None else 0
        program = program if patch is None else patch.apply(program, chosen)
        made = program.implementation(program.regions[0])
        ms = 1.0 if made.language == "cuda" else 2.0
        resources = Resources(32, 0, 128, 1)
        return Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(4.0), chosen=chosen, resources=resources)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "level1"
    folder.mkdir()
    (folder / "1_Softmax.py").write_text(SOFTMAX)
    (folder / "2_Product.py").write_text(PRODUCT)
    made = languages.make_task

    def fake(spec: object, **options: object) -> Task:
        return made(spec, evaluator=FakeClock(), **{**options, "device": "h200"})  # type: ignore[arg-type]

    monkeypatch.setattr(languages, "make_task", fake)
    return tmp_path


def test_each_problem_has_a_row_in_each_language(root: Path) -> None:
    out = root / "rows.jsonl"
    found = side_by_side(out, root, "1/1,2")
    assert [json.loads(line) for line in out.read_text().splitlines()] == found
    softmax = [r for r in found if r["problem"] == "level1/1"]
    assert [(r["language"], r["right"], r["ms"], r["registers"]) for r in softmax] == [
        ("triton", True, 2.0, 32),
        ("cuda", True, 1.0, 32),
    ]
    assert "language=cuda" in softmax[1]["schedule"] and softmax[1]["environment"]["device"]
    product = [r for r in found if r["problem"] == "level1/2"]
    assert [r["right"] for r in product] == [True, None] and "gemm" in product[1]["error"]
    assert "| level1/1 Softmax | right | 2 | right | 1 | 2.00 | 4 | 32, 32 | 0, 0 |" in table(found)
    assert side_by_side(out, root, "1/1,2") == found, "it goes on where it ended"


def test_what_nothing_checked_is_not_called_right() -> None:
    found = Evaluation(Gate.PASSED, timing=Timing(1.0, estimated=True), unchecked="it runs on a GPU only")
    problem = Problem("folder", "one", "", lambda: None)  # type: ignore[arg-type, return-value]
    row = asdict(languages._row(problem, "cuda", found, "tile()"))
    assert row["right"] is None and row["estimated"] and "| unchecked | 1 |" in table([row])
