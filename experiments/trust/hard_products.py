"""Products of fp32 operands whose values vary within a row: inputs on which a narrower format shows.

Each class makes two operands [M, K] and [K, N]; `forms` wraps them in the regions that a coder meets (weights packed
ahead, a prologue, an epilogue, a batch). Deals in tensors and modules. Knows nothing about kernels or the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Operands = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Rows, depth and columns, and the device on which operands are drawn."""

    m: int
    k: int
    n: int
    device: str = "cpu"

    def normal(self) -> Operands:
        """Two normal operands."""
        return torch.randn(self.m, self.k, device=self.device), torch.randn(self.k, self.n, device=self.device)

    def units(self, decades: float) -> torch.Tensor:
        """A unit for each place of the depth, 10^-decades to 10^decades."""
        return 10.0 ** torch.empty(self.k, device=self.device).uniform_(-decades, decades)


def _uniform(s: Shape) -> Operands:
    return torch.rand(s.m, s.k, device=s.device), torch.rand(s.k, s.n, device=s.device)


def _units(decades: float) -> Callable[[Shape], Operands]:
    def make(s: Shape) -> Operands:
        (x, y), unit = s.normal(), s.units(decades)
        return x * unit, y / unit[:, None]

    return make


def _masked(value: float) -> Callable[[Shape], Operands]:
    def make(s: Shape) -> Operands:
        x, y = s.normal()
        x[:, 7], y[7] = value, 0
        return x, y

    return make


def _half_of_the_outputs_ignore(s: Shape) -> Operands:
    x, y = s.normal()
    x[:, 7] *= 1e9
    y[7, : s.n // 2] = 0
    return x, y


def _one_hot(s: Shape) -> torch.Tensor:
    x = torch.zeros(s.m, s.k, device=s.device)
    x[torch.arange(s.m, device=s.device), torch.randint(s.k, (s.m,), device=s.device)] = 1
    return x


def _table(s: Shape) -> Operands:
    return _one_hot(s), s.normal()[1] * s.units(6)[:, None]


def _blocks(s: Shape) -> Operands:
    x, y = s.normal()
    x[: s.m // 2, s.k // 2 :] = 0
    x[s.m // 2 :, : s.k // 2] = 0
    y[: s.k // 2] *= 1e9
    return x, y


def _powers(s: Shape) -> Operands:
    t = torch.linspace(0.1, 10, s.m, device=s.device)[:, None]
    e = torch.linspace(-8, 8, s.k, device=s.device)
    return t**e, s.normal()[1] * (10.0 ** -e.abs())[:, None]


def _one(value: float) -> Callable[[Shape], Operands]:
    def make(s: Shape) -> Operands:
        x, y = (v + 0.1 for v in _uniform(s))
        x[3, 5] = value
        return x, y

    return make


def _scaled(a: float, b: float) -> Callable[[Shape], Operands]:
    def make(s: Shape) -> Operands:
        x, y = s.normal()
        return x * a, y * b

    return make


def _lognormal(deviation: float) -> Callable[[Shape], Operands]:
    def make(s: Shape) -> Operands:
        return tuple(v.mul(deviation).exp() * torch.randn_like(v).sign() for v in s.normal())  # type: ignore[return-value]

    return make


def _outlier(s: Shape) -> Operands:
    x, y = s.normal()
    x[:, 7] = 100.0
    return x, y


def _relu(s: Shape) -> Operands:
    x, y = s.normal()
    return x.relu(), y.relu()


def _softmax(s: Shape) -> Operands:
    x, y = s.normal()
    return (x * 4).softmax(-1), y


def _apart(s: Shape) -> Operands:
    """Where a row of A is large, a column of B is zero, and the other way round; no unit of the depth shows it."""
    x, y = s.normal()
    odd = torch.arange(s.k, device=s.device) % 2 == 1
    even_rows, even_columns = torch.arange(s.m, device=s.device) % 2 == 0, torch.arange(s.n, device=s.device) % 2 == 0
    x[even_rows[:, None] & odd] *= 1e-12
    y[~odd[:, None] & even_columns] = 0
    return x, y


BENIGN: Mapping[str, Callable[[Shape], Operands]] = {
    "normal": Shape.normal,
    "uniform": _uniform,
    "large, 1e6": _scaled(1e6, 1e6),
    "one outlier feature, 100": _outlier,
    "rectified, both": _relu,
    "probabilities": _softmax,
    "lognormal, deviation 1": _lognormal(1.0),
}
"""Inputs that nets have; speed counts on them."""

HARD: Mapping[str, Callable[[Shape], Operands]] = {
    "units 1e-3 to 1e3, weights inverse": _units(3),
    "units 1e-6 to 1e6, weights inverse": _units(6),
    "a mask of -1e4, weight 0": _masked(-1e4),
    "a mask of -1e9, weight 0": _masked(-1e9),
    "a mask of finfo.min, weight 0": _masked(torch.finfo(torch.float32).min),
    "a feature of 1e9, ignored by half of the outputs": _half_of_the_outputs_ignore,
    "one-hot by a table of mixed units": _table,
    "block diagonal, 1 and 1e9": _blocks,
    "powers t^-8 to t^8": _powers,
    "large where the other is zero": _apart,
    "lognormal, deviation 5": _lognormal(5.0),
    "1e30 by 1e-30": _scaled(1e30, 1e-30),
    "1e37 by 1e-10": _scaled(1e37, 1e-10),
    "1e-30 by 1e20": _scaled(1e-30, 1e20),
    "subnormal by 1e30": _scaled(1e-40, 1e30),
    "1e-19 by 1e-19": _scaled(1e-19, 1e-19),
    "one infinity": _one(float("inf")),
    "one NaN": _one(float("nan")),
    "one of 3.4e38": _one(3.4e38),
}
"""Inputs on which rows scaled by one power of two lose what counts, or leave fp32."""


class Product(torch.nn.Module):
    """A product in one of its forms; `weight` is [N, K] where it is a parameter.

    Raises:
        KeyError: no such form.
    """

    def __init__(self, form: str, operands: Operands):
        super().__init__()
        self.form, self.call = form, FORMS[form]
        held = form in WEIGHTED
        self.weight = torch.nn.Parameter(operands[1].T.contiguous(), requires_grad=False) if held else None

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The product of the inputs, or of the input and the weight."""
        return self.call(*inputs, *([self.weight] if self.weight is not None else []))

    def inputs(self, operands: Operands) -> tuple[torch.Tensor, ...]:
        """The inputs for `operands`."""
        x, y = operands
        if self.form == "batch":
            return x.expand(2, -1, -1).contiguous(), y.expand(2, -1, -1).contiguous()
        return (x,) if self.weight is not None else (x, y)


FORMS: Mapping[str, Callable[..., Any]] = {
    "two inputs": lambda x, y: x @ y,
    "weight": lambda x, w: x @ w.T,
    "prologue": lambda x, w: (x * 2.0) @ w.T,
    "epilogue": lambda x, w: (x @ w.T) * 0.5 + 0.0,
    "row sum": lambda x, y: (lambda p: (p, p.sum(1)))(x @ y),
    "batch": torch.bmm,
}
WEIGHTED = ("weight", "prologue", "epilogue")


__all__ = ["BENIGN", "FORMS", "HARD", "WEIGHTED", "Operands", "Product", "Shape"]
