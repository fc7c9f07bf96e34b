"""Integers and booleans that come of rounded numbers: other orders pass, lower precision and comparisons do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.discrete import Dividing, Rounding, may_jump
from qimeng.envs.errors.error_budget import Expected, check
from qimeng.envs.errors.explained import explained
from qimeng.envs.estimate.interpret import gpu_arithmetic
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.graph.region import merge
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.modes import precision

PRODUCT = (torch.randn(128, 200), torch.randn(200, 128))
ROWS = (torch.randn(512, 100),)


def references(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, mode: str = "default", arithmetic=gpu_arithmetic
) -> References:
    spec = KernelSpec.from_function(function, inputs, mode=mode)
    return References(spec, capture_spec(spec), torch.device("cpu"), arithmetic=arithmetic)


def refused(refs: References, candidate: Callable[..., torch.Tensor], enough: int = 1) -> int:
    """How many trials a candidate fails; a look at what is out of bounds takes long, and ends at `enough` of them."""
    found = 0
    for trial in refs.every_distribution():
        y = candidate(*refs.inputs(trial.draw))
        error, text = check(y, trial.expected[0])
        found += text is not None and refs.look_again(trial, 0, y, error) is None
        if found == enough:
            break
    return found


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The product, summed in another order."""
    return x[:, :64] @ y[:64] + x[:, 64:] @ y[64:]


def tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@pytest.mark.parametrize(
    ("function", "jumps"),
    [
        (lambda x: (x.sigmoid() * 255).to(torch.uint8), True),
        (lambda x: x.softmax(0).max(0).indices, True),
        (lambda x: torch.where(x > x.mean(), x, 0.0), True),
        (lambda x: torch.floor(x * 3), True),
        (lambda x: x > 0, False),
        (lambda x: torch.relu(x.softmax(0)), False),
        (lambda x: x.amax(0).half(), False),
        (lambda x: torch.dropout(x.softmax(0), 0.5, True), False),
        (lambda x: functional.max_pool2d(x.softmax(0)[None, None], 2), False),
        (lambda x: functional.max_pool2d(x.softmax(0)[None, None], 2, return_indices=True), True),
        (lambda x: x.softmax(0).sort(0).values, False),
        (lambda x: x.softmax(0)[(torch.arange(8) / 3).long()], False),
        (lambda x: x.softmax(0) + (torch.arange(8) * 0.3 > 1), False),
    ],
)
def test_what_may_jump(function, jumps):
    graph = capture_spec(KernelSpec.from_function(function, (torch.randn(8, 8),)))
    assert may_jump(graph, graph.ops()) is jumps


@pytest.mark.parametrize(
    ("function", "honest", "inputs"),
    [
        (lambda x, y: x @ y > 0, lambda x, y: split(x, y) > 0, PRODUCT),
        (lambda x, y: torch.round(x @ y).to(torch.int8), lambda x, y: torch.round(split(x, y)).to(torch.int8), PRODUCT),
        (lambda x, y: (x @ y).argmax(1), lambda x, y: split(x, y).argmax(1), PRODUCT),
        (lambda x: x > x.mean(1, keepdim=True), lambda x: x > x.sum(1, keepdim=True) * (1 / 100), ROWS),
    ],
)
def test_what_another_order_of_roundings_yields_is_right(function, honest, inputs):
    refs = references(function, *inputs)
    assert refused(refs, function) == 0 and refused(refs, honest) == 0


def test_a_lower_precision_is_not_a_matter_of_rounding_unless_the_mode_allows_it():
    function = lambda x, y: torch.round(8 * (x @ y)).to(torch.int32)  # noqa: E731
    lower = lambda x, y: torch.round(8 * (tf32(x) @ tf32(y))).to(torch.int32)  # noqa: E731
    half = lambda x, y: torch.round(8 * (x.bfloat16() @ y.bfloat16()).float()).to(torch.int32)  # noqa: E731
    assert refused(references(function, *PRODUCT), lower, enough=5) == 5, "all but the rounded inputs, which are exact"
    assert refused(references(function, *PRODUCT, mode="high"), lower) == 0
    assert refused(references(function, *PRODUCT, mode="high"), half, enough=5) == 5


def test_a_mode_that_allows_a_lower_precision_excuses_nothing_where_eager_makes_no_use_of_it():
    function = lambda x, y: torch.where(x @ y > 0, x @ y, -0.1)  # noqa: E731
    off = lambda x, y: function(x, y) * 1.0003  # noqa: E731
    refs = references(function, *PRODUCT, mode="high", arithmetic=precision)  # CPUs know no TF32
    assert refused(refs, function) == 0 and refused(refs, off, enough=6) == 6


def test_a_convolution_may_take_tf32_where_eager_does():
    x, y = torch.randn(2, 8, 12, 12), torch.randn(8, 8, 3, 3)
    convolve = functional.conv2d
    function = lambda x, y: torch.round(8 * convolve(x, y)).to(torch.int32)  # noqa: E731
    other = lambda x, y: torch.round(8 * convolve(tf32(x * 0.7), tf32(y)) / 0.7).to(torch.int32)  # noqa: E731

    def passes(**options) -> bool:
        refs = references(function, x, y, **options)
        trial = next(iter(refs.trials(1)))
        error, text = check(z := other(*refs.inputs(trial.draw)), trial.expected[0])
        assert text is not None, "operands are rounded elsewhere"
        return refs.look_again(trial, 0, z, error) is not None

    assert passes() and not passes(mode="highest")
    assert not passes(arithmetic=precision), "as where cuDNN chooses an algorithm without TF32"


@pytest.mark.parametrize(
    ("mode", "convolution", "product"), [("default", True, False), ("high", True, True), ("highest", False, False)]
)
def test_each_product_moves_as_the_mode_lets_it(mode, convolution, product):
    x = torch.rand(64, 1, 1, 1, dtype=torch.float64)
    with Rounding(torch.float32, mode, 1):
        found = functional.conv2d(x, x[:1]), x[:, :, 0, 0] @ x[0, 0]
    exact = x * x[0], x[:, :, 0, 0] * x[0, 0]
    moved = [float((a / b - 1).abs().max()) > 1e-4 for a, b in zip(found, exact, strict=True)]
    assert moved == [convolution, product]


def test_a_result_that_may_jump_is_no_excuse_for_a_lower_precision():
    function = lambda x, y: torch.where(x @ y > 0, x @ y, -0.1)  # noqa: E731

    def lower(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x.bfloat16() @ y.bfloat16()).float()
        return torch.where(z > 0, z, -0.1)

    for mode, least in (("default", 5), ("high", 2)):  # eager itself is off by a quarter as much there
        refs = references(function, *PRODUCT, mode=mode)
        assert refused(refs, function) == 0 and refused(refs, lower, enough=least) == least


def test_an_element_next_to_a_threshold_may_jump_and_no_other():
    inputs = torch.randn(128, 100), torch.randn(100, 512)
    refs = references(lambda x, y: torch.round(x @ y) / 2, *inputs)
    trial = next(iter(refs.trials(1)))
    expected = trial.outputs[0]
    x, y = refs.inputs(trial.draw)
    exact = x.double() @ y.double()
    distance = (exact - exact.floor() - 0.5).abs()
    other = (torch.where(exact - exact.floor() < 0.5, exact.floor() + 1, exact.floor()) / 2).float()

    def verdict(at: torch.Tensor, factor: float = 1.0) -> bool:
        z = torch.where(at, other, expected.value) * factor
        error, text = check(z, expected)
        return text is None or refs.look_again(trial, 0, z, error) is not None

    assert verdict(distance == distance.min()), "one of 65,536 is within rounding of a threshold"
    assert not verdict(distance == distance.max())
    assert not verdict(distance < 0.001) and not verdict(distance == distance.min(), 1 + 1e-2)


def test_inputs_that_are_compared_as_they_are_are_not_moved():
    refs = references(lambda x, y: torch.relu(x).t() > y.abs().t(), *torch.randn(2, 128, 128))
    assert refused(refs, lambda x, y: torch.relu(x).t() > y.abs().t()) == 0
    assert refused(refs, lambda x, y: torch.relu(x).t() >= y.abs().t(), enough=3) == 3


def test_a_region_is_given_the_same_leave(tmp_path):
    spec = KernelSpec.from_function(lambda x, y: torch.round(8 * (x @ y)).to(torch.int32), PRODUCT)
    graph = capture_spec(spec)
    refs = References(spec, graph, torch.device("cpu"))
    program = Program.start(graph)
    last = RegionReference(refs, program, program.regions[-1], str(tmp_path))
    assert not may_jump(graph, program.regions[-1].ops) and may_jump(graph, graph.ops())
    y = last.expected[0].value
    assert last.look_again(0, y + 1, check(y + 1, last.expected[0])[0]) is None


def test_random_numbers_drawn_anew_explain_nothing_in_a_region(tmp_path):
    spec = KernelSpec.from_function(lambda x: torch.round(torch.dropout(8 * x.softmax(0), 0.5, True)), ROWS)
    graph = capture_spec(spec)
    program = Program.start(graph)
    program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    region = RegionReference(References(spec, graph, torch.device("cpu")), program, program.regions[0], str(tmp_path))
    (expected,) = region.expected
    assert torch.count_nonzero(expected.value) > 1
    y = torch.zeros_like(expected.value)
    assert region.look_again(0, y, check(y, expected)[0]) is None


def test_an_element_that_no_run_explains_is_refused():
    expected, eager = Expected(torch.tensor([1, 2, 3])), torch.tensor([1, 5, 3])
    runs = iter([torch.tensor([-1, 2, 3]), *[torch.tensor([1, 2, 3])] * 99])
    assert explained(torch.tensor([0, 5, 3]), expected, [eager], lambda: next(runs)), "between two runs"
    assert not explained(torch.tensor([1, 2, 4]), expected, [eager], lambda: torch.tensor([1, 2, 3]))


def test_what_eager_has_is_right_where_results_may_jump():
    value = torch.tensor([1.0, 2.0, 3.0])
    expected, eager = Expected(value, Error(1e-6, 1e-6)), torch.tensor([1.0, 2.0, 7.0])
    assert explained(eager.clone(), expected, [eager], lambda: value)
    assert not explained(torch.tensor([1.0, 7.0, 3.0]), expected, [eager], lambda: value)


def test_what_is_just_beyond_the_budget_is_not_kept_for_rounding_of_the_difference():
    """In bf16 a difference has three digits, fewer than the budget."""
    torch.manual_seed(0)
    value = 100 * torch.randn(64, 128).to(torch.bfloat16)
    for _ in range(8):
        expected = Expected(value, Error(float(torch.rand(())) / 4, 1.0, 1.0, 1.0))
        eager = (value.float() * (1 + torch.randn(64, 128))).to(torch.bfloat16)
        assert explained(eager.clone(), expected, [eager], None)


def next_below(x: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(x, torch.zeros_like(x))


def exact_quotients() -> tuple[torch.Tensor, torch.Tensor]:
    width = torch.arange(1, 17).float().reshape(16, 1) * 7
    return width * torch.arange(64).float(), width


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda x, y: torch.floor(x / y), lambda x, y: torch.floor(next_below(x / y))),
        (lambda x, y: torch.trunc(x / y), lambda x, y: torch.trunc(next_below(x / y))),
        (lambda x, y: (x / y).to(torch.int32), lambda x, y: next_below(x / y).to(torch.int32)),
        (lambda x, y: torch.remainder(x, y), lambda x, y: x - y * torch.floor(next_below(x / y))),
        (lambda x, y: torch.floor(torch.sqrt(x * x) / y), lambda x, y: torch.floor(next_below(x / y))),
    ],
)
def test_the_floor_of_an_exact_quotient_is_exact(function, wrong):
    """One ulp low, it is one less: no rounding of these operands gives that."""
    refs = references(function, *exact_quotients())
    inputs = exact_quotients()
    refs.inputs = lambda draw, near=None: inputs  # type: ignore[method-assign]
    trial = refs.make(refs._new_draw("given", None))
    assert trial is not None

    def passes(y: torch.Tensor) -> bool:
        error, text = check(y, trial.expected[0])
        return text is None or refs.look_again(trial, 0, y, error) is not None

    right, low = function(*inputs), wrong(*inputs)
    assert passes(right) and not passes(low)
    few = torch.rand(right.shape, generator=torch.Generator().manual_seed(0)) < 0.02
    assert bool((right != low)[few].any()) and not passes(torch.where(few, low, right)), "nor in a few places"


def test_a_product_before_a_quotient_may_still_be_rounded_in_another_order():
    function = lambda x, y: torch.floor((x @ y) / 0.25)  # noqa: E731
    refs = references(function, *PRODUCT)
    assert refused(refs, lambda x, y: torch.floor(split(x, y) / 0.25)) == 0
    assert refused(refs, lambda x, y: torch.floor(next_below(x @ y) / 0.25 - 0.01), enough=5) == 5


def test_a_product_that_is_added_at_once_may_keep_its_digits():
    """Hardware rounds x * y + z once, eager twice."""
    function = lambda x, y, z: torch.floor(x * y + z)  # noqa: E731
    inputs = torch.randint(-99, 99, (3, 64, 64)).float() / 10
    refs = references(function, *inputs)
    fused = lambda x, y, z: torch.floor((x.double() * y.double() + z.double()).float())  # noqa: E731
    assert refused(refs, fused) == 0
    assert refused(refs, lambda x, y, z: torch.floor(x * y + z - 1e-3), enough=5) == 5


def test_a_tensor_divided_by_a_number_is_divided():
    x = torch.rand(100)
    with Dividing():
        assert torch.equal(x / 3.0, x / torch.full((100,), 3.0)) and torch.equal(x / x, torch.ones(100))


@pytest.mark.parametrize(("count", "right"), [(2, True), (20, False)])
def test_a_few_rows_that_jump_as_a_whole_may_use_all_runs(count: int, right: bool) -> None:
    """As where a router chooses another expert: a row has many elements, and one threshold decides on all of them."""
    usual = torch.zeros(40, 64, dtype=torch.int64)
    other = usual.clone()
    other[:count] = 1
    runs = iter([*[usual] * 50, *[other] * 50])
    assert explained(other, Expected(usual), [usual], lambda: next(runs)) is right
