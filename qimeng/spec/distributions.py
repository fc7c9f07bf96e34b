"""Values that inputs take in a trial.

Deals in changing tensors within their domain. Knows nothing about where they come from or what reads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from qimeng.errors import SpecError
from qimeng.spec.leaf import sample, unexpanded
from qimeng.spec.together import TOGETHER

DISTRIBUTIONS = (
    *("given", "normal", "x3", "x30", "x0.01", "negated", "shifted", "rounded", "slices", "spots"),
    *TOGETHER,
)
"""In order: as the spec makes them; normal with mean 0 and a deviation of 1/4 to 4, by the seed; times 3, 30, 0.01 and
-1; plus an offset of one to eight times their size, by the seed; normal, rounded to few values; as the spec makes them
except for some slices or a few elements (see `_SLICES`, `_SPOTS`); and those that change inputs and parameters together
(`qimeng.spec.together`). Inputs times 30 make unguarded exponentials overflow; inputs that are already large are scaled
by less (see `WIDEST`)."""

EXAMPLES = "examples"
"""The user's own values, bit for bit. They are always the first trial."""

SECRET_SIZE = ("normal", "shifted", "rounded", "slices", "spots", "units", "huge")
"""Distributions whose size or place depends on the seed. A program that special-cases its inputs by their size may
mistake one such draw for a usual one, so the final verification draws them twice."""

WILD = TOGETHER
"""Distributions on which eager itself may fail. A trial on which eager's result is useless is left out."""

PARAMETERS_TOO = ("units", "huge")
"""Distributions that change parameters too."""

WIDEST = 32.0
"""Largest root mean square of inputs times 30. Where 30 would exceed it, a power of two of at least 1 is used instead.
No model has logits of a thousand, and on those good formulas have a few wrong digits: exp(x - logsumexp(x)) loses what
one rounding of the logarithm changes (P. Blanchard, D. J. Higham, N. J. Higham, Accurately computing the log-sum-exp
and softmax functions, IMA J. Numer. Anal. 41(4), 2021)."""

_SLICES = 8
"""Along a dimension drawn by the seed, one slice in this many differs from the others: in turns it is wide or negated.
In every dimension that is at least this long, one slice is zero, like padding. All other slices are as given, so
neither a sample nor the mean of the inputs shows the difference."""

_SPOTS = (2, 4)
"""Two to the power of this many elements (by the seed) differ from the others. A quarter each is negated, zero, and
positive or negative numbers of deviation `WIDEST`, on which exponentials overflow. They are so few that a sample of a
large tensor hardly ever has one."""

_SPAN = 2.0
"""Logarithm to base 2 of the largest deviation of normal values. The deviation varies, so a program cannot recognize a
trial by it."""

_STEP, _POWERS = 0.25, (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
"""Rounded values are multiples of a quarter of the deviation, which is a power of two, by the seed. They include zeros
and equal values, which random numbers hardly ever have. Their size is secret."""

_FACTORS = {"x3": 3.0, "x0.01": 0.01, "negated": -1.0}

_ALLOWED = {
    "real": DISTRIBUTIONS,
    "positive": ("given", "x3", "x30", "x0.01", "shifted", "slices", "spots", "units", "infinite"),
    "sign": ("given", "negated"),
    "unit": ("given", "negated"),
    "orthogonal": ("given", "negated"),
    "sorted": ("given", "x3", "x0.01"),
    "definite": ("given", "x3", "x0.01"),
}


def applies(distribution: str, domain: str) -> bool:
    """Whether inputs of `domain` change under `distribution` (where not, they stay as given).

    Raises:
        SpecError: no such distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise SpecError(f"unknown distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    return distribution != "given" and distribution in _ALLOWED.get(domain, ())


def distributions_of(domains: Iterable[str], has_parameters: bool) -> tuple[str, ...]:
    """Those that change something, ``"given"`` first.

    Args:
        domains: of the inputs.
        has_parameters: whether the module has any.
    """
    listed = list(domains)
    return tuple(
        d
        for d in DISTRIBUTIONS
        if d == "given" or any(applies(d, domain) for domain in listed) or (has_parameters and d in PARAMETERS_TOO)
    )


def redistribute(x: Any, domain: str, distribution: str, seed: int) -> Any:
    """`x` with values of `distribution` where its domain allows, else `x` itself; strides stay.

    Distributions of `TOGETHER` concern several tensors: see `qimeng.spec.together.redistribute_together`.
    """
    if not applies(distribution, domain) or not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    if distribution in TOGETHER:
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    once = unexpanded(out)
    if distribution in ("normal", "rounded"):
        generator = torch.Generator(device=x.device)
        generator.manual_seed(seed ^ 0x5EED)
        once.normal_(generator=generator)
    if distribution == "normal":
        once.mul_(2.0 ** random.Random(seed).uniform(-_SPAN, _SPAN))
    elif distribution == "rounded":
        scale = 2.0 ** random.Random(seed).choice(_POWERS)
        once.div_(_STEP).round_().mul_(_STEP * scale)
    elif distribution == "shifted":
        torch.add(unexpanded(x), _offset(_size(x), domain, seed), out=once)
    elif distribution in ("slices", "spots"):
        once.copy_(unexpanded(x))
        (_unlike_slices if distribution == "slices" else _unlike_spots)(once, domain, seed, _size(x))
    else:
        factor = _factor(_size(x)) if distribution == "x30" else _FACTORS[distribution]
        torch.mul(unexpanded(x), factor, out=once)
    return out


def _unlike_slices(x: torch.Tensor, domain: str, seed: int, size: float) -> None:
    draw = random.Random(seed)
    dims = [d for d, length in enumerate(x.shape) if length > 1]
    if not dims:
        return
    dim = draw.choice(dims[:-1] * 3 + dims[-1:])  # what is reduced is last, as a rule
    count = -(-x.shape[dim] // _SLICES)
    generator = torch.Generator(device=x.device).manual_seed(seed ^ 0x5EED)
    for number, at in enumerate(draw.sample(range(x.shape[dim]), count)):
        part, is_wide = x.select(dim, at), number % 2 == 0
        if domain == "positive":
            part.mul_(_factor(size) if is_wide else 0.01)
        elif is_wide:
            part.copy_(torch.empty_like(part).normal_(generator=generator) * max(WIDEST, size))
        else:
            part.neg_()
    for d in dims if domain == "real" else ():
        if x.shape[d] >= _SLICES:
            x.select(d, draw.randrange(x.shape[d])).zero_()


def _unlike_spots(x: torch.Tensor, domain: str, seed: int, size: float) -> None:
    if not x.numel():
        return
    generator = torch.Generator(device=x.device).manual_seed(seed ^ 0x5EED)
    count = 2 ** random.Random(seed).randint(*_SPOTS)
    flat = torch.randint(x.numel(), (count,), generator=generator, device=x.device).unique()
    x = x if x.dim() else x.view(1)
    at = torch.unravel_index(flat, x.shape)
    if domain == "positive":
        x[at] *= _factor(size)
        return
    kinds = torch.randperm(len(flat), generator=generator, device=x.device) % 4
    large = torch.empty(len(flat), device=x.device).uniform_(3, 4, generator=generator) * max(WIDEST, size)
    values = torch.stack([large.to(x.dtype), -x[at], torch.zeros_like(x[at]), -large.to(x.dtype)])
    x[at] = values.gather(0, kinds[None])[0]


def _offset(size: float, domain: str, seed: int) -> float:
    draw = random.Random(seed)
    offset = min(size * 2 ** draw.uniform(0, 3), max(size, WIDEST))
    return offset if domain == "positive" else offset * draw.choice((-1, 1))


def _size(x: torch.Tensor) -> float:
    return float(sample(x).double().square().mean().sqrt())


def _factor(size: float) -> float:
    return next((f for f in (30.0, 16.0, 8.0, 4.0, 2.0) if size * f <= WIDEST), 1.0)  # not a number: 1


__all__ = ["DISTRIBUTIONS", "EXAMPLES", "SECRET_SIZE", "WILD", "applies", "distributions_of", "redistribute"]
