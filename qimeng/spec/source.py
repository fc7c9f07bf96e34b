"""Where the random numbers of one set of inputs come from.

Deals in seeds and orders. Inputs of one set share one order for each size. If a batch is reordered, its lengths,
offsets and masks are reordered alike and still fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Source:
    """The randomness of one set of inputs.

    Attributes:
        seed: of the set.
        device: where numbers are drawn.
        number: of the input at hand; each has numbers of its own.
    """

    seed: int
    device: str
    number: int = 0
    _orders: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def of(self, number: int) -> Source:
        """The same for another input of the set."""
        return Source(self.seed, self.device, number, self._orders)

    def generator(self) -> torch.Generator:
        """A fresh generator for the input at hand."""
        return self._seeded(self.number)

    def order(self, size: int) -> torch.Tensor:
        """The order for everything of this size, in all inputs."""
        if size not in self._orders:
            generator = self._seeded(-1 - size)
            self._orders[size] = torch.randperm(size, generator=generator, device=self.device)
        return self._orders[size]

    def _seeded(self, number: int) -> torch.Generator:
        return torch.Generator(device=torch.device(self.device)).manual_seed((self.seed * 1_000_003 + number) % 2**63)


__all__ = ["Source"]
