"""Forms of half products for Hopper: what is printed, what the compiler makes of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.coder.test_gemm import BF16, FLAT, GROUPS, Call, Case, _printed, mm, planned, shapes
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


@pytest.mark.parametrize("form", ["flat", "specialized"])
def test_the_printed_kernel(form: str, golden: Callable[[str, str], None]) -> None:
    changes = {"flat": dict(FLAT, warps=8), "specialized": dict(GROUPS, stores=True)}[form]
    golden(f"gemm_{form}.py.txt", _printed(LINEAR, 0, {**changes, **WIDE})[-1].source)


@pytest.mark.parametrize("warps, changes", [(8, dict(FLAT, warps=8)), (12, dict(GROUPS, stores=True)), (12, GROUPS)])
def test_a_form_fits_as_it_is_said_to(warps: int, changes: dict[str, Any], tmp_path: Path) -> None:
    from qimeng.coder.template.families.gemm.sweeps import shared_bytes

    _, region, plan, implementation = _printed(LINEAR, 0, {**changes, **WIDE})
    product = compiled_product(region, implementation, tmp_path / "cache")
    assert product.warps == warps and product.warpgroup and product.spills == 0
    assert shared_bytes(plan, implementation.schedule) == pytest.approx(product.shared_bytes, rel=0.01)


def test_a_tile_of_a_batch_is_not_halved_on_its_way_out() -> None:
    source = _printed(BATCH, 0, dict(GROUPS, stores=True))[-1].source
    assert "tl.store(y0_ptr" in source and "y0_tiles" not in source
    assert "y0_tiles.store([z, row0, col0]" in _printed(BATCH, 0, FLAT)[-1].source


def test_results_that_no_descriptor_takes_are_stored_by_pointers() -> None:
    for function, sizes in (
        (mm, ((40, 100), (100, 45))),  # rows of 90 bytes
        (lambda s, x, y: (x @ y).T.contiguous(), ((40, 100), (100, 48))),
        (lambda s, x, y: x @ y > 0, ((40, 100), (100, 48))),
    ):
        case = Case(lambda function=function: Call(function), shapes(*sizes, dtype=BF16), [])
        assert "y0_tiles" not in _printed(case, 0, FLAT)[-1].source


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"persistent": False}, "a persistent loop"),
        ({"warps": 8}, "4 warps a group"),
        ({"block_m": 64}, "128 rows a tile"),
        ({"splits": 2}, "the whole depth"),
        ({"descriptors": False}, "by tensor descriptors; a is not"),
    ],
)
def test_what_cannot_be_specialized_is_refused(changes: dict[str, Any], reason: str) -> None:
    from qimeng.family import Unsupported

    with pytest.raises(Unsupported, match=reason):
        _printed(LINEAR, 0, {**GROUPS, **changes})


def test_an_operand_with_a_prologue_is_not_specialized_unless_packed() -> None:
    from qimeng.family import Unsupported

    case = Case(lambda: Call(lambda s, x, y: functional.relu(x) @ y), shapes((256, 64), (64, 128), dtype=BF16), [])
    with pytest.raises(Unsupported, match="a is not"):
        _printed(case, 0, GROUPS)
    assert "warp_specialize=True" in _printed(case, 0, dict(GROUPS, packed="a"))[-1].source


def test_two_groups_hold_a_tile() -> None:
    from qimeng.coder.template.families.gemm.family import Gemm
    from qimeng.device import device_named

    _, _, plan = planned(LINEAR.module, LINEAR.inputs)
    schedule = Gemm.schedule().but(**{**GROUPS, **WIDE})
    assert Gemm().needs(plan, schedule).refusal(device_named("h200")) is None
    assert "a thread" in str(Gemm().needs(plan, schedule.but(specialized=False)).refusal(device_named("h200")))
