"""Kernels in the quickened interpreter give the same bits and the same errors as in Triton's own.

The interpreter must be chosen before triton is imported, so the kernels run in a process of their own (this file as a
script), first in Triton's own.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

from tests.interpreted import rows_of


@triton.jit
def scaled(x, factor):
    return x * factor + 1


@triton.jit
def kernel(a, b, out, count, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    inside = (rows < 5) & (columns < 6)
    x = tl.load(a + rows * N + columns, mask=inside, other=0.0)
    y = tl.load(b + columns)
    z = scaled(x, y.to(tl.float32)) - tl.sum(x, 1)[:, None] + tl.dot(x, x)
    tl.store(out + rows * N + columns, tl.where(inside, z / 2 - 0.5 * y, (7 - rows) % 3 + count).to(tl.float16))


@triton.jit
def misfit(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, N * 2))


def found() -> dict[str, Any]:
    """The bits of a result, and what is said of shapes that do not fit."""
    torch.manual_seed(0)
    a, b, out = torch.randn(16, 16), torch.randn(16, dtype=torch.float16), torch.zeros(16, 16, dtype=torch.float16)
    kernel[(1,)](a, b, out, 4, N=16)
    try:
        misfit[(1,)](torch.zeros(16, dtype=torch.int32), N=16)
        said = ""
    except Exception as error:  # noqa: BLE001 - its text is compared
        said = repr(error)
    return {"bits": out.view(torch.int16).tolist(), "said": said}


def test_results_and_errors_are_those_of_tritons_own() -> None:
    own, quick = rows_of(__file__)
    assert own == quick
    assert "incompatible dimensions" in own["said"] and len({bits for row in own["bits"] for bits in row}) > 20


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter_speed import quicken

    print(json.dumps(found()))
    quicken()
    print(json.dumps(found()))
