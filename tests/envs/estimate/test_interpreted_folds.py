"""Scans and reductions of whole tiles, which replace the element-wise ones of Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qimeng.envs.estimate.interpreted_folds import _reduce, _scan


def tile(x: Any, dtype: Any = np.float32) -> Any:
    return SimpleNamespace(handle=SimpleNamespace(data=np.asarray(x, dtype)), dtype=dtype)


def operation(function: Any, axis: int | None, keep_dims: bool = False) -> Any:
    def combine(*tiles: Any) -> Any:
        found = function(*(t.handle.data for t in tiles))
        made = tuple(tile(x, t.dtype) for x, t in zip(found, tiles, strict=False))
        return made if len(made) > 1 else made[0]

    return SimpleNamespace(axis=axis, keep_dims=keep_dims, combine_fn=SimpleNamespace(fn=combine), to_tensor=tile)


def add(a: Any, b: Any) -> tuple[Any]:
    return (a + b,)


def recur(a: Any, x: Any, b: Any, y: Any) -> tuple[Any, Any]:
    """Does not commute."""
    return a * b, b * x + y


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan_is_that_of_numpy(axis: int) -> None:
    x = np.arange(32).reshape(4, 8)
    (found,) = _scan(operation(add, axis), (tile(x, np.int64),))
    assert (found.handle.data == np.cumsum(x, axis)).all()


def test_a_scan_of_pairs_keeps_the_order() -> None:
    a, b = np.array([[0.5, 2.0, -1.0, 3.0]]), np.array([[1.0, 2.0, 3.0, 4.0]])
    _, state = _scan(operation(recur, 1), (tile(a), tile(b)))
    assert state.handle.data.tolist() == [[1.0, 4.0, -1.0, 1.0]]


def test_sums_round_as_a_tree() -> None:
    x = np.full((1, 1 << 16), 0.1, np.float32)
    (found,) = _scan(operation(add, 1), (tile(x),))
    exact = np.cumsum(x.astype(np.float64), 1)
    assert abs(found.handle.data / exact - 1).max() < 2e-7 < abs(np.cumsum(x, 1) / exact - 1).max()


@pytest.mark.parametrize(
    ("axis", "keep", "expected"),
    [(1, False, [6, 22]), (1, True, [[6], [22]]), (0, False, [4, 6, 8, 10]), (None, False, 28)],
)
def test_a_reduction_is_that_of_numpy(axis: int | None, keep: bool, expected: Any) -> None:
    (found,) = _reduce(operation(add, axis, keep), (tile(np.arange(8).reshape(2, 4), np.int64),))
    assert found.handle.data.tolist() == expected
