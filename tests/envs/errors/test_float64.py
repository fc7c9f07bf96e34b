"""Convolutions of float64 runs: the way that is quicker on a GPU computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qimeng.envs.errors import float64
from qimeng.envs.errors.float64 import NamedAsDouble

CASES = {
    "window": lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 3).to(x), padding=1),
    "strided": lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 3).to(x), stride=2),
    "pointwise": lambda x: functional.conv2d(x, torch.ones(6, 4, 1, 1).to(x)),
    "groups": lambda x: functional.conv2d(x, torch.ones(6, 2, 3, 3).to(x), groups=2),
    "transposed": lambda x: functional.conv_transpose2d(x, torch.ones(4, 6, 3, 3).to(x), stride=2),
}
QUICK = ("window", "transposed")


@pytest.mark.parametrize("name", CASES)
def test_cudnn_computes_what_it_is_quicker_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    slow = float64._is_slow_in_cudnn

    class OnGpu:
        """A tensor on the CPU that says it is on a GPU."""

        is_cuda, dtype = True, torch.float64

    def noted(x: torch.Tensor, *arguments: object) -> bool:
        used.append(not slow(OnGpu(), *arguments))  # type: ignore[arg-type]
        return not used[-1]

    monkeypatch.setattr(float64, "_is_slow_in_cudnn", noted)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad(), NamedAsDouble():
        found = CASES[name](x)
    assert torch.equal(found, CASES[name](x)) and used == [name not in QUICK]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_both_ways_agree_on_a_gpu(name: str) -> None:
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad(), NamedAsDouble():
        found = CASES[name](x.cuda())
    assert torch.allclose(found.cpu(), CASES[name](x), rtol=1e-12, atol=1e-12)
