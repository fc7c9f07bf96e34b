"""Capture, and the comparison with the module that makes it trusted."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.graph.capture import CaptureError, capture
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.program import verify
from qimeng.program.opaque import opaque_program
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec, verify_graph
from qimeng.spec import KernelSpec

X = torch.rand(8, 6)
ROOT = Path(__file__).resolve().parents[2]


def ops(graph: OpGraph) -> list[str]:
    return [n.packet.removeprefix("aten.") for n in graph.ops()]


def function(f: Callable[..., Any], *inputs: Any, **options: Any) -> OpGraph:
    return capture_spec(KernelSpec.of(f, inputs, **options))


class Stateful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(6))
        self.register_buffer("b", torch.ones(6))
        self.calls = 0


class Swap(Stateful):
    def forward(self, x: torch.Tensor) -> Any:
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old + x.sum(0))
        return x + self.a


class Returned(Stateful):
    def forward(self, x: torch.Tensor) -> Any:
        self.a.add_(x.sum(0))
        return self.a * 1


class Masked(torch.nn.Module):
    """Returns as many values as are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0.5]


class Counting(Stateful):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.calls


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Plain(torch.nn.Module):
    """Holds a number in a tensor that is neither parameter nor buffer."""

    def __init__(self, value: Any = 2.5) -> None:
        super().__init__()
        self.factor = torch.tensor(value)

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.factor + torch.tensor(1.5)


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.table


# ---- what is captured

MODULES = {
    "linear": (torch.nn.Linear(6, 5), (X,)),
    "batch_norm": (torch.nn.BatchNorm1d(6), (X,)),
    "batch_norm_eval": (torch.nn.BatchNorm1d(6).eval(), (X,)),
    "instance_norm": (torch.nn.InstanceNorm1d(3, track_running_stats=True), (torch.rand(4, 3, 8),)),
    "no_parameters": (torch.nn.GELU(), (X,)),
    "swap": (Swap(), (X,)),
    "returned_buffer": (Returned(), (X,)),
    "tied": (Tied(), (X,)),
    "number": (Plain(), (X,)),
    "convolution": (torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(2)), (torch.rand(2, 3, 8, 8),)),
    "lstm": (torch.nn.LSTM(6, 4), (torch.rand(3, 2, 6),)),
    "dropout": (torch.nn.Dropout(0.5), (X,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module, inputs = MODULES[name]
    graph = capture_spec(KernelSpec.of(module, inputs))
    if name == "lstm":
        assert "lstm" in ops(graph), "composites stay whole"
    standalone = Program.start(graph).load().Model()
    standalone.load_state_dict(module.state_dict())


def test_functions_with_every_kind_of_input_and_output() -> None:
    def f(pair: Any, table: Any, flip: bool, shift: float, dim: int, nothing: None) -> Any:
        x = -pair[0] if flip else pair[0]
        return {"a": x.sum(dim) + shift, "b": [pair[1].argsort(), (table["z"] > 0.5, 7, nothing)]}, pair[0]

    graph = function(f, (X, torch.rand(6)), {"z": X}, True, 0.5, 1, None)
    assert graph.scalars == {3: True, 5: 1, 6: None}
    model = Program.start(graph).load().Model()
    first, out = model((X, torch.rand(6)), {"z": X}, True, 4.0, 1, None)
    assert torch.equal(first["a"], -X.sum(1) + 4.0) and out is X
    assert first["b"][0].dtype is torch.int64 and first["b"][1][1:] == (7, None)
    for wrong in [((X, X[0]), {"y": X}, True, 0.5, 1, None), ([X, X[0]], {"z": X}, True, 0.5, 1, None), (X, X[0])]:
        with pytest.raises(ValueError, match="structure|made for 6 inputs"):
            model(*wrong)
    for position, value in ((2, 1), (3, "a"), (4, 0), (4, True), (5, 0)):
        inputs: list[Any] = [(X, X[0]), {"z": X}, True, 0.5, 1, None]
        inputs[position] = value
        with pytest.raises(ValueError, match=r"^input \d: (made for|expected a number)"):
            model(*inputs)
    with pytest.raises(ValueError, match=r"made for shape \(8, 6\)"):
        model((X.t(), X[0]), {"z": X}, True, 0.5, 1, None)


def test_numbers_are_kept_free_where_a_tensor_decides_the_dtype() -> None:
    free = function(lambda x, s: x * s + s, X, 2.0)
    assert not free.scalars and [n.target for n in free.nodes.values() if n.kind == "scalar"] == ["1"]
    for f, x in (
        (lambda x, s: x * s**0.5, X),  # a Python number made from it
        (lambda x, s: x * 2 if s > 0 else x, X),
        (lambda x, s: x * s, torch.arange(9)),  # the number makes the result floating
        (lambda x, s: (x, s), X),
        (lambda x, s: torch.lerp(x, x + 1, s), X),
        (lambda x, s: torch.threshold(x, s, 3.0), X),  # PyTorch takes it apart with `item`
    ):
        assert function(f, x, 2.0).scalars == {1: 2.0}
    assert function(lambda x, s: x.clamp(max=s), X, float("inf")).scalars == {1: float("inf")}


def test_distributions_are_captured_without_their_look_at_values() -> None:
    def likelihood(logits: torch.Tensor, taken: torch.Tensor, mean: torch.Tensor) -> Any:
        chosen = torch.distributions.Categorical(logits=logits)
        return chosen.log_prob(taken), chosen.entropy(), torch.distributions.Normal(mean, mean.exp()).log_prob(mean + 1)

    before = torch.distributions.Distribution._validate_args
    found = function(likelihood, torch.randn(8, 6), torch.randint(0, 6, (8,)), torch.randn(8))
    assert {"logsumexp", "gather"} <= set(ops(found))
    assert torch.distributions.Distribution._validate_args is before


def test_no_inputs_and_constant_outputs() -> None:
    graph = function(lambda: (torch.ones(3), 5))
    assert torch.equal(Program.start(graph).load().Model()()[0], torch.ones(3))
    out = Program.start(function(lambda x: (torch.tensor(1.5), x), X)).load().Model()(X)
    assert out[0].item() == 1.5 and out[1] is X


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    graph = capture_spec(
        KernelSpec.of(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Softmax(-1)), (X,), dtype=dtype)
    )
    assert {m.dtype for n in graph.nodes.values() for m in n.metas if m} == {dtype}


def test_complex_numbers_of_half_type_are_compared() -> None:
    assert function(lambda x: x.to(torch.complex32), X).meta(Value("_to_copy")).dtype == "complex32"


def test_mutations_are_outputs() -> None:
    graph = capture_spec(KernelSpec.of(torch.nn.BatchNorm1d(6), (X,)))
    assert [k for k, _ in graph.mutations] == ["running_mean", "running_var", "num_batches_tracked"]
    assert len(graph.results()) == 4


def test_running_statistics_of_half_types_have_the_dtype_of_their_buffers() -> None:
    graph = capture_spec(KernelSpec.of(torch.nn.BatchNorm1d(6).bfloat16(), (X.bfloat16(),)))
    (norm,) = [n for n in graph.nodes.values() if "batch_norm" in n.target]
    assert [m.dtype for m in norm.metas[3:]] == ["bfloat16", "bfloat16"]


def test_random_operators_agree_when_seeded() -> None:
    assert "rand" in ops(function(lambda x: x + torch.rand(8, 6), X))


# ---- what is not


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (
            lambda x: x * 2 if x.sum() > 0 else x,
            "its Python code depends on the values of a tensor .*test_capture.py, line",
        ),
        (lambda x: x[x > 0.5], "it returns a number, or a tensor of a size, that depends on"),
        (lambda x: (x, x.max().item()), "it returns a number, or a tensor of a size, that depends on"),
        (Masked(), "it returns a number, or a tensor of a size, .*test_capture.py, line [0-9]+: `return x.x > 0.5.`"),
        (
            lambda x: torch.nn.LayerNorm(6).to(x.device)(x),
            "it moves a module inside of forward.*make the module once, outside",
        ),
        (
            lambda x: torch.cat([x[:, int(i)] for i in x[0, :2].long()]),
            "its Python code depends on the values of a tensor .*test_capture.py, line",
        ),
        (Counting(), "output 0 differs by up to"),
        (
            Plain(torch.rand(200_000, 1, 6).tolist()),
            "tensor factor of 4800000 B is not in .* too large",
        ),
    ],
    ids=["branch", "mask", "number", "line", "module", "place", "counter", "large_tensor"],
)
def test_reasons(thing: Any, reason: str) -> None:
    spec = KernelSpec.of(thing, (X,))
    with pytest.raises(CaptureError, match=reason):
        capture_spec(spec)
    spec.check()


@pytest.mark.parametrize("thing", [Cached(), Plain([1.0, 2, 3, 4, 5, 6])], ids=["not_persistent", "plain_tensor"])
def test_tensors_outside_the_state_dict_are_carried(thing: Any) -> None:
    program = Program.start(capture_spec(KernelSpec.of(thing, (X,))))
    model = program.load().Model()
    assert not model.state_dict()
    assert torch.equal(model(X), thing(X))


def test_inputs_that_no_file_can_check() -> None:
    with pytest.raises(CaptureError, match="an input is a PosixPath"):
        capture(torch.nn.Identity, lambda: (Path("x"),))
    with pytest.raises(CaptureError, match="takes a dict with a key of type PosixPath"):
        capture(torch.nn.Identity, lambda: ({Path("x"): X},))


def test_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    function(lambda x, s: x * 2 if s > 0 else x, X, 2.0)
    assert capfd.readouterr() == ("", "")


# ---- a wrong graph is found out


def _changed(graph: OpGraph, packet: str, **changes: Any) -> OpGraph:
    nodes = {k: replace(n, **changes) if n.packet == packet else n for k, n in graph.nodes.items()}
    return replace(graph, nodes=nodes)


def test_what_cancels_to_rounding_errors_is_captured() -> None:
    def divergence(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean")

    torch.manual_seed(0)
    assert len(list(capture_spec(KernelSpec.of(divergence, (torch.randn(12, 16),))).ops())) > 5


def test_verification_finds_every_kind_of_difference() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    spec = KernelSpec.of(module, (torch.rand(6, 6),))
    graph = capture_spec(spec)
    relu = next(n for n in graph.ops() if n.packet == "aten.relu")
    before = relu.operands()[0]
    wrong = {
        "output 0 differs by up to": _changed(graph, "aten.relu", target="aten.neg.default"),
        "output 0 has shape": _changed(graph, "aten.relu", target="aten.sum.dim_IntList", args=(before, (0,))),
        "output 0 has dtype": _changed(graph, "aten.relu", target="aten.gt.Scalar", args=(before, 0)),
        "does not run": _changed(graph, "aten.relu", args=(before, 3)),
        "buffer 1.running_mean differs": replace(
            graph, mutations=tuple((k, Value("b_1_running_mean") if "mean" in k else v) for k, v in graph.mutations)
        ),
        "the module returns": replace(
            graph, outputs=(*graph.outputs, 3), out_spec=function(lambda x: (x, 3), X).out_spec
        ),
        "forward adds 0.bias to the module's state": replace(
            graph, nodes={k: replace(n, target="other") if n.target == "0.bias" else n for k, n in graph.nodes.items()}
        ),
    }
    for message, bad in wrong.items():
        with pytest.raises(CaptureError, match=message):
            verify_graph(spec, bad)


def test_verification_finds_shared_memory_and_free_numbers() -> None:
    spec = KernelSpec.of(lambda x: x.clone(), (X,))
    graph = capture_spec(spec)
    with pytest.raises(CaptureError, match="output 0 shares memory"):
        verify_graph(spec, replace(graph, outputs=(Value("args_0"),)))
    power = KernelSpec.of(lambda x, n: x**n, (X, 2))
    special = capture_spec(power)
    assert special.scalars == {1: 2}
    number = next(
        n for n in capture_spec(KernelSpec.of(lambda x, s: x * s, (X, 2.0))).nodes.values() if n.kind == "scalar"
    )
    unguarded = replace(special, scalars={}, nodes={**special.nodes, number.name: number})
    with pytest.raises(CaptureError, match="output 0 differs"):
        verify_graph(power, unguarded)


# ---- large ones, and the file of a computation that stays as it is


def test_16_gib_are_captured_quickly_and_in_little_memory() -> None:
    code = """if True:
        import re, time, torch
        from qimeng.program.verify import capture_spec
        from qimeng.spec import KernelSpec
        text = '''
        import torch
        rows, columns = 1 << 14, 262144
        class Model(torch.nn.Module):
            def __init__(self, n):
                super().__init__()
                self.norm = torch.nn.LayerNorm(n)
            def forward(self, x):
                return self.norm(x).relu()
        def get_inputs():
            return [torch.rand(16384, columns)]
        def get_init_inputs():
            return [columns]
        '''
        import textwrap
        capture_spec(KernelSpec.of(torch.relu, (torch.rand(2),)))
        start = time.process_time()
        spec = KernelSpec.from_source(textwrap.dedent(text))
        graph = capture_spec(spec)
        seconds = time.process_time() - start
        assert graph.meta(graph.outputs[0]).bytes == 16 << 30
        # not ru_maxrss: a child inherits its parent's, and a long test run is large
        peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        print(seconds, peak_kib / 2**20)
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seconds, gib = map(float, done.stdout.split())
    assert gib < 1.0
    assert seconds < 10, "about a second of processor time"


def test_opaque_program_of_a_file_stands_alone(tmp_path: Path) -> None:
    text = (
        "import torch\nN = 4\n\nclass Model(torch.nn.Module):\n    def __init__(self, n):\n"
        "        super(Model, self).__init__()\n        self.m = torch.nn.Linear(n, n)  # Model\n\n"
        "    def forward(self, x):\n        return self.m(x) if x.sum() > 0 else x\n\n"
        "def get_inputs():\n    return [torch.rand(2, N)]\n\ndef get_init_inputs():\n    return [N]\n"
    )
    spec = KernelSpec.from_source(text, dtype="bf16", training=False)
    program = opaque_program(spec)
    assert program.fallback == program.source and "# Model" in program.source and not program.regions
    model, module = load_source(program.source, folder=str(tmp_path)).Model(), spec.module()
    model.load_state_dict(module.state_dict())
    assert not model.training and torch.equal(model(*spec.inputs(0)), module(*spec.inputs(0)))


def test_opaque_program_of_a_file_leaves_frozen_parts_in_their_mode(tmp_path: Path) -> None:
    text = (
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.drop = torch.nn.Dropout().eval()\n\n    def forward(self, x):\n        return self.drop(x)\n\n"
        "def get_inputs():\n    return [torch.rand(2)]\n\ndef get_init_inputs():\n    return []\n"
    )
    for number, training in enumerate((True, False)):
        spec = KernelSpec.from_source(text, training=training)
        model = load_source(opaque_program(spec).source, f"opaque{number}", folder=str(tmp_path)).Model()
        assert model.training is training and not model.drop.training


def test_opaque_program_of_live_code_imports_it(tmp_path: Path) -> None:
    linear = opaque_program(KernelSpec.of(torch.nn.Linear(3, 3), (torch.rand(2, 3),)))
    assert "from torch.nn.modules.linear import Linear\n" in linear.source
    softmax = load_source(opaque_program(KernelSpec.of(torch.special.expit, (X,))).source, folder=str(tmp_path)).Model()
    with pytest.raises(ImportError, match="cannot be imported"):
        load_source(opaque_program(KernelSpec.of(lambda x: x, (X,))).source, folder=str(tmp_path)).Model()
    assert isinstance(softmax, object)


@pytest.mark.parametrize("number", [2, 2.5], ids=["integer", "free"])
def test_a_graph_that_a_verification_captured_is_not_captured_again(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.relu(x @ x.T) * factor

    spec = KernelSpec.of(scaled, (torch.rand(512, 512), number))
    small, graphs = spec.reduced(), []
    assert small is not spec
    fresh = capture_spec(small, verify=False)
    capture_spec(spec)
    monkeypatch.setattr(verify, "capture", lambda *arguments: graphs.append(arguments))
    found = capture_spec(small, verify=False)
    assert found.nodes == fresh.nodes and found.outputs == fresh.outputs and not graphs


def test_what_was_captured_is_not_captured_again_to_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_module(torch.nn.Linear(4, 4), (torch.rand(2, 4),))
    graph = capture_spec(spec, verify=False, kept=True)
    with monkeypatch.context() as patched:
        patched.setattr(verify, "_capture", None)
        assert capture_spec(spec).nodes == graph.nodes
    assert capture_spec(spec).nodes == graph.nodes, "and once only, as the module may change"


def test_what_the_cpu_lacks_is_compared_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []

    def lacking(spec: KernelSpec, graph: OpGraph, orders: object, device: str) -> None:
        places.append(device)
        if device == "cpu":
            why = RuntimeError("only supports per-tensor scaling for CPU backend")
            raise CaptureError("the module fails on its own inputs") from why

    spec = KernelSpec.from_function(torch.relu, (torch.randn(4),))
    graph = capture_spec(spec, verify=False)
    monkeypatch.setattr(verify, "_hold_against", lacking)
    for there, wanted in ((True, ["cpu", "cuda"]), (False, ["cpu"])):
        places.clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with contextlib.nullcontext() if there else pytest.raises(CaptureError, match="fails on its own inputs"):
            verify_graph(spec, graph)
        assert places == wanted
