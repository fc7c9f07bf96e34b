"""`ModelNew` as a function: what it computes is what the class did, its text is one that a kernel may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.envs.screening.allowed_text import violations
from qimeng.service.model_class import LAYERS, Original, Untranslated, as_function

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"


class Net(torch.nn.Module):
    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 3)
        self.norm = torch.nn.LayerNorm(3, eps=1e-3)
        self.scale = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("table", torch.rand(3))
        self.act = torch.nn.LeakyReLU(slope)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.linear(x))) * self.scale + y * self.table


def translated(text: str, **changes: Any) -> tuple[str, Original]:
    torch.manual_seed(0)
    module = Net(4, 0.3)
    keys = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    state = {key: f"s{number}" for number, key in enumerate(keys)}
    fields: dict[str, Any] = {
        "module": module,
        "arguments": (4, 0.3),
        "keywords": {},
        "state": state,
        "inputs": ("x", "y"),
        "single": True,
    }
    original = Original(**{**fields, **changes})
    return as_function(HEAD + text, "ModelNew", "entry", ["x", "y", *state.values()], original), original


def holds(text: str) -> None:
    """The function of the translated text computes what the module does, and does what a kernel's text may do."""
    written, original = translated(text)
    assert violations(written, "torch") == ()
    space: dict[str, Any] = {}
    exec(written, space)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    tensors = {**dict(original.module.named_parameters()), **dict(original.module.named_buffers())}
    (found,) = space["entry"](x, y, *tensors.values())
    torch.testing.assert_close(found, original.module(x, y))


def test_tensors_of_layers_and_settings_are_the_references() -> None:
    holds("""
def leaky(v, slope):
    return torch.where(v > 0, v, slope * v)

class ModelNew(nn.Module):
    eps = 1e-3

    def __init__(self, width, slope=0.1):
        super(ModelNew, self).__init__()
        self.linear = nn.Linear(width, 3)
        self.norm = nn.LayerNorm(3)
        initial = torch.rand(3)
        self.scale = nn.Parameter(initial)
        self.register_buffer('table', torch.rand(3))
        nn.init.zeros_(self.linear.bias)
        doubled = 2 * slope
        self.slope = doubled / 2
        self.unused = open

    def normed(self, v):
        centred = v - v.mean(-1, keepdim=True)
        v = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return v * self.norm.weight + self.norm.bias

    def forward(self, x, y):
        v = F.linear(x, self.linear.weight, self.linear.bias)
        return leaky(self.normed(v), self.slope) * self.scale + y * self.table
""")


def test_layers_may_be_called() -> None:
    holds("""
class ModelNew(nn.Module):
    def __init__(self, width, slope):
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.norm = nn.LayerNorm(3)
        if width > 2:
            self.act = nn.LeakyReLU(7.0)
        self.scale = torch.nn.Parameter(torch.zeros(3))
        self.table = nn.Buffer(torch.zeros(3))

    def forward(self, x, y):
        if self.training:
            return self.act(self.norm(self.linear(x))) * self.scale + y * self.table
        return x
""")


@pytest.mark.parametrize(
    ("init", "forward", "says"),
    [
        ("self.weights = nn.Parameter(torch.ones(3))", "x * self.weights", "self.weights is no parameter or buffer"),
        ("self.linear = nn.Conv2d(1, 1, 1)", "self.linear(x)", "the reference has an nn.Linear of that name"),
        ("self.first = nn.Linear(4, 3)", "self.first(x)", "the reference has none of that name"),
        ("self.part = Part()", "self.part(x)", "self.part is a module of your own"),
        ("self.width = width", "x * self.width", "a Tensor, which no text holds"),
    ],
)
def test_what_cannot_be_translated_is_said(init: str, forward: str, says: str) -> None:
    text = (
        "class Part(nn.Module):\n    def forward(self, x):\n        return x\n\n"
        "class ModelNew(nn.Module):\n    def __init__(self, width, slope):\n        super().__init__()\n"
        f"        {init}\n\n    def forward(self, x, y):\n        return {forward}\n"
    )
    with pytest.raises(Untranslated, match=says):
        translated(text, arguments=(torch.ones(1), 0.3))


def test_nothing_of_the_text_is_run() -> None:
    written, _ = translated(
        "raise SystemExit\nclass ModelNew(nn.Module):\n    def forward(self, x, y):\n        return x\n"
    )
    assert "raise SystemExit" in written and "def entry(x, y" in written


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_called_computes_what_it_does(kind: str) -> None:
    dimensions = next((n for n in (1, 2, 3) if f"{n}d" in kind), 0)
    given: dict[str, tuple[Any, ...]] = {"LayerNorm": (8,), "GroupNorm": (2, 4), "RMSNorm": (8,), "Linear": (8, 3)}
    given |= {"Embedding": (5, 3), "Softmax": (1,), "LogSoftmax": (1,), "Softplus": (2.0,)}
    arguments = given.get(kind, (4, 2, 3) if "Conv" in kind else (2,) if "Pool" in kind else ())
    keywords = {"eps": 0.1} if "Norm" in kind else {"stride": 2, "padding": 1} if "Conv" in kind else {}
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(*arguments, **keywords)
    x = torch.randn(2, 4, *(8 for _ in range(dimensions or 1)))
    if kind == "Embedding":
        x = torch.randint(0, 5, (3,))
    module = torch.nn.Module()
    module.layer = layer
    state = {f"layer.{name}": f"s_{name}" for name, _ in layer.named_parameters()}
    text = HEAD + (
        f"class ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layer = nn.{kind}()\n\n    def forward(self, x):\n        return self.layer(x)\n"
    )
    original = Original(module, (), {}, state, ("x",), True)
    written = as_function(text, "ModelNew", "entry", ["x", *state.values()], original)
    space: dict[str, Any] = {}
    exec(written, space)
    (found,) = space["entry"](x, *(p for _, p in layer.named_parameters()))
    torch.testing.assert_close(found, layer(x))
    assert violations(written, "torch") == ()
