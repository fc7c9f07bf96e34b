"""A module that only checks values is captured around its checks, and its program raises the module's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qimeng.graph.capture import CaptureError
from qimeng.graph.checks import checks_of
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.rand(8, 6)


class Odd(Exception):
    """No class of Python's own."""


class Checked(torch.nn.Module):
    """Checks its input, and a value on the way in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = torch.nn.Linear(6, 6), Inner()

    def forward(self, x: torch.Tensor) -> Any:
        if (x.abs() > 100).any():
            raise ValueError("too large")
        return {"y": self.inner(self.linear(x)).softmax(-1), "n": 3}


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all(), "not finite"
        return torch.nn.functional.gelu(x)


def own_error(x: torch.Tensor) -> torch.Tensor:
    if not bool((x >= 0).all().item()):
        raise Odd("negative")
    return x.sqrt() * 2


def by_pytorch(x: torch.Tensor) -> torch.Tensor:
    torch._assert((x < 5).all(), "five or more")
    return x.exp() * 2


def compared(x: torch.Tensor) -> torch.Tensor:
    if not torch.allclose(x, x.flip(0).flip(0)):
        raise ValueError("never")
    assert not torch.equal(x, -x), "zeros"
    return x.exp() * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return x.exp() if x.sum() > 0 else x


def branch_that_fails(x: torch.Tensor) -> torch.Tensor:
    return x.exp() if x.sum() > 0 else x.view(7)  # no statement raises: other values may need another shape


def both(x: torch.Tensor) -> torch.Tensor:
    if (x > 5).any():
        raise ValueError("five or more")
    return branches(x)


def model_of(thing: Any) -> Any:
    return Program.start(capture_spec(KernelSpec.of(thing, (X,)))).load().Model()


def test_a_module_is_captured_around_its_checks() -> None:
    module = Checked()
    program = Program.start(capture_spec(KernelSpec.of(module, (X,))))
    assert {"linear", "gelu", "_softmax", "torch.check"} <= {r.label() for r in program.regions}
    model = program.load().Model()
    model.load_state_dict(module.state_dict())
    torch.testing.assert_close(model(X), module(X))
    with pytest.raises(ValueError, match="^too large$"):
        model(X * 1000)
    with pytest.raises(AssertionError, match="^not finite$"):
        model(X * torch.nan)


@pytest.mark.parametrize(
    ("function", "wrong", "error", "words"),
    [
        (own_error, -X, RuntimeError, "Odd: negative"),
        (by_pytorch, X + 9, AssertionError, "five or more"),
        (compared, X * 0, AssertionError, "zeros"),
        (compared, X * torch.nan, ValueError, "never"),
    ],
)
def test_errors_of_functions_stay(
    function: Callable[..., Any], wrong: torch.Tensor, error: type[Exception], words: str
) -> None:
    model = model_of(function)
    torch.testing.assert_close(model(X), function(X))
    with pytest.raises(error, match=words):
        model(wrong)


def gaussian(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gaussian_nll_loss(x.sin(), x.cos(), x)


@pytest.mark.parametrize("computation", [gaussian, torch.nn.GaussianNLLLoss()])
def test_checks_in_functions_and_modules_of_pytorch_are_checks(computation: Callable[..., Any]) -> None:
    variance = X + 0.1
    before = () if computation is gaussian else (X.sin(), X.cos())
    model = Program.start(capture_spec(KernelSpec.of(computation, (*before, variance)))).load().Model()
    torch.testing.assert_close(model(*before, variance), computation(*before, variance))
    with pytest.raises(ValueError, match="^var has negative entry"):
        model(*before, -variance)


@pytest.mark.parametrize("function", [branches, branch_that_fails, both])
def test_a_branch_that_computes_something_else_is_no_check(function: Callable[..., Any]) -> None:
    assert len(checks_of(KernelSpec.of(function, (X,)))) == (function is both)
    with pytest.raises(CaptureError, match="depends on the values of a tensor .*line .*submodule of its own"):
        capture_spec(KernelSpec.of(function, (X,)))


def test_a_place_that_is_passed_with_both_values_is_no_check() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for row in x:
            if row.sum() > X.sum(1).median():
                continue
            if row.sum() > 100:
                raise ValueError("large")
        return x * 2

    found = checks_of(KernelSpec.of(function, (X,)))
    assert [c.message for c in found.values()] == ["large"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x[x > 0.5], "returns a number, or a tensor of a size, that depends on the values"),
        (lambda x: (x * 2).nonzero(), "returns a number, or a tensor of a size, that depends on the values"),
        (torch.nn.BatchNorm1d(6, momentum=None), r"depends on the values .*batchnorm.py, line \d+"),
        (lambda x: torch.from_numpy(x.numpy() * 2), r"leaves PyTorch, for NumPy .*test_checks.py, line \d+"),
    ],
)
def test_what_cannot_be_a_graph_is_said_with_what_to_do(function: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture_spec(KernelSpec.of(function, (X,)))


class Halved(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 1:
            x = x * 0.5
        return x


@pytest.mark.timeout(60)
def test_a_loop_that_is_not_entered_on_the_examples_is_no_check_and_its_trial_ends() -> None:
    module = torch.nn.Sequential(torch.nn.Softmax(-1), Halved(), torch.nn.GELU())
    spec = KernelSpec.of(module, (X,))
    assert not checks_of(spec)
    model = Program.start(capture_spec(spec)).load().Model()
    assert torch.equal(model(X), module(X))


def require(holds: torch.Tensor, words: str) -> None:
    if not bool(holds):
        raise ValueError(words)


def in_range(x: torch.Tensor) -> torch.Tensor:
    require((x >= 0).all(), "negative")
    require((x <= 1).all(), "above one")
    return x.sqrt() * 2


def test_code_that_has_run_often_is_captured_around_its_checks_and_each_keeps_its_words() -> None:
    for _ in range(64):
        in_range(X)  # Python now executes the calls by other instructions
    spec = KernelSpec.of(in_range, (X,))
    assert len(checks_of(spec)) == 2
    model = Program.start(capture_spec(spec)).load().Model()
    assert torch.equal(model(X), in_range(X))
    for wrong, words in ((X - 2, "negative"), (X + 2, "above one")):
        with pytest.raises(ValueError, match=words):
            model(wrong)
