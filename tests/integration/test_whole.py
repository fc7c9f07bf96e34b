"""A whole model beside the original."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qimeng.integration.whole import HALF, differences

X = torch.randn(64, 8)


def test_equal_results_have_no_error() -> None:
    found = differences({"a": X, "b": [1, None, X.long()]}, {"a": X.clone(), "b": [1, None, X.long()]})
    assert found.same and found.error == 0 and found.limit > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_errors_are_relative_and_limited_by_dtype(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    limit = differences(x, x).limit
    assert limit <= HALF
    for share, same in ((0.3, True), (3.0, False)):
        found = differences(x.to(torch.complex128), (x.to(torch.complex128) * (1 + share * limit)))
        assert found.error == pytest.approx(share * limit, rel=1e-6)
        assert differences(x, (x * (1 + share * limit)).to(dtype)).same is same


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (X, X[:1]),
        (X, X.double()),
        (X, [X]),
        (X.long(), X.long() + 1),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (1, 2),
        (1, 1.0),
        (None, X),
    ],
)
def test_other_results_differ(wanted: Any, found: Any) -> None:
    assert not differences(wanted, found).same
