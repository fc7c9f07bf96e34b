"""Times that need a word: faster than the tensor cores."""

from __future__ import annotations

import pytest
import torch

from qimeng.device import DEVICES
from qimeng.envs.cost.time_bounds import above_peak
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.spec.origin import FunctionModule

H200 = DEVICES["h200"]
N = 4096
FLOPS = 2 * N**3


def product(dtype: torch.dtype = torch.float32) -> OpGraph:
    return capture(
        lambda: FunctionModule(lambda a, b: torch.relu(a @ b)),
        lambda: (torch.empty(N, N, dtype=dtype), torch.empty(N, N, dtype=dtype)),
    )


@pytest.mark.parametrize(
    ("dtype", "mode", "tflops"),
    [
        (torch.float32, "default", 989 / 3),
        (torch.float32, "highest", 989 / 3),
        (torch.float32, "high", 989),
        (torch.bfloat16, "default", 989),
    ],
)
def test_a_product_above_the_peak_is_flagged(dtype: torch.dtype, mode: str, tflops: float) -> None:
    at_peak = FLOPS / (tflops * 1e9)
    graph = product(dtype)
    assert above_peak(graph, at_peak * 1.01, H200, mode) is None
    note = above_peak(graph, at_peak * 0.5, H200, mode)
    assert note is not None and note.startswith("above the tensor cores' peak")
    assert f"{2 * tflops:.4g} TFLOP/s" in note and f"h200 reaches {tflops:.4g} in mode {mode}" in note


def test_what_has_no_product_is_never_flagged() -> None:
    graph = capture(lambda: FunctionModule(torch.relu), lambda: (torch.empty(8, 8),))
    assert above_peak(graph, 1e-12, H200, "default") is None
