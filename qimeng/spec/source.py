"""Where the random numbers of one set of inputs come from.

Deals in seeds and orders. Inputs of one set share the order of each size: where a batch is put in another order, its
lengths, its offsets and its masks are too, so that what belongs together stays together.
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
        """The order that everything of this size is put in, whichever input it belongs to."""
        if size not in self._orders:
            generator = self._seeded(-1 - size)
            self._orders[size] = torch.randperm(size, generator=generator, device=self.device)
        return self._orders[size]

    def _seeded(self, number: int) -> torch.Generator:
        return torch.Generator(device=torch.device(self.device)).manual_seed((self.seed * 1_000_003 + number) % 2**63)


__all__ = ["Source"]
