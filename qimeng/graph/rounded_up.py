"""What roundings of one direction change: the scale of the error of a result whose terms cancel.

The mean of what a normalization made is zero but for roundings. Its error is no share of itself but of the terms that
were added: it is as large as what the result changes by where no term of a sum cancels another one's rounding.

Deals in runs of modules in float64 and in operators as they are called. Knows nothing about budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.ops import EXACT
from qimeng.spec.dispatch import DispatchMode


class RoundedUp(DispatchMode):
    """In the block, what an operator makes grows by a share of its size: `x + share * |x|`.

    What an operator copies stays, and so does what it writes to.

    Args:
        share: of its size.
    """

    def __init__(self, share: float):
        super().__init__()
        self._share = share

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator (see the class)."""
        found = func(*args, **(kwargs or {}))
        name = f"aten.{func.overloadpacket.__name__}"
        if name in EXACT or any(r.alias_info is not None for r in func._schema.returns):
            return found
        return _pytree.tree_map_only(torch.Tensor, lambda x: _up(x, self._share), found)


def rounded_up(inputs: Sequence[Any], share: float) -> tuple[Any, ...]:
    """`inputs` whose numbers are as `RoundedUp` makes them."""
    return tuple(_pytree.tree_map_only(torch.Tensor, lambda x: _up(x, share), list(inputs)))


def _up(x: torch.Tensor, share: float) -> torch.Tensor:
    return torch.add(x, x.abs(), alpha=share) if x.is_floating_point() and x.dtype.itemsize > 1 else x


__all__ = ["RoundedUp", "rounded_up"]
