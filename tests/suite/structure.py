"""The face of a module: views in between, several outputs, nested inputs, buffers, constants, shared parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import Table, normal

problem = Table()


@problem("views in between", normal((4, 6, 10)))
def views_in_between(x: Tensor) -> Tensor:
    y = torch.relu(x).reshape(8, 30).t().contiguous().view(5, 6, 8)
    return y.permute(2, 0, 1).flatten(1) * 2 + 1


@problem("pieces", normal((4, 6, 10), (4, 2, 10)))
def pieces(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = x.chunk(3, dim=1)
    return torch.cat([a * b, y.tanh()], 1), torch.stack([c.exp(), y], -1)


@problem("slices and flips", normal((9, 12)), stays=("view", "arange"))
def slices_and_flips(x: Tensor) -> tuple[Tensor, ...]:
    return x[1:, :-1] - x[:-1, 1:], x[:, 3], x[..., None, ::3] * 2, x.flip(0) + 1, x.roll(1, 0) * x, x.unfold(1, 4, 2)


@problem("unbound", normal((3, 7, 5)))
def unbound(x: Tensor) -> Tensor:
    a, b, c = x.unbind(0)
    first, second = (a + b).split([3, 2], dim=-1)
    return c * first.sum(1, keepdim=True) + second.amax(1, keepdim=True)


@problem("nested", lambda: ({"x": torch.randn(5, 7), "rest": [torch.randn(7), 2.0]}, (torch.randn(5, 1),)))
def nested(d: dict, t: tuple) -> dict:
    return {"sum": d["x"] + d["rest"][0] * d["rest"][1], "pair": (t[0].exp(), [t[0] * d["x"], 3])}


@problem("an input given back", normal((5, 7)))
def an_input_given_back(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return x, y, y.t(), y


@problem("expanded results", normal((5, 1)))
def expanded_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sigmoid()
    return y.expand(5, 4), y.expand(5, 4) + 1


@problem("buffers", normal((5, 7)))
class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(7))
        self.register_buffer("last", torch.zeros(5, 7, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.last.copy_(x.amax(0))
        self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x - self.mean) * self.steps + self.average + self.last


@problem("constants", normal((5, 3)))
class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.limit = nn.Parameter(torch.randn(3)), 0.75

    def forward(self, x: Tensor) -> Tensor:
        grey = torch.tensor([0.299, 0.587, 0.114], device=x.device)
        return torch.minimum(x @ grey, torch.tensor(self.limit)) + (x * self.weight).sum(-1)


@problem("hidden buffers", normal((6, 5)))
class HiddenBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6, 5).tril(), persistent=False)
        self.table = torch.arange(5.0) + 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask + self.table


@problem("unused parts", normal((6, 5)))
class UnusedParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.noise = nn.Linear(5, 4), nn.Linear(3, 3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.used(x)).mul_(2).add_(1)


@problem("tied layers", normal((6, 8)))
class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.first, self.second = block, block

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@problem("layers in lists", normal((6, 8)))
class LayersInLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.by_name = nn.ModuleDict({"out-put": nn.Linear(8, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + torch.relu(layer(x)) * scale
        return self.by_name["out-put"](x)


@problem("looked up", lambda: (torch.randint(0, 11, (4, 6)),), stays=("arange",))
class LookedUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.LayerNorm(8)

    def forward(self, n: Tensor) -> Tensor:
        return self.norm(self.tokens(n) + self.places(torch.arange(6, device=n.device)))


@problem("looks at values", normal((6, 5)))
def looks_at_values(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 3 else x - 1


@problem("branches on values", normal((6, 5)), whole="depends on the values of a tensor")
def branches_on_values(x: Tensor) -> Tensor:
    return x * 2 if bool((x.sum() > 0).item()) else x - 1


@problem("size one dimensions", normal((1, 7, 1, 5), (1, 1, 3, 1)))
def size_one_dimensions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + y, (x * 2).squeeze().sum(0), functional.softmax(y, 1)


@problem("pooled pixels", lambda: (torch.randn(2, 6, 8, 9).to(memory_format=torch.channels_last),))
def pooled_pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    return functional.relu(x) + 1, x.mean((2, 3))


@problem("patches", normal((2, 3, 8, 12)))
class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(48, 20)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(2, 3, 2, 4, 3, 4).permute(0, 2, 4, 3, 5, 1).reshape(2, 6, 48)
        return self.map(y)


@problem("rotated heads", lambda: (torch.randn(2, 7, 24), torch.randn(7, 4)))
def rotated_heads(x: Tensor, angles: Tensor) -> Tensor:
    y = x.view(2, 7, 3, 8).transpose(1, 2)
    a, b = y[..., :4], y[..., 4:]
    c, s = angles.cos(), angles.sin()
    return torch.cat([a * c - b * s, a * s + b * c], -1)
