"""What a refusal says about wrong values: where they lie, and what they suggest."""

from __future__ import annotations

import pytest
import torch

from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected, check
from qimeng.envs.errors.error_words import Extent, likely_mistake


def reference() -> torch.Tensor:
    return torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))


def refusal(actual: torch.Tensor) -> str:
    expected = Expected(reference(), floor=Error(1e-5, 1e-5))
    return check(actual, expected)[1] or ""


def test_where_the_wrong_elements_lie() -> None:
    y = reference()
    y[3:7, 960:] += 1.0
    assert "160 of 64000 elements are out of bounds, all in [3:7, 960:1000]" in refusal(y)
    assert ", all in" not in refusal(reference() * 2)


def test_an_extent_of_nothing_and_of_everything_is_no_news() -> None:
    extent = Extent((2, 3))
    extent.add(torch.tensor([], dtype=torch.long))
    assert extent.text() == ""
    extent.add(torch.tensor([4]))
    assert extent.text() == "[1:2, 1:2]"
    extent.add(torch.arange(6))
    assert extent.text() == "" and Extent(()).text() == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y * 0.5, "the values are 0.5 times the expected ones"),
        (lambda y: -y, "the values are -1 times the expected ones"),
        (lambda y: y - 3.0, "the values are the expected ones - 3"),
        (lambda y: y * 0, "the values are all zero"),
        (lambda y: torch.where(y > 2, torch.nan, y), "NaN among the values"),
        (lambda y: y.flip(0), ""),
    ],
)
def test_what_the_values_suggest(change: object, words: str) -> None:
    assert callable(change)
    found = likely_mistake(change(reference()), reference())
    assert found.startswith(words) and (words != "" or found == "")
    assert words in refusal(change(reference()))
