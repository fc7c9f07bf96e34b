"""The GEMM family: orientations, batches, prologues, epilogues, small modules around linear maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import BF16, FP16, FP64, INT32, Table, normal

problem = Table()


@problem("odd sizes", normal((37, 101), (101, 53)))
def odd_sizes(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@problem("gram matrices", normal((61, 29)))
def gram_matrices(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.T @ x, x @ x.T


@problem("one row, one column", normal((1, 67), (67, 41), (41, 1), (67,)))
def one_row_one_column(row: Tensor, m: Tensor, column: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return row @ m, m @ column, v @ m, m.T @ v, torch.dot(v, v), torch.outer(v, column[:, 0]), m.mv(column[:, 0])


@problem("depth of one", normal((33, 1), (1, 29)))
def depth_of_one(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x @ y)


@problem("broadcast batches", normal((3, 1, 17, 23), (5, 23, 19)))
def broadcast_batches(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


@problem("expanded batch", lambda: (torch.randn(17, 23).expand(4, 17, 23), torch.randn(4, 23, 19)))
def expanded_batch(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y)


@problem("strided operands", lambda: (torch.randn(40, 60)[::2, 5:45], torch.randn(33, 40, 2)[..., 1]))
def strided_operands(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T


@problem("added products", normal((1, 31), (19, 23), (23, 31), (3, 7, 11), (3, 11, 5), (5,)))
def added_products(c: Tensor, x: Tensor, y: Tensor, p: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    more = torch.addbmm(d, p, q, beta=0.5, alpha=-2)
    return torch.addmm(c, x, y, beta=0.5, alpha=2.0), torch.baddbmm(d, p, q), torch.addmv(c[0], y.T, x[0]), more


@problem("einsums", normal((3, 5, 7, 11), (3, 5, 13, 11), (11, 13), (7, 11)))
def einsums(q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.einsum("bhqd,bhkd->bhqk", q, k),
        torch.einsum("bhqd,de->beqh", q, w),
        torch.einsum("bhqd,qd->bh", q, v),
        torch.einsum("qd,de->eq", v, w),
        torch.einsum("bhqd,bhqd->bq", q, q),
        torch.einsum("i,j->ij", v[:, 0], w[0]),
    )


@problem("matrices of halves", normal((33, 72), (72, 40), dtype=FP16))
def matrices_of_halves(x: Tensor, y: Tensor) -> Tensor:
    return functional.gelu(x @ y)


@problem("matrices of bfloat16", normal((33, 71), (45, 71), dtype=BF16))
def matrices_of_bfloat16(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x @ y.T) * 0.5


@problem("matrices of doubles", normal((9, 20), (20, 12), dtype=FP64), stays=("mm",))
def matrices_of_doubles(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).tanh()


@problem("vector of doubles", normal((9, 20), (20, 1), dtype=FP64))
def vector_of_doubles(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@problem("matrices of integers", lambda: (torch.randint(-5, 5, (9, 20)), torch.randint(-5, 5, (20, 6))), stays=("mm",))
def matrices_of_integers(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@problem("vector of integers", lambda: (torch.randint(-5, 5, (9, 20), dtype=INT32), torch.randint(-5, 5, (20,)).int()))
def vector_of_integers(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@problem("triangles and diagonals", normal((21, 21), (21, 21), (21,)), stays=("arange", "view"))
def triangles_and_diagonals(x: Tensor, y: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.tril(x) @ torch.tril(y),
        torch.triu(x @ y, -2),
        torch.diag(d) @ x,
        x @ torch.diag(d),
        (x @ y).diagonal(),
    )


@problem("reduced products", normal((19, 23), (23, 31)))
def reduced_products(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    p = x @ y
    return p.max(1)[0], torch.logsumexp(p, 1), p.mean(), p.sum(0), p.argmax(1), p.softmax(1), p.var(1)


@problem("long epilogue", normal((19, 24), (19, 32), (1,)))
class LongEpilogue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.scale = nn.Linear(24, 32), nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        return torch.clamp(functional.gelu(self.map(x)) * self.scale + residual, -1, 1) / (gain * gain + 1)


@problem("perceptron", normal((2, 9, 14)))
class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(14, 33), nn.ReLU(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1)


@problem("gated perceptron", normal((3, 5, 24)))
class GatedPerceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


@problem("gate in chunks", normal((3, 5, 24)))
class GateInChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 80), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(a, approximate="tanh") * b)


@problem("gated linear unit", normal((7, 24)))
class GatedLinearUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(24, 34)

    def forward(self, x: Tensor) -> Tensor:
        return functional.glu(self.map(x), -1)


@problem("residual and norm", normal((2, 5, 24)))
class ResidualAndNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.map(x))


@problem("low rank", normal((11, 24)))
class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(24, 30), nn.Linear(24, 4, bias=False), nn.Linear(4, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.25 * self.b(self.a(x))


@problem("one weight twice", normal((11, 24)))
class OneWeightTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 24, bias=False)
        self.back = nn.Linear(24, 24)
        self.back.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.embed(x)))


@problem("bilinear", normal((11, 7), (11, 9)))
class BilinearForm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Parameter(torch.randn(7, 9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ self.form) * y).sum(-1, keepdim=True)


@problem("bilinear layer", normal((11, 7), (11, 9)))
class BilinearLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(7, 9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.layer(x, y))


@problem("scores", normal((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16)))
def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1) @ v


@problem("distances", normal((13, 8), (17, 8)), ("triu_indices",))
def distances(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    pairs = nn.functional.pdist(x), nn.functional.pdist(y, p=3.0)
    return *pairs, (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T).clamp_min(0).sqrt()


@problem("two and three factors", normal((5, 7), (7, 9), (9, 4)))
def three_factors(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.multi_dot([x, y, z]), torch.kron(x[:2, :3], z[:2])


@problem("a line of features", normal((24,)))
class LineOfFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(24, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).sigmoid()


@problem("no rows", normal((0, 24)), stays=("linear",))
class NoRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(24, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)
