"""One flattened input: what was seen of it, and how to draw another like it.

Deals in shapes, strides, dtypes, value ranges and domains. Knows nothing about modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

DOMAINS = ("real", "positive", "probability", "sign", "index", "mask", "scalar")
"""What values an input may take: any number; above zero; rows in [0, 1] that sum to 1; -1 or 1; an integer in a range;
one of two values (bool, 0/1, 0/-inf); a Python object that is no tensor."""

_SAMPLE = 1 << 20


@dataclass(frozen=True)
class Leaf:
    """Description of one input.

    Attributes:
        domain: one of `DOMAINS`.
        shape: sizes; empty for a scalar.
        stride: strides in elements.
        dtype: None for a scalar.
        low: smallest value seen (of two-valued inputs: the smaller).
        high: largest value seen.
        mean: mean of the values seen; of two-valued inputs the share of `high`.
        std: standard deviation of the values seen.
        value: the object itself, for a scalar.
    """

    domain: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    low: float = 0.0
    high: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    value: Any = None

    @classmethod
    def of(cls, example: Any) -> Leaf:
        """What `example` shows."""
        if not isinstance(example, torch.Tensor):
            return cls("scalar", value=example)
        like = partial(cls, shape=tuple(example.shape), stride=tuple(example.stride()), dtype=example.dtype)
        seen = sample(example)
        if seen.dtype.itemsize == 1 and seen.is_floating_point():
            seen = seen.float()  # 8-bit floats have no arithmetic of their own
        if seen.numel() == 0:
            return like("real" if example.is_floating_point() else "index")
        if example.is_complex():
            return like("real", low=-1.0, std=float(seen.abs().std()) if seen.numel() > 1 else 1.0)
        domain = infer_domain(example)
        if domain in ("mask", "sign"):
            low, high = float(seen.min()), float(seen.max())
            return like(domain, low=low, high=high, mean=float((seen == seen.max()).double().mean()))
        if domain == "index":
            return like(domain, low=int(example.min()), high=int(example.max()))
        finite = seen[seen.isfinite()].double()
        if finite.numel() == 0:
            return like(domain)
        std = float(finite.std()) if finite.numel() > 1 else 0.0
        return like(domain, low=float(finite.min()), high=float(finite.max()), mean=float(finite.mean()), std=std)

    @property
    def layout(self) -> str:
        """Shape, stride and dtype (or the scalar) as text."""
        return repr(self.value) if self.dtype is None else f"{self.shape} {self.stride} {self.dtype}"

    def with_shape(self, shape: tuple[int, ...]) -> Leaf:
        """The same input in another size; the order of the dimensions in memory stays."""
        order = sorted(range(len(shape)), key=lambda i: (self.stride[i], self.shape[i] == 1, -i))
        stride, step = [0] * len(shape), 1
        for i in order:
            if self.stride[i] == 0:
                continue
            stride[i] = step
            step *= max(shape[i], 1)
        return replace(self, shape=shape, stride=tuple(stride))

    def draw(self, generator: torch.Generator, device: str) -> Any:
        """Another input like the one seen."""
        if self.dtype is None:
            return self.value
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        once = unexpanded(out)
        wide = (
            torch.float32 if self.domain in ("mask", "sign", "probability") or self.dtype.itemsize == 1 else self.dtype
        )
        if self.domain == "index":
            beyond = min(int(self.high) + 1, torch.iinfo(torch.int64).max)
            once.random_(int(self.low), beyond, generator=generator)
            return out
        x = once if wide is self.dtype else torch.empty(once.shape, dtype=wide, device=device)
        if self.domain in ("mask", "sign"):
            x = torch.where(x.uniform_(generator=generator) < self.mean, self.high, self.low)
        elif self.domain == "probability":
            x = x.normal_(generator=generator).softmax(-1)
        elif self.low == self.high:
            x.fill_(self.low)
        elif self.low >= 0:
            x.uniform_(self.low, self.high, generator=generator)
        else:
            x.normal_(self.mean, self.std, generator=generator)
        if x is not once:
            once.copy_(x)
        return out


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    """The part of `x` that holds each of its elements in memory once (broadcast dimensions cut to size 1)."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def sample(x: torch.Tensor) -> torch.Tensor:
    """At most about a million elements of `x`, whole rows, spread evenly."""
    x = unexpanded(x.detach())
    if x.numel() <= _SAMPLE or x.dim() == 0:
        return x
    if x.dim() == 1:
        return x[:: -(-x.numel() // _SAMPLE)]
    dim = max(range(x.dim() - 1), key=lambda d: x.shape[d])
    step = min(x.shape[dim], -(-x.numel() // _SAMPLE))
    cut = x.movedim(dim, 0)[::step].movedim(0, dim)
    return sample(cut) if cut.numel() < x.numel() else cut


def infer_domain(x: Any) -> str:
    """The domain that the values of `x` suggest; `real` where nothing else is plain to see.

    >>> infer_domain(torch.tensor([1.0, -1.0])), infer_domain(torch.rand(9, 9)), infer_domain(3.5)
    ('sign', 'real', 'scalar')
    """
    if not isinstance(x, torch.Tensor):
        return "scalar"
    if x.dtype == torch.bool:
        return "mask"
    if not x.is_floating_point():
        return "real" if x.is_complex() else "index"
    if isinstance(x, FakeTensor):
        return "real"  # there are no values to look at
    seen = sample(x).float() if x.dtype.itemsize == 1 else sample(x)
    if seen.numel() < 2:
        return "real"
    low, high = seen.min(), seen.max()
    if bool(low != high) and bool(((seen == low) | (seen == high)).all()):
        if float(low) == -1.0 and float(high) == 1.0:
            return "sign"
        return "mask" if seen.numel() > 2 else "real"
    if float(low) >= 0 and float(high) <= 1 and seen.dim() and seen.shape[-1] > 1:
        rows = seen.double().sum(-1)
        if bool(((rows - 1).abs() < seen.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps * 4).all()):
            return "probability"
    clear = max(0.02, 20 / seen.numel()) * float(high)  # n uniform draws have their minimum near maximum / n
    return "positive" if clear < float(low) < float(high) else "real"
