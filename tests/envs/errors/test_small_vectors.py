"""Errors of many small vectors at once are those of each, and nothing is right that is wrong by itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qimeng.envs.errors.accuracy import Error, comparable, measure
from qimeng.envs.errors.error_budget import Expected, check
from qimeng.envs.errors.small_vectors import LONGEST, errors_of_right, errors_together
from tests.properties import PROPERTY

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OTHERS = (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn)
SHAPES = ((), (1,), (0,), (3,), (15,), (16,), (17,), (64,), (64, 1), (1, 40), (5, 9), (400,), (1, 1, 1), (LONGEST + 1,))
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, 1e-40, 1.0)


def drawn(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)), dtype=torch.float64)
    x = x * rng.choice((1.0, 1.0, 0.0, 1e-30, 1e20)) + rng.choice((0.0, 0.0, 3.0))
    return x.round() if rng.random() < 0.1 else x


def pair(rng: random.Random) -> tuple[torch.Tensor, Expected]:
    """What was computed and what it should be: near, with a few elements that are odd, or altogether wrong."""
    dtype = rng.choice(FLOATS * 3 + OTHERS)
    r = drawn(rng, rng.choice(SHAPES), dtype)
    y = r * (1 + rng.choice((0.0, 0.0, 1e-9, 3e-7, 1e-4)) * torch.randn(r.shape, dtype=torch.float64))
    for x in (y, y, r):
        if x.numel() and rng.random() < 0.1:
            x.view(-1)[rng.randrange(x.numel())] = rng.choice(ODD)
    integers = not dtype.is_floating_point and not dtype.is_complex
    y, r = ((x.nan_to_num(0.0, 1.0, 2.0).clamp(0, 100) if integers else x).to(dtype) for x in (y, r))
    allowed = rng.choice((0.0, 1e-9, 1e-6, 1e-3))
    eager = None if integers or rng.random() < 0.9 else r.clone()
    expected = Expected(r, Error(*4 * (allowed,)), Error(), eager, signed=rng.random() < 0.1)
    return y, expected


def pairs(seed: int, count: int) -> list[tuple[torch.Tensor, Expected]]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    return [pair(rng) for _ in range(count)]


@PROPERTY
@given(st.integers(0, 1 << 30))
def test_what_is_right_together_is_right_by_itself(seed: int) -> None:
    made = pairs(seed, 60)
    together = errors_of_right([y for y, _ in made], [e for _, e in made])
    for known, (y, e) in zip(together, made, strict=True):
        if known is not None:
            error, text = check(comparable(y), e)
            assert text is None, (y, e)
            assert known.figures == pytest.approx(error.figures, rel=1e-6, abs=1e-300)


@PROPERTY
@given(st.integers(0, 1 << 30))
def test_errors_together_are_those_of_each(seed: int) -> None:
    made = [(y, e.value) for y, e in pairs(seed, 60)]
    made = [(y.double() if y.dtype in FLOATS and i % 3 == 0 else y, r) for i, (y, r) in enumerate(made)]
    for known, (y, r) in zip(errors_together([y for y, _ in made], [r for _, r in made]), made, strict=True):
        if known is not None:
            single = measure(y, r).figures if r.is_floating_point() else Error().figures
            assert known.figures == pytest.approx(single, rel=1e-6, abs=1e-300)
            assert r.is_floating_point() or torch.equal(y, r)


def test_what_is_plain_is_known_and_what_is_at_its_budget_is_asked() -> None:
    values = [torch.rand(n) + 0.5 for n in (64, 64, 60, 100, 90)] + [torch.tensor(3)] * 2
    actual = [x * (1 + 1e-6) if x.is_floating_point() else x for x in values]
    expected = [Expected(x, Error(*4 * (1e-5,))) for x in values]
    assert None not in errors_of_right(actual, expected)
    exact = replace(expected[0], error=Error(), floor=check(actual[0], expected[0])[0])
    assert check(actual[0], exact)[1] is None
    assert [x is None for x in errors_of_right(actual, [exact, *expected[1:]])] == [True, *6 * [False]]
    actual[1][3], actual[6] = math.nan, torch.tensor(4)
    assert [i for i, x in enumerate(errors_of_right(actual, expected)) if x is None] == [1, 6]


def test_zeros_of_another_sign_are_asked_about() -> None:
    values = [torch.zeros(20) for _ in range(4)]
    expected = [Expected(x, floor=Error(*4 * (1.0,)), signed=True) for x in values]
    assert [x is None for x in errors_of_right([-values[0], *values[1:]], expected)] == [True, False, False, False]


def test_many_vectors_take_a_few_operators_and_waits() -> None:
    expected = [Expected(torch.rand(64), Error(*4 * (1e-5,))) for _ in range(100)]
    expected += [Expected(torch.tensor(i)) for i in range(100)]
    with torch.profiler.profile() as profile:
        errors_of_right([e.value.clone() for e in expected], expected)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::item", 0) + counts["aten::equal"] < 5 and counts["aten::sort"] < 5
