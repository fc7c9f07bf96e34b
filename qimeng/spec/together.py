"""Distributions that change inputs and parameters of a trial together: what is large in one is small in another.

A large number times zero is zero, and a change of units leaves a sum unchanged. So the results stay ordinary, while a
scheme that scales a whole row by one power of two loses digits that matter. Deals in lists of tensors. Knows nothing
about modules or trials.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from qimeng.spec.leaf import unexpanded

TOGETHER = ("units", "huge", "infinite")
"""In order: each index of an axis times its own power of two, and the inverse along the same axis of other tensors; a
few numbers up to 1e9, or down to the dtype's minimum as masks have, where other tensors are zero; a few infinities or
NaN in one input."""

_SPANS = (7, 14, 20)
"""Units are powers of two up to this exponent, by the seed: values from 1e-6 to 1e6 at most."""
_HALF_SPAN = 3
"""The same for float16, whose products would overflow."""
_SHORTEST = 8
"""Minimum length of an axis on which one element may become zero. Shorter axes, such as a convolution kernel's, would
lose too much."""
_HUGE = {torch.float16: (1e3, 3e4)}
_HUGE_ELSE = (1e4, 1e9)
_FEW = 4
"""Numbers that are not finite, at most."""


def redistribute_together(
    leaves: Sequence[Any], domains: Sequence[str], distribution: str, seed: int, same: Sequence[int] = ()
) -> list[Any]:
    """`leaves`, those whose domain allows it in new memory with the values of `distribution`; strides stay.

    Args:
        leaves: inputs, flattened.
        domains: of each.
        distribution: one of `TOGETHER`.
        seed: of a trial's inputs.
        same: for each input the number of the first one that always has its values; by default none has another's.
    """
    allowed = ("real",) if distribution == "huge" else ("real", "positive")
    made, changing = list(leaves), []
    for i, (x, domain) in enumerate(zip(leaves, domains, strict=True)):
        if domain in allowed and isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype.itemsize > 1:
            made[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            unexpanded(made[i]).copy_(unexpanded(x))
            changing.append(i)
    draw = random.Random(_secret(seed))
    copies = [i for i in changing if same and same[i] != i]
    changing = [i for i in changing if i not in copies]
    hosts = [i for i in changing if made[i].dim() and made[i].numel()]
    if not hosts:
        return made
    host = draw.choice(hosts)
    others = [unexpanded(made[i]) for i in changing if i != host]
    x = unexpanded(made[host])
    if distribution == "infinite":
        _make_infinite(x, domains[host], draw)
    elif distribution == "units":
        _change_units(x, others, draw, seed)
    else:
        _make_huge(x, others, draw, seed)
    for i in copies:
        unexpanded(made[i]).copy_(unexpanded(made[same[i]]))
    return made


def change_parameters(tensors: Sequence[torch.Tensor], distribution: str, seed: int) -> None:
    """Change parameters for ``"units"`` and ``"huge"``, in place.

    A layer's input features are along the second axis of its weight (for some seeds, the first). They get the inverse
    of the factors of the input's features. Its output features get factors of their own, for the next layer.

    Args:
        tensors: the parameters.
        distribution: of the inputs.
        seed: of the trial's inputs, or what `tied` keeps of it.
    """
    power, turned = _power(seed), bool(_secret(seed) & 2)
    for x in tensors:
        for axis, n in enumerate(x.shape[:2] if distribution == "units" else x.shape):
            if distribution == "units" and n > 1:
                inward = axis == (0 if turned else 1) and x.dim() > 1
                _scale(x, axis, _units(seed, n, x.dtype, -power if inward else power).to(x.device))
            elif distribution == "huge" and n >= _SHORTEST:
                x.select(axis, _place(seed, n)).zero_()


_KINDS = {"units": 1, "huge": 2}
_SECRET_BITS, _LOW_BITS, _KIND_AT = 48, 4, 60


def tied(parameter_seed: int, distribution: str, seed: int) -> int:
    """The seed of a change to parameters that goes with the inputs of `seed`, where `distribution` has one."""
    if distribution not in _KINDS:
        return parameter_seed
    low = parameter_seed % (1 << _LOW_BITS)
    return _KINDS[distribution] << _KIND_AT | _secret(seed) << _LOW_BITS | low


def untied(parameter_seed: int) -> tuple[str, int]:
    """The distribution and the seed that `tied` was given; an empty name where it changed nothing."""
    names = {number: name for name, number in _KINDS.items()}
    name = names.get(parameter_seed >> _KIND_AT, "")
    return name, (parameter_seed >> _LOW_BITS) % (1 << _SECRET_BITS)


def _secret(seed: int) -> int:
    return seed % (1 << _SECRET_BITS)


def _power(seed: int) -> int:
    return 1 if _secret(seed) & 1 else -1


def _place(seed: int, n: int) -> int:
    return random.Random(_secret(seed) + 1).randrange(1 << 30) * n >> 30


def _units(seed: int, n: int, dtype: torch.dtype, power: int) -> torch.Tensor:
    """Powers of two for the indices of an axis of `n` elements: the same in every tensor of a trial."""
    span = _HALF_SPAN if dtype is torch.float16 else random.Random(_secret(seed)).choice(_SPANS)
    generator = torch.Generator().manual_seed(_secret(seed) * 31 + n)
    exponents = (torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1) * span
    return torch.exp2(power * exponents.round())


def _scale(x: torch.Tensor, axis: int, factors: torch.Tensor) -> None:
    x.mul_(factors.to(x.dtype).view([-1 if d == axis else 1 for d in range(x.dim())]))


def _axis(x: torch.Tensor, others: Sequence[torch.Tensor], draw: random.Random) -> int | None:
    """An axis of more than one element. The last axis, where features usually are, and shared axes are preferred."""
    shared = {n for y in others for n in y.shape}
    axes = [d for d, n in enumerate(x.shape) if n > 1]
    weights = [1 + 3 * (x.shape[d] in shared) + 2 * (d == x.dim() - 1) + (d == 1) for d in axes]
    return draw.choices(axes, weights)[0] if axes else None


def _change_units(x: torch.Tensor, others: Sequence[torch.Tensor], draw: random.Random, seed: int) -> None:
    axis = _axis(x, others, draw)
    if axis is None:
        return
    n, power, everywhere = x.shape[axis], _power(seed), draw.random() < 0.5
    for number, y in enumerate((x, *others)):
        mine = axis if not number else next((d for d, size in enumerate(y.shape) if size == n), None)
        if mine is not None:
            _scale(y, mine, _units(seed, n, y.dtype, power if not number else -power).to(y.device))
        rest = [d for d, size in enumerate(y.shape) if d != mine and 1 < size != n]
        if everywhere and rest and y.dtype is not torch.float16:
            d = draw.choice(rest)
            _scale(y, d, _units(seed, y.shape[d], y.dtype, power).to(y.device))


def _make_huge(x: torch.Tensor, others: Sequence[torch.Tensor], draw: random.Random, seed: int) -> None:
    sizes = _HUGE.get(x.dtype, _HUGE_ELSE)
    value = draw.choice((*sizes, *(-size for size in sizes), torch.finfo(x.dtype).min))
    axis = _axis(x, others, draw)
    if axis is None or x.shape[axis] < _SHORTEST:
        return
    n = x.shape[axis]
    slice_ = x.select(axis, _place(seed, n))
    if draw.random() < 0.5 and slice_.dim() and len(slice_) > 1:  # in some rows only
        slice_ = slice_[:: draw.choice((2, 8))]
    slice_.fill_(value)
    for y in others:
        for d, size in enumerate(y.shape):
            if size == n:
                y.select(d, _place(seed, n)).zero_()


def _make_infinite(x: torch.Tensor, domain: str, draw: random.Random) -> None:
    values = [float("inf"), float("nan"), *((-float("inf"),) if domain == "real" else ())]
    values = draw.sample(values, draw.randint(1, len(values)))
    for _ in range(draw.randint(1, _FEW if x.numel() >= 16 else 1)):
        x[tuple(draw.randrange(n) for n in x.shape)] = draw.choice(values)


__all__ = ["TOGETHER", "change_parameters", "redistribute_together", "tied", "untied"]
