"""The fused errors are those of `qimeng.envs.errors.accuracy`, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from qimeng.envs.errors import accuracy, error_budget
from tests.interpreted import rows_of

ROOT = str(Path(__file__).parents[3])
CASES = {
    "short rows": ((37, 5), torch.float32, torch.float32),
    "rows of a tile": ((3, 4096), torch.float32, torch.float32),
    "long rows, odd": ((2, 5, 9001), torch.float32, torch.float32),
    "one row": ((70001,), torch.float32, torch.float32),
    "both double": ((11, 300), torch.float64, torch.float64),
    "half": ((11, 300), torch.bfloat16, torch.bfloat16),
    "mixed": ((11, 300), torch.float32, torch.float64),
}


def pair(name: str, device: str = "cpu", zeros: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    shape, actual, expected = CASES[name]
    generator = torch.Generator().manual_seed(3)
    r = torch.randn(shape, generator=generator, dtype=torch.float64).to(expected)
    y = (r.double() * (1 + 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64))).to(actual)
    if zeros:  # a row of zeros that are met exactly has no error
        r[..., :] = torch.where(torch.arange(shape[-1]) < shape[-1], 0.0, r)
        y = r.to(actual)
    return y.to(device), r.to(device)


def plain(y: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    return accuracy._summary(accuracy._quick_errors(y, r, accuracy.least_of(r)), y.device)


def all_cases(device: str) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    from qimeng.envs.errors.fused_error import fused_summary, row_scales

    found = {}
    for name in CASES:
        for zeros in (False, True):
            y, r = pair(name, device, zeros)
            found[f"{name}, zeros {zeros}"] = (fused_summary(y, r, accuracy.least_of(r)), plain(y, r))
    y, r = pair("mixed", device)
    known = fused_summary(y, r, accuracy.least_of(r), row_scales(r))
    assert known == fused_summary(y, r, accuracy.least_of(r))
    with mock.patch.object(accuracy, "_is_fused", lambda x: True):
        assert math.isclose(accuracy.Scale.of(r).least, accuracy.least_of(r), rel_tol=1e-12)
        assert accuracy.measured(y, r)[0] == accuracy.measured(y, r, scale=error_budget.Expected(r).scale)[0]
    for value in (math.nan, math.inf):
        y, r = pair("long rows, odd", device)
        y[1, 2, 777] = value
        found[f"actual {value}"] = (fused_summary(y, r, accuracy.least_of(r)), (math.inf, math.inf))
        y[1, 2, 777], r[0, 0, 0] = 1.0, value
        found[f"expected {value}"] = (fused_summary(y, r, accuracy.least_of(r)), (math.inf, math.inf))
    return found


def hold(found: dict[str, tuple[tuple[float, float], tuple[float, float]]]) -> None:
    assert len(found) == 2 * len(CASES) + 4
    for name, (fused, expected) in found.items():
        assert fused[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-30), name
        if math.isfinite(expected[0]):
            assert fused[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-30), name


def test_in_the_interpreter() -> None:
    (found,) = rows_of("-m", "tests.envs.errors.test_fused_error")
    hold(found)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from qimeng.envs.errors.fused_error import TILE, _errors_of_tile as kernel

for y, r in (("fp32", "fp32"), ("fp64", "fp64"), ("bf16", "bf16"), ("fp32", "fp64")):
    double = "*fp64"
    types = [f"*{y}", f"*{r}", double, double, double, double, "i32", "i32", "constexpr", "constexpr"]
    for height, width in ((1, TILE), (TILE // 8, 8)):
        constants = {"R": height, "C": width}
        source = ASTSource(kernel, dict(zip(kernel.arg_names, types)), constants)
        assert "ptx" in compile(source, target=GPUTarget("cuda", 90, 32)).asm
print("compiled")
"""


def test_it_compiles_for_a_gpu() -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.split() == ["compiled"], run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    hold(all_cases("cuda"))
    y, r = torch.randn(2, 4099, 4099, device="cuda")
    assert y.numel() >= accuracy.FUSED_ELEMENTS
    fused, (top, total) = accuracy.measure(y, r), plain(y, r)
    assert fused.max == pytest.approx(top, rel=1e-5)
    assert fused.rms == pytest.approx(math.sqrt(total / y.numel()), rel=1e-5)


if __name__ == "__main__":
    print(json.dumps(all_cases("cpu")))
