"""Attentions at special values: rows without a key, masks of every kind, infinities that a mask hides.

Deals in PyTorch calls. Knows nothing about kernels, and nothing about the values that are put in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from experiments.trust.case import HEAVY, Case

NAME = "scaled_dot_product_attention"


def attention_cases() -> Iterator[Case]:
    """All of them; values keep the infinity and the NaN of `q`, scores and keys do not."""
    for label, call in _calls():
        yield Case(NAME, label, call, "q", HEAVY, _size)


def _size(q: Tensor) -> Tensor:
    return q.abs().nan_to_num(posinf=0.0).max().expand(1, *q.shape) + 1


def _calls() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    attend = functional.scaled_dot_product_attention
    yield "", lambda q: attend(_plain(q), _plain(q).flip(1), _plain(q))
    yield "infinite values", lambda q: attend(_plain(q), _plain(q).flip(1), q[None])
    yield "causal, infinite values", lambda q: attend(_plain(q), _plain(q), q.flip(0)[None], is_causal=True)
    yield "no key", lambda q: attend(_plain(q), _plain(q), _plain(q), attn_mask=_seen(q))
    yield "no key, -inf", lambda q: attend(_plain(q), _plain(q), _plain(q), attn_mask=_added(q, -math.inf))
    yield (
        "lowest mask",
        lambda q: attend(_plain(q), _plain(q), _plain(q), attn_mask=_added(q, torch.finfo(q.dtype).min)),
    )
    yield "one mask, infinite values", lambda q: attend(*_heads(q), attn_mask=_seen(q).tril())
    yield "infinite scores", lambda q: attend(q[None], _plain(q), _plain(q))


def _plain(q: Tensor) -> Tensor:
    return q.nan_to_num(nan=1.0, posinf=2.0)[None]


def _heads(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads, the first of which has values that are not finite."""
    plain = _plain(q).expand(1, 4, *q.shape)
    values = torch.cat([q.flip(0)[None, None], plain[:, 1:]], 1)
    return plain, plain, values


def _seen(q: Tensor) -> Tensor:
    """Which keys are seen; none by the fifth query, whose row is 0."""
    return q.nan_to_num(posinf=1.0) > 0


def _added(q: Tensor, least: float) -> Tensor:
    return torch.where(_seen(q), 0.0, least).to(q.dtype)
