"""Modules with odd state or odd outputs are captured, and their programs do what they do."""

from __future__ import annotations

from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from qimeng.graph.capture import CaptureError
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.rand(8, 6)


class Counter(torch.nn.Module):
    def __init__(self, count: torch.Tensor, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("n", count, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(1)
        return x * self.n


class Shared(torch.nn.Module):
    """A buffer that two submodules hold and update, a submodule under two names, one that is applied twice."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        count = torch.zeros(1)
        self.a, self.b = Counter(count, persistent), Counter(count, persistent)
        self.one = torch.nn.Linear(6, 6)
        self.two = self.one

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(self.one(x)), self.b(torch.relu(self.two(self.one(x))))


class Views(torch.nn.Module):
    """Returns inputs, parameters, buffers, views of them, the same thing twice, None and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = x @ self.weight
        kept = {"weight": [self.weight.t(), self.mask[:2]], "none": None}
        return y, y, y.t(), y.view(-1), x, x[0], (kept, 3, ()), x.expand(2, 8, 6)


class Data(torch.nn.Module):
    """Reads the data of its parameter, its input and a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> Any:
        return x.data * self.weight.data, (x + 1).data.exp()


class Mixed(torch.nn.Module):
    """A half layer inside a float32 one, a float8 buffer, and a complex table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6).to(torch.bfloat16)
        self.register_buffer("codes", torch.randn(6, 6).to(torch.float8_e4m3fn))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.low(self.first(x).relu().to(torch.bfloat16)).float()
        z = torch.view_as_complex(y.reshape(8, 3, 2)) * self.turn
        return torch.view_as_real(z).flatten(1) @ self.codes.float().t(), y.clamp(-1, 1).to(torch.float8_e4m3fn).float()


class Named(torch.nn.Module):
    """State called like Python's keywords, at any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("class", torch.nn.Parameter(torch.randn(6)))
        self.register_buffer("import", torch.ones(6))
        self.parts = torch.nn.ModuleDict({"for": torch.nn.Linear(6, 6), "a-b": torch.nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self, "import").mul_(1.5)
        for part in self.parts.values():
            x = part(x).relu()
        return x * getattr(self, "class") + getattr(self, "import")


class Table:
    """A plain object with a tensor."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = torch.linspace(0, 1, 6)


class Held(torch.nn.Module):
    """Tensors in a list, a dict, a deque, an object with slots, a partial function; a module in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.table = [torch.ones(6), {"shift": torch.arange(6.0)}], Table()
        self.queue, self.more = deque([torch.full((6,), 2.0)]), partial(torch.add, torch.arange(6.0))
        self.hidden = [torch.nn.Linear(6, 6)]

    def forward(self, x: torch.Tensor) -> Any:
        y = (x + self.steps[0]) * self.table.scale - self.steps[1]["shift"]
        return self.hidden[0](self.more(y * self.queue[0])), x.shape


class Recording(torch.nn.Module):
    """Hooks that are closures keep results in lists of the module itself, which a copy of it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.last = torch.nn.Linear(6, 6), [], None
        self.linear.register_forward_hook(lambda _, inputs, output: self.seen.append(output))
        self.linear.register_forward_hook(self.keep(self))

    @staticmethod
    def keep(mine: Any) -> Any:
        def hook(_: Any, inputs: Any, output: torch.Tensor) -> None:
            mine.last = {"output": output}

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + 1


class Containers(torch.nn.Module):
    """Returns containers of Python's own beyond tuples, lists and dicts with texts as keys."""

    def forward(self, x: torch.Tensor) -> Any:
        found: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        found["a"] += [x.exp(), x.tanh()]
        space = SimpleNamespace(y=x.softmax(-1), z=(x * 2,), name="two", n=3)
        return found, {(1, "b"): x.relu(), None: x.sum(0), True: x.mean()}, space


@pytest.mark.parametrize(
    "module",
    [Shared(), Shared(False), Views(), Data(), Mixed(), Named(), Held(), Recording(), Containers()],
    ids=["shared", "local", "views", "data", "mixed", "named", "held", "recording", "containers"],
)
def test_captured_and_equal(module: torch.nn.Module) -> None:
    program = Program.start(capture_spec(KernelSpec.of(module, (X,))))
    assert len(program.regions) > 2
    model = program.load().Model()
    assert model.state_dict().keys() == module.state_dict().keys()
    model.load_state_dict(module.state_dict())
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in module.state_dict().items()}
    leaves, structure_of = torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_structure
    with torch.no_grad():
        for _ in range(2):
            expected, found = module(X), model(X)
            assert structure_of(found) == structure_of(expected)
            for a, b in zip(leaves(found), leaves(expected), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, torch.Tensor) else a == b
        for key, value in module.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)


def test_a_module_that_records_its_results_is_left_without_fake_ones() -> None:
    module = Recording()
    capture_spec(KernelSpec.of(module, (X,)))
    KernelSpec.of(module, (X,)).module()
    assert all(type(t) is torch.Tensor for t in torch.utils._pytree.tree_leaves([module.seen, module.last]))


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    rest: Pair


class Takes(torch.nn.Module):
    """Named tuples, dataclasses and a dtype as inputs."""

    def forward(self, record: Record, pairs: dict[str, Pair], dtype: torch.dtype) -> Any:
        return Pair(record.x * 2 + pairs["p"].a, record.rest.b.to(dtype).exp())


def test_inputs_of_any_class_and_dtypes_are_captured() -> None:
    pair = Pair(X + 1, X + 2)
    inputs = (Record(X, pair), {"p": pair}, torch.float64)
    program = Program.start(capture_spec(KernelSpec.of(Takes(), inputs)))
    assert len(program.regions) == 4
    found, expected = program.load().Model()(*inputs), Takes()(*inputs)
    assert type(found) is Pair and torch.equal(found.a, expected.a) and torch.equal(found.b, expected.b)
    with pytest.raises(ValueError, match=r"input 5: made for torch\.float64"):
        program.load().Model()(*inputs[:2], torch.float32)
    with pytest.raises(ValueError, match="structure"):
        program.load().Model()(inputs[0], {"p": (pair.a, pair.b)}, torch.float64)


def test_inputs_and_outputs_of_local_classes_are_captured() -> None:
    local = namedtuple("local", "u v")
    program = Program.start(capture_spec(KernelSpec.of(lambda q: local(q.u * 2, q.v), (local(X, X + 1),))))
    assert torch.equal(program.load().Model()(local(X, X)).u, X * 2)


class Layer:
    """What a cache of keys keeps of a layer."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.dtype, self.device, self.seen = keys, keys.dtype, keys.device, {0: True}


class Cache:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.limit, self.empty = layers, None, torch.tensor([])


class Caching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.exp(), Cache([Layer(x * 2), Layer(x + 1)])


def test_outputs_that_are_plain_objects_are_captured() -> None:
    program = Program.start(capture_spec(KernelSpec.of(Caching(), (X,))))
    assert len(program.regions) == 3
    y, cache = program.load().Model()(X)
    assert torch.equal(y, X.exp()) and type(cache) is Cache and vars(cache).keys() == {"layers", "limit", "empty"}
    assert cache.empty.shape == (0,) and torch.equal(cache.layers[1].keys, X + 1)
    assert vars(cache.layers[0]).keys() == vars(Layer(X)).keys() and cache.layers[0].device == X.device


class Cyclic:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.me = x, self


def test_an_output_that_holds_itself_is_no_structure() -> None:
    spec = KernelSpec.of(lambda x: (x * 2, Cyclic(x)), (X,))
    spec.check()
    with pytest.raises(CaptureError, match="it returns a .*Cyclic. To have it optimized, return tensors"):
        capture_spec(spec)


def test_outputs_share_memory_as_the_modules_do() -> None:
    module = Views()
    model = Program.start(capture_spec(KernelSpec.of(module, (X,)))).load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        y, again, turned, flat, x, row, (kept, number, empty), wide = model(X)
    assert y is again and x is X and (number, empty, kept["none"]) == (3, (), None)
    assert {t.untyped_storage().data_ptr() for t in (turned, flat)} == {y.untyped_storage().data_ptr()}
    assert {t.untyped_storage().data_ptr() for t in (row, wide)} == {X.untyped_storage().data_ptr()}
    assert kept["weight"][0].untyped_storage().data_ptr() == model.weight.untyped_storage().data_ptr()


class Steps(torch.nn.Module):
    """Counts its calls in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Module()
        self.part.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.steps += 1
        return x.exp() * self.part.steps


class Grows(torch.nn.Module):
    """Makes a parameter at its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "weight"):
            self.weight = torch.nn.Parameter(torch.ones(6))
        return x * self.weight + 1


class Extra(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(torch.nn.Linear(6, 6), X)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).relu()


class Own(dict[str, torch.Tensor]):
    """PyTorch sees into no class made from dict."""


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.rand(8, 6)


def slope(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(y.tanh().sum(), y)[0] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Steps, r"forward changes part\.steps, and a graph keeps tensors only; keep it in a buffer"),
        (Grows, "forward adds weight to the module's state: call the module once"),
        (Extra, r"more than parameters and buffers \(_extra_state\): keep that out of the state_dict"),
        (Scripted, "its part inner is TorchScript: give the Python module"),
        (lambda: seeded, "forward seeds random generators, which a graph cannot"),
        (lambda: slope, "as for gradients inside of forward"),
        (lambda: lambda x: Own(y=x.exp()), "it returns a .*Own. To have it optimized, return tensors"),
        (lambda: lambda x: (x.exp(), {1, 2}), "it returns a set. To have it optimized, return tensors"),
        (lambda: lambda x: x + torch.rand(8, 6, generator=torch.Generator()), "no tensor .*a Generator"),
    ],
)
def test_what_no_graph_holds_is_said_in_words(make: Any, words: str) -> None:
    spec = KernelSpec.of(make(), (X,))
    spec.check()
    with pytest.raises(CaptureError, match=words):
        capture_spec(spec)
