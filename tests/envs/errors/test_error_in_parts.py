"""An error that is summed up part by part is that of the whole."""

from __future__ import annotations

import pytest
import torch

from qimeng.envs.errors import accuracy
from qimeng.envs.errors.accuracy import measure
from qimeng.envs.errors.error_in_parts import ErrorInParts


def in_parts(y: torch.Tensor, r: torch.Tensor, step: int) -> accuracy.Error:
    found = ErrorInParts(r.shape, accuracy.least_of(r))
    for start in range(0, r.shape[0], step):
        found.add(y[start : start + step], r[start : start + step])
    return found.error()


@pytest.mark.parametrize("shape", [(600, 700), (20, 30, 40, 50), (64, 9000, 1), (5000,), (3000, 1), (24,)])
@pytest.mark.parametrize("step", [1, 7])
def test_the_figures_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], step: int) -> None:
    monkeypatch.setattr("qimeng.envs.errors.error_in_parts.BLOCK", 100)
    r = torch.randn(shape, dtype=torch.float64)
    y = r * (1 + 1e-7 * torch.randn(shape, dtype=torch.float64))
    if len(shape) == 1 or shape[0] > 100:
        step *= 50
    whole, found = measure(y, r, y), in_parts(y, r, step)
    assert found.max == whole.max and found.across == whole.across and found.alone == whole.alone
    assert found.rms == pytest.approx(whole.rms, rel=1e-12)


def test_what_is_not_finite_counts_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.envs.errors.error_in_parts.BLOCK", 10)
    r = torch.randn(40, 50, dtype=torch.float64)
    y = r + 1e-9
    y[3, 4] = r[3, 4] = torch.inf
    y[30, 1] = torch.nan
    whole, found = measure(y, r, y), in_parts(y, r, 8)
    assert found.figures == pytest.approx(whole.figures, rel=1e-12)


def test_integers_have_no_error() -> None:
    x = torch.arange(12).reshape(4, 3)
    found = ErrorInParts(x.shape, 0.0)
    found.add(x, x + 1)
    assert found.error() == accuracy.Error()
