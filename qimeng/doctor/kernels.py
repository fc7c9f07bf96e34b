"""Small kernels that show whether Triton and the driver here compute what generated kernels rely on.

Each check launches a kernel on `device` and returns why it is wrong, or an empty string. Needs torch and triton only: a
process of its own runs it (`qimeng.doctor.conformance`). Knows nothing about programs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


@triton.jit
def _masked(x, y, rows, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    kept = (at < columns) & (row < rows)
    value = tl.load(x + row * stride + at, mask=kept, other=7.0)
    tl.store(y + row * columns + at, value * 2 + 1, mask=kept)


def masked_tiles(device: str) -> str:
    """Loads and stores of a masked, strided tile touch nothing beside it."""
    rows, columns = 5, 37
    x = torch.arange(rows * 50.0, device=device).view(rows, 50)
    y = torch.full((rows + 1, columns), -3.0, device=device)
    _masked[(rows,)](x, y, rows, columns, x.stride(0), BLOCK=64)
    wanted = torch.cat([x[:, :columns] * 2 + 1, torch.full((1, columns), -3.0, device=device)])
    return _same(y, wanted)


@triton.jit
def _sums(x, total, top, place, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(total, tl.sum(value, 0))
    hidden = tl.where(at < n, value, float("-inf"))
    tl.store(top, tl.max(hidden, 0))
    tl.store(place, tl.argmax(hidden, 0))


def reductions(device: str) -> str:
    """Sums, maxima and the first place of the largest."""
    x = torch.arange(1000.0, device=device) % 97
    found = [torch.zeros(1, device=device, dtype=d) for d in (torch.float32, torch.float32, torch.int32)]
    _sums[(1,)](x, *found, 1000, BLOCK=1024)
    wanted = (float(x.sum()), 96.0, 96)
    got = tuple(t.item() for t in found)
    return "" if got == wanted else f"got {got}, expected {wanted}"


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _scan(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.store(y + at, tl.associative_scan(value, 0, _add), mask=at < n)


def scans(device: str) -> str:
    """A scan with a function of its own."""
    x = torch.arange(200, device=device, dtype=torch.int32) - 90
    y = torch.zeros_like(x)
    _scan[(1,)](x, y, 200, BLOCK=256)
    return _same(y, x.cumsum(0).to(torch.int32))


@triton.jit
def _product(a, b, c, DEPTH: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):
    row, column, depth = tl.arange(0, SIZE), tl.arange(0, SIZE), tl.arange(0, STEP)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in tl.range(0, DEPTH, STEP, num_stages=3):
        left = tl.load(a + row[:, None] * DEPTH + start + depth[None, :])
        right = tl.load(b + (start + depth)[:, None] * SIZE + column[None, :])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(c + row[:, None] * SIZE + column[None, :], total)


def _product_error(device: str, dtype: torch.dtype, precision: str) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator).to(device, dtype) for s in ((64, 256), (256, 64)))
    c = torch.empty(64, 64, device=device)
    _product[(1,)](a, b, c, DEPTH=256, SIZE=64, STEP=32, PRECISION=precision, num_warps=4)
    exact = a.double() @ b.double()
    return float((c.double() - exact).abs().max() / exact.square().mean().sqrt())


def products_in_half_types(device: str) -> str:
    """Pipelined fp16 and bf16 products, summed in fp32."""
    errors = [_product_error(device, dtype, "ieee") for dtype in (torch.float16, torch.bfloat16)]
    return "" if max(errors) < 1e-5 else f"relative errors {errors}, at most 1e-5 is right"


def products_in_fp32(device: str) -> str:
    """fp32 products without tensor cores' rounding of the operands."""
    error = _product_error(device, torch.float32, "ieee")
    return "" if error < 1e-5 else f"relative error {error:.2g}, at most 1e-5 is right"


def products_in_tf32(device: str) -> str:
    """TF32 products: less exact than fp32, no worse than TF32's eleven bits."""
    error = _product_error(device, torch.float32, "tf32")
    return "" if error < 5e-3 else f"relative error {error:.2g}, at most 5e-3 is right"


@triton.jit
def _round(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)


def rounding(device: str) -> str:
    """fp32 becomes bf16 and fp16 by rounding to the nearest, ties to even, with infinities and NaN kept."""
    x = torch.tensor(
        [1.0, 1.00390625, 1.01171875, 3.4e38, -0.0, math.inf, math.nan, 65519.0, 65520.0, 1e-8], device=device
    )
    for dtype in (torch.bfloat16, torch.float16):
        y = torch.zeros(len(x), device=device, dtype=dtype)
        _round[(1,)](x, y, len(x), BLOCK=16)
        if wrong := _same(y, x.to(dtype)):
            return f"{dtype}: {wrong}"
    return ""


@triton.jit
def _extremes(x, y, smaller, larger, chosen, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0)
    b = tl.load(y + at, mask=at < n, other=0.0)
    tl.store(smaller + at, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=at < n)
    tl.store(larger + at, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=at < n)
    tl.store(chosen + at, tl.where(a < b, a, b), mask=at < n)


def nan_and_infinity(device: str) -> str:
    """Minima and maxima pass NaN on, comparisons with NaN are false."""
    values = [math.nan, math.inf, -math.inf, 0.0, -1.0, 2.0]
    a, b = (t.reshape(-1).to(device) for t in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij"))
    found = [torch.zeros_like(a) for _ in range(3)]
    _extremes[(1,)](a.contiguous(), b.contiguous(), *found, len(a), BLOCK=64)
    wanted = (torch.minimum(a, b), torch.maximum(a, b), torch.where(a < b, a, b))
    return next(filter(None, map(_same, found, wanted)), "")


@triton.jit
def _whole(x, y, quotient, remainder, shifted, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=1)
    b = tl.load(y + at, mask=at < n, other=1)
    tl.store(quotient + at, a // b, mask=at < n)
    tl.store(remainder + at, a % b, mask=at < n)
    tl.store(shifted + at, (a * 1000003) >> 3, mask=at < n)


def whole_numbers(device: str) -> str:
    """Quotients toward zero, remainders of the dividend's sign, products that wrap, shifts that keep the sign."""
    a = torch.tensor([7, -7, 7, -7, 123456, -123456, 0, 2**31 - 1], device=device, dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 1000, 1000, 5, 3], device=device, dtype=torch.int32)
    found = [torch.zeros_like(a) for _ in range(3)]
    _whole[(1,)](a, b, *found, len(a), BLOCK=8)
    wanted = (torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), (a * 1000003) >> 3)
    return next(filter(None, map(_same, found, wanted)), "")


@triton.jit
def _exact(x, y, quotient, root, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=1.0)
    b = tl.load(y + at, mask=at < n, other=1.0)
    tl.store(quotient + at, tl.div_rn(a, b), mask=at < n)
    tl.store(root + at, tl.sqrt_rn(a), mask=at < n)


def exact_quotients_and_roots(device: str) -> str:
    """IEEE quotients and square roots, which floors and comparisons rely on."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(1000, generator=generator).to(device) * 100 + 1e-3 for _ in range(2))
    found = [torch.zeros_like(a) for _ in range(2)]
    _exact[(1,)](a, b, *found, len(a), BLOCK=1024)
    wanted = [t.float() for t in (a.double() / b.double(), a.double().sqrt())]  # rounded once more, to the same numbers
    return next(filter(None, map(_same, found, wanted)), "")


@triton.jit
def _gathered(table, index, y, n, width, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(index + tl.program_id(0))
    value = tl.load(table + row * width + at, mask=at < width, other=0.0)
    tl.store(y + tl.program_id(0) * width + at, value, mask=at < width)


def gathers(device: str) -> str:
    """Rows read through 64-bit indices."""
    table = torch.arange(300.0, device=device).view(20, 15)
    index = torch.tensor([19, 0, 7, 7], device=device)
    y = torch.zeros(4, 15, device=device)
    _gathered[(4,)](table, index, y, 4, 15, BLOCK=16)
    return _same(y, table[index])


@triton.jit
def _elementary(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=1.0)
    tl.store(y + at, tl.exp(value), mask=at < n)
    tl.store(y + n + at, tl.log(tl.abs(value)), mask=at < n)
    tl.store(y + 2 * n + at, tl.erf(value), mask=at < n)
    tl.store(y + 3 * n + at, tl.sin(value), mask=at < n)


def elementary_functions(device: str) -> str:
    """exp, log, erf and sin are a few units in the last place off at most."""
    x = torch.linspace(-20, 20, 1001, device=device)
    y = torch.zeros(4, len(x), device=device)
    _elementary[(1,)](x, y, len(x), BLOCK=1024)
    wide = x.double()
    wanted = torch.stack([wide.exp(), wide.abs().log(), wide.erf(), wide.sin()])
    off = (y.double() - wanted).abs() / (wanted.abs() + 1e-2)
    finite = off[wanted.isfinite()]
    return "" if float(finite.max()) < 5e-6 else f"relative error {float(finite.max()):.2g}, at most 5e-6 is right"


def _same(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Empty where all values are the same, NaN included; else the first that is not."""
    equal = (found == wanted) | (found.isnan() & wanted.isnan()) if wanted.is_floating_point() else found == wanted
    if bool(equal.all()):
        return ""
    at = int((~equal).reshape(-1).int().argmax())
    got, right = (t.reshape(-1)[at].item() for t in (found, wanted))
    return f"{int((~equal).sum())} values differ, first got {got}, expected {right}"


CHECKS = (
    masked_tiles,
    reductions,
    scans,
    products_in_half_types,
    products_in_fp32,
    products_in_tf32,
    rounding,
    nan_and_infinity,
    whole_numbers,
    exact_quotients_and_roots,
    gathers,
    elementary_functions,
)
"""All checks; the first line of each one's docstring says what it shows."""

__all__ = [
    "CHECKS",
    "elementary_functions",
    "exact_quotients_and_roots",
    "gathers",
    "masked_tiles",
    "nan_and_infinity",
    "products_in_fp32",
    "products_in_half_types",
    "products_in_tf32",
    "reductions",
    "rounding",
    "scans",
    "whole_numbers",
]
