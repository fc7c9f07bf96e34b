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
"""As the spec makes them; normal with mean 0 and a deviation of 1/4 to 4, by the seed; times 3, 30, 0.01 and -1; plus
an offset of one to eight times their size, by the seed; normal, of few values; as the spec makes them but for some
slices, or for a few elements (see `_SLICES`, `_SPOTS`); and those that tie inputs and parameters together
(`qimeng.spec.together`). Times 30, exponentials overflow where nothing keeps them from it: what is large as given is
made larger by less (see `WIDEST`)."""

EXAMPLES = "examples"
"""The user's own values, bit for bit: what a program has to be right on first of all."""

SECRET_SIZE = ("normal", "shifted", "rounded", "slices", "spots", "units", "huge")
"""Those of a size, or in a place, that nobody knows before: a program that goes by the size of its inputs, or by a part
of them, meets one that it takes for a usual one now and then, so that a final verification draws them twice."""

WILD = TOGETHER
"""Those whose numbers may be more than eager bears: a trial on which it has lost everything itself is left out."""

PARAMETERS_TOO = ("units", "huge")
"""Those that change parameters as well."""

WIDEST = 32.0
"""Root mean square that times 30 does not exceed: powers of two take its place, 1 at least. Of logits of a thousand,
which no model has, good formulas give a few wrong digits: exp(x - logsumexp(x)) loses what one rounding of the sum's
logarithm does (P. Blanchard, D. J. Higham, N. J. Higham, Accurately computing the log-sum-exp and softmax functions,
IMA J. Numer. Anal. 41(4), 2021)."""

_SLICES = 8
"""Of a dimension drawn by the seed, one slice in so many is unlike the others, in turns wide and negated; of every
dimension as long as that, one slice is zero, as padding is. All others are as given, so that a program that goes by a
sample of its inputs, or by their means, takes them for usual."""

_SPOTS = (2, 4)
"""Two to the power of this many elements, by the seed, are unlike the others: a quarter each is negated, zero, and as
large as numbers of deviation `WIDEST` get (at which exponentials overflow whatever the inputs are as given), in both
signs. So few of a large tensor that hardly any sample has one."""

_SPAN = 2.0
"""Logarithm to base 2 of the largest deviation of normal values: nobody can tell a trial by a deviation of 1."""

_STEP, _POWERS = 0.25, (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
"""Rounded values are multiples of a quarter of the deviation, which is a power of two, by the seed. Zeros and equal
values, which numbers drawn at random hardly ever are, are among them, and nobody knows their size before."""

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

    Those of `TOGETHER` are no matter of one tensor: see `qimeng.spec.together.redistribute_together`.
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
