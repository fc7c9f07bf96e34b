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


def test_codes_of_8_bits_may_be_multiplied_as_such() -> None:
    def widened(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.float() * scale).to(torch.bfloat16)

    def made(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(widened(a, scale), b if b.dtype == torch.bfloat16 else widened(b, scale))

    codes, half = torch.empty(N, N, dtype=torch.int8), torch.empty(N, N, dtype=torch.bfloat16)
    for right, tflops in ((codes, 1979), (half, 989)):
        both = (codes, right, torch.empty(N, 1))
        graph = capture(lambda: FunctionModule(made), lambda both=both: both)  # type: ignore[misc]
        note = above_peak(graph, FLOPS / (4000 * 1e9), H200, "default")
        assert note is not None and f"h200 reaches {tflops} " in note


def test_what_has_no_product_is_never_flagged() -> None:
    graph = capture(lambda: FunctionModule(torch.relu), lambda: (torch.empty(8, 8),))
    assert above_peak(graph, 1e-12, H200, "default") is None
