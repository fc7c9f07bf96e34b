"""Programs as a user calls them: keywords, defaults, gradients, state of any name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from qimeng import KernelSpec, SpecError, plan_and_code
from qimeng.program.face import OUTPUT_CLASS
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec.call import Call
from qimeng.testing import FakeCoder, FakeEvaluator

X, MASK = torch.randn(4, 8), torch.rand(4, 8) > 0.5


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0, *, bias: Any = None, **more: Any
    ) -> torch.Tensor:
        y = torch.relu(self.map(x)) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        y = y if bias is None else y + bias
        return y + more["extra"] if "extra" in more else y


def program_of(spec: KernelSpec) -> torch.nn.Module:
    model = load_source(Program.start(capture_spec(spec)).source).Model()
    model.load_state_dict(spec.module().state_dict())
    return model


CALLS: list[tuple[tuple[Any, ...], dict[str, Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = [
    ((X,), {}, [((), {"x": X}), ((X, None), {}), ((X,), {"mask": None, "scale": 2.0}), ((X,), {"bias": None})]),
    ((X, MASK), {}, [((X,), {"mask": MASK}), ((), {"mask": MASK, "x": X}), ((X, MASK, 2.0), {})]),
    ((X,), {"mask": MASK}, [((X, MASK), {}), ((), {"mask": MASK, "x": X})]),
    ((), {"x": X, "scale": 3.0}, [((X, None, 3.0), {}), ((X,), {"scale": 3.0, "mask": None})]),
    ((X,), {"bias": X}, [((X,), {"bias": X}), ((X, None, 2.0), {"bias": X}), ((), {"x": X, "bias": X})]),
    ((X,), {"extra": X, "bias": X}, [((X,), {"extra": X, "bias": X}), ((X, None), {"bias": X, "extra": X})]),
]


@pytest.mark.parametrize(("args", "kwargs", "calls"), CALLS)
def test_a_call_with_keywords_works_as_the_modules_does(args: Any, kwargs: Any, calls: Any):
    module = Masked()
    spec = KernelSpec.from_module(module, args, kwargs=kwargs)
    program = program_of(spec)
    with torch.no_grad():
        expected = module(*args, **kwargs)
        for reference in (spec.module(), KernelSpec.from_bytes(spec.to_bytes()).module()):
            assert torch.equal(reference(*spec_inputs(spec, args, kwargs)), expected)
        for positional, named in [(args, kwargs), *calls]:
            assert torch.equal(program(*positional, **named), expected)
            assert torch.equal(spec.module()(*positional, **named), expected), "what a result left on PyTorch is"


def spec_inputs(spec: KernelSpec, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """`args` and `kwargs` by position, in the order of the spec's inputs."""
    names = spec.call(len(spec.inputs(0))).names
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return tuple(given.get(n, {"mask": None, "scale": 2.0}.get(n)) for n in names)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((X,), {"y": X}, "input y: made for no input of that name"),
        ((X,), {"x": X}, "input x: given twice"),
        ((X,), {"scale": 3.0}, "input scale: made for 2.0, got 3.0"),
        ((X, MASK), {}, "input mask: made for None"),
        ((), {}, "made for 1 inputs, got no x"),
        ((X, None, 2.0, None, None), {}, "made for 1 inputs, got 5"),
    ],
)
def test_a_call_that_it_was_not_made_for_is_a_clear_error(args: Any, kwargs: Any, words: str):
    with pytest.raises(ValueError, match=words):
        program_of(KernelSpec.from_module(Masked(), (X,)))(*args, **kwargs)


def test_functions_take_keywords_and_a_dict_stands_for_them():
    def scaled(x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * by)

    spec = KernelSpec.from_function(scaled, {"by": X, "x": X})
    assert spec.call(2) == Call(("x", "by"))
    program = program_of(spec)
    assert torch.equal(program(X, by=X), scaled(X, by=X)) and torch.equal(program(X, X), scaled(X, by=X))
    result = plan_and_code(
        scaled, (X,), kwargs={"by": X}, evaluator=FakeEvaluator(), coder=FakeCoder(), planner="random"
    )
    assert torch.equal(result.module(x=X, by=X), scaled(X, by=X))
    with pytest.raises(SpecError, match="do not fit scaled: missing a required argument: 'by'"):
        KernelSpec.from_function(scaled, (), kwargs={"x": X})
    with pytest.raises(SpecError, match="kwargs are for a module or a function"):
        KernelSpec.of("no.py", kwargs={"x": X})


def test_inputs_without_names_go_by_position():
    program = program_of(KernelSpec.from_function(lambda *xs: xs[0] + xs[1], (X, X)))
    assert torch.equal(program(X, X), X + X)
    with pytest.raises(ValueError, match="input x: made for no input of that name"):
        program(X, x=X)
    with pytest.raises(ValueError, match=r"made for 2 inputs, got no xs\[1\]"):
        program(X)


def test_keywords_beside_any_number_of_positions():
    def added(
        x: torch.Tensor, *rest: torch.Tensor, mask: torch.Tensor, scale: float = 2.0, **more: Any
    ) -> torch.Tensor:
        return (sum(rest, x) * scale).masked_fill(mask, 0.0) + more["extra"]

    program = program_of(KernelSpec.from_function(added, (X, X, X), kwargs={"mask": MASK, "extra": X}))
    assert torch.equal(program(X, X, X, extra=X, mask=MASK), added(X, X, X, mask=MASK, extra=X))
    with pytest.raises(ValueError, match="input scale: made for 2.0, got 3.0"):
        program(X, X, X, mask=MASK, extra=X, scale=3.0)


class Hooked(Masked):
    """Its hooks see keywords, and change one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _, args, named: (args, {**named, "scale": 3.0}), with_kwargs=True)
        self.register_forward_hook(lambda _, args, named, y: y * len(named), with_kwargs=True)


@pytest.mark.parametrize(("args", "kwargs"), [((X,), {"mask": MASK}), ((), {"mask": MASK, "x": X, "bias": X})])
def test_hooks_see_the_keywords_of_the_call(args: Any, kwargs: Any):
    module = Hooked()
    spec = KernelSpec.from_module(module, args, kwargs=kwargs)
    program = program_of(spec)
    with torch.no_grad():
        expected = module(*args, **kwargs)
        assert torch.equal(program(*args, **kwargs), expected)
        assert torch.equal(spec.module()(*args, **kwargs), expected)
        assert torch.equal(module(*args, **kwargs), expected), "the module's own hooks stay"


def skip(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.softmax(x * 2, -1), x], 1)


def test_no_part_of_a_gradient_is_handed_out():
    program = program_of(KernelSpec.from_function(skip, (X,)))
    learned = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"computes no gradients: call it under torch.no_grad\(\)"):
        program(learned)
    with pytest.raises(RuntimeError, match="computes no gradients"):
        torch.func.grad(lambda x: program(x).sum())(X)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="computes no gradients"):
        program(forward_ad.make_dual(X, X))
    with torch.no_grad():
        assert torch.equal(program(learned), skip(X))
    assert torch.equal(program(learned.detach()), skip(X)) and not program(X).requires_grad


def test_parameters_of_a_program_are_frozen_and_thawed_ones_are_refused():
    program = program_of(KernelSpec.from_module(Masked(), (X,)))
    assert not any(p.requires_grad for p in program.parameters()) and not program(X).requires_grad
    program.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model.requires_grad_\(False\)"):
        program(X)
    with torch.inference_mode():
        program(X)


NAMES = (
    "_prepared _fits _qimeng_prepared _qimeng_fits device args kwargs t1 a0 _check key value self model module _STATE "
    "_NAMES old0 prepared leaves structure torch triton __secret names _check_state"
).split()


class Named(torch.nn.Module):
    """State with every name that the text of a program uses, and with Python's keywords; one that is updated."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(NAMES):
            self.register_parameter(name, torch.nn.Parameter(torch.full((8,), 1.0 + number)))
            self.register_buffer(f"{name}_", torch.full((8,), 0.5 + number))
        self.register_buffer("_Model__secret", torch.full((8,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        held["_STATE_"].mul_(1.5)
        for number, name in enumerate(held):
            x = x + held[name] * (1 + number)
        return torch.relu(x)


def test_state_may_have_any_name():
    module = Named()
    spec = KernelSpec.from_module(module, (X,))
    program = program_of(spec)
    assert program.state_dict().keys() == module.state_dict().keys()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(program(X), module(X))
        module._parameters["_fits"].mul_(2)
        program.load_state_dict(module.state_dict())
        torch.testing.assert_close(program(X), module(X))
    program.double()
    with pytest.raises(ValueError, match="made for shape"):
        program(X)


def test_a_class_whose_file_may_not_be_read_is_made_anew() -> None:
    """In a sandbox the file of the user's class is found, and opening it is refused."""

    class Refused:
        def __getattr__(self, name: str) -> None:
            raise PermissionError(13, "Permission denied", name)

    space: dict[str, Any] = {}
    exec(OUTPUT_CLASS, space)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "refused", Refused())
        made = space["_output_class"]("refused", "Out", ("image", "mu"), "named")
    assert made._fields == ("image", "mu") and made.__module__ == "refused"
