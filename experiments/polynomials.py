"""Fits the polynomials of `qimeng.coder.template.triton`: minimax, by Lawson's reweighted least squares.

Prints each form's coefficients (rounded to fp32) and its largest error, of the fit alone: what fp32 arithmetic and the
units add is in the module's docstring. Needs numpy only: `python -m experiments.polynomials`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def minimax(basis: Sequence[Array], values: Array, weight: Array, rounds: int = 3000) -> tuple[Array, float]:
    """Coefficients that make the largest weighted error least, and that error (C. L. Lawson, thesis, UCLA 1961)."""
    matrix, share = np.stack(basis, 1), np.full(len(values), 1 / len(values))
    best, least = np.zeros(len(basis)), math.inf
    for _ in range(rounds):
        scale = np.sqrt(share) * weight
        found = np.linalg.lstsq(matrix * scale[:, None], values * scale, rcond=None)[0]
        error = np.abs((matrix @ found - values) * weight)
        if error.max() < least:
            best, least = found, float(error.max())
        share = share * error
        share /= share.sum()
    return best, least


def points(low: float, high: float, count: int = 4000) -> Array:
    """Chebyshev's extremal points."""
    return (low + high) / 2 - (high - low) / 2 * np.cos(np.linspace(0, np.pi, count))


def of(function: Callable[[float], float], at: Array) -> Array:
    """A function of Python's `math` on an array."""
    return np.array([function(float(x)) for x in at])


def show(name: str, found: tuple[Array, float]) -> None:
    """Print a fit, the lowest power first."""
    print(f"{name}: error {found[1]:.2e}:", ", ".join(repr(float(np.float32(c))) for c in found[0]))


def main() -> None:
    """Print every fit."""
    t = points(1e-4, 4.0)
    rest = of(math.erfc, t)
    weight = rest * math.log(2) / of(math.erf, t)
    show("erf, half: log2 erfc(t) / t on (0, 4)", minimax([t**k for k in range(1, 6)], np.log2(rest), weight))
    t = points(0.45, 4.0)
    rest = of(math.erfc, t)
    weight = rest * math.log(2) / of(math.erf, t)
    show("erf: log2 erfc(t) on (0.45, 4)", minimax([t**k for k in range(6)], np.log2(rest), weight))
    t = points(1e-3, 0.45)
    values = of(math.erf, t) / t
    show("erf near 0: erf(t) / t in t^2", minimax([t ** (2 * k) for k in range(4)], values, 1 / values))
    t = points(1e-2, math.pi / 2 + 0.01)
    values = np.sin(t) / t
    show("sin(t) / t - 1 in t^2", minimax([t ** (2 * k) for k in range(1, 5)], values - 1, 1 / values))
    t = points(1e-3, math.tan(math.pi / 8) + 1e-4)
    values = of(math.atan, t) / t
    show("atan(t) / t in t^2", minimax([t ** (2 * k) for k in range(5)], values, 1 / values))
    t = points(0.4, 10.2)
    u, values = 1 / (1 + t / 2), of(math.erfc, t) * np.exp(t * t)
    show("erfc(t) e^(t^2) / u in u = 1 / (1 + t / 2)", minimax([u**k for k in range(1, 10)], values, 1 / values))
    t = points(0.0, 13.4)
    u, values = 1 / (1 + 0.3 * t), of(lambda x: math.erfc(x / math.sqrt(2)) * math.exp(x * x / 2), t)
    gate = minimax([u**k for k in range(1, 9)], values, 1 / values)
    t = points(-0.25, 0.25)
    t = t[np.abs(t) > 1e-6]
    values, exact = np.log1p(t) - t, np.abs(np.log1p(t))
    show("(log(1 + t) - t) / t^2", minimax([t ** (2 + k) for k in range(7)], values, 1 / exact))
    t = points(0.0, 1.0)
    t = t[t > 1e-6]
    exact = np.log1p(t)
    show("the same up to 1", minimax([t ** (2 + k) for k in range(8)], exact - t, 1 / exact))
    t = points(1.5, 2.5)
    values = of(math.lgamma, t) / ((t - 1) * (t - 2))
    fit = minimax([(t - 2) ** k for k in range(9)], values, 1 / values)
    show("lgamma(t) / ((t - 1) (t - 2)) in t - 2", fit)
    show("erfc(t / sqrt 2) e^(t^2 / 2) / u in u = 1 / (1 + 0.3 t)", gate)


if __name__ == "__main__":
    main()
