"""Pointwise computations: broadcasting, dtypes, masks, strides."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.suite.problem import BF16, FP16, FP64, INT8, INT32, INT64, UINT8, Table, normal

problem = Table()


@problem("three broadcasts", normal((7, 1, 13), (11, 1), (5, 1, 1, 1)))
def three_broadcasts(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sigmoid(x * y) + z


@problem("transposed and strided", lambda: (torch.randn(37, 23).T, torch.randn(46, 74)[::2, ::2]))
def transposed_and_strided(x: Tensor, y: Tensor) -> Tensor:
    return x.abs().sqrt() - y


@problem("expanded inputs", lambda: (torch.randn(1, 17).expand(19, 17), torch.randn(19, 1).expand(19, 17)))
def expanded_inputs(x: Tensor, y: Tensor) -> Tensor:
    return x * y + x


@problem("a tensor and its transpose", normal((29, 29)))
def symmetric(x: Tensor) -> Tensor:
    return 0.5 * (x + x.T)


@problem("prime size", normal((10007,), (1,)))
def prime_size(x: Tensor, y: Tensor) -> Tensor:
    return torch.clamp(x * y, -0.5, 1.5).exp()


@problem("zero dimensions", lambda: (torch.randn(()), torch.randn(()), torch.randn(5)))
def zero_dimensions(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return x * y - 1, x + z


@problem("numbers", lambda: (torch.randn(33, 7), 0.3, 2, True))
def numbers(x: Tensor, scale: float, power: int, flag: bool) -> Tensor:
    y = x * scale + scale
    return y**power if flag else y


@problem("integers", lambda: (torch.randint(-9, 9, (31, 5)), torch.randint(1, 7, (5,), dtype=INT32)))
def integers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * y + 3, x.clamp(-2, 5), torch.maximum(x, y), x / y, x.abs(), torch.relu(x), x.sign(), -y


@problem("powers of tensors", lambda: (torch.rand(9, 31) + 0.1, torch.randn(31), torch.rand(1) + 2))
def powers_of_tensors(x: Tensor, y: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    return x**y, x.pow(p).mean(-1).pow(1 / p), (-2.0) ** y.round(), x**70


@problem("integer division", lambda: (torch.randint(-99, 99, (31, 5)), torch.randint(1, 7, (5,))))
def integer_division(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x // y, x % y, torch.div(x, y, rounding_mode="trunc")


@problem("floating remainders", lambda: (torch.randn(9, 31) * 8, torch.randn(31), torch.randn(9, 1) * 1e9))
def floating_remainders(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x % 0.3, x // 0.3, torch.fmod(x, y), torch.remainder(z, y), (x / y.clamp(0.1)) // z.tanh()


@problem(
    "buckets",
    lambda: (torch.randn(9, 31), torch.randn(31), torch.linspace(-2, 2, 7), torch.randn(7, 4)),
    ("searchsorted",),
)
def buckets(x: Tensor, y: Tensor, bounds: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    code = torch.bucketize(x, bounds, right=True)
    z = torch.fmax(x, y) - torch.fmin(x, y)
    of_a_number = torch.searchsorted(bounds, 0.3)
    return values[code - 1], torch.searchsorted(bounds, z), z.round(decimals=1), torch.ldexp(z, code), of_a_number


@problem("gammas", lambda: (torch.rand(9, 31) * 12 + 0.01, torch.rand(31) * 3, torch.randn(9, 31) * 4))
def gammas(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    beta = torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y)
    return beta, torch.digamma(x) - torch.digamma(y + 1), functional.poisson_nll_loss(z, x, full=True)


@problem("bytes", lambda: (torch.randint(0, 255, (9, 13), dtype=UINT8), torch.randint(-99, 99, (13,), dtype=INT8)))
def bytes_of_images(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.float() / 255 - 0.5, x + 100, y * 3, x > 7, x - y, x // x.clamp(3)


@problem("booleans", lambda: (torch.rand(9, 31) > 0.5, torch.rand(31) > 0.3, torch.randn(9, 31)))
def booleans(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x & ~y, x | (z > 0), x ^ y, x + y, x * z, torch.logical_and(z, y), torch.logical_not(z), x.float() - 1


@problem("masks", lambda: (torch.randn(6, 21, 21), torch.rand(21, 21) > 0.3, torch.randn(21)))
def masks(x: Tensor, mask: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.where(mask & (x > -1), x, other)
    return y, x.masked_fill(~mask, float("-inf"))


@problem("half types", lambda: (torch.randn(15, 33).half(), torch.randn(33).bfloat16(), torch.randn(15, 1)))
def half_types(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x * 2 + x, x + z, y * y, x * y


@problem("bfloat16 activations", normal((12, 65), dtype=BF16))
def bfloat16_activations(x: Tensor) -> Tensor:
    return functional.gelu(x) * torch.sigmoid(x) + functional.silu(x)


@problem("float16 activations", normal((12, 65), dtype=FP16))
def float16_activations(x: Tensor) -> Tensor:
    return functional.elu(x) + functional.leaky_relu(x, 0.2) + functional.hardswish(x)


@problem("double activations", normal((12, 65), dtype=FP64))
def double_activations(x: Tensor) -> tuple[Tensor, ...]:
    return torch.tanh(x), functional.softplus(x), torch.expm1(x) * 3.3, functional.gelu(x), torch.log1p(x.abs())


@problem(
    "double and others",
    lambda: (torch.randn(9, 7).double(), torch.randn(7), torch.randint(0, 9, (9, 1)), 0.1),
    stays=("mul",),
)
def double_and_others(x: Tensor, y: Tensor, n: Tensor, scale: float) -> Tensor:
    return (x + y) / (n + 1) * scale + 0.7


@problem("rounded on the way", normal((8, 40)))
def rounded_on_the_way(x: Tensor) -> Tensor:
    return x.half().float() * 3 + x.to(torch.bfloat16).to(torch.float32)


@problem("rounding", lambda: (torch.randn(8, 40) * 5,))
def rounding(x: Tensor) -> tuple[Tensor, ...]:
    return x.floor(), x.ceil(), x.round(), x.trunc(), x.int(), x - x.floor(), torch.fmod(x, 2), torch.remainder(x, 2)


@problem("powers", lambda: (torch.rand(8, 40) + 0.5, torch.randn(40)))
def powers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x**-2, x**1.7, x**0.5, x**y, 2**y, torch.rsqrt(x), x.square(), x**0


@problem("special functions", lambda: (torch.randn(8, 40),), stays=("full",))
def special_functions(x: Tensor) -> tuple[Tensor, ...]:
    return torch.erf(x), torch.sin(x) * torch.cos(x), torch.tan(x), torch.atan(x), torch.lerp(x, -x, 0.3), x.sinh()


@problem("inverse functions", lambda: (torch.rand(8, 40) * 2 - 1, torch.randn(8, 40) * 4))
def inverse_functions(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    arcs = torch.asin(x), torch.acos(x), torch.atanh(x), torch.atan(y * 5)
    return *arcs, torch.asinh(y * 1e3), torch.acosh(1 + y.abs()), torch.erfc(y), torch.hypot(x, y * 1e20)


@problem("inverse functions of half types", normal((8, 40), (8, 40), dtype=BF16))
def inverse_functions_of_half_types(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.atan(x), torch.erfc(x), torch.asinh(x), torch.atan2(x, y)


@problem("angles of all quarters", lambda: (torch.randn(16, 40), torch.randint(-2, 3, (16, 40)) * 1.0))
def angles_of_all_quarters(x: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
    return torch.atan2(x, whole), torch.atan2(whole, -x), torch.atan2(whole.abs(), whole), torch.hypot(whole, x * whole)


@problem("inverse functions of doubles", normal((8, 40), dtype=FP64), stays=("atan", "erfc"))
def inverse_functions_of_doubles(x: Tensor) -> tuple[Tensor, ...]:
    return torch.atan(x), torch.erfc(x), torch.asinh(x), torch.acosh(1 + x.square()), torch.atanh(torch.tanh(x))


@problem(
    "shifts",
    lambda: (torch.randint(-(1 << 40), 1 << 40, (9, 13)), torch.randint(0, 255, (9, 13), dtype=UINT8)),
    stays=("bitwise_left_shift",),
)
def shifts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x >> 7, x << 3, y >> 2, y << 6, torch.bitwise_right_shift(x, 63), torch.bitwise_left_shift(x, y)


@problem("clamp by tensors", lambda: (torch.randn(9, 14), torch.randn(14) - 1, torch.randint(0, 3, (9, 1))))
def clamp_by_tensors(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return torch.clamp(x, low, low + high), torch.clamp(high, min=0.5)


@problem("not finite", normal((40, 7)))
def not_finite(x: Tensor) -> tuple[Tensor, ...]:
    x = torch.where(x.abs() > 1.5, x * float("inf"), torch.where(x < -1, x.log(), x))
    signs = torch.nan_to_num(x), x.isnan(), x.isinf(), torch.relu(x), x.clamp(-1, 1), torch.maximum(x, -x), x.isfinite()
    return *signs, x.sinh(), torch.logsumexp(x, 1)


@problem("made inside", normal((9, 14)), stays=("arange", "full"))
def made_inside(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ramp = torch.arange(14, device=x.device)
    causal = torch.ones(9, 14, dtype=torch.bool, device=x.device).tril()
    return x * ramp, torch.where(causal, x, 0.0), torch.zeros_like(x) + torch.full((14,), 2.5)


@problem("ramp with a start", normal((9, 14)), stays=("arange",))
def ramp_with_a_start(x: Tensor) -> Tensor:
    return x + torch.arange(1, 29, 2) + torch.linspace(0, 1, 14)


@problem("long types", lambda: (torch.randint(0, 1 << 40, (17,), dtype=INT64),))
def long_types(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + 1, x * 2 - 5, x.double() * 0.5


@problem("one element", normal((1, 1, 1)))
def one_element(x: Tensor) -> Tensor:
    return functional.mish(x) + 1


@problem("nothing", lambda: (torch.randn(0, 5), torch.randn(5)), stays=("add", "relu"))
def nothing(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


@problem("constants computed with", normal((5, 7)))
def constants_computed_with(x: Tensor) -> tuple[Tensor, ...]:
    two = torch.full_like(x, 2.7)
    return two.int() + x, two.exp() + x, torch.ones_like(x).bool().sum(1), (two * 3).sqrt().sum(0) * x.sum(0)


@problem("quantised", normal((5, 8)))
def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale
