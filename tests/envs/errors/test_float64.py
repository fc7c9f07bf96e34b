"""Convolutions of float64 runs: each way that is quicker on a GPU computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qimeng.envs.errors import double_convolution, float64
from qimeng.envs.errors.float64 import NamedAsDouble

CASES = {
    "window": lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 3).to(x), padding=1),
    "many": lambda x: functional.conv2d(x, torch.ones(128, 4, 3, 3).to(x), stride=2),
    "strided": lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 3).to(x), stride=2),
    "pointwise": lambda x: functional.conv2d(x, torch.ones(6, 4, 1, 1).to(x)),
    "wide pointwise": lambda x: functional.conv2d(x, torch.ones(128, 4, 1, 1).to(x)),
    "groups": lambda x: functional.conv2d(x, torch.ones(6, 2, 3, 3).to(x), groups=2),
    "depthwise": lambda x: functional.conv2d(x, torch.ones(4, 1, 3, 3).to(x), groups=4),
    "transposed": lambda x: functional.conv_transpose2d(x, torch.ones(4, 6, 3, 3).to(x), stride=2),
}
WAYS = {"many": "products", "groups": "products", "transposed": "products", "window": "PyTorch"}  # others: cuDNN


@pytest.mark.parametrize("name", CASES)
def test_each_convolution_is_computed_the_quickest_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    products = double_convolution.as_products

    class Flags:
        """Notes whether cuDNN is on."""

        def __init__(self, enabled: bool):
            used.append("cuDNN" if enabled else "PyTorch")

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(float64, "_on_gpu", lambda *arguments: True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", Flags)
    monkeypatch.setattr(float64, "as_products", lambda *a: used.append("products") or products(*a))
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad(), NamedAsDouble():
        found = CASES[name](x)
    assert torch.allclose(found, CASES[name](x), rtol=1e-12, atol=1e-12) and used == [WAYS.get(name, "cuDNN")]


def test_convolutions_on_a_cpu_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "_convolved", None)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad(), NamedAsDouble():
        assert torch.equal(CASES["many"](x), CASES["many"](x))


@pytest.mark.parametrize("columns", [1 << 25, 200])  # all at once, and a few places of the window at a time
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_products_compute_what_pytorch_does(
    dims: int, transposed: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double_convolution, "COLUMNS", columns)
    for groups, window, stride, dilation in [(1, 1, 1, 1), (1, 3, 1, 2), (2, 2, 2, 1), (3, 3, 2, 2)]:
        x = torch.randn(3, 6, *[7, 8, 6][:dims], dtype=torch.float64)
        channels = (6, 12 // groups) if transposed else (12, 6 // groups)
        weight = torch.randn(*channels, *[window] * dims, dtype=torch.float64)
        more = [1] * dims if transposed and stride == 2 else [0] * dims
        arguments = x, weight, torch.randn(12).double(), [stride], [int(window > 1)], [dilation], transposed, more
        found = double_convolution.as_products(*arguments, groups)
        expected = torch.ops.aten.convolution(*arguments, groups)
        assert found.is_contiguous() and torch.allclose(found, expected, rtol=1e-12, atol=1e-12), (groups, window)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_take_any_layout(transposed: bool) -> None:
    x = torch.randn(2, 6, 5, 8, dtype=torch.float64).permute(0, 3, 1, 2)  # channels last
    weight = torch.randn(8, 8, 2, 2, dtype=torch.float64)
    arguments = x, weight, None, [2], [0], [1], transposed, [0], 1
    found = double_convolution.as_products(*arguments)
    assert torch.allclose(found, torch.ops.aten.convolution(*arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_the_ways_agree_on_a_gpu(name: str) -> None:
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad(), NamedAsDouble():
        found = CASES[name](x.cuda())
    assert torch.allclose(found.cpu(), CASES[name](x), rtol=1e-12, atol=1e-12)
