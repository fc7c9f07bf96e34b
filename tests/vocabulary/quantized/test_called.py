"""Products of codes that a module calls itself: what is taken, what is refused, values and kernels.

Values are computed in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.quantized.called import is_called
from tests.vocabulary.lowprecision.samples import CONTEXT, after, start_of
from tests.vocabulary.values import BF16, Case, Errors, check, loaded, run


class Layer(nn.Module):
    """A layer on codes, as torchao's are.

    Args:
        form: ``"int8"``, or ``"rows"`` or ``"tensor"`` for scales of fp8; a word after it changes something.
        depth: of the product.
        columns: of it.
        bias: whether there is one.
    """

    def __init__(self, form: str, depth: int = 64, columns: int = 48, bias: bool = False):
        super().__init__()
        self.form, _, self.word = form.partition(" ")
        weight = torch.randn(columns, depth)
        most = 127 if self.form == "int8" else 448
        self.whole = self.form == "tensor"
        size = weight.abs().amax() if self.whole else weight.abs().amax(1, keepdim=True)
        self.register_buffer("scale", size / most)
        codes = weight / self.scale
        self.register_buffer(
            "codes", codes.round().to(torch.int8) if self.form == "int8" else codes.to(torch.float8_e4m3fn)
        )
        self.register_buffer("bias", torch.randn(columns).to(BF16) if bias else None)

    def coded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of activations and their scales."""
        values = x.float()
        size = values.abs().amax() if self.whole else values.abs().amax(1, keepdim=True)
        scale = (size / (127 if self.form == "int8" else 448)).clamp_min(1e-8)
        codes = values / scale
        return codes.round().to(torch.int8) if self.form == "int8" else codes.to(torch.float8_e4m3fn), scale

    def forward(self, x: torch.Tensor) -> Any:
        codes, scale = self.coded(x)
        if self.form == "int8":
            sums = torch._int_mm(codes, self.codes.t())
            if self.word == "alone":
                return sums
            return torch.relu(sums.float() * scale * self.scale.t()).to(x.dtype)
        dtype = torch.float32 if self.word == "fp32" else BF16
        right = self.codes.t()
        return torch._scaled_mm(codes, right, scale, self.scale.t(), bias=self.bias, out_dtype=dtype)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float64, of the same codes."""
        codes, scale = self.coded(x)
        y = (codes.double() * scale.double()) @ (self.codes.double() * self.scale.double()).t()
        return torch.relu(y) if self.form == "int8" else y if self.bias is None else y + self.bias.double()


def start(form: str, rows: int = 32, **options: Any) -> tuple[Layer, torch.Tensor, Program]:
    torch.manual_seed(0)
    module = Layer(form, **options)
    x = torch.randn(rows, options.get("depth", 64)).to(BF16)
    return module, x, start_of(KernelSpec.from_module(module, (x,)))


def lowered(program: Program, choice: int = 0) -> Program:
    """The program with a kernel for its product and what follows it."""
    product = next(r for r in program.called if is_called(r))
    later = program.called[program.called.index(product) + 1 :]
    for _ in later:
        first, second = (next((i for i, r in enumerate(program.called) if is_called(r)), 0) + n for n in (0, 1))
        program = after(program, Action("fusion", (program.called[first].id, program.called[second].id)))
    product = next(r for r in program.called if is_called(r))
    return after(program, Action("lowering", (product.id,)), choice)


@pytest.mark.parametrize("form", ["int8", "rows", "tensor"])
def test_a_product_is_lowered_to_the_family(form: str) -> None:
    program = lowered(start(form)[2])
    region = next(r for r in program.called if is_called(r))
    schedule = program.schedule(region)
    assert schedule is not None and schedule.family == "quantized" and region == program.called[-1]


def test_sums_that_leave_as_integers_are_refused() -> None:
    program = start("int8 alone")[2]
    region = next(r for r in program.called if is_called(r))
    with pytest.raises(IllegalAction, match="the sums of _int_mm leave as int32: kernels convert them, so fuse"):
        check_action(program, Action("lowering", (region.id,)), CONTEXT)


class Odd(nn.Module):
    """`_scaled_mm` with arguments that are not covered."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        kind = torch.float8_e5m2 if form == "e5m2" else torch.float8_e4m3fn
        self.register_buffer("codes", torch.randn(32, 64).to(kind))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        x, right = a.to(torch.float8_e4m3fn), self.codes.t()
        if self.form == "both":
            return torch._scaled_mm(x, right, self.scale, self.scale, out_dtype=BF16)
        if self.form == "number":
            return torch._scaled_mm(x, right, torch.tensor(1.0), self.scale, out_dtype=BF16)
        made = a.float().mean()
        result = made if self.form == "result" else None
        out = torch.float8_e4m3fn if self.form == "result" else BF16
        return torch._scaled_mm(x, right, made, self.scale, scale_result=result, out_dtype=out)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("e5m2", "e4m3 or int8 is covered"),
        ("number", "reads a number that is made in forward: hold it in a buffer"),
        ("both", "reads one tensor on both sides"),
        ("result", "scales its result, which is not covered: multiply the result instead"),
    ],
)
def test_other_arguments_are_refused(form: str, reason: str) -> None:
    program = start_of(KernelSpec.from_module(Odd(form), (torch.randn(32, 64, dtype=BF16),)))
    region = next(r for r in program.called if is_called(r))
    with pytest.raises(IllegalAction, match=reason):
        check_action(program, Action("lowering", (region.id,)), CONTEXT)


CASES = {
    "int8": Case("int8", (40, 200, 96), BF16, bias=False, choices=(0, 3)),
    "rows": Case("rows", (20, 96, 80), BF16, bias=True, choices=(0, 3)),
    "rows, fp32": Case("rows fp32", (17, 64, 48), torch.float32, bias=False, choices=(0,)),
    "tensor": Case("tensor", (150, 256, 144), BF16, bias=False, choices=(0, 4)),
}


def errors_of(case: Case) -> Errors:
    """The largest errors of each program with a kernel for the product, and of PyTorch."""
    rows, depth, columns = case.sizes
    module, x, program = start(case.weights, rows, depth=depth, columns=columns, bias=case.bias)
    eager, exact = module(x), module.exact(x)
    scale = exact.abs() + exact.square().mean(-1, keepdim=True).sqrt() + 1e-30
    for choice in case.choices:
        found = loaded(lowered(program, choice), module)
        mine, theirs = (float(((z.double() - exact).abs() / scale).max()) for z in (found(x), eager))
        yield mine, theirs


def test_values() -> None:
    check("tests.vocabulary.quantized.test_called", list(CASES))


@pytest.mark.parametrize("form", ["int8", "tensor"])
def test_it_compiles_within_what_it_says(form: str, tmp_path: Path) -> None:
    program = lowered(start(form, 64, depth=512, columns=256)[2])
    region = next(r for r in program.called if is_called(r))
    made = program.implementation(region)
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and all(k.spills == 0 for k in found.kernels)
    assert {d for k in found.kernels for d in k.dots} == {"s8" if form == "int8" else "e4m3"}


if __name__ == "__main__":
    import sys

    run(CASES, sys.argv[1:], errors_of)
