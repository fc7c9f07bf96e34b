"""The attention family: products with weights between them, as one operator and taken apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.suite.problem import BF16, FP16, Table, normal

problem = Table()


@problem("attention", normal(*[(2, 3, 48, 32)] * 3))
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


@problem("attention in bf16", normal(*[(2, 2, 37, 64)] * 3, dtype=BF16))
def attention_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


@problem("attention in fp16, odd sizes", normal((1, 2, 33, 80), (1, 2, 51, 80), (1, 2, 51, 40), dtype=FP16))
def attention_of_odd_sizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, scale=0.25)


@problem("causal attention", normal((1, 2, 150, 16), (1, 2, 170, 16), (1, 2, 170, 16)))
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@problem("masked attention", lambda: (*normal(*[(2, 4, 40, 16)] * 3)(), torch.rand(2, 1, 40, 40) > 0.4))
def attention_with_masks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.where(seen, 0.0, torch.finfo(q.dtype).min)
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen), attend(q, k, v, attn_mask=bias)


@problem("attention of grouped heads", normal((1, 6, 20, 32), (1, 2, 35, 32), (1, 2, 35, 32), dtype=BF16))
def attention_of_grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@problem("attention of one query", normal((2, 4, 1, 32), (2, 4, 90, 32), (2, 4, 90, 32)))
def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


@problem("attention of one query in bf16", normal((2, 4, 1, 32), (2, 2, 9, 32), (2, 2, 9, 32), dtype=BF16))
def attention_of_one_query_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
