"""Schemes for fp32 products on half-type units: what loses small numbers is refused, what is fp32 passes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.float64 import move
from qimeng.envs.judge.reference import References
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CPU = torch.device("cpu")
M, K, N = 64, 256, 64


def scaled_planes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two fp16 planes of each operand, rows of `x` and columns of `y` scaled by one power of two each: 22 bits."""

    def split(a: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top = a.abs().amax(dim, keepdim=True).clamp(min=1e-30)
        scale = torch.exp2(10 - top.log2().floor())
        a = a * scale
        high = a.half()
        return high.float(), (a - high.float()).half().float(), scale

    a, b, s = split(x, 1)
    c, d, t = split(y, 0)
    return (a @ c + (a @ d + b @ c)) / s / t


def three_planes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Three bf16 planes of each operand, six products: fp32's exponent and digits; what is not finite has one plane."""

    def split(a: torch.Tensor) -> list[torch.Tensor]:
        planes = []
        for _ in range(3):
            bits = a.view(torch.int32) & -0x10000  # cut, not rounded: the largest number stays finite
            planes.append(bits.view(torch.float32))
            a = torch.where(planes[-1].isfinite(), a - planes[-1], 0.0)
        return planes

    (a, b, c), (d, e, f) = split(x), split(y)
    if not bool(x.isfinite().all() & y.isfinite().all()):
        return x @ y  # the exact path of a guarded scheme
    return a @ d + (a @ e + b @ d) + (b @ e + a @ f + c @ d)


def split_k(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum(x[:, i : i + 64] @ y[i : i + 64] for i in range(0, K, 64))  # type: ignore[return-value]


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def verdicts(refs: References, product: Product, linear: bool) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for trial in refs.every_distribution():
        state = refs.parameters.set(trial.draw.parameter_seed)
        inputs = refs.inputs(trial.draw)
        y = product(inputs[0], state["weight"].t()) + state["bias"] if linear else product(*inputs)
        error, text = error_budget.check(y, trial.outputs[0])
        right = text is None or refs.look_again(trial, 0, y, error) is not None
        found.setdefault(trial.draw.distribution, []).append(right)
    return found


def references(linear: bool, seed: int) -> References:
    draws = random.Random(seed)
    torch.manual_seed(seed)
    if linear:
        spec = KernelSpec.from_module(torch.nn.Linear(K, N), (torch.randn(M, K),))
    else:
        spec = KernelSpec.from_function(plain, (torch.randn(M, K), torch.randn(K, N)))
    return References(spec, capture_spec(spec), CPU, draw_seed=lambda: draws.getrandbits(62))


@pytest.fixture(autouse=True)
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("linear", [False, True], ids=["matmul", "linear"])
@pytest.mark.parametrize("honest", [plain, split_k, three_planes])
def test_products_with_fp32s_digits_pass_on_every_distribution(honest, linear):
    for seed in range(2):
        found = verdicts(references(linear, seed), honest, linear)
        assert all(all(rights) for rights in found.values()), (honest.__name__, found)
        assert {"units", "huge", "infinite", "shifted"} <= found.keys()


@pytest.mark.parametrize("linear", [False, True], ids=["matmul", "linear"])
def test_planes_scaled_by_rows_are_refused(linear):
    refused: dict[str, int] = {}
    for seed in range(4):
        found = verdicts(references(linear, seed), scaled_planes, linear)
        assert not all(all(rights) for rights in found.values()), (seed, found)
        for distribution, rights in found.items():
            refused[distribution] = refused.get(distribution, 0) + (not all(rights))
    assert refused["units"] >= 1 and refused["huge"] >= 1 and refused["infinite"] >= 2, refused
    assert refused["given"] == refused["normal"] == 0, "where rows are even it is as good as fp32"


def units() -> tuple[torch.Tensor, torch.Tensor]:
    unit = 10.0 ** torch.empty(K).uniform_(-6, 6)
    return torch.randn(M, K) * unit, torch.randn(K, N) / unit[:, None]


def masked(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(M, K), torch.randn(K, N)
    x[:, 7], y[7] = value, 0
    return x, y


def one_hot() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(M, K)
    x[torch.arange(M), torch.randperm(K)[:M]] = 1
    return x, torch.randn(K, N) * 10.0 ** torch.empty(K, 1).uniform_(-6, 6)


def one_hot_of_columns() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table whose columns have units of their own, multiplied by unit rows: seen along columns alone."""
    x, y = one_hot()[0], torch.randn(K, N)
    return y[:, :K].repeat(1, 4)[:M] * 10.0 ** torch.linspace(-6, 6, K), torch.eye(K)[:, :N] + 0 * x.sum()


def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.zeros(M, K), torch.zeros(K, N)
    x[:32, :128], x[32:, 128:] = torch.randn(32, 128), torch.randn(32, 128)
    y[:128], y[128:] = torch.randn(128, N) * 1e9, torch.randn(128, N)
    return x, y


def powers() -> tuple[torch.Tensor, torch.Tensor]:
    t, at = torch.linspace(0.1, 10, M), torch.linspace(-8, 8, K)
    return t[:, None] ** at, torch.randn(K, N) * (10.0 ** -at.abs())[:, None]


def infinite() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.rand(M, K) + 0.1, torch.rand(K, N) + 0.1
    x[3, 5] = torch.inf
    return x, y


HARD = {
    "units": units,
    "masked -1e9": lambda: masked(-1e9),
    "masked least": lambda: masked(torch.finfo(torch.float32).min),
    "one-hot": one_hot,
    "columns of a table": one_hot_of_columns,
    "blocks of 1 and 1e9": blocks,
    "powers": powers,
    "an infinity": infinite,
}


def expected_of(x: torch.Tensor, y: torch.Tensor) -> error_budget.Expected:
    exact, moved = x.double() @ y.double(), [x.double(), y.double()]
    move(moved, torch.finfo(torch.float32).eps)
    change = accuracy.measure(moved[0] @ moved[1], exact, moved[0] @ moved[1])
    value, eager = exact.float(), x @ y
    odd = eager if not bool(eager.isfinite().all()) else None
    floor = error_budget.floor(torch.float32, error_budget.roundings(K), change)
    return error_budget.Expected(value, accuracy.measure(eager, value, odd), floor, odd)


@pytest.mark.parametrize("name", HARD)
def test_on_hard_inputs_the_rule_tells_the_schemes_apart(name):
    torch.manual_seed(1)
    x, y = HARD[name]()
    expected = expected_of(x, y)
    for honest in (plain, split_k, three_planes):
        assert error_budget.check(honest(x, y), expected)[1] is None, honest.__name__
    assert error_budget.check(scaled_planes(x, y), expected)[1] is not None
