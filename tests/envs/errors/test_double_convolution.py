"""Convolutions in float64 as matrix products: PyTorch's results, in parts too, and in its memory formats."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qimeng.envs.errors import double_convolution
from qimeng.envs.errors.float64 import InDouble, NamedAsDouble

CASES = {  # shape of the input, outputs, kernel, the rest
    "1d": ((2, 8, 17), 6, (3,), {"stride": 2, "padding": 1}),
    "1d dilated, in groups": ((3, 16, 21), 24, (5,), {"dilation": 3, "padding": 2, "groups": 2}),
    "2d pointwise": ((2, 8, 5, 7), 9, (1, 1), {}),
    "2d": ((3, 8, 11, 9), 10, (3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    "2d depthwise": ((2, 8, 9, 9), 16, (3, 3), {"groups": 8}),
    "3d": ((2, 8, 6, 7, 5), 4, (3, 1, 2), {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
}
TRANSPOSED = {
    "1d": ((2, 8, 9), 6, (4,), {"stride": 3, "padding": 2, "output_padding": 1, "dilation": 2}),
    "2d": ((3, 8, 5, 6), 10, (3, 2), {"stride": (2, 1), "padding": (1, 1), "output_padding": (1, 0)}),
    "2d in groups": ((2, 16, 5, 4), 24, (3, 3), {"stride": 2, "groups": 4}),
    "3d": ((2, 8, 4, 3, 5), 4, (3, 5, 2), {"stride": (2, 1, 2), "padding": (1, 2, 0)}),
}


@pytest.fixture(params=[None, 1 << 13, 1], ids=["whole", "parts", "rows"])
def _window_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of all samples at once, of some, and of one row."""
    if request.param:
        monkeypatch.setattr(double_convolution, "WINDOW_BYTES", request.param)
    monkeypatch.setattr(double_convolution, "is_worthwhile", lambda x, weight: True)


@pytest.mark.usefixtures("_window_bytes")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, bias: bool) -> None:
    shape, outputs, kernel, options = CASES[name]
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(outputs, shape[1] // options.get("groups", 1), *kernel, dtype=torch.float64)
    _compare(getattr(functional, f"conv{len(kernel)}d"), x, weight, outputs if bias else 0, options)


@pytest.mark.usefixtures("_window_bytes")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed(name: str, bias: bool) -> None:
    shape, outputs, kernel, options = TRANSPOSED[name]
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(shape[1], outputs // options.get("groups", 1), *kernel, dtype=torch.float64)
    _compare(getattr(functional, f"conv_transpose{len(kernel)}d"), x, weight, outputs if bias else 0, options)


def _compare(convolve, x, weight, bias: int, options) -> None:
    arguments = (x, weight, torch.randn(bias, dtype=torch.float64) if bias else None)
    right = convolve(*arguments, **options)
    with torch.no_grad(), InDouble():
        found = convolve(*arguments, **options)
    assert found.shape == right.shape
    assert found.stride() == right.stride()
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [InDouble, NamedAsDouble])
def test_is_called_under_both_modes(mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(double_convolution, "is_worthwhile", lambda x, weight: True)
    monkeypatch.setattr(double_convolution, "convolution", lambda *args: seen.append(args) or args[0])
    layer = torch.nn.Conv2d(8, 8, 1, dtype=torch.float64)
    with torch.no_grad(), mode():
        layer(torch.randn(1, 8, 2, 2, dtype=torch.float64))
    assert len(seen) == 1


def test_channels_last_stays() -> None:
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    found = double_convolution.convolution(
        x, torch.randn(9, 8, 3, 3, dtype=torch.float64), None, (1,), (0,), (1,), False, (0,), 1
    )
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_infinities_and_nan() -> None:
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    x[0, 1, 2, 3], x[1, 2, 3, 4] = float("inf"), float("nan")
    weight = torch.randn(9, 8, 3, 3, dtype=torch.float64)
    found = double_convolution.convolution(x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    torch.testing.assert_close(found, functional.conv2d(x, weight, padding=1), equal_nan=True)


def test_only_on_a_gpu_in_float64_and_not_depthwise() -> None:
    x, weight = torch.randn(1, 8, 4, 4, dtype=torch.float64), torch.randn(8, 8, 1, 1, dtype=torch.float64)
    assert not double_convolution.is_worthwhile(x, weight)
