"""The forms of stored weights, and declaring them: values, refusals, digests, travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.envs.steps.setup import make_task
from qimeng.errors import SpecError
from qimeng.graph.capture import CaptureError
from qimeng.program import verify
from qimeng.program.verify import capture_spec
from qimeng.spec import declared
from qimeng.spec.declared import WeightForm, register_weights, unregister_weights, weight_form
from qimeng.spec.declared_linear import DeclaredLinear, read_declared
from qimeng.vocabulary.lowprecision.forms import packed, unpacked
from tests.vocabulary.lowprecision.samples import layer, spec_of

X = torch.randn(4, 96)


@pytest.mark.parametrize(("text", "group", "most"), [("int8", 96, 127), ("int4:32", 32, 7), ("int4:64", 64, 7)])
def test_each_weight_is_the_nearest_code_times_its_scale(text: str, group: int, most: int) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    found = weight_form(text).declared(weight)
    assert found.shape == weight.shape and found.is_contiguous()
    for first in range(0, 96, group):
        part, exact = found[:, first : first + group].double(), weight[:, first : first + group].double()
        scale = exact.abs().amax(-1, keepdim=True) / most
        codes = part / scale
        assert (codes - codes.round()).abs().max() < 1e-4 and codes.abs().max() < most + 1e-4
        assert ((part - exact).abs() / scale).max() <= 0.5 + 1e-5


def test_fp8_weights_are_the_nearest_numbers_times_their_scale() -> None:
    weight = torch.randn(24, 96)
    scale = weight.abs().amax(-1, keepdim=True) / 448
    found = weight_form("fp8").declared(weight)
    assert torch.equal((found / scale).abs().amax(-1).round(), torch.full((24,), 448.0))
    again = (found / scale).to(torch.float8_e4m3fn).float() * scale
    assert (again - found).abs().max() < 1e-6, "they are such numbers"
    assert ((found - weight).abs() <= weight.abs() / 16 + scale * 2**-10).all(), "half of the last place of 3 bits"


@pytest.mark.parametrize(("rows", "depth"), [(32, 64), (64, 32)])
def test_blocks_of_fp8_share_a_scale(rows: int, depth: int) -> None:
    weight = torch.randn(70, 96)
    weight[:rows, :depth] = 0.0
    found = weight_form(f"fp8:{rows}x{depth}").declared(weight)
    assert found.is_contiguous() and found.isfinite().all() and not found[:rows, :depth].any()
    for i in range(rows, 70, rows):
        for j in range(0, 96, depth):
            part, exact = found[i : i + rows, j : j + depth], weight[i : i + rows, j : j + depth]
            scale = exact.abs().amax() / 448
            again = (part / scale).to(torch.float8_e4m3fn).float() * scale
            assert (again - part).abs().max() < 1e-6, "they are such numbers"
            assert ((part - exact).abs() <= exact.abs() / 16 + scale * 2**-10).all(), "the nearest"


def test_channels_and_groups_of_zeros_stay_zeros() -> None:
    weight = torch.randn(4, 64)
    weight[1], weight[2, :32] = 0.0, 0.0
    for text in ("int8", "int4:32", "fp8"):
        found = weight_form(text).declared(weight)
        assert found.isfinite().all() and not found[1].any() and not found[2, :32].any()
        assert found[0].any() and found[2, 32:].any()


def test_the_reference_in_float64_multiplies_by_the_same_codes() -> None:
    weight = torch.randn(16, 100).to(torch.bfloat16)
    for text in ("int8", "int4:64", "fp8", "fp8:32x64"):
        exact = weight_form(text).declared(weight.double())
        assert exact.dtype is torch.float64 and torch.equal(
            exact.to(torch.bfloat16), weight_form(text).declared(weight)
        )


def test_packing_loses_nothing() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert packed(codes).shape == (3, 16) and torch.equal(unpacked(packed(codes)), codes)


# ---- on a spec


def test_a_spec_computes_what_it_declares() -> None:
    module, x = layer(4, 96, 24, torch.bfloat16)
    declared = spec_of(module, x, "int4").module()
    assert isinstance(declared[0], DeclaredLinear) and declared.state_dict().keys() == module.state_dict().keys()
    with torch.no_grad():
        weight = weight_form("int4:128").declared(module[0].weight)
        assert torch.equal(declared(x), nn.functional.linear(x, weight, module[0].bias))
        assert not torch.equal(declared(x), module(x))
        declared[0].weight.mul_(2)
        assert torch.equal(declared(x), nn.functional.linear(x, 2 * weight, module[0].bias)), "a change is noticed"
    assert type(module[0]) is nn.Linear, "the user's own module stays as it is"


def test_torch_compile_is_given_the_weight_that_is_known() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    declared, seen = spec_of(module, x, "int8").module(), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op.startswith("call"))
        return graph

    read_declared(declared)
    with torch.no_grad():
        assert torch.equal(torch.compile(declared, backend=backend)(x), declared(x))
    assert len(seen) == 1 and "linear" in seen[0]


def test_the_declaration_belongs_to_the_digest_and_travels() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    plain = KernelSpec.from_module(module, (x,))
    specs = [spec_of(module, x, text) for text in ("int8", "int4", "int4:64")]
    assert len({s.digest for s in (plain, *specs)}) == 4
    assert specs[1] == spec_of(module, x, "int4:128") and specs[1].weights == "int4:128"
    found = KernelSpec.from_bytes(specs[2].to_bytes())
    assert found == specs[2] and torch.equal(found.module()(x), specs[2].module()(x))
    assert plain.with_(weights="int8") == specs[0] and not plain.weights


class Halves(WeightForm):
    """Half of each weight: a form of a user's own script."""

    text = "halves"

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


@pytest.fixture
def halves() -> Iterator[type[Halves]]:
    """The class, a copy that a test may change; the word is free again afterwards."""
    yield type("Halves", (Halves,), {})
    unregister_weights("halves")


def test_a_form_that_a_script_registers_travels_with_its_spec(halves: type[Halves]) -> None:
    register_weights("halves", lambda rest: halves())
    module, x = layer(4, 96, 24, torch.float32)
    linear = module[0]
    data = spec_of(module, x, "halves").to_bytes()
    unregister_weights("halves")  # as another process, which has not run the script
    found = KernelSpec.from_bytes(data).with_(name="made again")
    assert torch.equal(found.module()(x), nn.functional.linear(x, linear.weight * 0.5, linear.bias))
    assert KernelSpec.from_bytes(found.to_bytes()) == found, "and on to the next one"


def test_a_form_of_a_package_that_is_installed_to_be_edited_travels(
    halves: type[Halves], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in a sandbox does not read the package's folder."""
    monkeypatch.setattr(declared._installed, "take", lambda: register_weights("halves", lambda rest: halves()))
    declared._take_installed()
    monkeypatch.undo()
    assert list(declared.own_makers("halves", "")["weights"]) == ["halves"]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda form: None, "is at fault: it is made as NoneType, not an object of WeightForm"),
        (lambda form: form, "is at fault: it is made as the class Halves, not an object of WeightForm"),
        (lambda form: form.none, "is at fault: making it raised AttributeError: "),
        (lambda form: type("Named", (form,), {"text": "half"})(), "is at fault: its text is 'half'"),
        (
            lambda form: type("Cut", (form,), {"declared": lambda self, weight: weight[:3]})(),
            "Cut) is at fault: its declared returned float32[3, 96] for float32[24, 96]; return a tensor of the same",
        ),
        (lambda form: type("No", (form,), {"declared": lambda self, weight: None})(), "its declared returned NoneType"),
    ],
)
def test_a_form_at_fault_is_named(made: Any, words: str, halves: type[Halves]) -> None:
    register_weights("halves", lambda rest: made(halves))
    module, x = layer(4, 96, 24, torch.float32)
    with pytest.raises(SpecError, match="the form 'halves'") as refused:
        spec_of(module, x, "halves").check()
    assert words in str(refused.value)


def test_a_form_needs_a_function_that_makes_it() -> None:
    with pytest.raises(ValueError, match="the form 'halves' of weights needs a function that makes it from a text"):
        register_weights("halves", Halves())  # type: ignore[arg-type]


def test_none_declares_nothing() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    spec = KernelSpec.from_module(module, (x,), weights=None, activations=None)  # type: ignore[arg-type]
    assert spec.weights == spec.activations == spec.declaration == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int3", "weights='int3': no such form of weights; known: 2:4, bsr:32:10, csr:5, fp8, int4, int8"),
        ("int8:64", "int8 has a scale for each output channel and takes no group size"),
        ("fp8:128", "a block is outputs x depth, such as 128x128, each one of 32, 64, 128, 256"),
        ("fp8:48x128", "a block is outputs x depth"),
        ("int4:100", "the group size must be one of 16, 32, 64, 128, 256, 512, 1024"),
        ("int4:x", "the group size must be one of"),
    ],
)
def test_an_unknown_form_is_refused(text: str, words: str) -> None:
    module, x = layer(4, 96, 24, torch.float32)
    with pytest.raises(SpecError, match="weights=") as refused:
        spec_of(module, x, text)
    assert words in str(refused.value)


def test_a_module_without_linear_layers_is_refused() -> None:
    with pytest.raises(SpecError, match="weights='int8': GELU has no torch.nn.Linear"):
        make_task(KernelSpec.from_module(nn.GELU(), (X,), weights="int8"), device="h100")


def test_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(SpecError, match="a weight of torch.float64; it must be fp32, fp16 or bf16"):
        KernelSpec.from_module(nn.Linear(96, 8).double(), (X.double(),), weights="int8").check()


def test_what_makes_codes_of_a_weight_does_not_make_a_layer_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: some twenty operators, each of a weight's size, run once over it."""
    module, x = layer(8, 512, 512, torch.float32)
    monkeypatch.setattr(KernelSpec, "reduced", lambda spec: spec)
    monkeypatch.setattr(verify, "RUNNABLE", 3 * 512 * 512)
    capture_spec(spec_of(module, x, "int4:64"))
    monkeypatch.setattr(verify, "RUNNABLE", 8 * 512)
    with pytest.raises(CaptureError, match="no smaller size does the same"):
        capture_spec(spec_of(module, x, "int4:64"))


def test_what_cannot_be_captured_is_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(96, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if float(y.sum()) > 0 else -y

    with pytest.raises(SpecError, match="weights='int8' needs the computation as a graph"):
        make_task(KernelSpec.from_module(Branches(), (X,), weights="int8"), device="h100")


@pytest.mark.parametrize("weights", ["int4", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(weights: str, value: float) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 8))
    layer[0].weight.data[3, 4] = value
    with pytest.raises(SpecError, match="0.weight holds NaN or infinity; declared weights must be finite"):
        KernelSpec.from_module(layer, (torch.randn(2, 32),), weights=weights).check()


def test_forms_of_another_process_are_among_those_that_are_known() -> None:
    declared.take_makers({"weights": {"elsewhere": lambda rest: weight_form("int8")}})
    try:
        with pytest.raises(SpecError, match="no such form of weights; known: .*elsewhere"):
            weight_form("nowhere")
    finally:
        unregister_weights("elsewhere")
