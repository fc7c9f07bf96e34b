"""What holds for an example holds for what is drawn in its place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qimeng.spec import KernelSpec
from qimeng.spec.leaf import Leaf, domain_of
from qimeng.spec.source import Source
from qimeng.spec.ways import Shuffled
from tests.properties import PROPERTY

Predicate = Callable[[torch.Tensor, torch.Tensor], bool]
"""Of what was drawn and the example."""


def close(a: torch.Tensor, b: torch.Tensor | float, limit: float = 1e-4) -> bool:
    return bool(((a - b).abs() <= limit).all())


def ends(x: torch.Tensor) -> list[float]:
    return [float(x[0]), float(x[-1])]


def prefix(mask: torch.Tensor) -> bool:
    return bool((mask.int().diff() <= 0).all())


def even(x: torch.Tensor) -> bool:
    return close(x.std(0).log2(), 0, 1.0) and close(x.std(1).log2(), 0, 1.0)


def spd(size: int) -> torch.Tensor:
    a = torch.randn(size, size)
    return a @ a.t() + size * torch.eye(size)


def causal(size: int, low: float) -> torch.Tensor:
    return torch.triu(torch.full((size, size), low), 1)


torch.manual_seed(0)
LENGTHS = torch.tensor([3, 5, 16, 1, 7, 3])
PADDING = torch.arange(16) < LENGTHS[:, None]
TINY = torch.finfo(torch.float32).min

SCALES = 10.0 ** torch.linspace(-3, 3, 64) * 10.0 ** torch.linspace(-3, 3, 64)[:, None]

KINDS: dict[str, tuple[torch.Tensor, str, Predicate]] = {
    "offsets": (torch.tensor([0, 4, 7, 12]), "offsets", lambda y, x: ends(y) == ends(x) and bool((y.diff() > 0).all())),
    "segments": (torch.tensor([0, 0, 1, 1, 1, 2]), "offsets", lambda y, x: {*y.diff().tolist()} == {0, 1}),
    "even offsets": (torch.arange(0, 65, 8), "offsets", lambda y, x: ends(y) == [0, 64] and bool((y.diff() > 0).all())),
    "permutation": (torch.randperm(32), "permutation", lambda y, x: torch.equal(y.sort().values, torch.arange(32))),
    "rows": (
        torch.rand(4, 9).argsort(-1),
        "permutation",
        lambda y, x: bool((y.sort(-1).values == torch.arange(9)).all()),
    ),
    "unique": (torch.randperm(99)[:20] + 5, "permutation", lambda y, x: len(y.unique()) == 20 and y.min() >= 5),
    "ignored": (
        torch.tensor([1, 2, -100, 4, 0, 3] * 4),
        "index",
        lambda y, x: bool(((y == -100) == (x == -100)).all()) and {*y.tolist()} <= {-100, 0, 1, 2, 3, 4},
    ),
    "two classes": (
        torch.tensor([0, 1, -100, 1, 0] * 4),
        "index",
        lambda y, x: bool(((y == -100) == (x == -100)).all()) and {*y.tolist()} == {-100, 0, 1},
    ),
    "padded": (
        torch.where(PADDING, torch.randint(5, 900, (6, 16)), 1),
        "index",
        lambda y, x: bool(((y == 1) == ~PADDING).all()) and bool((y[PADDING] >= 5).all()),
    ),
    "codes": (torch.randint(-128, 128, (64,), dtype=torch.int8), "index", lambda y, x: y.dtype is torch.int8),
    "padding mask": (
        PADDING,
        "mask",
        lambda y, x: sorted(y.sum(-1).tolist()) == sorted(LENGTHS.tolist()) and prefix(y),
    ),
    "one row": (torch.arange(9) < 5, "mask", lambda y, x: 0 < int(y.sum()) < 9 and prefix(y[None])),
    "causal": (
        causal(16, -math.inf),
        "mask",
        lambda y, x: {*y.unique().tolist()} == {0.0, -math.inf} and bool((y == 0).any(-1).all()),
    ),
    "random mask": (torch.rand(16, 16) < 0.3, "mask", lambda y, x: int(y.sum()) == int(x.sum())),
    "one hot": (torch.eye(8)[torch.randint(0, 8, (20,))], "mask", lambda y, x: bool((y.sum(-1) == 1).all())),
    "bias": (
        torch.randn(16, 16) + causal(16, -math.inf),
        "real",
        lambda y, x: bool(((y == -math.inf) == (x == -math.inf)).all()),
    ),
    "huge bias": (
        torch.randn(16, 16).where(torch.ones(16, 16).tril() > 0, TINY),
        "real",
        lambda y, x: bool(((y == TINY) == (x == TINY)).all()),
    ),
    "few huge": (
        torch.randn(64, 64).index_put((torch.tensor([5]), torch.tensor([9])), torch.tensor(-1e9)),
        "real",
        lambda y, x: float(y[5, 9]) == -1e9 and int((y.abs() > 9).sum()) == 1,
    ),
    "sparse": (
        torch.randn(32, 32) * (torch.rand(32, 32) < 0.2),
        "real",
        lambda y, x: bool(((y == 0) == (x == 0)).all()),
    ),
    "columns": (
        torch.randn(64, 8) * 10.0 ** torch.arange(-4, 4),
        "real",
        lambda y, x: close((y.std(0) / x.std(0)).log2(), 0, 1.0),
    ),
    "rows and columns": (torch.randn(64, 64) * SCALES, "real", lambda y, x: even(y / SCALES)),
    "masked column": (
        torch.randn(64, 64).index_fill(1, torch.tensor([7]), -1e9),
        "real",
        lambda y, x: bool((y[:, 7] == -1e9).all()) and float(y[:, 8:].abs().max()) < 9,
    ),
    "times": (
        torch.stack([1e6 + torch.rand(64), torch.randn(64)], 1),
        "real",
        lambda y, x: bool((y[:, 0] >= 1e6).all()) and float(y[:, 1].abs().max()) < 9,
    ),
    "vector": (
        10.0 ** torch.linspace(-6, 6, 32)[torch.randperm(32)],
        "real",
        lambda y, x: close((y / x).log2(), 0, 1.0),
    ),
    "unit interval": (torch.rand(64, 64), "real", lambda y, x: y.min() >= 0 and y.max() <= 1),
    "both signs": (
        torch.rand(64, 64) * 2 - 1,
        "real",
        lambda y, x: float(y.abs().max()) <= 1 and float(y.min()) < -0.9,
    ),
    "hole": (torch.cat([torch.rand(256) + 1, -torch.rand(256) - 1]), "real", lambda y, x: float(y.abs().min()) >= 1),
    "counts": (torch.randint(0, 50, (64, 8)).float(), "real", lambda y, x: torch.equal(y, y.round())),
    "probabilities": (
        torch.randn(9, 9).softmax(-1),
        "probability",
        lambda y, x: close(y.sum(-1), 1) and bool((y > 0).all()),
    ),
    "log-probabilities": (torch.randn(9, 9).log_softmax(-1), "log_probability", lambda y, x: close(y.logsumexp(-1), 0)),
    "unit vectors": (
        torch.nn.functional.normalize(torch.randn(9, 5), dim=-1),
        "unit",
        lambda y, x: close(y.norm(dim=-1), 1),
    ),
    "unit columns": (
        torch.nn.functional.normalize(torch.randn(9, 30), dim=0),
        "unit",
        lambda y, x: close(y.norm(dim=0), 1),
    ),
    "orthogonal": (torch.linalg.qr(torch.randn(3, 8, 8)).Q, "orthogonal", lambda y, x: close(y @ y.mT, torch.eye(8))),
    "definite": (spd(8), "definite", lambda y, x: torch.equal(y, y.t()) and bool((torch.linalg.eigvalsh(y) > 0).all())),
    "correlations": (
        torch.corrcoef(torch.randn(6, 40)).fill_diagonal_(1),
        "definite",
        lambda y, x: bool((y.diagonal() == 1).all()) and bool((torch.linalg.eigvalsh(y) > 0).all()),
    ),
    "triangular": (
        torch.linalg.cholesky(spd(8)),
        "definite",
        lambda y, x: torch.equal(y, y.tril()) and bool((y.diagonal() > 0).all()),
    ),
    "dominant": (torch.randn(8, 8) + 20 * torch.eye(8), "definite", lambda y, x: bool((y.diagonal() > 10).all())),
    "grid": (
        torch.linspace(-2, 2, 9),
        "sorted",
        lambda y, x: close(y.diff(), float(y[1] - y[0]), 1e-5) and float(y[1]) > float(y[0]),
    ),
    "times in order": (
        torch.rand(64).cumsum(0),
        "sorted",
        lambda y, x: bool((y.diff() > 0).all()) and close(y[-1], x[-1]),
    ),
    "falling rows": (
        torch.rand(4, 32).sort(-1, descending=True).values,
        "sorted",
        lambda y, x: bool((y.diff() <= 0).all()),
    ),
    "phases": (torch.polar(torch.ones(4, 8), torch.randn(4, 8)), "unit", lambda y, x: close(y.abs(), 1)),
    "hermitian": (
        torch.randn(6, 6, dtype=torch.complex64) @ torch.eye(6, dtype=torch.complex64),
        "real",
        lambda y, x: y.dtype is torch.complex64,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_for_an_example_holds_for_others_like_it(kind: str) -> None:
    example, domain, holds = KINDS[kind]
    assert domain_of(example) == domain and holds(example, example)
    leaf = Leaf.of(example)
    drawn = [leaf.draw(Source(seed, "cpu")) for seed in range(5)]
    assert all(holds(y, example) for y in drawn)
    assert any(not torch.equal(y, example) for y in drawn), "it changes"
    assert torch.equal(drawn[3], leaf.draw(Source(3, "cpu"))), "the same for the same seed"
    for way in range(len(leaf.ways)):
        if isinstance(leaf.ways[way], Shuffled):
            pair = [
                x.reshape(-1).sort().values for x in (leaf.draw(Source(1, "cpu"), way), example) if not x.is_complex()
            ]
            assert not pair or torch.equal(*pair), "the same values in another order"
    assert torch.equal(leaf.draw(Source(1, "cpu"), len(leaf.ways)), example), "as given"


@settings(PROPERTY, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=30), st.integers(0, 2**31))
def test_offsets_keep_their_ends_and_the_lengths_of_their_segments(lengths: list[int], seed: int) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    drawn = Leaf.of(offsets).draw(Source(seed, "cpu"))
    if domain_of(offsets) == "offsets" and len(set(lengths)) > 1:
        assert sorted(drawn.diff().tolist()) == sorted(lengths)
    assert int(drawn[0]) == 0 and int(drawn[-1]) == sum(lengths) and bool((drawn.diff() >= 0).all())


@settings(PROPERTY, max_examples=60)
@given(st.data())
def test_whole_numbers_never_leave_the_range_seen(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    numbers = st.integers(-(2**62), 2**62) | st.integers(-3, 12)
    flat = data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    example = torch.tensor(flat).view(rows, columns)
    leaf = Leaf.of(example)
    for way in range(len(leaf.ways) + 1):
        drawn = leaf.draw(Source(data.draw(st.integers(0, 2**31)), "cpu"), way)
        assert example.min() <= drawn.min() and drawn.max() <= example.max()
        if leaf.domain == "permutation":
            assert all(len(set(row)) == columns for row in drawn.tolist())


@settings(PROPERTY, max_examples=60)
@given(st.data())
def test_real_numbers_never_leave_the_range_seen(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    kind = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    value = st.floats(-1000, 1000, width=16) | st.sampled_from([0.0, -math.inf, 1.0])
    flat = data.draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    example = torch.tensor(flat).view(rows, columns).to(kind)
    leaf = Leaf.of(example)
    drawn = leaf.draw(Source(data.draw(st.integers(0, 2**31)), "cpu"))
    assert not drawn.isnan().any()
    if leaf.domain != "mask":  # the length of what is masked is drawn
        assert torch.equal((drawn == -math.inf).sum(), (example == -math.inf).sum())
    finite = example[example.isfinite()]
    if finite.numel() and leaf.domain in ("real", "positive"):
        assert finite.min() <= drawn[drawn.isfinite()].min() and drawn.max() <= finite.max()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_numbers_are_drawn_like_others(dtype: torch.dtype) -> None:
    table, pages = torch.randn(4, 8), torch.tensor([7, 0, 3, 65535]).to(dtype)
    spec = KernelSpec.of(lambda x, p: x * p.float()[:, None], (table, pages))
    spec.check()
    assert spec.never_changed == () and spec.inputs(1)[1].dtype is dtype
    drawn = {tuple(spec.inputs(seed)[1].long().tolist()) for seed in range(8)}
    assert len(drawn) > 1 and all(0 <= n <= 65535 for row in drawn for n in row)


def test_the_default_device_changes_nothing() -> None:
    example = torch.randn(64, 32) * torch.logspace(-2, 2, 32)
    expected = Leaf.of(example).ways
    with torch.device("meta"):
        found = Leaf.of(example).ways
    assert str(found) == str(expected)
