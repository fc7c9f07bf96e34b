"""The standalone class as a PyTorch user treats it: modes, copies, casts, other weights."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

nn = torch.nn


class Functional(nn.Module):
    """Reads its mode itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Branches(nn.Module):
    """Two ways to compute the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x + x


class NotFor(nn.Module):
    """Runs in one mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("for training only")
        return x + 1


def model_of(module: nn.Module, *inputs: torch.Tensor, **options: bool) -> nn.Module:
    spec = KernelSpec.from_module(module, inputs, **options)
    model = Program.start(capture_spec(spec)).load().Model()
    model.load_state_dict(spec.module().state_dict())
    return model


MATTERS = [
    nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    nn.Dropout(0.5),
    nn.RReLU(),
    Functional(),
]
SAME = [
    nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    nn.Dropout(0.0),
    nn.BatchNorm1d(8, track_running_stats=False),
    Branches(),
]


def named(modules: list[nn.Module]) -> list[object]:
    return [pytest.param(m, id=type(m[-1] if isinstance(m, nn.Sequential) else m).__name__) for m in modules]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("module", named(MATTERS))
def test_a_mode_that_it_was_not_made_for_is_refused_when_it_is_called(module, training):
    x = torch.randn(4, 8)
    model = model_of(module, x, training=training)
    assert model.training == training or training, "as it is made, it is in the mode that it was made for"
    parent = nn.Sequential(model)
    parent.train(not training)  # changes nothing by itself, so that a parent can be switched to and fro
    mine, back = ("training", "train()") if training else ("evaluation", "eval()")
    with pytest.raises(ValueError, match=rf"made for {mine} mode.*call {back.replace('()', r'..')}"):
        parent(x)
    parent.train(training)
    spec = KernelSpec.from_module(module, (x,), training=training)
    torch.manual_seed(3)
    expected = spec.module()(x)
    torch.manual_seed(3)
    assert torch.allclose(parent(x), expected, atol=1e-5)


@pytest.mark.parametrize("module", named(SAME))
def test_where_both_modes_compute_the_same_nothing_is_said(module):
    x = torch.randn(4, 8)
    model = model_of(module, x, training=True)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert "training" not in Program.start(capture_spec(KernelSpec.from_module(module, (x,)))).source


def test_a_module_for_one_mode_is_guarded_as_well():
    model = model_of(NotFor(), torch.randn(4), training=True)
    with pytest.raises(ValueError, match="made for training mode"):
        model.eval()(torch.randn(4))


class Transposed(nn.Module):
    """A weight that is not contiguous, in a module of its own, and one that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(6, 8).t())
        self.conv = nn.Conv2d(3, 4, 2)
        self.register_buffer("ones", torch.ones(1).expand(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.inner.weight + self.ones, self.conv(y)


XY = torch.randn(4, 8), torch.randn(2, 3, 5, 5)


def test_parameters_keep_the_strides_that_the_kernels_were_made_for():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(Transposed(), *XY)
    assert model.inner.weight.stride() == (1, 8)
    assert copy.deepcopy(model).inner.weight.stride() == (1, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.half(), r"inner\.weight: made for shape \(8, 6\), .*float32; got .*float16"),
        (lambda m: m.double(), "float32; got .*float64"),
        (lambda m: m.to(memory_format=torch.channels_last), r"conv\.weight: made for .*stride \(12, 4, 2, 1\)"),
        (
            lambda m: m.load_state_dict({k: v.bfloat16() for k, v in m.state_dict().items()}, assign=True),
            "float32; got .*bfloat16",
        ),
    ],
    ids=["half", "double", "channels_last", "assign"],
)
def test_state_that_it_was_not_made_for_is_refused(change, words):
    model = model_of(Transposed(), *XY)
    expected = model(*XY)
    state = copy.deepcopy(model.state_dict())
    parent = nn.Sequential(model)
    change(model)
    with pytest.raises(ValueError, match=words):
        model(*XY)
    with pytest.raises(ValueError, match=words):  # until it is put right
        model(*XY)
    parent.float().to(memory_format=torch.contiguous_format)
    model.load_state_dict(state)
    if model.inner.weight.stride() == (1, 8):
        assert all(torch.equal(a, b) for a, b in zip(model(*XY), expected, strict=True))


PACKED = Implementation(
    "torch",
    "def pack(w):\n    return (w.t().contiguous(),)\ndef entry(x, w, b, p):\n    return (torch.addmm(b, x, p),)\n",
    "entry",
    "pack",
    (1,),
)


def packed() -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(4, 8)
    spec = KernelSpec.from_module(nn.Linear(8, 8), (x,))
    program = Program.start(capture_spec(spec))
    model = program.with_implementation(program.regions[0].id, PACKED).load().Model()
    model.load_state_dict(spec.module().state_dict())
    return model, x


def right(model: nn.Module, x: torch.Tensor) -> bool:
    return torch.allclose(model(x), nn.functional.linear(x, model.weight, model.bias), atol=1e-5)


def test_what_was_prepared_follows_every_change_of_the_parameters():
    model, x = packed()
    assert right(model, x)
    model.weight.add_(1)
    assert right(model, x)
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    assert right(model, x)
    for _ in range(20):  # one after the other may get the address that the first one had
        for _ in range(2):
            model.weight.data = torch.randn(8, 8)
        assert right(model, x)


def test_copies_are_independent_and_have_the_state_of_the_reference():
    model, x = packed()
    before = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), before)
    twin.weight.zero_()
    assert right(twin, x) and torch.equal(model(x), before)
    assert list(model.state_dict()) == ["weight", "bias"]
    again = type(model)().to(x.device)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), before)
    assert not any(p.requires_grad for p in model.parameters())


def reading_memory(spec: KernelSpec) -> nn.Module:
    """The spec's program whose last region is taken for a kernel's, which sees only what is in memory."""
    program = Program.start(capture_spec(spec, verify=False))
    source = "def kernel(x0):\n    assert not x0.is_neg()\n    return (x0 * 2,)\n"
    last = program.regions[-1]
    assert last.label() == "mul"
    return program.with_implementation(last.id, Implementation("triton", source, "kernel")).load().Model()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[:, :1].expand(4, 5)])
def test_kernels_get_values_and_strides_of_lazily_negative_views(view):
    z = torch.randn(4, 5, dtype=torch.complex64)
    model = reading_memory(KernelSpec.from_function(lambda x: x * 2, (view(z.imag),)))
    x = view(z.conj().imag)
    assert x.is_neg()
    assert torch.equal(model(x), x * 2)
    inside = reading_memory(KernelSpec.from_function(lambda z: z.conj().imag * 2, (z,)))
    assert torch.equal(inside(z), z.conj().imag * 2)


def test_a_lazily_negative_parameter_is_refused():
    module = nn.Linear(3, 3)
    spec = KernelSpec.from_module(module, (torch.randn(2, 3),))
    model = Program.start(capture_spec(spec)).load().Model()
    model.weight = nn.Parameter(torch._neg_view(torch.randn(3, 3)))
    vars(model)["_qimeng_fits"] = False
    with pytest.raises(ValueError, match="resolve_neg"):
        model(torch.randn(2, 3))


def test_a_kernel_with_assembly_is_refused_where_the_interpreter_has_none(monkeypatch):
    import triton

    source = "@triton.jit\ndef f(x_ptr):\n    tl.inline_asm_elementwise()\n\n\ndef kernel(x0):\n    return (x0 * 2,)\n"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    program = Program.start(capture_spec(KernelSpec.from_function(lambda x: x * 2, (torch.randn(2),)), verify=False))
    changed = program.with_implementation(program.regions[0].id, Implementation("triton", source, "kernel"))
    with pytest.raises(ValueError, match="has no inline assembly: run this program on a GPU"):
        changed.load().Model()(torch.randn(2))


def test_a_kernel_in_bf16_is_refused_where_the_interpreter_is_wrong(monkeypatch):
    import triton
    from triton.runtime.interpreter import InterpreterBuilder

    source = "@triton.jit\ndef f(x_ptr):\n    pass\n\n\ndef kernel(x0):\n    return (x0 * 2,)\n"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    for dtype in (torch.bfloat16, torch.float16):
        spec = KernelSpec.from_function(lambda x: x * 2, (torch.randn(2, 3).to(dtype),))
        program = Program.start(capture_spec(spec, verify=False))
        changed = program.with_implementation(program.regions[0].id, Implementation("triton", source, "kernel"))
        model, x = changed.load().Model(), torch.randn(2, 3).to(dtype)
        if dtype is torch.float16:
            assert torch.equal(model(x), x * 2)
            continue
        with pytest.raises(ValueError, match="bfloat16"):
            model(x)
        monkeypatch.setattr(InterpreterBuilder, "rounds_to_bfloat16", True, raising=False)  # as the worker's does
        assert torch.equal(model(x), x * 2)


def test_a_conjugated_input_is_read_as_real_numbers() -> None:
    z = torch.randn(4, 6, dtype=torch.complex64).conj()
    model = Program.start(
        capture_spec(KernelSpec.from_function(lambda z: (z.real * 2, z.imag + 1, z * 2), (z,)))
    ).load()
    for found, expected in zip(model.Model()(z), (z.real * 2, z.imag + 1, z * 2), strict=True):
        assert torch.equal(found, expected)
