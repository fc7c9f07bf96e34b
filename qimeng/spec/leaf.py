"""One flattened input: the example, and how to make another like it.

Deals in shapes, strides, dtypes and domains. Knows nothing about modules.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from qimeng.spec.source import Source
from qimeng.spec.structure import STRUCTURED, structure_of, ways_of
from qimeng.spec.ways import Way

PLAIN = ("real", "positive", "probability", "sign", "index", "mask", "scalar")

DOMAINS = (*PLAIN, *STRUCTURED)
"""What values an input may take: any number; above zero; rows in [0, 1] that sum to 1; -1 or 1; an integer in a range;
one of two values (bool, 0/1, 0/-inf); a Python object that is no tensor. Then those of `STRUCTURED`."""

_SAMPLE = 1 << 20
_BARE = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One input: the example, and how others like it are made.

    Attributes:
        value: the example: a copy on the CPU with its strides, or a Python object that is no tensor.
        domain: one of `DOMAINS`.
        limited: how others are made, if that depends on more than the example; else None.
    """

    value: Any
    domain: str
    limited: tuple[Way, ...] | None = None
    _there: dict[tuple[str, int], tuple[Way, torch.Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, example: Any, domain: str = "") -> Leaf:
        """What `example` shows; its domain may be known."""
        if not isinstance(example, torch.Tensor):
            return cls(example, "scalar")
        value = placed(example, "cpu")
        with value.device:
            return cls(value, domain or domain_of(value))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Ways to make other values, the one that changes most first; empty if only the example itself can be used."""
        if self.limited is not None or not self.is_tensor:
            return self.limited or ()
        return ways_like(self.value, self.domain)

    @property
    def is_tensor(self) -> bool:
        """False for other Python objects."""
        return isinstance(self.value, torch.Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; empty for what is no tensor."""
        return tuple(self.value.shape) if self.is_tensor else ()

    @property
    def layout(self) -> str:
        """Shape, stride and dtype (or the object) as text."""
        x = self.value
        return f"{tuple(x.shape)} {tuple(x.stride())} {x.dtype}" if self.is_tensor else repr(x)

    @property
    def content(self) -> str:
        """Hash of the example's values."""
        if not self.is_tensor:
            return ""
        return hashlib.blake2b(_span(self.value).view(torch.uint8).numpy().data, digest_size=8).hexdigest()

    def example(self, device: str) -> Any:
        """The example itself on `device`."""
        return placed(self.value, device) if self.is_tensor else self.value

    def draw(self, source: Source, way: int = 0) -> Any:
        """Another input like the example, made in the given one of `ways`; the example itself where there is none."""
        if not self.is_tensor:
            return self.value
        out = torch.empty_strided(self.shape, self.value.stride(), dtype=self.value.dtype, device=source.device)
        if isinstance(out, FakeTensor):
            return out  # it has no values, and nothing that is looked at for them has
        if way >= len(self.ways):
            return self.example(source.device)
        once = unexpanded(out)
        chosen, example = self._on(source.device, way)
        made = readable(once)
        chosen.make(made, example, source)
        if made is not once:
            once.copy_(made)
        return out

    def _on(self, device: str, number: int) -> tuple[Way, torch.Tensor]:
        """A way on `device`, and the example if the way needs it. Both are cached there for the next draw."""
        if (device, number) not in self._there:
            way = self.ways[number]
            example = placed(unexpanded(self.value), device) if way.needs_example else torch.empty(0, device=device)
            self._there[device, number] = way.to(device), readable(example)
        return self._there[device, number]

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value, "domain": self.domain, "limited": self.ways, "_there": {}}


def readable(x: torch.Tensor) -> torch.Tensor:
    """`x` in a dtype that PyTorch computes in, where its own has next to no operators (8-bit floats, uint16 and up)."""
    if x.dtype in _BARE:
        return x.to(torch.int64)
    return x.float() if x.dtype.itemsize == 1 and x.is_floating_point() else x


def is_plain(x: torch.Tensor) -> bool:
    """Whether each element of `x` is in memory once."""
    steps = sorted((step, size) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    reach = 0
    for step, size in steps:
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def ways_like(x: torch.Tensor, domain: str) -> tuple[Way, ...]:
    """Ways to make other values of `domain` like those of `x`, which are looked at where they are (`Leaf.ways`)."""
    seen = readable(unexpanded(x))
    with seen.device:  # whatever the user's default device is
        return ways_of(seen, domain) if is_plain(seen) else ()


def placed(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of `x` on `device` with the same strides. Other tensors in the same memory are not copied."""
    x = x.detach()
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if isinstance(out, FakeTensor):
        return out
    if x.is_conj() or x.is_neg():  # PyTorch holds its sign back, which its memory does not show
        unexpanded(out).copy_(unexpanded(x))
    else:
        _span(out).copy_(_span(x))
    return out


def _span(x: torch.Tensor) -> torch.Tensor:
    """All memory from the first to the last element of `x`, in a row: its strides may overlap or leave gaps."""
    length = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((length,), (1,))


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


def domain_of(x: Any) -> str:
    """The domain of `x`, including properties of the whole tensor (order, symmetry, norms).

    >>> domain_of(torch.tensor([0, 3, 7])), domain_of(torch.diag(torch.arange(4.0, 8.0)) + 0.5)
    ('offsets', 'definite')
    """
    domain = infer_domain(x)
    if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
        return domain
    return structure_of(readable(unexpanded(x.detach())), domain)


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
    seen = readable(sample(x))
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


__all__ = [
    "DOMAINS",
    "Leaf",
    "domain_of",
    "infer_domain",
    "is_plain",
    "placed",
    "readable",
    "sample",
    "unexpanded",
    "ways_like",
]
