"""What is printed for kept blocks, and what the compiler makes of it for Hopper."""

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
from tests.vocabulary.sparse.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of


@pytest.mark.parametrize(("name", "weights"), [("bsr", "bsr:32:20"), ("csr", "csr:5")])
def test_the_printed_kernel(name: str, weights: str, golden: Callable[[str, str], None]) -> None:
    module, x = layer(8, 200, 100, torch.bfloat16, after=nn.SiLU())
    start = start_of(spec_of(module, x, weights))
    fused = after(start, action_of(start, "fusion"))
    program = after(fused, action_of(fused, "sparsify"))
    golden(f"{name}.py.txt", program.implementation(reading(program)).source)


@pytest.mark.parametrize("weights", ["bsr:16:10", "bsr:64:10", "csr:5"])
@pytest.mark.parametrize(
    ("rows", "choice", "dtype"),
    [(8, 0, torch.bfloat16), (8, 3, torch.bfloat16), (2048, 0, torch.bfloat16), (64, 1, torch.float32)],
)
def test_it_compiles_and_takes_what_it_is_said_to(
    weights: str, rows: int, choice: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    module, x = layer(rows, 512, 512, dtype, bias=False)
    start = start_of(spec_of(module, x, weights))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "sparsify"), CONTEXT.device))
    region, made = reading(patch.apply(start)), patch.alternatives[min(choice, len(patch.alternatives) - 1)]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    product = next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))
    family, plan = covering(region)
    said = family.needs(plan, made.schedule).shared_bytes
    assert product.spills == 0 and not product.overlaps
    exact = dtype is torch.bfloat16 and weights != "csr:5"
    assert product.shared_bytes == said if exact else product.shared_bytes <= said
