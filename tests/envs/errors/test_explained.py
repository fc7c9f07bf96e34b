"""A few steep elements of a large output: rounding explains these, and nothing else that is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from qimeng.envs.errors import discrete, error_budget
from qimeng.envs.errors import explained as module
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.discrete import Rounding
from qimeng.envs.errors.error_budget import Expected, check
from qimeng.envs.errors.explained import explained
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.graph.region import merge
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

pytestmark = pytest.mark.usefixtures("as_for_a_larger_output")

SIZE, STEEP = 1 << 14, 1234
FLOOR = error_budget.floor(torch.float32, error_budget.roundings(1), Error())
Tensors = tuple[torch.Tensor, torch.Tensor]


def steep(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """1 where `y` is negative; where it is exp(x) but for its last digit, any value between -1 and 1."""
    return torch.tanh((torch.exp(x) - y) * 1e7)


@pytest.fixture(scope="module")
def given() -> Tensors:
    x, y = torch.linspace(-2, 2, SIZE), -torch.linspace(0.1, 1, SIZE)
    x[STEEP] = 2.0
    y[STEEP] = torch.exp(x[STEEP].double()).float()
    return x, y


@pytest.fixture(scope="module")
def expected(given: Tensors) -> Expected:
    return Expected(steep(*(x.double() for x in given)).float(), FLOOR)


def changed(expected: Expected, place: int, value: float) -> torch.Tensor:
    y = expected.value.clone()
    y[place] = value
    return y


def other(expected: Expected) -> torch.Tensor:
    """What an exp that is off by an ulp gives at the steep element."""
    return changed(expected, STEEP, -0.9 if expected.value[STEEP] > 0 else 0.9)


@pytest.fixture
def as_for_a_larger_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of 2^20 elements or more is said of fewer here, with as few runs as for 2^27 elements."""
    monkeypatch.setattr(module, "LARGE", SIZE)
    monkeypatch.setattr(module, "STEEP_ELEMENTS", 0)


class Runs:
    """Float64 runs that move operands by roundings, and how many there were."""

    def __init__(self, given: Tensors):
        self.given, self.count = tuple(x.double() for x in given), 0

    def __call__(self) -> torch.Tensor:
        self.count += 1
        with Rounding(torch.float32, "default", 1):
            return steep(*self.given)


def test_a_steep_element_may_have_what_rounding_gives_and_nothing_beyond(given, expected):
    judged = partial(explained, expected=expected, eager=[expected.value], jumps=False)
    y, runs = other(expected), Runs(given)
    assert check(y, expected)[1] is not None and judged(y, run=runs) and 1 <= runs.count <= 8
    runs = Runs(given)
    assert not judged(changed(expected, STEEP, 1.1), run=runs) and runs.count == 8, "no more for a large output"
    assert not judged(changed(expected, STEEP, torch.nan), run=Runs(given))
    assert not judged(y, run=None)


@pytest.mark.parametrize("value", [0.0, 0.999])
def test_one_wrong_element_where_the_function_is_not_steep_is_refused(given, expected, value):
    assert not explained(changed(expected, -1, value), expected, [expected.value], Runs(given), jumps=False)


def test_nothing_is_run_where_many_elements_are_wrong_or_few_of_a_small_output(given, expected):
    runs = Runs(given)
    many = torch.where(torch.arange(SIZE) < 2, 0.5, other(expected))
    assert not explained(many, expected, (runs() for _ in range(1)), runs, jumps=False)
    small = replace(expected, value=expected.value[: SIZE // 2].clone())
    assert not explained(other(small), small, (runs() for _ in range(1)), runs, jumps=False)
    assert not explained(other(expected) * (1 + 1e-5), expected, (runs() for _ in range(1)), runs, jumps=False)
    assert runs.count == 0


def test_a_steep_element_within_the_maximum_may_still_make_the_root_mean_square_too_large(given, expected):
    wide = replace(expected, floor=replace(FLOOR, max=3.0, across=3.0))
    y = other(wide)
    error, text = check(y, wide)
    assert text is not None and error.max < wide.budget.max and error.rms > wide.budget.rms
    assert explained(y, wide, [wide.value], Runs(given), jumps=False)
    assert not explained(changed(wide, -1, 0.0), wide, [wide.value], Runs(given), jumps=False)


def test_any_strides_and_dtypes_will_do(given, expected):
    def folded(x: torch.Tensor) -> torch.Tensor:
        return x.view(128, 128).t()

    wide = Expected(folded(expected.value), FLOOR)
    assert explained(folded(other(expected)), wide, [folded(expected.value)], lambda: folded(Runs(given)()), False)


def test_a_program_and_a_region_are_given_the_leave(given, expected, tmp_path, monkeypatch):
    spec = KernelSpec.from_function(steep, given)
    graph = capture_spec(spec)
    refs = References(spec, graph, torch.device("cpu"))
    refs.inputs = lambda draw, near=None: given  # type: ignore[method-assign]
    trial = refs.make(refs._new_draw("given", None))
    assert trial is not None and torch.equal(trial.outputs[0].value, expected.value)
    trial.outputs[0] = expected  # as if eager were not off at the steep element
    program = Program.start(graph)
    program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    region = RegionReference(refs, program, program.regions[0], str(tmp_path))
    region.expected = [expected]
    for place, value, right in ((STEEP, float(other(expected)[STEEP]), True), (STEEP, 1.1, False), (-1, 0.0, False)):
        y = changed(expected, place, value)
        error, text = check(y, expected)
        assert text is not None
        assert (refs.look_again(trial, 0, y, error) is not None) is right
        assert (region.look_again(0, y, error) is not None) is right

    def fails(*arguments: object) -> None:
        raise torch.OutOfMemoryError("8 GiB")

    monkeypatch.setattr(discrete, "Rounding", fails)
    y = other(expected)
    error, _ = check(y, expected)
    assert refs.look_again(trial, 0, y, error) is None and region.look_again(0, y, error) is None
