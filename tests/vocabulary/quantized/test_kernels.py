"""What is printed for products of codes, and what the compiler makes of it for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, reading, start_of


def start(text: str, rows: int, depth: int, columns: int, more: nn.Module | None = None) -> Program:
    module, x = layer(rows, depth, columns, torch.bfloat16, bias=more is not None, after=more)
    weights = text.replace("1x", "128x")
    return start_of(KernelSpec.from_module(module, (x,), weights=weights, activations=text))


@pytest.mark.parametrize(("text", "rows", "choice"), [("int8", 16, 0), ("fp8", 300, 2)])
def test_the_printed_kernel(text: str, rows: int, choice: int, golden: Callable[[str, str], None]) -> None:
    first = start(text, rows, 512, 256, nn.SiLU())
    program = after(first, action_of(first, "multiply_codes"), choice)
    golden(f"{text}_{rows}_rows.py.txt", program.implementation(reading(program)).source)


def test_the_kernel_that_makes_codes(golden: Callable[[str, str], None]) -> None:
    first = start("fp8", 16, 512, 64)
    program = after(first, action_of(first, "multiply_codes"))
    making = next(r for r in program.called if "amax" in r.label())
    program = after(program, Action("lowering", (making.id,)))
    golden("makes_fp8.py.txt", program.implementation(making).source)


@pytest.mark.parametrize(
    ("text", "rows", "choice"),
    [
        ("int8", 1, 0),
        ("fp8", 16, 0),
        ("int8", 16, 5),
        ("int8", 64, 0),
        ("fp8", 64, 3),
        ("int8", 2048, 0),
        ("fp8", 2048, 2),
        ("fp8:1x128", 16, 0),
        ("fp8:1x128", 2048, 2),
    ],
)
def test_it_compiles_and_takes_what_it_is_said_to(text: str, rows: int, choice: int, tmp_path: Path) -> None:
    first = start(text, rows, 4096, 1024)
    patch = CONTEXT.coder.write(Request(first, action_of(first, "multiply_codes"), CONTEXT.device))
    region, made = reading(patch.apply(first)), patch.alternatives[choice]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    product = next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))
    family, plan = covering(region)
    assert product.spills == 0 and not product.overlaps
    assert family.needs(plan, made.schedule).shared_bytes == pytest.approx(product.shared_bytes, rel=0.01)
