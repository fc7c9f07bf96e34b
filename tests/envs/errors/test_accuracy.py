from __future__ import annotations

import math

import pytest
import torch

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.accuracy import Error, kernelbench_close, measure
from qimeng.envs.errors.error_budget import Expected, check, floor, roundings
from qimeng.envs.workers import tensor_bits
from qimeng.envs.workers.tensor_bits import checksum, same


def by_the_formula(y: torch.Tensor, r: torch.Tensor) -> Error:
    y, r = y.double(), r.double()
    scale = r.square().mean(-1, keepdim=True).sqrt() if r.dim() else r.abs()
    e = (y - r).abs() / (r.abs() + scale)
    return Error(float(e.max()), float(e.square().mean().sqrt()))


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (1, 1), (4, 3, 11), (2, 3, 4, 5)])
@pytest.mark.parametrize("block", [4, 16, 1 << 24])
def test_error_is_the_formula_in_blocks_of_any_size(shape, block, monkeypatch):
    monkeypatch.setattr(accuracy, "BLOCK", block)
    monkeypatch.setattr(tensor_bits.blocks, "__defaults__", (block,))
    r = torch.randn(shape, dtype=torch.float64)
    y = (r + 1e-4 * torch.randn(shape, dtype=torch.float64)).float()
    got, want = measure(y, r), by_the_formula(y, r)
    assert got.max == pytest.approx(want.max, rel=1e-9) and got.rms == pytest.approx(want.rms, rel=1e-9)


def test_error_follows_strides():
    r = torch.randn(6, 5, 4).permute(2, 0, 1)
    y = (r + 1e-3).contiguous()
    assert measure(y, r).max == pytest.approx(by_the_formula(y, r).max)


def test_complex_values_are_measured_by_their_parts():
    r = torch.randn(4, 4, dtype=torch.complex64)
    assert measure(r.clone(), r).max == 0
    assert measure(r + 1e-3j, r).max > 1e-4


@pytest.mark.parametrize(("shape", "at"), [((), ()), ((2, 3), (1, 2)), ((4, 1), (3, 0))])
def test_a_wrong_complex_number_is_named_by_its_place(shape: tuple[int, ...], at: tuple[int, ...]):
    value = torch.ones(shape, dtype=torch.complex64)
    wrong = value.clone()
    wrong[at] = 2j
    assert f"worst at {at}" in (check(wrong, Expected(value))[1] or "")


def test_nan_where_the_reference_is_finite_is_an_infinite_error():
    r = torch.ones(8)
    y = r.clone()
    y[3] = math.nan
    assert measure(y, r).max == math.inf


def test_where_the_reference_or_eager_is_not_finite_either_value_is_right():
    r = torch.tensor([1.0, math.inf, math.nan, 2.0])
    eager = torch.tensor([1.0, 3e38, math.nan, math.inf])
    for second in (math.inf, 3e38):
        for fourth in (2.0, math.inf):
            y = torch.tensor([1.0, second, math.nan, fourth])
            assert measure(y, r, eager).max == 0
    assert measure(torch.tensor([1.0, 5.0, math.nan, 2.0]), r, eager).max > 0.1
    assert measure(torch.tensor([1.0, math.inf, 0.0, 2.0]), r, eager).max == math.inf
    assert accuracy.not_finite_share(r, eager) == 0.75


def test_budget_is_four_and_two_times_eager_or_the_floor():
    many = torch.ones(error_budget.FEW_VALUES)
    assert Expected(many, Error(1e-5, 1e-6), Error(1e-6, 1e-6)).budget == Error(4e-5, 2e-6)
    assert Expected(many, Error(1.0, 1.0, 1.0, 1e-6)).budget == Error(4.0, 2.0, 4.0, 4e-6)
    assert Expected(many[1:], Error(1e-5, 1e-6), Error(1e-6, 1e-6)).budget == Error(4e-5, 4e-6), "luck, in few values"
    assert Expected(torch.ones(1), Error(1.0, 1.0, 1.0, 1e-5)).budget.alone == math.inf, "eager has lost digits itself"
    assert Expected(torch.ones(1), Error(0.0, 0.0), Error(1e-6, 1e-6)).budget == Error(1e-6, 1e-6)
    assert floor(torch.float32, roundings(10000), Error()).max == pytest.approx(16 * 2**-23 + 100 * 2**-24)
    assert floor(torch.bfloat16, roundings(10000), Error()).max == pytest.approx(4 * 2**-7 + 100 * 2**-24)
    assert roundings(10000, independent=False) == 10000 and roundings(1 << 30, independent=False) == 1 << 16


def test_a_refusal_says_where_and_how_much():
    expected = Expected(torch.ones(4, 5), floor=Error(1e-6, 1e-6))
    actual = torch.ones(4, 5)
    actual[2, 3] = 1.5
    error, text = check(actual, expected)
    assert error.max == pytest.approx(0.25) and text is not None
    assert "(2, 3)" in text and "got 1.5" in text and "1 of 20" in text
    assert "zero" in (check(torch.zeros(4, 5), expected)[1] or "")
    assert "NaN" in (check(torch.full((4, 5), math.nan), expected)[1] or "")
    assert check(torch.ones(4, 5), expected) == (Error(), None)


def test_integers_equal_the_reference_or_eager():
    expected = Expected(torch.tensor([1, 2, 3]), eager=torch.tensor([1, 2, 4]))
    assert check(torch.tensor([1, 2, 4]), expected)[1] is None
    assert "got 5, expected 3" in (check(torch.tensor([1, 2, 5]), expected)[1] or "")


def test_same_compares_bits_and_checksums_tell_contents_apart():
    a = torch.tensor([1.0, math.nan, 3.0])
    assert same(a, a.clone()) and not same(a, a.double())
    assert checksum(a) == checksum(a.clone()) != checksum(a * 2)
    assert checksum(torch.ones(4, 6).t()) == checksum(torch.ones(6, 4))
    assert checksum(torch.zeros(3, dtype=torch.bool)) != checksum(torch.ones(3, dtype=torch.bool))


def test_kernelbench_rule():
    eager = torch.ones(10)
    assert kernelbench_close(eager + 1.5e-4, eager) and not kernelbench_close(eager + 3e-4, eager)
    assert kernelbench_close((eager + 0.01).half(), eager.half())
    assert not kernelbench_close(eager.half(), eager)


def test_a_column_is_judged_as_a_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(64, generator=generator)
    y = r + 1e-3 * torch.randn(64, generator=generator)
    for shape in ((64, 1), (64, 1, 1), (1, 64, 1)):
        assert measure(y.reshape(shape), r.reshape(shape)) == measure(y, r)
    assert measure(y.reshape(8, 8, 1), r.reshape(8, 8, 1)) == measure(y.reshape(8, 8), r.reshape(8, 8))
    one = torch.tensor([[2.0]])
    assert measure(one + 1, one).max == pytest.approx(0.25)
    error, text = check(y.reshape(64, 1), Expected(r.reshape(64, 1)))
    assert text is not None and "got" in text


def test_what_is_far_below_an_ulp_of_the_whole_output_is_no_error():
    expected = torch.ones(4, 8)
    expected[1] = 0.0
    actual = expected.clone()
    actual[1, 3] = 1e-17  # a better formula than the reference's, which came to zero
    assert measure(actual, expected).max < 2e-6
    actual[1, 3] = 1e-8
    assert measure(actual, expected).max > 100, "a row of zeros is a row of zeros"
    assert measure(actual.double(), expected.double()).max > 1e6, "float64 has digits there"
    expected[2, 2] = actual[2, 2] = math.inf
    actual[1, 3] = 1e-17
    assert measure(actual, expected, expected).max < 2e-6


def rows_and_columns() -> torch.Tensor:
    return torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_small_row_or_column_beside_large_ones_is_judged_by_itself():
    for axis in (0, 1):
        r = rows_and_columns()
        r.select(axis, 3).mul_(1e-6)
        y = r.clone()
        y.select(axis, 3).mul_(1.01)
        error = measure(y, r)
        figure = error.across if axis else error.max
        assert 1e-3 < figure < 1e-2, "relative to what is of its size"
        assert (error.max if axis else error.across) < 1e-7


def test_rows_of_one_number_each_are_judged_by_themselves():
    """Sums of rows in units of their own have neither row nor column."""
    r = rows_and_columns().sum(1) * 10.0 ** torch.linspace(-6, 6, 64, dtype=torch.float64)
    y = r + 1e-3
    assert measure(y, r).max < 1e-3 < measure(y, r).alone
    one_wrong = r.clone()
    one_wrong[5] *= 2
    assert measure(one_wrong, r).alone == 0, "a few elements may have cancelled"
    assert measure(r[:15] + 1e-3, r[:15]).alone == 0, "too few to say anything"


def test_columns_and_elements_of_large_outputs_are_looked_at_in_a_sample():
    r = torch.ones(4096, 1024)
    r[:, ::2] = 1e-6
    y = r.clone()
    y[:, ::2] *= 1.5
    assert measure(y, r).across == pytest.approx(0.25, rel=1e-3) and measure(y, r).max < 1e-6
    y = r * 1.5
    assert measure(y, r).alone == pytest.approx(0.5)


def test_numbers_below_the_smallest_normal_one_may_be_lost():
    r = torch.full((64,), 1e-39)
    assert measure(torch.zeros(64), r).alone < 16 * 2**-23
    assert measure(torch.zeros(64), torch.full((64,), 1e-30)).alone == 1


def test_a_figure_out_of_bounds_is_named():
    r = torch.ones(64, 64)
    r[:, 3] = 1e-6
    y = r.clone()
    y[:, 3] *= 1.1
    text = check(y, Expected(r, floor=Error(1e-5, 1e-5, 1e-5, 1e-5)))[1]
    assert text is not None and "relative to what its column has" in text and "of themselves" not in text
    text = check(r.sign() * 1.1, Expected(r.sign(), floor=Error(1, 1, 1, 1e-5)))[1]
    assert text is not None and "a quarter of the elements are 0.1 of themselves off" in text
    assert Error(2, 1, 0, 3).share_of(Error(1, 1, 0, 1)) == 3 and Error(0, 0, 1).share_of(Error(1, 1)) == math.inf
    assert not Error(0, 0, math.nan).within(Error(1, 1, 1, 1)) and not Error(0, 0, 0, 2).within(Error(1, 1, 1, 1))


def test_what_an_output_is_divided_by_is_found_block_by_block(monkeypatch):
    r = torch.randn(7, 5, 300)
    whole = accuracy.least_of(r)
    assert whole == pytest.approx(accuracy.OF_ALL * 2**-23 * float(r.square().mean().sqrt()), rel=1e-5)
    monkeypatch.setattr(accuracy, "BLOCK", 100)
    for shape in ((7, 5, 300), (10500,), (7, 1500)):
        assert accuracy.least_of(r.reshape(shape)) == pytest.approx(whole, rel=1e-9)
    assert accuracy.least_of(torch.tensor(0.0)) == torch.finfo(torch.float32).tiny


def test_few_infinities_may_have_the_other_sign_and_no_row_may_be_no_number():
    """An infinity times what is nearly zero has the sign of a rounding."""
    value = torch.ones(400, 8)
    value[:, 3] = math.inf
    expected = Expected(value, floor=Error(1e-6, 1e-6, 1e-6, 1e-6), eager=value.clone())
    few, row, wrong = value.clone(), value.clone(), value.clone()
    few[:4, 3], row[:20, 3], wrong[0, 0] = -math.inf, math.nan, 2.0
    assert error_budget.same_but_for_few(few, expected)
    assert not error_budget.same_but_for_few(row, expected) and not error_budget.same_but_for_few(wrong, expected)
    assert error_budget.same_but_for_few(row, expected, any_kind=True)
    assert not error_budget.same_but_for_few(torch.ones(400, 8), expected, any_kind=True)
    assert not error_budget.same_but_for_few(few, Expected(value)), "only where something is not finite"


@pytest.mark.parametrize("shape", [(300, 40), (300, 40, 1), (7,), (1,), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_scale_that_is_known_changes_no_figure(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape, dtype=dtype)
    actual = value * (1 + 1e-3)
    expected = error_budget.Expected(value)
    found, finite = accuracy.measured(actual, value, None, expected.scale)
    assert found == accuracy.measure(actual, value) and finite
    assert error_budget.check(actual, expected)[0] == found
    assert expected.widened(expected).scale == expected.scale


def test_whether_all_is_finite_is_known_from_the_errors() -> None:
    x = torch.randn(30, 40)
    assert accuracy.measured(x, x + 1, x)[1]
    for odd in (torch.inf, -torch.inf, torch.nan):
        y = x.clone()
        y[3, 4] = odd
        for pair in ((x, y), (y, x), (y, y)):
            assert not accuracy.measured(*pair, pair[0])[1]
