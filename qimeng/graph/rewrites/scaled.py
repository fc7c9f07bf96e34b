"""Small parts that several rules share: the dtype in which weights are computed, and looking for a linear map.

Deals in one value. Knows nothing about any rule.
"""

from __future__ import annotations

from typing import Any

import torch

from qimeng.graph.opgraph import Value
from qimeng.graph.rewrites.base import Edit, NoRewrite
from qimeng.graph.rewrites.linear import linear_map

HALF = ("float16", "bfloat16")


def wide(edit: Edit, value: Value) -> Value:
    """`value` in fp32, where it is of a half type."""
    if edit.meta(value).dtype not in HALF:
        return value
    return edit.op("aten._to_copy.default", value, dtype=torch.float32)


def narrow(edit: Edit, value: Value, dtype: str) -> Value:
    """`value` in `dtype`."""
    if edit.meta(value).dtype == dtype:
        return value
    return edit.op("aten._to_copy.default", value, dtype=getattr(torch, dtype))


def is_map(edit: Edit, value: Any) -> bool:
    """Whether a linear map with weights of parameters alone yields `value`."""
    try:
        linear_map(edit, value)
    except NoRewrite:
        return False
    return True


__all__ = ["HALF", "is_map", "narrow", "wide"]
