"""Forms of half products for Hopper: what is printed, what the compiler makes of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.coder.product_cases import BF16, FLAT, Call, Case, mm, printed, shapes
from tests.coder.test_gemm_registers import compiled_product

LINEAR = Case(
    lambda: Call(lambda s, x: functional.relu(functional.linear(x, s.w, s.b)), w=(512, 256, BF16), b=(512, BF16)),
    shapes((384, 256), dtype=BF16),
    [],
)
BATCH = Case(lambda: Call(torch_bmm), shapes((2, 256, 64), (2, 64, 128), dtype=BF16), [])
WIDE = {"block_m": 128, "block_n": 256, "block_k": 64, "stages": 3}


def torch_bmm(s: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, y)


EIGHT = {**FLAT, **WIDE, "warps": 8}


def test_the_printed_kernel(golden: Callable[[str, str], None]) -> None:
    golden("gemm_flat.py.txt", printed(LINEAR, 0, EIGHT)[-1].source)


def test_it_fits_as_it_is_said_to(tmp_path: Path) -> None:
    from qimeng.coder.template.families.gemm.sweeps import shared_bytes

    _, region, plan, implementation = printed(LINEAR, 0, EIGHT)
    product = compiled_product(region, implementation, tmp_path / "cache")
    assert product.warps == 8 and product.warpgroup and product.spills == 0
    assert shared_bytes(plan, implementation.schedule) == pytest.approx(product.shared_bytes, rel=0.01)


def test_a_tile_of_a_batch_leaves_through_a_descriptor() -> None:
    assert "y0_tiles.store([z, row0, col0]" in printed(BATCH, 0, FLAT)[-1].source


def test_results_that_no_descriptor_takes_are_stored_by_pointers() -> None:
    for function, sizes in (
        (mm, ((40, 100), (100, 45))),  # rows of 90 bytes
        (lambda s, x, y: (x @ y).T.contiguous(), ((40, 100), (100, 48))),
        (lambda s, x, y: x @ y > 0, ((40, 100), (100, 48))),
    ):
        case = Case(lambda function=function: Call(function), shapes(*sizes, dtype=BF16), [])
        assert "y0_tiles" not in printed(case, 0, FLAT)[-1].source
