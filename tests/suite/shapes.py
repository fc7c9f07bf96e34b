"""Values at other positions: slices, joins, padding, gathers, windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import BF16, INT64, Table, normal

problem = Table()


@problem("slices of a result", normal((6, 10)))
def slices_of_a_result(x: Tensor) -> Tensor:
    y = x.exp()
    return y[1:, ::3] * 2 + y[:-1, 9:].abs() - y[2, 1:5]


@problem("halves", normal((3, 4, 8)))
def halves(x: Tensor) -> Tensor:
    a, b = x.tanh().chunk(2, -1)
    return a * torch.sigmoid(b)


@problem("rotary embedding", normal((2, 3, 5, 8), (5, 8), (5, 8)))
def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


@problem("rotary embedding of half numbers", normal((2, 3, 5, 8), (5, 8), (5, 8), dtype=BF16))
def rotary_half(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


@problem("joins", lambda: (torch.randn(3, 2, 5), torch.randn(3, 4, 5), torch.randint(0, 9, (3, 1, 5))))
def joins(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x.relu(), y.exp(), x + 1], 1) * 2, torch.cat([n, n + 1, x.long()], 1)


@problem("stacked", normal((4, 6), (4, 6)))
def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.cos(), y.sin()], -1).flatten(1).softmax(-1)


@problem("padding", normal((2, 3, 6, 7)))
def padding(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.relu()
    return functional.pad(y, (1, 2, 0, 3), value=-0.5) + 1, functional.pad(y, (-1, 1, 2, -2)).exp()


@problem("padding by reflection", normal((2, 3, 6, 7)), stays=("arange",))
def reflected(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.relu()
    return functional.pad(y, (2, 1, 1, 3), mode="reflect"), functional.pad(y, (2, 1, 1, 3), mode="replicate")


@problem("turned and rolled", normal((4, 5, 6)), stays=("arange",))
def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().flip(0, 2) + 1, x.exp().roll((1, -2), (1, 2)) * x


@problem("taken by an index", lambda: (torch.randn(7, 9), torch.tensor([4, 0, 6, 4]), torch.tensor([[1, 3], [-2, 0]])))
def taken(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    y = x.tanh()
    return y.index_select(0, i) + 1, y[:, j] * 2, y[j, j + 1], y[i, None], y[i][:, i]


@problem("gathered", lambda: (torch.randn(5, 6, 4), torch.randint(0, 6, (5, 3, 4)), torch.randint(0, 4, (2, 6, 4))))
def gathered(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().gather(1, i) + 1, x.sin().gather(2, j)


@problem("embedded", lambda: (torch.randint(0, 11, (2, 6)), torch.randint(0, 6, (2, 6))))
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.LayerNorm(8)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        return self.norm(self.words(words) + self.places(places))


@problem("windows of a view", normal((4, 12)))
def windows_of_a_view(x: Tensor) -> Tensor:
    return x.relu().unfold(1, 4, 2).mean(-1)


@problem("average pools", normal((2, 3, 9, 8)))
def average_pools(x: Tensor) -> tuple[Tensor, ...]:
    y = x.relu()
    return (
        functional.avg_pool2d(y, 3, 2, 1),
        functional.avg_pool2d(y, (2, 3), ceil_mode=True, padding=1, count_include_pad=False),
        functional.avg_pool2d(y, 20, ceil_mode=True, padding=1),
        functional.avg_pool1d(y[:, 0], 3),
        functional.avg_pool3d(y, 2),
        functional.adaptive_avg_pool2d(y, (4, 3)),
    )


@problem("largest of windows", normal((2, 3, 9, 8)))
def max_pools(x: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.max_pool2d(x.exp(), 3, 2, 1),
        functional.max_pool2d(x, 2, dilation=2, ceil_mode=True),
        functional.max_pool2d(x, 12, ceil_mode=True),
        functional.max_pool1d(x[:, 0], 3),
        functional.adaptive_max_pool2d(x, 4),
    )


@problem("where the largest of windows are", normal((2, 2, 7, 6), (2, 1, 3, 4, 5)))
def max_pool_positions(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        *functional.max_pool2d(x.exp(), 3, 2, 1, return_indices=True),
        *functional.max_pool2d(x, (2, 3), padding=(1, 0), ceil_mode=True, return_indices=True),
        functional.max_pool1d(x[:, 0], 3, dilation=2, return_indices=True)[1],
        functional.max_pool3d(y, 2, return_indices=True)[1],
        *functional.adaptive_max_pool2d(x, (3, 4), return_indices=True),
        functional.adaptive_max_pool3d(torch.where(y > 1, torch.nan, y), 2, return_indices=True)[1],
    )


@problem("windows of nothing but the least value", lambda: (torch.full((1, 2, 5, 6), -torch.inf),))
def least_windows(x: Tensor) -> tuple[Tensor, ...]:
    return (
        *functional.max_pool2d(x, 3, 2, 1, return_indices=True),
        *functional.max_pool2d(x, (2, 3), (1, 2), 1, dilation=(2, 3), return_indices=True),
        *functional.adaptive_max_pool2d(x, (2, 4), return_indices=True),
    )


@problem(
    "windows with several NaN", lambda: (torch.arange(30.0).view(1, 1, 5, 6) % 3 + torch.tensor([0, torch.nan] * 3),)
)
def nan_windows(x: Tensor) -> tuple[Tensor, ...]:
    """The last NaN of a window is its largest element."""
    return (
        *functional.max_pool2d(x, 3, 2, 1, return_indices=True),
        *functional.max_pool2d(x, 2, dilation=2, return_indices=True),
    )


@problem("resized linearly", normal((2, 3, 5, 4), (1, 2, 3, 3)))
def resized_linearly(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.interpolate(x.tanh(), scale_factor=2, mode="bilinear") + 1,
        functional.interpolate(x, size=(7, 11), mode="bilinear", align_corners=True),
        functional.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"),
        functional.interpolate(y.double(), size=(1, 2), mode="bilinear", align_corners=True),
        functional.interpolate(y.half(), scale_factor=3, mode="bilinear"),
        functional.interpolate(x[0], 11, mode="linear", align_corners=True),
        functional.interpolate(x[None], scale_factor=(0.7, 2, 1.3), mode="trilinear"),
    )


@problem("resized without aliases", normal((2, 3, 16, 17), (1, 2, 5, 9)))
def resized_without_aliases(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.interpolate(x.relu(), size=(7, 9), mode="bilinear", antialias=True),
        functional.interpolate(x, size=(16, 5), mode="bicubic", antialias=True, align_corners=True),
        functional.interpolate(y, scale_factor=(0.4, 1.7), mode="bicubic", antialias=True),
    )


@problem("padding around", normal((2, 3, 6, 7)), stays=("empty",))
def around(x: Tensor) -> Tensor:
    return functional.pad(x.relu(), (2, 1, 1, 3), mode="circular") * 2


@problem("slices replaced", normal((6, 9), (6, 3), (2, 9)))
def slices_replaced(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().slice_scatter(y.sin(), 1, 1, 9, 3), x.slice_scatter(z, 0, -2).abs()


@problem("resized", normal((2, 3, 5, 4)))
def resized(x: Tensor) -> tuple[Tensor, ...]:
    y = x.tanh()
    return (
        functional.interpolate(y, scale_factor=2) + 1,
        functional.interpolate(y, size=(7, 11)),
        functional.interpolate(y, scale_factor=1.7),
        functional.interpolate(y, scale_factor=2.5, mode="bicubic") + 1,
        functional.interpolate(y, size=(7, 3), mode="bicubic", align_corners=True),
    )


@problem("sampled images", lambda: (torch.randn(2, 3, 5, 7), torch.rand(2, 4, 6, 2) * 2.6 - 1.3))
def sampled_images(x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.grid_sample(x.tanh(), places, align_corners=False).relu(),
        functional.grid_sample(x, places.flip(2), padding_mode="reflection", align_corners=True),
        functional.grid_sample(x[:1].expand(2, 3, 5, 7), places, "nearest", "border", align_corners=False) + 1,
    )


@problem("routed", lambda: (torch.randn(6, 9), torch.randn(6, 2, 4, 8), torch.tensor([3]), torch.randn(6, 2, 1, 8)))
def routed(x: Tensor, cache: Tensor, step: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    weight, expert = x.softmax(1).topk(2)
    spread = torch.zeros_like(x).scatter(1, expert, weight / weight.sum(1, keepdim=True))
    return spread, cache.index_copy(2, step, new) * 2, x.index_add(0, step, x[:1]), x.scatter(1, expert[:, :1], 0.0)


@problem("shuffled channels", normal((2, 8, 3, 5)))
def shuffled(x: Tensor) -> tuple[Tensor, Tensor]:
    return functional.pixel_shuffle(x.relu(), 2) * 2, functional.channel_shuffle(x.relu(), 4) + 1


@problem("depthwise convolutions", normal((2, 4, 9, 8)))
class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.b = nn.Conv2d(4, 8, (2, 3), stride=(2, 1), dilation=(1, 2), groups=4, bias=False)
        self.c = nn.Conv1d(1, 5, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return functional.gelu(self.a(x)) + x, self.b(x.relu()), self.c(x[:, :1, 0])


@problem("positions of many things", lambda: (torch.randn(3, 8), torch.arange(24, dtype=INT64).reshape(3, 8)))
def positions(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    y = (x + n).reshape(4, 6)[1:3, 2:].reshape(8)
    return y * 2, torch.cat([y, y.flip(0)]).view(4, 4).amax(1)


@problem("written where a mask says", normal((4, 5, 6)))
def written_by_mask(x: Tensor) -> tuple[Tensor, ...]:
    y, rows, planes, added = x.relu(), x.exp(), x.clone(), x.tanh()
    y[x > 1] = float("nan")
    rows[x.sum(-1) > 0] = x[0, 0]
    planes[:, x[0] < 0] = x[:, 0, :1]
    added.index_put_((x[:, 0, 0] > 0,), x[:1], accumulate=True)
    return y, rows, planes, added


@problem("computed where a mask says", lambda: (torch.randn(4, 6), torch.rand(4) > 0.5, torch.randn(4, 6)))
def computed_by_mask(x: Tensor, rows: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b, c = x.exp(), x.relu(), torch.zeros_like(x)
    a[x > 0] = (x[x > 0] * 0.5).tanh() + y[x > 0]
    b[rows] = b[rows] * y[0] - y[rows]
    b[rows] += 1
    c[:, y[0] > 0] += x[:, y[0] > 0].sigmoid()
    return a, b, c


@problem("one element of each row", lambda: (torch.randn(5, 7), torch.randint(-7, 7, (5,))), stays=("arange",))
def one_of_each_row(x: Tensor, labels: Tensor) -> Tensor:
    y = x.softmax(-1)
    y[torch.arange(5), labels] -= 1.0
    return y * 0.2


@problem(
    "picked by a tensor",
    lambda: (torch.randn(6, 8, 3), torch.tensor(-2), torch.tensor([5])),
    stays=("torch._local_scalar_dense_select",),
)
def picked(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    """The last is a view in the module, whose strides a gather does not have."""
    return x[i] * 2, x.tanh()[:, j.squeeze()].sum(-1), x.exp()[1, :, i + 1]


@problem(
    "written where tensors of one number say",
    lambda: (torch.randn(6, 8, 3), torch.tensor(-2), torch.tensor(5), torch.randn(6, 3)),
    stays=("full",),
)
def written_at(x: Tensor, i: Tensor, j: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d = x * 2, x + 1, x - 1, x.exp()
    a[:, j] = y.tanh()
    b[i, ..., j - 4] = 0.5
    c[2:4, i, 1] = y[:1, 0].double()
    d[i] = y.T[None, 0, :1] * 3
    return a, b, c.sum(0), d
