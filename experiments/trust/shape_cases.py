"""Calls of the operators that read at other positions: slices, joins, padding, gathers, windows.

Deals in PyTorch calls by operator. Knows nothing about kernels, and nothing about the values that are put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from experiments.trust.case import HEAVY, Case


def shape_cases() -> Iterator[Case]:
    """All of them; each reads what another operator computed, so that no view is made beforehand."""
    yield from (Case(name, label, call, "r") for name, label, call in _moved())
    for name, label, call in _windows():
        yield Case(name, label, call, "r", HEAVY, _magnitude(call))
    for label, call in _convolutions():
        size = lambda r, call=call: call(r.abs().nan_to_num(posinf=0.0), torch.abs) + 1  # noqa: E731
        yield Case("convolution", label, lambda r, call=call: call(r, lambda w: w), "r", HEAVY, size)
    channels = lambda r, w: functional.conv2d(_image(r), w, padding=1, groups=12)  # noqa: E731
    yield Case(
        "convolution",
        "depthwise",
        lambda r: channels(r, _weights(r)),
        "r",
        HEAVY,
        lambda r: channels(r.abs().nan_to_num(posinf=0.0), _weights(r).abs()) + 1,
    )


def _moved() -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    yield "slice", "", lambda r: (r + 1)[3:, 4:30:3] * 2
    yield "slice", "of a slice", lambda r: ((r + 1)[:, 5:] * 2)[:, :-7] + 1
    yield "select", "", lambda r: (r + 1)[:, -3] * 2
    yield "flip", "", lambda r: (r + 1).flip(0, 1) * 2
    yield "unfold", "", lambda r: (r + 1).unfold(1, 5, 3) * 2
    yield "cat", "", lambda r: torch.cat([r + 1, r * 2, (r + 3)[:, :5]], 1) * 2
    yield "cat", "rows", lambda r: torch.cat([r + 1, r * 2]) * 2
    yield "cat", "halves turned", lambda r: torch.cat([-(r + 1)[:, 18:36], (r + 1)[:, :18]], 1) * 2
    yield "constant_pad_nd", "", lambda r: functional.pad(r + 1, (2, 3, 1, 0), value=3) * 2
    yield "constant_pad_nd", "cropped", lambda r: functional.pad(r + 1, (-2, 3, 1, -4)) * 2
    yield "index_select", "", lambda r: (r + 1).index_select(1, _places(r)[0]) * 2
    yield "index", "", lambda r: (r + 1)[:, _places(r)] * 2
    yield "index", "negative", lambda r: (r + 1)[_places(r) - 6, _places(r)] * 2
    yield "embedding", "", lambda r: functional.embedding(_places(r), r + 1) * 2
    yield "slice_scatter", "", lambda r: torch.slice_scatter(r + 1, r[:, :6] * 2, 1, 4, 16, 2) * 2
    yield "topk", "", lambda r: (r + 1).topk(3)[0] * 2
    yield "topk", "the least of a column", lambda r: (r + 1).topk(2, 0, False)[0] * 2
    for name in ("scatter", "scatter_add"):
        f = getattr(torch, name)
        yield name, "", partial(_scattered, f)
        yield name, "several of a row", partial(_scattered_widely, f)
        yield name, "columns", partial(_scattered_along_columns, f)
    yield "scatter", "a number", lambda r: torch.scatter(r * 2, 1, _apart(r), 1)
    yield "index_put", "", lambda r: (r + 1).index_put((_rising(r[:3])[:, 0] * 5 - 6,), r[:3] * 2)
    yield "index_put", "added", lambda r: (r + 1).index_put((_rising(r[:3])[:, 0] * 5,), r[:3] * 2, accumulate=True)
    yield "index_put", "columns", lambda r: torch.index_copy(r + 1, 1, _rising(r[:3])[:, 0] * 5, r[:, 2:5] * 2)
    yield "index_put", "a number", lambda r: torch.index_fill(r + 1, 1, _rising(r[:3])[:, 0] * 5, 2)
    yield "gather", "several of a row", lambda r: torch.gather(r + 1, 1, (r[:, :6] > 0).long() * 3) * 2


def _scattered(f: Callable[..., Tensor], r: Tensor) -> Tensor:
    return f(r + 1, 1, (r[:, :1] > 0).long() * 3, r[:, 1:2] * 2) * 2


def _scattered_widely(f: Callable[..., Tensor], r: Tensor) -> Tensor:
    return f(r + 1, 1, _apart(r), r[:, 4:8] * 2)


def _scattered_along_columns(f: Callable[..., Tensor], r: Tensor) -> Tensor:
    return f(r + 1, 0, (r[:2] > 0).long() * 3 + _rising(r[:2]), r[2:4])


def _apart(r: Tensor) -> Tensor:
    """Four places in each row, no two of them equal."""
    return (r[:, :4] > 0).long() * 4 + torch.arange(4, device=r.device) + 7


def _rising(r: Tensor) -> Tensor:
    """The number of its row for each element."""
    return torch.arange(r.shape[0], device=r.device)[:, None].expand(r.shape)


def _places(r: Tensor) -> Tensor:
    return (r[:2, :3] > 0).long() * 4 + 1


def _windows() -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    yield "avg_pool2d", "", lambda r: functional.avg_pool2d(_image(r), 3, 2, 1)
    yield "avg_pool2d", "of elements", lambda r: functional.avg_pool2d(_image(r), 3, 2, 1, True, False)
    yield "avg_pool3d", "", lambda r: functional.avg_pool3d(_image(r), 2)
    yield "max_pool2d_with_indices", "", lambda r: functional.max_pool2d(_image(r), 3, 2, 1)
    yield "max_pool2d_with_indices", "spread", lambda r: functional.max_pool2d(_image(r), 2, 1, dilation=2)
    yield "max_pool3d_with_indices", "", lambda r: functional.max_pool3d(_image(r), 2)
    yield "_adaptive_avg_pool2d", "", lambda r: functional.adaptive_avg_pool2d(_image(r), (4, 5))
    yield "_adaptive_avg_pool3d", "", lambda r: functional.adaptive_avg_pool3d(_image(r), (5, 4, 5))
    yield "adaptive_max_pool2d", "", lambda r: functional.adaptive_max_pool2d(_image(r), 4)
    yield "adaptive_max_pool3d", "", lambda r: functional.adaptive_max_pool3d(_image(r), 4)
    yield "upsample_nearest1d", "", lambda r: functional.interpolate(_image(r)[0], scale_factor=1.7)
    yield "upsample_nearest2d", "", lambda r: functional.interpolate(_image(r), scale_factor=2)
    yield "upsample_linear1d", "", lambda r: functional.interpolate(_image(r)[0], scale_factor=1.7, mode="linear")
    yield "upsample_bilinear2d", "", lambda r: functional.interpolate(_image(r), scale_factor=2, mode="bilinear")
    yield "upsample_bicubic2d", "", lambda r: functional.interpolate(_image(r), (7, 5), mode="bicubic")
    for mode in ("bilinear", "bicubic"):
        yield f"_upsample_{mode}2d_aa", "", partial(_without_aliases, mode)
    yield "upsample_trilinear3d", "", lambda r: functional.interpolate(_image(r)[None], (7, 5, 3), mode="trilinear")
    for padding in ("zeros", "border", "reflection"):
        yield "grid_sampler_2d", padding, partial(_sampled, padding=padding)
        yield "grid_sampler_2d", f"corners, {padding}", partial(_sampled, padding=padding, corners=True)
    yield "grid_sampler_2d", "nearest", partial(_sampled, mode="nearest")
    yield "grid_sampler_3d", "", partial(_sampled, padding="border", corners=True, volume=True)
    yield "_cdist_forward", "", lambda r: torch.cdist(r[:5, :36] + 1, r[5:12, :36] * 2, 1.0)
    yield "_cdist_forward", "largest", lambda r: torch.cdist(r[:5, :36] + 1, r[5:12, :36] * 2, float("inf"))
    yield "dist", "", lambda r: torch.dist(r + 1, r * 2)
    yield "upsample_nearest3d", "", lambda r: functional.interpolate(_image(r)[:, :, None], size=(2, 7, 5))


def _convolutions() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """A function of the values and of one that its weights go through."""
    yield "dense", lambda r, f: functional.conv2d(_image(r), f(_dense(r)), padding=1)
    yield "strided groups", lambda r, f: functional.conv2d(_image(r), f(_dense(r)[:, :3]), None, 2, 1, 1, 4)
    yield "dilated", lambda r, f: functional.conv2d(_image(r) * 2, f(_dense(r)), None, 1, 2, 2)
    yield "one by one", lambda r, f: functional.conv2d(_image(r), f(_dense(r)[:, :, :1, :1]))
    yield "transposed", lambda r, f: functional.conv_transpose2d(_image(r), f(_dense(r)), None, 2, 1)


def _dense(r: Tensor) -> Tensor:
    inside = torch.arange(9, device=r.device).reshape(3, 3) % 5 + 1
    return ((r[:12, :12] > 0).long()[:, :, None, None] + inside).to(r.dtype)


def _sampled(
    r: Tensor, mode: str = "bilinear", padding: str = "zeros", corners: bool = False, volume: bool = False
) -> Tensor:
    """An image at places inside and outside of it, some of them halfway."""
    image = _image(r)[:, :, None] if volume else _image(r)
    rank = image.dim() - 2
    numbers = torch.arange(2 * 15 * rank, device=r.device)
    places = ((numbers * 37 % 101) / 32 - 1.5).reshape(2, *[1] * (rank - 2), 3, 5, rank).to(r.dtype)
    return functional.grid_sample(image, places, mode, padding, corners)


def _without_aliases(mode: str, r: Tensor) -> Tensor:
    return functional.interpolate(_image(r), (4, 7), mode=mode, antialias=True)


def _image(r: Tensor) -> Tensor:
    return (r + 1)[:, :36].reshape(2, 12, 6, 6)


def _weights(r: Tensor) -> Tensor:
    return (torch.arange(108, device=r.device).reshape(12, 1, 3, 3) % 5 - 2).to(r.dtype)


def _magnitude(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What the ulp are of: the same windows of magnitudes."""
    return lambda r: call(r.abs().nan_to_num(posinf=0.0)).abs() + 1


__all__ = ["shape_cases"]
