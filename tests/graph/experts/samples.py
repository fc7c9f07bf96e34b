"""Layers of experts as Python loops, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

LOOPS = ("hit", "equal", "stacked")


class Expert(nn.Module):
    """Two linear layers with a gate between them."""

    def __init__(self, width: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """Rows add up the weighted results of their experts, one expert after the other.

    Args:
        form: how the loop is written.
        width: of the rows.
        inner: width between an expert's layers.
        experts: number of experts.
        bias: whether linear layers have one.
    """

    def __init__(self, form: str = "hit", width: int = 16, inner: int = 32, experts: int = 3, bias: bool = False):
        super().__init__()
        self.form, self.number = form, experts
        self.router = nn.Linear(width, experts, bias=False)
        if form == "stacked":
            self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) / 4)
            self.down = nn.Parameter(torch.randn(experts, width, inner) / 4)
        else:
            self.experts = nn.ModuleList(Expert(width, inner, bias) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(self.router(x).float(), -1)
        weights, chosen = torch.topk(shares, 2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        if self.form == "equal":
            for e in range(self.number):
                rows, place = torch.where(chosen == e)
                out[rows] += self.experts[e](x[rows]) * weights[rows, place, None]
            return out
        mask = functional.one_hot(chosen, self.number + (self.form == "stacked")).permute(2, 1, 0)
        for e in self.turns(mask):
            if self.form == "stacked":
                e = e[0]
            if self.form == "stacked" and e == self.number:
                continue
            place, rows = torch.where(mask[e].squeeze(0))
            out.index_add_(0, rows, self.turn(e, x, rows) * self.weight(weights, rows, place))
        return out

    def turns(self, mask: torch.Tensor) -> Any:
        """The numbers of the experts whose turn it is."""
        return range(self.number) if self.form == "range" else (mask.sum((-1, -2)) > 0).nonzero()

    def weight(self, weights: torch.Tensor, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Of each selected row."""
        return weights[rows, place, None]

    def turn(self, e: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What an expert computes of the selected rows."""
        if self.form != "stacked":
            return self.experts[e](x[None, rows].reshape(-1, x.shape[-1]))
        gate, up = functional.linear(x[rows], self.gate_up[e]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down[e])


class Mixes(Loop):
    """An expert's rows depend on each other."""

    def turn(self, e: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(super().turn(e, x, rows), 0)


class Unweighted(Loop):
    """Results are added as they are."""

    def weight(self, weights: torch.Tensor, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return weights.new_full((), 2.0)


class OtherTurns(Loop):
    """An expert has its turn where another one was chosen."""

    def turns(self, mask: torch.Tensor) -> Any:
        return (mask.flip(0).sum((-1, -2)) > 0).nonzero()


ASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "numel": lambda rows, mask: rows.numel() > 0,
    "len": lambda rows, mask: len(rows) != 0,
    "any": lambda rows, mask: mask.any(),
    "item": lambda rows, mask: mask.any().item(),
    "count": lambda rows, mask: torch.count_nonzero(mask) > 0,
    "integer": lambda rows, mask: int(mask.long().sum()) >= 1,
}
"""Ways to ask whether an expert has rows."""

COUNTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "many": lambda rows, mask: len(rows) > 3,
    "few": lambda rows, mask: len(rows) < 3,
    "one": lambda rows, mask: mask.sum() != 1,
    "item above": lambda rows, mask: mask.sum().item() > 4,
}
"""What asks how many rows an expert has."""


class Asks(Loop):
    """A turn asks whether it has rows.

    Args:
        form: how it asks.
        otherwise: what it does without rows.
    """

    def __init__(self, form: str = "numel", otherwise: str = "continue"):
        super().__init__("range")
        self.asks, self.otherwise = form, otherwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        out, first = torch.zeros_like(x), True
        for e in range(self.number):
            mask = chosen == e
            rows, place = torch.where(mask)
            if {**ASKS, **COUNTS}[self.asks](rows, mask):
                if first and self.otherwise == "flag":
                    out = out + x
                out.index_add_(0, rows, self.turn(e, x, rows) * weights[rows, place, None])
            elif self.otherwise == "adds":
                out = out + 1
            elif self.otherwise == "returns":
                return out
            first = False
        return out


HITS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda weights, mask, hit: (weights * mask).sum(-1)[hit, None],
    "where": lambda weights, mask, hit: torch.where(mask, weights, 0.0).sum(-1)[hit].unsqueeze(-1),
    "mask": lambda weights, mask, hit: weights[mask].unsqueeze(-1),
    "mean": lambda weights, mask, hit: weights[hit].mean(-1, keepdim=True),
}
"""Ways to weight rows that a mask of rows selects; the last is of no expert."""


class Hits(Loop):
    """A mask of rows is the index.

    Args:
        form: how rows are weighted.
        sets: whether they are set, not added to.
    """

    def __init__(self, form: str, sets: bool = False):
        super().__init__("range", experts=2)
        self.weights, self.sets = form, sets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        out = torch.zeros_like(x)
        for e in range(self.number):
            mask = chosen == e
            hit = mask.any(-1)
            if not hit.any():
                continue
            y = self.experts[e](x[hit]) * HITS[self.weights](weights, mask, hit)
            out[hit] = y if self.sets else out[hit] + y
        return out


class OneHot(Loop):
    """Asks of one expert's part of ``one_hot`` whether it has rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        mask, out = functional.one_hot(chosen, self.number).permute(2, 1, 0), torch.zeros_like(x)
        for e in range(self.number):
            if mask[e].sum() == 0:
                continue
            place, rows = torch.where(mask[e])
            out.index_add_(0, rows, self.turn(e, x, rows) * weights[rows, place, None])
        return out


class AsksOther(Loop):
    """A turn is skipped where another expert has no rows.

    Args:
        between: masks that it makes and looks up besides.
    """

    def __init__(self, between: int = 0):
        super().__init__("range")
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        out = torch.zeros_like(x)
        for e in range(self.number):
            if (chosen == (e + 1) % self.number).sum() == 0:
                continue
            for i in range(self.between):
                torch.where(chosen < e + i)
            hit = (chosen == e).any(-1)
            out[hit] += self.experts[e](x[hit])
        return out


class Dense(nn.Module):
    """Every expert computes every row; results are weighted by shares that are zero but for the best experts.

    Args:
        form: how results are added up.
    """

    def __init__(self, form: str = "stack 1", width: int = 16, inner: int = 32, experts: int = 3, bias: bool = False):
        super().__init__()
        self.form = form
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner, bias) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        weights, chosen = torch.topk(torch.softmax(logits, -1), 2)
        shares = torch.zeros_like(logits).scatter(1, chosen, weights)
        results = [expert(x) for expert in self.experts]
        if self.form == "stack 1":
            return (torch.stack(results, 1) * shares.unsqueeze(-1)).sum(1)
        if self.form == "stack 0":
            return (torch.stack(results) * shares.t().unsqueeze(-1)).sum(0)
        return sum(shares[:, e : e + 1] * y for e, y in enumerate(results))
