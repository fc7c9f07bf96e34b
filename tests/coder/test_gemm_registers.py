"""Products of which one operand goes through registers, at a size where stages of the pipeline race."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.coder.test_gemm import Call, Case, _measure, mm, shapes

LARGE = {"block_m": 128, "block_n": 128, "block_k": 32, "warps": 8, "stages": 4, "descriptors": True}
"""What races where stages are refilled too early: enough warps and stages, and a depth to run them."""

MIXED: dict[str, Case] = {
    f"{precision}, {packed} packed": Case(
        lambda: Call(mm),
        shapes((1024, 2048), (2048, 768)),
        [
            dict(
                LARGE,
                precision=precision,
                promote=512,
                packed=packed,
                inline="" if precision == "tf32" else {"a": "b"}.get(packed, "a"),
            )
        ],
        limit,
    )
    for precision, limit in (("tf32", 4e-3), ("fp16x3", 8e-6), ("bf16x3", 3e-5))
    for packed in ("a", "b")
}
MIXED["computed half"] = Case(
    lambda: Call(lambda s, x, y: functional.relu(x) @ y),
    shapes((1024, 2048), (2048, 768), dtype=torch.bfloat16),
    [LARGE, dict(LARGE, block_k=64, stages=3)],
    1.6e-2,
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXED)
def test_one_operand_through_registers_on_the_gpu(name: str) -> None:
    for number, changes in enumerate(MIXED[name].schedules):
        for _ in range(3):
            measured = _measure(MIXED[name], number, changes, "cuda")
            assert measured["error"] <= measured["limit"], (changes, measured)
