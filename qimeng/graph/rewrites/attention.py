"""Takes an attention of deep heads apart into its products, which tensor cores compute in other ways.

Flash kernels hold the whole depth of a head; beyond 256 elements it does not fit an SM (T. Dao, FlashAttention-2,
2023), and PyTorch falls back to kernels that are slow for fp32. Deals in one operator. Knows nothing about kernels.
"""

from __future__ import annotations

import math

from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule

DEEPEST = 256
"""Elements of a head up to which flash kernels hold it."""


class TakeApart(Rule):
    """``attention(q, k, v)`` as ``softmax(q @ k.T * scale) @ v``."""

    name = "attention"
    option = "apart"
    packets = ("aten.scaled_dot_product_attention",)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for deep heads without a mask, whose rows all have a key."""
        q, k, v = node.args[:3]
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
        depth = edit.meta(q).shape[-1]
        if max(depth, edit.meta(v).shape[-1]) <= DEEPEST:
            raise NoRewrite(f"{node.name} has heads of {depth}; up to {DEEPEST} they fit one kernel")
        if any(given.get(name) for name in ("attn_mask", "dropout_p", "is_causal", "enable_gqa")):
            raise NoRewrite(f"{node.name} has a mask, dropout or grouped heads")
        scale = given.get("scale")
        scores = edit.op("aten.matmul.default", q, edit.op("aten.transpose.int", k, -2, -1))
        scores = edit.op("aten.mul.Tensor", scores, 1 / math.sqrt(depth) if scale is None else scale)
        edit.instead(
            Value(node.name), edit.op("aten.matmul.default", edit.op("aten._softmax.default", scores, -1, False), v)
        )


__all__ = ["DEEPEST", "TakeApart"]
