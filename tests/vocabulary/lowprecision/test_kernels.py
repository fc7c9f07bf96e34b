"""What is printed for stored weights, and what the compiler makes of it for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Request
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of


@pytest.mark.parametrize(
    ("name", "weights", "depth"),
    [("int8", "int8", 512), ("int4", "int4", 512), ("int4_small_groups", "int4:32", 200)],
)
def test_the_printed_kernel(name: str, weights: str, depth: int, golden: Callable[[str, str], None]) -> None:
    module, x = layer(8, depth, 100, torch.bfloat16, after=nn.SiLU())
    start = start_of(spec_of(module, x, weights))
    fused = after(start, action_of(start, "fusion"))
    program = after(fused, action_of(fused, "dequantize"))
    golden(f"{name}.py.txt", program.implementation(reading(program)).source)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "choice"), [(8, 0), (8, 2), (64, 0), (2048, 0)])
def test_it_compiles_and_takes_what_it_is_said_to(weights: str, rows: int, choice: int, tmp_path: Path) -> None:
    module, x = layer(rows, 4096, 1024, torch.bfloat16, bias=False)
    start = start_of(spec_of(module, x, weights))
    action = action_of(start, "dequantize")
    patch = CONTEXT.coder.write(Request(start, action, CONTEXT.device))
    region, made = reading(patch.apply(start)), patch.alternatives[choice]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    product = next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))
    family, plan = covering(region)
    assert product.spills == 0 and not product.overlaps
    assert family.needs(plan, made.schedule).shared_bytes == pytest.approx(product.shared_bytes, rel=0.01)
