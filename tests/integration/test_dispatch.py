"""When a program runs in place of a module's own code, and when it does not."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from qimeng.integration.dispatch import Dispatch, FallbackWarning, attach, detach
from tests.integration.small_models import Block, variant

X = torch.randn(4, 8)
MASK = torch.rand(4, 8) > 0.5


@pytest.fixture
def block() -> Block:
    made = Block().eval()
    assert attach(made, variant(made, X, mask=MASK))
    return made


def counts(block: Block) -> dict[str, int]:
    dispatch = block.__dict__["forward"]
    assert isinstance(dispatch, Dispatch)
    return dict(dispatch.calls)


def own(block: Block, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


@torch.no_grad()
def test_the_program_runs_for_calls_like_the_example(block: Block) -> None:
    for x in (X, X * 2 + 1):
        assert torch.allclose(block(x, mask=MASK), own(block, x, mask=MASK))
    assert counts(block) == {"program": 2}


CHANGES: dict[str, tuple[str, Callable[[Block], Any]]] = {
    "shapes": ("shapes", lambda b: b(X[:2], mask=MASK[:2])),
    "no_mask": ("shapes", lambda b: b(X)),
    "scale": ("shapes", lambda b: b(X, 2.0, mask=MASK)),
    "dtype": ("shapes", lambda b: b.double()(X.double(), mask=MASK)),
    "training": ("mode", lambda b: b.train()(X, mask=MASK)),
    "training_inside": ("mode", lambda b: b.norm.train() and b(X, mask=MASK)),
    "hook": ("hooks", lambda b: b.norm.register_forward_hook(lambda m, i, o: o * 2) and b(X, mask=MASK)),
    "submodule": ("hooks", lambda b: setattr(b, "norm", torch.nn.Identity()) or b(X, mask=MASK)),
    "attribute": ("attributes", lambda b: setattr(b.norm, "eps", 0.1) or b(X, mask=MASK)),
    "buffer": ("tensors", lambda b: b.steps.add_(1) is not None and b(X, mask=MASK)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_other_calls_run_the_module_s_own_code_and_say_so_once(block: Block, name: str) -> None:
    reason, change = CHANGES[name]
    with pytest.warns(FallbackWarning, match="Block runs its own code"):
        found = change(block)
    assert counts(block) == {reason: 1}
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change(block)
    assert counts(block)[reason] == 2


@torch.no_grad()
def test_hooks_around_every_module_are_called(block: Block) -> None:
    handle = register_module_forward_hook(lambda module, given, output: output * 2)
    try:
        with pytest.warns(FallbackWarning, match="hooks"):
            found = block(X, mask=MASK)
    finally:
        handle.remove()
    assert not torch.allclose(found, block(X, mask=MASK)) and counts(block) == {"hooks": 1, "program": 1}


def test_those_who_look_at_its_forward_see_the_module_s_own(block: Block) -> None:
    assert list(inspect.signature(block.forward).parameters) == list(inspect.signature(Block().forward).parameters)
    for made in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert inspect.signature(made.forward) == inspect.signature(block.forward)


def test_the_module_s_own_code_is_exported(block: Block) -> None:
    with pytest.warns(FallbackWarning, match="traced by another tool"), torch.no_grad():
        exported = torch.export.export(block, (X,), {"mask": MASK})
        assert torch.allclose(exported.module()(X, mask=MASK), own(block, X, mask=MASK))


@torch.no_grad()
def test_under_autocast_the_module_s_own_code_runs(block: Block) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(FallbackWarning, match="autocast"):
        block(X, mask=MASK)
    assert counts(block) == {"autocast": 1}


def test_gradients_are_those_of_the_module(block: Block) -> None:
    x = X.clone().requires_grad_()
    block(x, mask=MASK).square().sum().backward()
    grads = [t.grad.clone() for t in (x, *block.parameters()) if t.grad is not None]
    x.grad = None
    block.zero_grad()
    own(block, x, mask=MASK).square().sum().backward()
    assert len(grads) == 5
    assert all(
        torch.equal(a, t.grad) for a, t in zip(grads, (x, *block.parameters()), strict=True) if t.grad is not None
    )
    assert counts(block) == {"gradients": 1}


@torch.no_grad()
def test_new_parameters_are_taken_up(block: Block) -> None:
    block.load_state_dict({k: v * 3 for k, v in block.state_dict().items()})
    assert torch.allclose(block(X, mask=MASK), own(block, X, mask=MASK))
    block.linear.weight = torch.nn.Parameter(torch.randn(8, 8))
    assert torch.allclose(block(X, mask=MASK), own(block, X, mask=MASK))
    block.double()
    block.float()
    assert torch.allclose(block(X, mask=MASK), own(block, X, mask=MASK))
    assert counts(block) == {"program": 3}


@torch.no_grad()
def test_a_program_whose_tensors_do_not_fit_is_not_attached(block: Block) -> None:
    wider = Block(16).eval()
    assert not attach(wider, variant(Block().eval(), X, mask=MASK))
    assert "forward" not in wider.__dict__
    moved = Block().eval()
    moved.steps.add_(1)  # its values are part of the program
    assert not attach(moved, variant(Block().eval(), X, mask=MASK))


@torch.no_grad()
@pytest.mark.parametrize("way", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))], ids=["copy", "pickle"])
def test_copies_compute_with_tensors_of_their_own(block: Block, way: Callable[[Block], Block]) -> None:
    block(X, mask=MASK)
    twin = way(block)
    twin.linear.weight.zero_()
    assert torch.allclose(twin(X, mask=MASK), own(twin, X, mask=MASK))
    assert torch.allclose(block(X, mask=MASK), own(block, X, mask=MASK))
    assert counts(twin)["program"] == 2


@torch.no_grad()
def test_transforms_of_functions_see_the_module_s_own_code(block: Block) -> None:
    xs = torch.randn(3, 4, 8)
    with pytest.warns(FallbackWarning, match="traced by another tool"):
        found = torch.func.vmap(lambda x: block(x, mask=MASK))(xs)
    assert torch.allclose(found, torch.stack([own(block, x, mask=MASK) for x in xs]), atol=1e-6)
    assert counts(block) == {"traced": 1}


@torch.no_grad()
def test_detached_modules_have_their_forward_back(block: Block) -> None:
    detach(block)
    assert "forward" not in block.__dict__
    other = Block().eval()
    other.forward = lambda x: x + 1  # type: ignore[method-assign]
    mine = other.forward
    attach(other, variant(Block().eval(), X))
    with pytest.warns(FallbackWarning):  # what it falls back to is its own forward
        assert torch.equal(other.forward(X.double()), X.double() + 1)
    detach(other)
    assert other.forward is mine
