"""Values that inputs and parameters take in a trial.

Deals in changing tensors within their domain. Knows nothing about where they come from or what reads them.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from qimeng.errors import SpecError
from qimeng.spec.leaf import infer_domain, sample, unexpanded

DISTRIBUTIONS = ("given", "normal", "x3", "x30", "x0.01", "negated", "rounded", "slices", "spots")
"""As the spec makes them; normal with mean 0 and a deviation of 1/4 to 4, by the seed; times 3, 30, 0.01 and -1;
normal, of few values; as the spec makes them but for some slices, or for a few elements (see `_SLICES`, `_SPOTS`).
Times 30, exponentials overflow where nothing keeps them from it: what is large as given is made larger by less (see
`WIDEST`)."""

SECRET_SIZE = ("normal", "rounded", "slices", "spots")
"""Those of a size, or in a place, that nobody knows before: a program that goes by the size of its inputs, or by a part
of them, meets one that it takes for a usual one now and then, so that a final verification draws them twice."""

UNEVEN = ("slices", "spots")
"""Those in which a few numbers are unlike all others: results may differ by orders of magnitude within one tensor."""

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
    "positive": ("given", "x3", "x30", "x0.01", "slices", "spots"),
    "sign": ("given", "negated"),
}


def applies(distribution: str, domain: str) -> bool:
    """Whether inputs of `domain` change under `distribution` (where not, they stay as given).

    Raises:
        SpecError: no such distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise SpecError(f"unknown distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    return distribution != "given" and distribution in _ALLOWED.get(domain, ())


def redistribute(x: Any, domain: str, distribution: str, seed: int) -> Any:
    """`x` with values of `distribution` where its domain allows, else `x` itself; strides stay."""
    if not applies(distribution, domain) or not isinstance(x, torch.Tensor) or not x.is_floating_point():
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


def _size(x: torch.Tensor) -> float:
    return float(sample(x).double().square().mean().sqrt())


def _factor(size: float) -> float:
    return next((f for f in (30.0, 16.0, 8.0, 4.0, 2.0) if size * f <= WIDEST), 1.0)  # not a number: 1


SHARES = (0.0, 1.0, 0.25, 1 / 16)
"""Of the rows of a parameter, those that change (one at least), by the seed: nobody can tell a change by a
sample of the values, and what a single row does not show, all of them do."""


def share_of(seed: int) -> int:
    """Which of `SHARES` a seed of `perturb_parameters` stands for."""
    return seed // 2 % len(SHARES)


@torch.no_grad()
def perturb_parameters(module: torch.nn.Module, seed: int) -> None:
    """Change `module`'s state in place, so that nothing made for its first weights stays right.

    With n ~ N(0, 1): parameters p (1 + 0.1 n) + 0.05 n in some rows, one at least; running variances v exp(0.3 n),
    running means m + 0.1 n; other buffers of many real values b (1 + 0.1 n) in some rows. Where all elements of a
    parameter have one sign, as a scale made of ones has, and `seed` is odd, half of those that change get the other.
    Masks, constants, what no state dictionary holds, integers and booleans stay. The same on every call with the same
    seed and device type.
    """

    def noise(like: torch.Tensor) -> torch.Tensor:
        draw = torch.empty(like.shape, dtype=torch.float32, device=like.device).normal_(
            generator=generators[like.device]
        )
        return draw.to(like.dtype)

    def rows(like: torch.Tensor) -> torch.Tensor:
        """1 where the rows of `like` change, 0 where they stay, to be broadcast."""
        shape = [size if d == dim else 1 for d, size in enumerate(like.shape)] if (dim := _long(like)) >= 0 else []
        draw = torch.rand(shape, generator=generators[like.device], device=like.device)
        return ((draw < share) | (draw == draw.min())).to(like.dtype)

    share = SHARES[share_of(seed)]
    generators: dict[torch.device, torch.Generator] = {}
    held = module.state_dict().keys()
    state: list[tuple[str, torch.Tensor, bool]] = [(n, t, True) for n, t in module.named_parameters()]
    state += [(n, t, False) for n, t in module.named_buffers() if n in held]
    for name, tensor, trained in state:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(device=tensor.device)
            generators[tensor.device].manual_seed(seed)
        last = name.rsplit(".", 1)[-1]
        if trained:
            n, moved = noise(tensor), rows(tensor)
            if seed % 2 and bool((tensor > 0).all() | (tensor < 0).all()):
                tensor.mul_(1 - 2 * moved * (noise(tensor) > 0))
            tensor.mul_(1 + 0.1 * n * moved).add_(n * moved, alpha=0.05)
        elif last == "running_var":
            tensor.mul_((0.3 * noise(tensor)).exp())
        elif last == "running_mean":
            tensor.add_(noise(tensor), alpha=0.1)
        elif infer_domain(tensor) in ("real", "positive") and bool(tensor.min() != tensor.max()):
            tensor.mul_(1 + 0.1 * noise(tensor) * rows(tensor))


def _long(x: torch.Tensor) -> int:
    """The first dimension of more than one element, else the last; -1 where there is none."""
    return next((d for d, size in enumerate(x.shape) if size > 1), x.dim() - 1)
