"""What tells kinds of calls apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qimeng.integration.calls import filled, hollow, key_of, tensors_of

X = torch.rand(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        X.double(), X.T.contiguous().T, X[:1], X.expand(4, 2, 3), None, 1, 1.0, True, "1", [X], (X,), {"x": X},
        torch.float32, math.nan, -0.0, 0.0, 0,
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_calls_that_differ_have_other_keys(other: object) -> None:
    assert key_of((other,), {}) != key_of((X,), {})
    assert key_of((other,), {}) == key_of((other,), {})


def test_numbers_of_other_types_and_signs_differ() -> None:
    keys = [key_of((x,), {}) for x in (0, 0.0, -0.0, False, "0", None)]
    assert len(set(keys)) == len(keys)


def test_values_of_tensors_and_the_order_of_keywords_do_not_count() -> None:
    assert key_of((X,), {"a": 1, "b": X}) == key_of((X + 1,), {"b": X * 2, "a": 1})
    assert key_of((nn.Parameter(X),), {}) == key_of((X,), {})


def test_other_objects_have_no_key() -> None:
    class Sub(torch.Tensor):
        pass

    assert key_of((object(),), {}) is None
    assert key_of((X.as_subclass(Sub),), {}) is None
    assert key_of((X,), {"cache": {1: {2: object()}}}) is None


def test_tensors_are_taken_out_and_put_back() -> None:
    given = (X, [1, {"a": X + 1, "b": None}]), {"k": X + 2}
    tensors = list(tensors_of(given))
    assert [float(t[0, 0] - X[0, 0]) for t in tensors] == pytest.approx([0, 1, 2])
    back = filled(hollow(given), [t * 2 for t in tensors])
    assert torch.equal(back[0][1][1]["a"], (X + 1) * 2) and back[0][1][0] == 1 and back[0][1][1]["b"] is None
