"""How much better an answer was than others to the same request at the same turn.

Deals in returns and groups. Knows nothing about what a return is of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

EPSILON = 1e-6
"""Added to a standard deviation that is divided by."""

Advantages = Callable[[torch.Tensor, Sequence[Hashable]], torch.Tensor]
"""From returns (n) and the group of each to advantages (n)."""


def leave_one_out(returns: torch.Tensor, groups: Sequence[Hashable]) -> torch.Tensor:
    """TRLOO: n / (n - 1) * (G - mean of G) within each group: G less the mean of the others.

    No answer is in its own baseline, so the gradient is not shrunk by 1 - 1/n, which differs between turns that
    different numbers of answers reached. Source: Dr. Kernel (arXiv 2602.05885), equation 5. An answer that is alone in
    its group has nothing to be compared with: 0.

    Args:
        returns: G of each answer (n).
        groups: what each is compared within: request and turn.

    Returns:
        (n) advantages, of the dtype of `returns`.

    Raises:
        ValueError: not as many groups as returns.

    >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0]), ["a"] * 3).tolist()
    [-3.0, -1.5, 4.5]
    """
    _, means, counts = _grouped(returns, groups)
    factor = torch.where(counts > 1, counts / (counts - 1).clamp(min=1), torch.zeros_like(counts))
    return factor * (returns - means)


def group_relative(returns: torch.Tensor, groups: Sequence[Hashable]) -> torch.Tensor:
    """GRPO: (G - mean of G) / standard deviation within each group, to compare `leave_one_out` with.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. The standard deviation is that of the group (divided by n).
    A group whose returns are equal has advantages of 0.

    Args:
        returns: G of each answer (n).
        groups: what each is compared within.

    Raises:
        ValueError: not as many groups as returns.

    >>> [round(a, 3) for a in group_relative(torch.tensor([1.0, 3.0, 7.0]), ["a", "a", "b"]).tolist()]
    [-1.0, 1.0, 0.0]
    """
    index, means, counts = _grouped(returns, groups)
    squares = torch.zeros_like(returns).index_add_(0, index, (returns - means) ** 2)[index] / counts
    return (returns - means) / (squares.sqrt() + EPSILON)


def _grouped(returns: torch.Tensor, groups: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each answer the number of its group, the group's mean and how many it has."""
    if len(groups) != len(returns):
        raise ValueError(f"{len(returns)} returns have {len(groups)} groups: pass one group for each return")
    numbers = {group: n for n, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([numbers[group] for group in groups], dtype=torch.long, device=returns.device)
    counts = torch.zeros_like(returns).index_add_(0, index, torch.ones_like(returns))[index]
    means = torch.zeros_like(returns).index_add_(0, index, returns)[index] / counts
    return index, means, counts


ADVANTAGES: dict[str, Advantages] = {"leave-one-out": leave_one_out, "grpo": group_relative}
"""What settings call them."""


__all__ = ["ADVANTAGES", "Advantages", "group_relative", "leave_one_out"]
