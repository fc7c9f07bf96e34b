"""Layers of graph networks, bags and segments, and their programs, for the tests beside this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from qimeng.graph.region import Region
from qimeng.program.program import Program
from qimeng.vocabulary.irregular.kinds import reduction_of
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, start_of


class Layer(nn.Module):
    """Messages between nodes, weighted by edge, an activation, and their reduction at each node."""

    def __init__(self, reduce: str = "index_add", edges: torch.Tensor | None = None):
        super().__init__()
        self.reduce = reduce
        self.register_buffer("edges", edges)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, edges: torch.Tensor | None = None) -> Any:
        source, target = self.edges if edges is None else edges
        messages = torch.relu(x.index_select(0, source) * weights.unsqueeze(-1))
        base, spread = torch.zeros_like(x), target.view(-1, 1).expand_as(messages)
        if self.reduce == "index_add":
            return base.index_add_(0, target, messages)
        if self.reduce == "index":
            return torch.zeros_like(x).index_add(0, target, torch.relu(x[source] * weights[:, None]))
        if self.reduce == "onto x":
            return x.index_add(0, target, messages)
        if self.reduce == "scatter_add":
            return base.scatter_add_(0, spread, messages)
        if self.reduce.startswith("index_reduce"):
            return base.index_reduce_(0, target, messages, self.reduce.split()[1], include_self=False)
        name, own = self.reduce.split()
        return (x if own == "joined" else base).scatter_reduce(0, spread, messages, name, include_self=own == "joined")


class Attention(nn.Module):
    """A layer in which each node weighs its neighbours by a softmax over its edges, over the number of its edges."""

    def forward(self, x: torch.Tensor, scores: torch.Tensor, edges: torch.Tensor) -> Any:
        source, target = edges
        logits = functional.leaky_relu(scores[source] + scores[target], 0.2)
        spread, lowest = target.view(-1, 1).expand_as(logits), torch.full_like(scores, -1e9)
        largest = lowest.scatter_reduce(0, spread, logits, "amax")
        weights = (logits - largest[target]).exp()
        total = torch.zeros_like(scores).scatter_add(0, spread, weights)
        shares = weights / (total[target] + 1e-16)
        count = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        return torch.zeros_like(x).index_add(0, target, x[source] * shares.unsqueeze(-1)) / count[:, None, None]


class Bags(nn.Module):
    """Bags of a table's rows."""

    def __init__(self, mode: str, *, last: bool = False, rows: int = 40, width: int = 20):
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, width, mode=mode, include_last_offset=last)

    def forward(self, numbers: torch.Tensor, offsets: Any = None, weights: Any = None) -> Any:
        return self.bag(numbers, offsets, weights)


class Segments(nn.Module):
    """Neighbouring rows, scaled, reduced by segment."""

    def __init__(self, reduce: str, by: str, initial: float | None = None):
        super().__init__()
        self.reduce, self.by, self.initial = reduce, by, initial

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> Any:
        return torch.segment_reduce(x * 2, self.reduce, axis=0, initial=self.initial, **{self.by: place})


class Experts(nn.Module):
    """A layer of experts: the best of each row are chosen, and their results weighted."""

    def __init__(self, form: str, experts: int = 8, width: int = 20, inner: int = 28, best: int = 2):
        super().__init__()
        self.form, self.best = form, best
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, inner, width) / 8)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / 8)

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), self.best)
        weights = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)
        if self.form == "einsum":
            inner = functional.silu(torch.einsum("td,tkhd->tkh", x, self.up[chosen]))
            return (torch.einsum("tkh,tkdh->tkd", inner, self.down[chosen]) * weights).sum(1)
        if self.form == "matmul":
            inner = functional.silu(torch.matmul(self.up[chosen], x[:, None, :, None]))
            return (torch.matmul(self.down[chosen], inner).squeeze(-1) * weights).sum(1)
        flat = chosen.view(-1)
        inner = torch.bmm(x.repeat_interleave(self.best, 0).unsqueeze(1), self.up[flat].transpose(1, 2))
        found = torch.bmm(functional.silu(inner), self.down.transpose(1, 2).index_select(0, flat))
        return (found.view(len(x), self.best, -1) * weights).sum(1)


class AllExperts(nn.Module):
    """A layer that computes all experts, and weighs those that were not chosen by zero."""

    def __init__(self, form: str, experts: int = 8, width: int = 20, inner: int = 28, best: int = 2):
        super().__init__()
        self.form, self.best = form, best
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner * (2 if form == "gated" else 1)) / 4)
        self.gate = nn.Parameter(torch.randn(experts, inner, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)
        if form == "biased":  # gate and values in turns, as in models of OpenAI's
            self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) / 4)
            self.up_bias, self.down_bias = (nn.Parameter(torch.randn(experts, n)) for n in (2 * inner, width))

    def forward(self, x: torch.Tensor) -> Any:
        scores = torch.softmax(self.router(x), -1)
        weights, chosen = torch.topk(scores, self.best)
        shares = torch.zeros_like(scores).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        if self.form == "gated":  # one product for gate and values
            gate, values = torch.matmul(x, self.up).chunk(2, -1)
            inner = functional.silu(gate) * values
        elif self.form == "biased":
            both = torch.matmul(x, self.up) + self.up_bias[:, None, :]
            inner = (both[..., 1::2] + 1) * functional.silu(both[..., ::2])
            return ((torch.matmul(inner, self.down) + self.down_bias[:, None, :]) * shares.t().unsqueeze(-1)).sum(0)
        elif self.form == "repeated":  # the gate's matrices lie transposed
            rows = x.repeat(len(self.up), 1).view(len(self.up), -1, x.shape[1])
            inner = functional.gelu(torch.bmm(rows, self.gate.transpose(1, 2))) * torch.bmm(rows, self.up)
        else:
            inner = torch.matmul(x, self.up)
        return (torch.matmul(inner, self.down) * shares.t().unsqueeze(-1)).sum(0)


class SortedExperts(AllExperts):
    """A layer that multiplies the rows of each expert together, as models of transformers do by default."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = torch.topk(torch.softmax(self.router(x).float(), -1), self.best)
        slots, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(slots.float(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        both = torch._grouped_mm(x[order // self.best], self.up, offs=ends)
        if self.form == "biased":
            both = both + self.up_bias[slots]
            found = torch._grouped_mm(functional.silu(both[..., ::2]) * (both[..., 1::2] + 1), self.down, offs=ends)
            found = found + self.down_bias[slots]
        else:
            gate, values = both.chunk(2, -1)
            found = torch._grouped_mm(functional.silu(gate) * values, self.down, offs=ends)
        weighted = found * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        rows = len(x) if self.form != "others" else len(x) // 2
        return weighted[back].view(rows, len(order) // rows, -1).sum(1).to(x.dtype)


def graph(nodes: int, edges: int, seed: int = 0) -> torch.Tensor:
    """[2, edges]: edges between nodes drawn at random, some twice; the last fifth of the nodes gets none."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, nodes, (edges,), generator=generator)
    target = torch.randint(0, max(1, nodes * 4 // 5), (edges,), generator=generator)
    source[1], target[1] = source[0], target[0]
    return torch.stack([source, target])


def reducing(program: Program) -> Region:
    """The region that reduces by segment."""
    return next(r for r in program.called if reduction_of(r) is not None)


__all__ = [
    "CONTEXT",
    "AllExperts",
    "Bags",
    "Experts",
    "Layer",
    "Segments",
    "SortedExperts",
    "action_of",
    "after",
    "graph",
    "reducing",
    "start_of",
]
