"""Files of computations that stay on PyTorch compute what the reference does."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree

from qimeng import KernelSpec
from qimeng.program.opaque import opaque_program
from qimeng.program.program import load_source

HEAD = "import torch\nfrom collections import namedtuple\nOut = namedtuple('Out', 'y n')\n"

COMPLEX = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.rand(6, 4)))
        self.register_buffer("wide", torch.rand(8, dtype=torch.float64))

    def forward(self, x):
        z = torch.view_as_complex(x.reshape(2, 6, 4, 2)) * self.turns
        return Out(torch.view_as_real(z).flatten(2), self.wide)

def get_inputs():
    return [torch.randn(2, 6, 8)]

def get_init_inputs():
    return []
"""
MIXED = """
class Model(torch.nn.Module):
    def __init__(self, width):
        super(Model, self).__init__()
        self.a = torch.nn.Linear(width, width)
        self.b = torch.nn.Linear(width, width).to(torch.bfloat16)
        self.a2 = self.a
        self.noise = torch.randn(width)  # in no state_dict

    def forward(self, x, scale: float = 2.0):
        return Out(self.b((self.a2(x) + self.noise.to(x.dtype)).to(torch.bfloat16)) * scale, 3)

def get_inputs():
    return [torch.randn(4, 16)]

def get_init_inputs():
    return [16]
"""
BUILT = """
class Model(torch.nn.Module):
    def __init__(self, sizes, bias=True, table=None):
        super().__init__()
        self.l = torch.nn.Linear(*sizes, bias=bias)
        self.k = (table or {"a": {"k": 1}})["a"]["k"]

    def forward(self, x):
        return torch.sort(self.l(x), -1).values * self.k

def get_inputs():
    return [torch.randn(4, 16)]

def get_init_inputs():
    return %s
"""
FACTORY = """
def Model(width, bias=True):
    return torch.nn.Linear(width, width, bias=bias)

def get_inputs():
    return [torch.randn(4, 16)]

def get_init_inputs():
    return {"width": 16, "bias": False}
"""
CASES = {
    "complex": COMPLEX,
    "mixed": MIXED,
    "keywords": BUILT % '{"sizes": (16, 8), "bias": False, "table": {"a": {"k": 3}}}',
    "kernelbook": BUILT % '[[(16, 8)], {"bias": False, "table": {"a": {"k": 3}}}]',
    "positions": BUILT % '[(16, 8), False, {"a": {"k": 3}}]',
    "factory": FACTORY,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_the_file_computes_what_the_reference_does(name: str, dtype: str, tmp_path: Path):
    spec = KernelSpec.from_source(HEAD + textwrap.dedent(CASES[name]), dtype=dtype)
    if name == "complex" and dtype == "bfloat16":
        pytest.skip("PyTorch has no complex numbers of two bfloat16")
    reference, inputs = spec.module(), spec.inputs(0)
    source = opaque_program(spec).source
    before = torch.random.get_rng_state()
    program = load_source(source, f"opaque_{name}_{dtype}", str(tmp_path)).Model()
    assert torch.equal(torch.random.get_rng_state(), before), "making it draws nothing from the user's generator"
    state = reference.state_dict()
    assert {k: v.dtype for k, v in program.state_dict().items()} == {k: v.dtype for k, v in state.items()}
    program.load_state_dict(state)
    with torch.no_grad():
        expected, found = reference(*inputs), program(*inputs)
    assert type(found).__name__ == type(expected).__name__
    pairs = list(zip(_pytree.tree_leaves(found), _pytree.tree_leaves(expected), strict=True))
    assert all(torch.equal(a, b) and a.dtype is b.dtype if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


def test_a_module_with_an_attribute_called_function_is_no_function():
    module = torch.nn.Linear(3, 3)
    module.function = torch.nn.ReLU()
    assert "class Model(Linear)" in opaque_program(KernelSpec.of(module, (torch.rand(2, 3),))).source


@pytest.mark.parametrize("module", [torch.nn.EmbeddingBag(9, 4), torch.nn.Sequential(torch.nn.LSTM(3, 4))])
def test_a_module_with_arguments_is_made_without_them(module: torch.nn.Module, tmp_path: Path):
    x = torch.tensor([[1, 2], [3, 8]]) if isinstance(module, torch.nn.EmbeddingBag) else torch.rand(2, 3)
    source = opaque_program(KernelSpec.of(module, (x,))).source
    model = load_source(source, f"opaque_{type(module).__name__}", str(tmp_path)).Model()
    assert not any(t.any() for t in model.state_dict().values())
    model.load_state_dict(module.state_dict())
    assert all(map(torch.equal, _pytree.tree_leaves(model(x)), _pytree.tree_leaves(module(x))))


class Elsewhere(torch.nn.Identity):
    __module__ = "__main__"


@pytest.mark.parametrize(("part", "reason"), [(Elsewhere(), "no file can import its Elsewhere"), (lambda: 0, "pickle")])
def test_a_module_that_no_file_can_make_says_so(part: object, reason: str, tmp_path: Path):
    module = torch.nn.Sequential()
    module.part = part
    source = opaque_program(KernelSpec.of(module, (torch.rand(2),))).source
    with pytest.raises(ImportError, match=f"use the module you gave: Sequential .*{reason}"):
        load_source(source, f"opaque_{len(source)}", str(tmp_path)).Model()
