"""Reductions, softmax-like programs and normalizations over any dimensions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import BF16, FP16, FP64, INT8, INT64, Table, normal

problem = Table()


@problem("sums", normal((5, 7, 11, 3)))
def sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(-1), x.sum((0, 2)), x.mean((-1, -3), keepdim=True), x.sum(), x.mean(1), x.sum(dim=[])


@problem("extremes", normal((5, 7, 11)))
def extremes(x: Tensor) -> tuple[Tensor, ...]:
    return x.amin((0, -1)), x.amax(1, keepdim=True), x.max(), x.min(dim=0)[0], x.max(-1)[1], x.amax() - x.amin()


@problem("positions", lambda: (torch.randn(6, 19), torch.randint(-3, 3, (6, 19))))
def positions(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return x.argmax(0), x.argmin(1, keepdim=True), x.argmax(), n.max(1)[0], torch.min(x, dim=-1).indices


@problem("integer reductions", lambda: (torch.randint(-50, 50, (9, 33)), torch.randint(-9, 9, (9, 33), dtype=INT8)))
def integer_reductions(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), y.sum(0), y.amax(1), y.amin(), x.prod(1), y.argmax(1), (x % 3 == 0).sum(1), y.max(1)[0]


@problem("truths", lambda: (torch.randn(9, 33) > 1, torch.randint(0, 2, (9, 33)), torch.randn(9, 33)))
def truths(x: Tensor, n: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.any(1), n.all(0), (y > -3).all(), x.sum(), x.float().mean(0), torch.any(y, dim=1), n.bool().any()


@problem("spreads", normal((4, 9, 31)))
def spreads(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.var(-1),
        x.std((0, 2), keepdim=True),
        x.var(1, unbiased=False),
        torch.var(x, dim=2, correction=3),
        *torch.std_mean(x, 0),
    )


@problem("distances between rows", normal((3, 5, 8), (3, 7, 8), (5, 8)))
def distances_between_rows(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.cdist(x, y),
        torch.cdist(z, z, 1.0),
        torch.cdist(x, y.exp(), float("inf")),
        torch.dist(x[0], z),
        torch.dist(x[0], z, 1),
    )


@problem("the few largest", lambda: (torch.randn(6, 19), torch.randn(9, 40).to(BF16)))
def few_largest(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    lost = torch.where(x > 2.5, torch.nan, x)
    return (
        *torch.topk(x, 2),
        torch.topk(y, 3)[0],
        *torch.topk(x.exp(), 1),
        *torch.topk(x.T, 3, 0),
        torch.topk(lost, 4)[0],
    )


@problem("norms", normal((4, 9, 31)))
def norms(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.norm(dim=-1),
        torch.linalg.vector_norm(x, 1, dim=(0, 1)),
        torch.linalg.vector_norm(x, float("inf"), dim=1),
        functional.normalize(x, dim=1),
        torch.linalg.vector_norm(x, 3, dim=2),
        torch.linalg.matrix_norm(x),
    )


@problem("products", lambda: (torch.rand(4, 9, 3) + 0.5,))
def products(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.prod(1), x.prod()


@problem("logsumexp", lambda: (torch.randn(7, 5, 13) * 30,))
def logsumexp(x: Tensor) -> tuple[Tensor, ...]:
    return torch.logsumexp(x, 1), x.logsumexp((0, 2), keepdim=True), x.logsumexp(-1) * 2


@problem("half sums", lambda: (torch.randn(7, 130).half(), torch.randn(7, 130).bfloat16()))
def half_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), y.mean(0), x.sum(dtype=torch.float32), x.float().std(1), y.amax(1), x.softmax(1), y.logsumexp(1)


@problem("double reductions", normal((7, 130), dtype=FP64))
def double_reductions(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.var(0), x.softmax(1), x.logsumexp(0), x.norm(), functional.log_softmax(x, 0), x.max(1)[0]


@problem("running sums", normal((7, 13)))
def running_sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(1) * 2, x.cumprod(0), x.topk(3)[0], x.sort(1)[1], x.cummax(0)[0]


@problem("softmax of dimensions", normal((5, 6, 7)))
def softmax_of_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    return x.softmax(0), functional.log_softmax(x, 1), functional.softmin(x, -1), torch.softmax(x.permute(2, 0, 1), 1)


@problem("softmax by hand", normal((9, 57)))
def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(dim=1, keepdim=True)[0])
    return e / e.sum(dim=1, keepdim=True)


@problem("causal softmax", normal((3, 21, 21)), stays=("full", "arange"))
def causal_softmax(x: Tensor) -> Tensor:
    mask = torch.ones(21, 21, dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((x * 0.2).masked_fill(mask, float("-inf")), dim=-1)


@problem("softmax of a temperature", lambda: (torch.randn(6, 41).half(), 0.7))
def softmax_of_a_temperature(x: Tensor, t: float) -> Tensor:
    return torch.softmax(x / t, -1).float()


@problem("over one", normal((6, 1, 5)))
def over_one(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.softmax(1), x.max(1)[1], x.logsumexp(1), x.mean(1, keepdim=True), x.argmax(1)


@problem("nothing to reduce", lambda: (torch.randn(4, 0, 3),), stays=("sum", "prod"))
def nothing_to_reduce(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), x.prod(1)


@problem("long row", normal((2, 70001)))
def long_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(1), x.std(1)


@problem("column sums", lambda: (torch.randn(53, 129).T.contiguous().T,))
def column_sums(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sum(0), x.softmax(0), x.amax(1)


@problem("layer norms", lambda: (torch.randn(3, 5, 7, 9), torch.randn(9), torch.randn(7, 9)))
def layer_norms(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        functional.layer_norm(x, (9,), w),
        functional.layer_norm(x, (7, 9), v, v),
        functional.layer_norm(x.transpose(1, 3), (5,)),
    )


@problem("norms in bfloat16", normal((5, 48), dtype=BF16))
class NormsInBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(48, dtype=BF16), nn.RMSNorm(48, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms(self.layer(x) + x)


@problem("norm in float16 of float32", lambda: (torch.randn(5, 48).half(),))
def norm_in_float16_of_float32(x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * x


@problem("group and instance norm", normal((3, 6, 5, 7)))
class GroupAndInstanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.group(x)), self.instance(x)


@problem("norms of large constants", lambda: (torch.full((4, 33), 3e37), torch.full((3, 5000), 3e37)))
def norms_of_large_constants(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Numbers whose sum overflows, and whose mean does not."""
    return functional.layer_norm(x, (33,)), functional.layer_norm(y, (5000,)), torch.var_mean(x, 1)[1]


@problem(
    "batch norms",
    lambda: (torch.randn(11, 5), torch.randn(3, 5, 7), torch.randn(2, 5, 3, 4, 5)),
    stays=("_foreach_add",),
)
class BatchNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.line = nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False, momentum=0.3)
        self.cube = nn.BatchNorm3d(5, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {"flat": self.flat(x), "line": functional.gelu(self.line(y)), "cube": self.cube(z)}


@problem("batch norm of half types in training", normal((4, 5, 7, 3), dtype=BF16), training=True)
class BatchNormOfHalfTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(5).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@problem("batch norm that only reads", normal((4, 5, 7, 3)), training=False)
class BatchNormThatOnlyReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).clamp_min(0)


@problem("double model", normal((6, 10), dtype=FP64))
class DoubleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(10).double(), nn.Parameter(torch.rand(10).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale) + functional.batch_norm(x, None, None, training=True)


@problem("regression losses", normal((13, 17), (13, 17)))
def regression_losses(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.mse_loss(x, y),
        functional.l1_loss(x, y, reduction="sum"),
        functional.smooth_l1_loss(x, y, reduction="none", beta=0.5),
        functional.huber_loss(x, y, delta=0.7),
        functional.cosine_similarity(x, y, dim=1),
        functional.pairwise_distance(x, y),
    )


@problem("classification losses", lambda: (torch.randn(13, 17), torch.randint(0, 17, (13,)), torch.rand(13, 17)))
def classification_losses(x: Tensor, labels: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.cross_entropy(x, labels),
        functional.cross_entropy(x, labels, reduction="none", label_smoothing=0.1),
        functional.nll_loss(functional.log_softmax(x, 1), labels, reduction="sum"),
        functional.binary_cross_entropy_with_logits(x, p),
        functional.kl_div(functional.log_softmax(x, 1), p, reduction="batchmean"),
        functional.cross_entropy(x, p),
    )


@problem("labels of pixels", lambda: (torch.randn(2, 7, 5, 3), torch.randint(0, 7, (2, 5, 3)), torch.rand(7)))
def labels_of_pixels(x: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(x, labels, ignore_index=3), functional.cross_entropy(x, labels, weight=weight)


@problem(
    "margins",
    lambda: (torch.randn(13, 8), torch.randn(13, 8), torch.randn(13, 8), torch.randn(13).sign()),
    stays=("empty_permuted",),  # alone; a kernel that fills it makes it
)
def margins(a: Tensor, p: Tensor, n: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        functional.triplet_margin_loss(a, p, n),
        functional.hinge_embedding_loss(a, y[:, None]),
        functional.margin_ranking_loss(a[:, 0], p[:, 0], y),
        functional.soft_margin_loss(a, y[:, None].expand(13, 8)),
        functional.poisson_nll_loss(a, p.abs()),
    )


@problem("standardised", lambda: (torch.randint(0, 255, (3, 8, 9)), torch.randn(40, 9, dtype=FP16)))
def standardised(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x.to(torch.float32)
    return (z - z.mean((1, 2), keepdim=True)) / (z.std((1, 2), keepdim=True) + 1e-6), (y - y.mean(0)) / y.std(0)


@problem("counting", lambda: (torch.randint(0, 5, (40, 3), dtype=INT64),), stays=("arange",))
def counting(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x[:, :, None] == torch.arange(5)).sum((0, 1)), torch.count_nonzero(x, dim=0)


@problem("of expanded inputs", normal((5, 7)))
def of_expanded_inputs(x: Tensor) -> tuple[Tensor, ...]:
    wide = x[:, None].expand(5, 6, 7)
    return wide.sum(1), wide.softmax(1), wide.mean((0, 1)), wide.amax(1), wide.logsumexp((1, 2)), wide.argmax(1)


@problem("ratios of reductions", normal((37, 5), (5, 37), (185,), (6, 37)))
def ratios_of_reductions(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Reductions over axes that nothing makes the same: they may share a kernel, and must not be mixed up."""
    a = x.sum() / y.abs().sum() + z.amax()
    return a, x.sum(0) - y.amax(1), y / x.sum(1), w.mean(1) * x.t().mean()


@problem("not a number among them", normal((13, 17)))
def not_a_number_among_them(x: Tensor) -> tuple[Tensor, ...]:
    y, z = torch.where(x > 1, float("nan"), x), torch.where(x > 0, x, float("-inf"))
    return y.argmax(1), y.max(1)[0], y.amin(0), z.softmax(1), torch.where(x > 9, x, float("-inf")).logsumexp(1)


@problem("variances in all spellings", normal((5, 7)))
def variances(x: Tensor) -> tuple[Tensor, ...]:
    along = torch.var_mean(x, 0, unbiased=False), torch.var_mean(x, (0, 1), keepdim=True), torch.std_mean(x, True)
    return (*torch.var_mean(x), *torch.var_mean(x, False), *sum(along, ()), x.var(False), x.std(1, correction=2))
