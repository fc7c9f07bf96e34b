"""Inputs from a seed: what each input may be, and the distributions that it is drawn from.

Deals in single tensors. Knows nothing about modules or graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DISTRIBUTIONS = ("given", "normal", "x3", "x0.01", "negated")
"""Input distributions of a trial: as the spec makes them, standard normal, scaled, and with the sign turned."""

ALLOWED = {
    "real": DISTRIBUTIONS,
    "positive": ("given", "x3", "x0.01"),
    "probability": ("given",),
    "sign": ("given", "negated"),
    "index": ("given",),
    "mask": ("given",),
    "scalar": ("given",),
}
"""Domain to the distributions that stay inside it."""


@dataclass(frozen=True)
class Leaf:
    """How to draw one input that was given as an example.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its dtype.
        low: smallest value seen.
        high: largest value seen.
        mean: mean of the values seen.
        std: standard deviation of the values seen.
        value: a plain Python object, for inputs that are no tensors.
    """

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    low: float = 0.0
    high: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    value: Any = None

    @classmethod
    def like(cls, x: Any) -> Leaf:
        """The description of an example."""
        if not isinstance(x, torch.Tensor):
            return cls(value=x)
        sample = x.detach().reshape(-1)[: 1 << 20].to(torch.float64) if x.numel() else torch.zeros(1)
        std = float(sample.std()) if sample.numel() > 1 else 0.0
        return cls(
            tuple(x.shape), tuple(x.stride()), x.dtype, float(sample.min()), float(sample.max()), float(sample.mean()), std
        )

    def draw(self, generator: torch.Generator, device: str | torch.device) -> Any:
        """A new input like the example: uniform where it was not negative, else normal; the same strides."""
        if self.dtype is None:
            return self.value
        if self.dtype == torch.bool:
            x = torch.rand(self.shape, generator=generator, device=device) < self.mean
        elif not self.dtype.is_floating_point:
            x = torch.randint(int(self.low), int(self.high) + 1, self.shape, generator=generator, device=device, dtype=self.dtype)
        elif self.low >= 0:
            x = torch.rand(self.shape, generator=generator, device=device, dtype=self.dtype)
            x = x * (self.high - self.low) + self.low
        else:
            x = torch.randn(self.shape, generator=generator, device=device, dtype=self.dtype) * (self.std or 1.0) + self.mean
        if tuple(x.stride()) != self.stride and len(self.stride) == len(self.shape):
            out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            x = out.copy_(x) if 0 not in self.stride else x
        return x


def distort(x: Any, domain: str, distribution: str, generator: torch.Generator) -> Any:
    """`x` under another distribution, unless that leaves its domain."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or distribution not in ALLOWED[domain]:
        return x
    if distribution == "normal":
        return torch.empty_like(x).normal_(generator=generator)
    factor = {"given": 1.0, "x3": 3.0, "x0.01": 0.01, "negated": -1.0}[distribution]
    return x if factor == 1.0 else x.mul_(factor)


def infer_domain(x: Any) -> str:
    """The domain that an example suggests: index, mask, scalar, sign, probability or real."""
    if not isinstance(x, torch.Tensor):
        return "scalar"
    if x.dtype == torch.bool:
        return "mask"
    if not x.is_floating_point():
        return "index"
    if x.numel() == 0:
        return "real"
    values = x.detach().float()
    if bool((values.abs() == 1).all()) and x.numel() > 1:
        return "sign"
    if x.ndim and x.shape[-1] > 1 and float(values.min()) >= 0:
        sums = values.sum(-1)
        if bool(((sums - 1).abs() < 1e-3).all()):
            return "probability"
    return "real"


def perturb_parameters(module: torch.nn.Module, seed: int) -> None:
    """Change every parameter in place: p (1 + 0.1 n) + 0.05 n', n normal; running statistics likewise.

    Running variances are multiplied by a lognormal factor, so that they stay positive; masks and other buffers stay.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def normal(t: torch.Tensor) -> torch.Tensor:
        if t.device not in generators:
            generators[t.device] = torch.Generator(t.device).manual_seed(seed)
        return torch.empty_like(t).normal_(generator=generators[t.device])

    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.mul_(1 + 0.1 * normal(p)).add_(0.05 * normal(p))
        for name, b in module.named_buffers():
            if name.endswith("running_var"):
                b.mul_(torch.exp(0.3 * normal(b)))
            elif name.endswith("running_mean"):
                b.add_(0.1 * normal(b))
