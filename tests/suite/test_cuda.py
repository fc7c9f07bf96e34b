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


@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="needs g++, which runs CUDA text on the CPU")
@pytest.mark.parametrize("name", SOME)
def test_its_kernels_are_right(name: str, tmp_path: Path) -> None:
    (problem,) = (p for p in problems() if p.name == name)
    with cuda_on_cpu(tmp_path):
        row = run(problem, fusions=1)
    assert row["right"] and not row["wrong"], "\n".join(row["wrong"])
