"""Programs called in surroundings where their module would do something else: one clear error, never a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.errors import SpecError
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.randn(6, 8)


@pytest.fixture(scope="module")
def model() -> Any:
    return Program.start(capture_spec(KernelSpec.of(torch.nn.Linear(8, 8), (X,)))).load().Model()


def test_autocast_is_refused_and_may_be_left(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="made for calls outside of autocast: .*enabled=False"):
            model(X)
        with torch.autocast("cpu", enabled=False):
            assert model(X).dtype is torch.float32


def test_autocast_inside_the_module_is_part_of_it() -> None:
    class Inside(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).relu()

    module = Inside(8, 8)
    model = Program.start(capture_spec(KernelSpec.of(module, (X,)))).load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(model(X), module(X)) and model(X).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_operators_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="torch.jit.trace records no kernels"):
        torch.jit.trace(model, X)


def test_tensors_without_memory_of_their_own_are_refused(model: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Named(torch.Tensor):
        pass

    with FakeTensorMode() as mode, pytest.raises(ValueError, match="memory of its own, got a FakeTensor"):
        model(mode.from_tensor(X))
    torch.testing.assert_close(model(X.as_subclass(Named)), model(X))


def test_transforms_of_functions_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="torch.func.vmap does not .*: apply it to the module"):
        torch.func.vmap(model)(X.expand(3, 6, 8))


def test_tensors_without_values_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="input 0: expected on cpu, got meta; give a tensor with values"):
        model(X.to("meta"))
    function = Program.start(capture_spec(KernelSpec.of(torch.sin, (X,)))).load().Model()
    assert function(X.to("meta")).is_meta, "PyTorch's own operators need none"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(model: Any, layout: torch.layout) -> None:
    with pytest.raises(ValueError, match="got a nested tensor; .* take the module"):
        model(torch.nested.nested_tensor([X], layout=layout))


def test_another_shape_is_refused_with_what_to_do(model: Any) -> None:
    with pytest.raises(ValueError, match=r"got shape \(7, 8\), .*make a program .*or use qimeng.optimize"):
        model(torch.randn(7, 8))


def test_a_spec_is_made_outside_of_autocast_and_with_the_usual_default_dtype() -> None:
    spec = KernelSpec.of(torch.nn.Linear(8, 8), (X,))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SpecError, match="autocast is on for cpu"):
        spec.check()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(SpecError, match="the default dtype is torch.float64"):
            spec.check()
    finally:
        torch.set_default_dtype(torch.float32)
    spec.check()


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(SpecError, match="weight is on the meta device and has no values: load the weights first"):
        KernelSpec.of(torch.nn.Linear(8, 8, device="meta"), (X,))


def test_inputs_whose_sign_pytorch_holds_back_keep_their_strides() -> None:
    held = torch.randn(4, dtype=torch.cfloat).conj().imag
    assert held.is_neg() and held.stride() == (2,)
    model = Program.start(capture_spec(KernelSpec.of(torch.sin, (held,)))).load().Model()
    torch.testing.assert_close(model(held), held.sin())
