"""Problems of the suite in CUDA C++, on the CPU: operators and dtypes that the cases of `tests.coder` leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coder.cuda_on_cpu import GXX, cuda_on_cpu
from tests.suite.problem import problems
from tests.suite.run_cuda import run

SOME = (
    "booleans", "bytes", "bfloat16 activations", "double activations", "integer division", "powers", "rounding",
    "sums", "positions", "truths", "spreads", "causal softmax", "batch norms", "regression losses",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, since g++ takes seconds for the header."""
    return tmp_path_factory.mktemp("cuda")


@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="needs g++, which runs CUDA text on the CPU")
@pytest.mark.parametrize("name", SOME)
def test_its_kernels_are_right(name: str, folder: Path) -> None:
    (problem,) = (p for p in problems() if p.name == name)
    with cuda_on_cpu(folder) as cpu:
        row = run(problem, 1, cpu)
    assert row["right"] and not row["wrong"], "\n".join(row["wrong"])
