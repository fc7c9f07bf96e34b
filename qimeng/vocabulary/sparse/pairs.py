"""Weights of which two of each four neighbours along the contracted axis are kept (2:4), for sparse tensor cores.

Deals in the form, and in finding it in a graph by what it computes. Knows nothing about who multiplies.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from qimeng.errors import SpecError
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.spec.declared import WeightForm
from qimeng.vocabulary.sparse.kept import agree, between

FOUR, TWO = 4, 2


def paired(weight: torch.Tensor) -> torch.Tensor:
    """`weight` without all but the two largest magnitudes of each four neighbours, of equals the first ones."""
    rows, depth = weight.shape
    fours = torch.nn.functional.pad(weight, (0, -depth % FOUR)).view(rows, -1, FOUR)
    order = fours.to(torch.float32).abs().sort(dim=-1, descending=True, stable=True).indices[..., :TWO]
    marks = torch.zeros_like(fours).scatter(-1, order, 1.0)
    kept = torch.where(marks > 0, fours, torch.zeros_like(fours))
    return kept.view(rows, -1)[:, :depth].contiguous()


class Pairs(WeightForm):
    """Two of each four neighbours, the others zero."""

    text, prunes = "2:4", True

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight itself where no four neighbours hold more; else without the least magnitudes of those."""
        return paired(weight)


def pairs(rest: str) -> Pairs:
    """The form of ``weights="2:4"``.

    Raises:
        SpecError: something else follows the colon.
    """
    if rest != str(FOUR):
        raise SpecError(f"weights='2:{rest}': tensor cores skip two of each four, declare '2:4'")
    return Pairs()


def making(graph: OpGraph, weight: Value) -> frozenset[str]:
    """The operators that make `weight` of a parameter by keeping two of each four; none where they do not."""
    found: dict[Value, frozenset[str]] = graph.memo.setdefault("pairs", {})
    if weight not in found:
        found[weight] = _making(graph, weight)
    return found[weight]


def _making(graph: OpGraph, weight: Value) -> frozenset[str]:
    meta = graph.meta(weight)
    if len(meta.shape) != 2 or meta.dtype not in ("float32", "float16", "bfloat16"):
        return frozenset()
    made = _captured(meta.shape, meta.dtype)
    same: dict[Value, Value] = {}
    if not agree(made, made.outputs[0], graph, weight, same):
        return frozenset()
    (start,) = (same[v] for v in same if made.nodes[v.node].kind == "input")
    return frozenset(between(graph, weight, {start}))


@lru_cache(256)
def _captured(shape: tuple[int, ...], dtype: str) -> OpGraph:
    """What the form computes."""

    class Form(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return paired(weight)

    return capture(Form, lambda: (torch.empty(shape, dtype=getattr(torch, dtype)),))


__all__ = ["Pairs", "making", "paired", "pairs"]
