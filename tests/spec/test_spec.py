"""Ways into a spec, what it makes, what it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qimeng.errors import SpecError
from qimeng.spec import KernelSpec, perturb_parameters


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"spec_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


problems = _load("problems")
PROBLEM: str = problems.PROBLEM


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.relu() * factor


@pytest.fixture(scope="module")
def spec() -> KernelSpec:
    return KernelSpec.from_source(PROBLEM, "shifted")


def test_every_way_in(spec: KernelSpec, tmp_path: Path) -> None:
    file = tmp_path / "shifted.py"
    file.write_text(PROBLEM)
    for path in (file, str(file)):
        assert KernelSpec.of(path) == spec and KernelSpec.of(path).name == "shifted"
    assert KernelSpec.of(PROBLEM) == spec and spec.source == PROBLEM
    assert KernelSpec.of(spec) is spec
    assert KernelSpec.of(spec, mode="high", dtype=None).mode == "high"
    linear = torch.nn.Linear(4, 3).eval()
    assert not KernelSpec.of(linear, (torch.rand(2, 4),)).training
    assert spec.training
    assert KernelSpec.of(scaled, (torch.rand(3), 2.0)).name == "scaled"


def test_weights_come_from_the_seed_and_inputs_from_theirs(spec: KernelSpec) -> None:
    small = spec.reduced()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = small.module(), small.with_(seed=1).module()
    assert torch.equal(first.map.weight, small.module().map.weight)
    assert not torch.equal(first.map.weight, second.map.weight)
    x, shift = small.inputs(3)
    assert shift == 0.5 and torch.equal(x, small.inputs(3)[0]) and not torch.equal(x, small.inputs(4)[0])
    assert torch.equal(torch.get_rng_state(), state), "making things leaves torch's generator alone"
    assert not any(p.requires_grad for p in first.parameters()) and first.training


@pytest.mark.parametrize("dtype", ["float16", "bf16"])
def test_half_types_cast_floats_only(spec: KernelSpec, dtype: str) -> None:
    half = spec.with_(dtype=dtype).reduced()
    module, (x, shift) = half.module(), half.inputs(0)
    want = torch.float16 if dtype == "float16" else torch.bfloat16
    assert x.dtype is want and module.map.weight.dtype is want and type(shift) is float
    assert module.norm.num_batches_tracked.dtype is torch.int64
    wide, (y, _) = half.module(dtype=torch.float64), half.inputs(0, dtype=torch.float64)
    assert torch.equal(wide.map.weight, module.map.weight.double()), "the reference has the rounded weights"
    assert torch.equal(y, x.double())


def test_dtype_of_a_module_is_the_one_it_has() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), torch.nn.LayerNorm(4))
    spec = KernelSpec.from_module(module[:1], (torch.rand(2, 4).half(),))
    assert spec.dtype == "float16"
    ids = KernelSpec.from_module(torch.nn.Embedding(9, 4), (torch.tensor([1, 8]),), dtype="bf16")
    assert ids.inputs(0)[0].dtype is torch.int64 and ids.module().weight.dtype is torch.bfloat16


def test_a_module_is_copied_with_its_weights_and_ties() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4))
    module[1].weight = module[0].weight
    copy = KernelSpec.from_module(module, (torch.rand(2, 4),), dtype="bf16").module()
    assert copy[0].weight is copy[1].weight and copy[0].weight is not module[0].weight
    assert torch.equal(copy[0].weight, module[0].weight.bfloat16())
    assert module[0].weight.requires_grad and module[0].weight.dtype is torch.float32, (
        "the user's module stays as it is"
    )
    assert all(w.dtype is torch.bfloat16 for w in copy[2]._flat_weights)


def test_frozen_parts_of_a_module_stay_in_their_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).train()
    plain = KernelSpec.from_module(module, (torch.rand(2, 4),)).digest
    module[1].eval()
    frozen = KernelSpec.from_module(module, (torch.rand(2, 4),))
    assert frozen.module().training and not frozen.module()[1].training
    assert torch.equal(frozen.module()(x := torch.rand(2, 4)), module(x))
    assert not frozen.reduced().module()[1].training
    assert frozen.digest != plain
    assert not frozen.with_(training=False).module().training


def test_a_file_says_its_mode_by_its_constructor() -> None:
    dropping = "self.drop = torch.nn.Dropout(0.5)"
    texts = [
        problems.problem("return self.drop(x)", "[torch.rand(4)]", init=i)
        for i in (dropping, f"{dropping}; self.eval()")
    ]
    left, called = (KernelSpec.from_source(text) for text in texts)
    assert left.training and left.module().training
    assert not called.training and not called.module().training and not called.reduced().module().training
    assert KernelSpec.from_source(texts[1], training=True).module().drop.training, "what is asked for goes first"
    valued = problems.problem("return x", "[torch.rand(4)]", init="self.p = torch.ones(1).item(); self.eval()")
    assert not KernelSpec.from_source(valued).training, "where it cannot be made without values"


def test_frozen_parts_of_a_file_stay_in_their_mode() -> None:
    init = "self.drop = torch.nn.Dropout(0.5).eval()"
    spec = KernelSpec.from_source(problems.problem("return self.drop(x)", "[torch.rand(1 << 20)]", init=init))
    assert spec.training and not spec.module().drop.training
    assert not spec.reduced().module().drop.training


def test_nested_inputs_and_scalars() -> None:
    examples = ((torch.rand(4, 5), torch.arange(6)), {"a": torch.rand(5), "b": True})
    spec = KernelSpec.of(problems.Nested(), examples)
    (x, index), table = spec.inputs(0)
    assert x.shape == (4, 5) and index.dtype is torch.int64 and table["b"] is True
    assert spec.domains == ("real", "offsets", "real", "scalar")
    spec.check()


def test_digest_is_about_what_is_computed(spec: KernelSpec) -> None:
    same = KernelSpec.from_source(
        PROBLEM.replace("# odd on purpose", "# a comment").replace("What is", "Which is"), "x"
    )
    assert same == spec and hash(same) == hash(spec)
    others = [
        spec.with_(dtype="bf16"),
        spec.with_(mode="high"),
        spec.with_(training=False),
        spec.with_(domains=("positive", "scalar")),
        KernelSpec.from_source(PROBLEM.replace("+ shift", "- shift")),
        KernelSpec.from_source(PROBLEM.replace("4095", "4097")),
    ]
    assert len({s.digest for s in (spec, *others)}) == 7


def test_digest_of_modules_and_functions() -> None:
    x = (torch.rand(4, 4),)

    def of(thing: object, inputs: tuple[object, ...] = x) -> str:
        return KernelSpec.of(thing, inputs).digest

    def adder(n: int) -> object:
        return lambda x: x + n

    assert of(torch.nn.Linear(4, 3)) == of(torch.nn.Linear(4, 3)), "weights' values do not count"
    assert of(adder(1)) == of(adder(1)) != of(adder(2)), "what a function closes over does"
    assert len({of(torch.nn.GELU()), of(torch.nn.GELU(approximate="tanh")), of(torch.nn.ReLU())}) == 3
    assert of(torch.nn.ReLU()) != of(torch.nn.ReLU(), (torch.rand(4, 5),))
    assert of(scaled, (x[0], 2.0)) != of(scaled, (x[0], 3.0))


def test_specs_travel_to_a_process_that_cannot_import_their_code(spec: KernelSpec, tmp_path: Path) -> None:
    examples = ((torch.rand(4, 5), torch.arange(6)), {"a": torch.rand(5), "b": True})
    specs = [spec, KernelSpec.of(problems.Nested(), examples), KernelSpec.of(lambda x: x + 1, (torch.rand(3),))]
    for i, s in enumerate(specs):
        (tmp_path / str(i)).write_bytes(s.to_bytes())
        assert KernelSpec.from_bytes(s.to_bytes()) == s
    code = (
        "import pathlib, sys\nfrom qimeng.spec import KernelSpec\n"
        f"for i in range({len(specs)}):\n"
        f"    s = KernelSpec.from_bytes((pathlib.Path({str(tmp_path)!r}) / str(i)).read_bytes())\n"
        "    s.check()\n    print(s.digest)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.split() == [s.digest for s in specs], done.stderr


# ---- refusals: one clear error each


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define Model, get_inputs, get_init_inputs; missing: Model, get_inputs, get_init_inputs"),
        (PROBLEM.replace("def get_init_inputs", "def other"), "missing: get_init_inputs"),
        ("def (:\n", "does not load: SyntaxError"),
        ("import no_such_package_at_all\n", "does not load: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "does not load: SystemExit: 3"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        KernelSpec.from_source(text, "bad")


@pytest.mark.parametrize(
    ("forward", "inputs", "message"),
    [
        ("return x @ others[0]", "[torch.rand(4, 5), torch.rand(4, 5)]", r"float32\[4, 5\], float32\[4, 5\].*must fit"),
        ("raise KeyError('mine')", "[torch.rand(4)]", "fails on its own inputs .*KeyError: 'mine'"),
        ("return x.add_(1)", "[torch.rand(4)]", r"changes its input 0; make it work on a copy \(x.clone\(\)\)"),
        ("x.data[0] = 7; return x + 1", "[torch.rand(4)]", "changes its input 0"),
        ("return 3", "[torch.rand(4)]", "returns no tensor, but int"),
        ("return x", "torch.rand(4)", "must return a list of inputs, got Tensor"),
        ("return x", "[1 / 0]", r"get_inputs\(\) raises ZeroDivisionError"),
        ("return x", "[]", "fails on its own inputs .no inputs.: TypeError"),
    ],
)
def test_bad_computations(forward: str, inputs: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        KernelSpec.from_source(problems.problem(forward, inputs)).check()


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"\x7fELF\xd0\x00")
    with pytest.raises(SpecError, match="cannot read .*bad.py as Python"):
        KernelSpec.from_file(tmp_path / "bad.py")


def test_a_file_is_read_as_python_reads_it(tmp_path: Path) -> None:
    text = problems.problem("return x + 1  # größer", "[torch.rand(4)]")
    plain, marked, declared = (tmp_path / name / "one.py" for name in "abc")
    for path, data in (
        (plain, text.encode()),
        (marked, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()),
        (declared, b"# coding: latin-1\n" + text.encode("latin-1")),
    ):
        path.parent.mkdir()
        path.write_bytes(data)
    assert KernelSpec.from_file(marked).digest == KernelSpec.from_file(plain).digest
    assert "größer" in KernelSpec.from_file(declared).source


def test_a_refusal_is_all_that_is_said() -> None:
    """PyTorch logs a traceback for each attempt that does not fit on fake tensors, where nothing silences it."""
    code = (
        "import torch\nfrom qimeng import KernelSpec, SpecError\n"
        "try:\n    KernelSpec.of(torch.nn.Linear(3, 4), (torch.rand(2, 5),)).check()\n"
        "except SpecError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "must fit forward" in done.stdout and done.stderr == ""


def test_computations_that_need_values_are_checked_at_reduced_size() -> None:
    for forward in ("return x * 2 if x.sum() > 0 else x", "return x[x > 0.5]", "return x * x.max().item()"):
        spec = KernelSpec.from_source(problems.problem(forward, "[torch.rand(N, N)]", "N = 4096"))
        spec.check()
        assert spec.reduced().inputs(0)[0].numel() <= 1 << 16


def test_sizes_that_fit_only_when_reduced_are_refused() -> None:
    spec = KernelSpec.from_source(
        problems.problem("return x @ others[0]", "[torch.rand(4096, 1 << 8), torch.rand(300, 7)]")
    )
    with pytest.raises(SpecError, match="must fit"):
        spec.check()


def test_bad_constructor() -> None:
    with pytest.raises(SpecError, match=r"Model\(\*get_init_inputs\(\)\) raises ValueError: no"):
        KernelSpec.from_source(problems.problem("return x", "[]", init="raise ValueError('no')")).check()


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("[5]", (5, 7)),
        ("[[5], {'outer': 3}]", (5, 3)),
        ("[[], {'inner': 5, 'outer': 3}]", (5, 3)),
        ("{'inner': 2}", (2, 7)),
    ],
)
def test_arguments_of_the_constructor(given: str, size: tuple[int, int]) -> None:
    text = problems.problem("return x", "[torch.rand(4)]", init="self.w = torch.nn.Parameter(torch.rand(inner, outer))")
    text = text.replace("__init__(self)", "__init__(self, inner, outer=7)")
    module = KernelSpec.from_source(
        text[: text.index("def get_init_inputs")] + f"get_init_inputs = lambda: {given}"
    ).module()
    assert module.w.shape == size


def test_bad_options(spec: KernelSpec) -> None:
    lock = threading.Lock()
    refusals = {
        "no such file: /no/such.py": lambda: KernelSpec.of("/no/such.py"),
        "example inputs are needed": lambda: KernelSpec.of(torch.nn.ReLU()),
        "not from int": lambda: KernelSpec.of(3),
        "must be a tuple of positional inputs": lambda: KernelSpec.of(torch.nn.ReLU(), torch.rand(3)),
        "unknown dtype 'int8'": lambda: spec.with_(dtype="int8"),
        "unknown precision mode 'fast'": lambda: spec.with_(mode="fast"),
        "unknown input domain 'big'": lambda: spec.with_(domains=("big", "scalar")),
        "3 domains declared for 2": lambda: spec.with_(domains=("real",) * 3).check(),
        "a spec has no colour": lambda: spec.with_(colour="red"),
        "takes a torch.nn.Module": lambda: KernelSpec.from_module(scaled, (torch.rand(3),)),
        "input 0 has no values": lambda: KernelSpec.of(torch.nn.ReLU(), (torch.rand(3, device="meta"),)),
        "input 0 is a nested tensor": lambda: KernelSpec.of(
            torch.nn.ReLU(), (torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),)
        ),
        "is a PackedSequence": lambda: KernelSpec.of(
            torch.nn.LSTM(2, 2), (torch.nn.utils.rnn.pack_sequence([torch.rand(3, 2), torch.rand(2, 2)]),)
        ),
        "input 0 is sparse": lambda: KernelSpec.of(torch.nn.ReLU(), (torch.eye(3).to_sparse(),)),
        "cannot travel": lambda: KernelSpec.of(lambda x: (lock, x), (torch.rand(3),)).to_bytes(),
    }
    for message, act in refusals.items():
        with pytest.raises(SpecError, match=message):
            act()


def test_large_specs_are_checked_without_values() -> None:
    text = problems.problem("return x.exp()", "[torch.rand(1 << 34) for _ in range(unreducible)]", "unreducible = 1")
    text = text.replace("1 << 34", "int('17179869184')")
    huge = KernelSpec.from_source(text)
    assert huge.reduced() is huge and not huge.is_small
    huge.check()
    with pytest.raises(SpecError, match="changes its input 0"):
        KernelSpec.from_source(text.replace("x.exp()", "x.exp_()")).check()
    assert huge.domains == ("real",)


class Coded(torch.nn.Module):
    """A weight in float8, as quantized checkpoints hold it."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(6, 6).to(torch.float8_e4m3fn)
        self.weight, self.bias = torch.nn.Parameter(codes, requires_grad=False), torch.nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.float() + self.bias)


def test_float8_is_used_inside_and_refused_at_the_edge():
    module, x = Coded(), torch.randn(2, 6)
    spec = KernelSpec.from_module(module, (x,))
    spec.check()
    again = KernelSpec.from_bytes(spec.to_bytes()).module()
    assert spec.dtype == "float32" and again.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(again(x), module(x))
    perturb_parameters(again, 3)
    assert torch.equal(again.weight.view(torch.uint8), module.weight.view(torch.uint8))
    assert not torch.equal(again.bias, module.bias)
    with pytest.raises(SpecError, match="example input 0 is float8_e4m3fn, which a computation may use inside only"):
        KernelSpec.from_function(lambda q: q.float(), (x.to(torch.float8_e4m3fn),))
    with pytest.raises(SpecError, match="output 0 is float8_e5m2"):
        KernelSpec.from_function(lambda x: x.to(torch.float8_e5m2), (x,)).check()


def test_parameters_without_a_shape_are_one_clear_error():
    words = "has no shape before the first call"
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())
    with pytest.raises(SpecError, match=rf"Sequential: 0.weight {words} \(a lazy module\): call the module once"):
        KernelSpec.from_module(lazy, (torch.randn(3, 6),))
    text = "import torch\ndef Model():\n    return torch.nn.LazyLinear(4)\n"
    text += "def get_inputs():\n    return [torch.rand(3, 6)]\ndef get_init_inputs():\n    return []\n"
    with pytest.raises(SpecError, match=f"source: weight {words}"):
        KernelSpec.from_source(text).check()
    lazy(torch.randn(3, 6))
    KernelSpec.from_module(lazy, (torch.randn(3, 6),)).check()


class _Plus(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", ["script", "trace", "function"])
def test_torchscript_is_refused_with_one_clear_error(make: str) -> None:
    x = torch.ones(2)
    made = {
        "script": lambda: torch.jit.script(_Plus()),
        "trace": lambda: torch.jit.trace(_Plus(), x),
        "function": lambda: torch.jit.trace(torch.relu, x),
    }[make]()
    with pytest.raises(SpecError, match="a TorchScript (module|function) cannot be optimized: give the Python"):
        KernelSpec.of(made, (x,))


def test_parametrized_modules_travel() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).eval()
    torch.nn.utils.parametrizations.weight_norm(module[0])
    torch.nn.utils.parametrizations.spectral_norm(module[1])
    spec = KernelSpec.of(module, (torch.rand(4, 6),))
    again = KernelSpec.from_bytes(spec.to_bytes())
    assert again.digest == spec.digest and again.module().state_dict().keys() == module.state_dict().keys()
    torch.testing.assert_close(again.module()(*again.inputs(0)), module(*spec.inputs(0)), rtol=0, atol=0)
    copied = again.module()
    copied[0].parametrizations.weight.original0.mul_(2)
    assert not torch.equal(copied[0].weight, module[0].weight)


@pytest.mark.parametrize("place", ["get_inputs", "Model"])
def test_memory_that_runs_out_is_not_said_to_be_the_files_fault(tmp_path: Path, place: str) -> None:
    """The device's memory may be held by others: the judge waits for it."""
    full = "raise torch.OutOfMemoryError('CUDA out of memory')"
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        f"    def __init__(self):\n        super().__init__()\n        {full if place == 'Model' else 'pass'}\n"
        "    def forward(self, x):\n        return x\n"
        f"def get_inputs():\n    {full if place == 'get_inputs' else 'return [torch.ones(2)]'}\n"
        "def get_init_inputs():\n    return []\n"
    )
    spec = KernelSpec.from_file(path)
    with pytest.raises(torch.OutOfMemoryError):
        spec.origin.inputs(0, "cpu") if place == "get_inputs" else spec.module("cpu")


class OnGpusAlone(torch.nn.Module):
    """An operator that the CPU lacks; the computation itself is there."""

    here = "cpu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if OnGpusAlone.here == "cpu":
            raise NotImplementedError("\"product\" not implemented for 'Float8_e4m3fn'")
        return x * 2


def test_what_the_cpu_lacks_needs_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match=r"needs a GPU, and there is none here.*not implemented for 'Float8"):
        KernelSpec.from_module(OnGpusAlone(), (torch.randn(4),)).check()


def test_what_the_cpu_lacks_is_checked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, real, places = KernelSpec.from_module(OnGpusAlone(), (torch.randn(4),)), KernelSpec.module, []

    def placed(self: KernelSpec, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
        monkeypatch.setattr(OnGpusAlone, "here", device)
        places.append(device)
        return real(self, "cpu", dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(KernelSpec, "module", placed)
    monkeypatch.setattr(KernelSpec, "inputs", lambda self, *args: (torch.randn(4),))
    spec.check()
    assert "cuda" in places


def test_an_error_of_the_modules_own_code_is_no_missing_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="fails on its own inputs"):
        KernelSpec.from_module(torch.nn.Module(), (torch.randn(4),)).check()
