"""Products of which one operand goes through registers, at a size where stages of the pipeline race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from qimeng.backend.facts import KernelFacts
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from tests.coder.product_cases import Call, Case, measured, mm, printed, shapes

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


def compiled_product(region: Region, implementation: Implementation, cache: Path) -> KernelFacts:
    """What the compiler says of the main kernel for an H200."""
    cache.mkdir()
    compilers = Compilers(shared_server(), DEVICES["h200"], str(cache), 2, 120.0)
    (found,) = compilers.compile([job_of(region, implementation)])
    assert found.error is None
    return next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))


@pytest.mark.parametrize("name", MIXED)
def test_no_operand_is_made_while_the_tensor_cores_read_registers(name: str, tmp_path: Path) -> None:
    for number, changes in enumerate(MIXED[name].schedules):
        _, region, _, implementation = printed(MIXED[name], number, changes)
        product = compiled_product(region, implementation, tmp_path / str(number))
        assert product.warpgroup and not product.overlaps, changes


def test_a_kernel_that_goes_on_meanwhile_is_known(tmp_path: Path) -> None:
    case = MIXED["tf32, b packed"]
    _, region, _, implementation = printed(case, 0, case.schedules[0])
    lines = implementation.source.splitlines()
    kept = [line for line in lines if "until the product is done" not in line]
    assert len(kept) == len(lines) - 1
    hasty = replace(implementation, source="\n".join(kept) + "\n")
    assert compiled_product(region, hasty, tmp_path / "cache").overlaps


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXED)
def test_one_operand_through_registers_on_the_gpu(name: str) -> None:
    for number, changes in enumerate(MIXED[name].schedules):
        for _ in range(3):
            found = measured(MIXED[name], number, changes, "cuda")
            assert found["error"] <= found["limit"], (changes, found)
