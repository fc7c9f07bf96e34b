"""The forms of activations, and declaring them: values, refusals, digests, travel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.envs.steps.setup import make_task
from qimeng.errors import SpecError
from qimeng.spec.declared import activation_form, weight_form
from qimeng.spec.declared_linear import read_declared
from tests.vocabulary.lowprecision.samples import layer

X = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))


def declared(text: str, x: torch.Tensor) -> torch.Tensor:
    return activation_form(text, text.partition(":")[0]).declared(x)


@pytest.mark.parametrize("text", ["int8", "int8:tensor"])
def test_each_activation_is_the_nearest_code_times_its_scale(text: str) -> None:
    exact = X.double()
    scale = (exact.abs().amax() if "tensor" in text else exact.abs().amax(-1, keepdim=True)) / 127
    found = declared(text, X).double()
    codes = found / scale
    assert (codes - codes.round()).abs().max() < 1e-4 and codes.abs().max() < 127 + 1e-4
    assert ((found - exact).abs() / scale).max() <= 0.5 + 1e-5


@pytest.mark.parametrize("text", ["fp8", "fp8:tensor"])
def test_fp8_activations_are_the_nearest_numbers_times_their_scale(text: str) -> None:
    scale = (X.abs().amax() if "tensor" in text else X.abs().amax(-1, keepdim=True)) / 448
    found = declared(text, X)
    assert (found / scale).abs().max() == pytest.approx(448)
    assert (((found / scale).to(torch.float8_e4m3fn).float() * scale) - found).abs().max() < 1e-6
    assert ((found - X).abs() <= X.abs() / 16 + scale * 2**-10).all(), "half of the last place of 3 bits"


@pytest.mark.parametrize("text", ["int8", "fp8"])
def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_row_nan(text: str) -> None:
    x = X.clone()
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, float("nan"), float("inf"), -float("inf")
    found = declared(text, x)
    assert not found[0].any() and found[1:4].isnan().all() and found[4:].isfinite().all()
    assert torch.equal(found[4:], declared(text, X)[4:]), "other rows are as they were"
    assert declared(f"{text}:tensor", x).isnan().all()


@pytest.mark.parametrize("group", [32, 64])
def test_groups_of_a_row_have_scales_of_their_own(group: int) -> None:
    x = torch.randn(4, 96)
    x[1, 0], x[2, :group] = float("inf"), 0.0
    found = declared(f"fp8:1x{group}", x)
    for first in range(0, 96, group):
        assert torch.allclose(
            found[:, first : first + group], declared("fp8", x[:, first : first + group]), equal_nan=True
        )
    assert found[1, :group].isnan().all() and found[1, group:].isfinite().all() and not found[2, :group].any()


@pytest.mark.parametrize("text", ["int8", "fp8", "fp8:tensor", "fp8:1x64"])
def test_the_reference_in_float64_multiplies_by_the_same_codes(text: str) -> None:
    x = X.view(2, 3, 96).to(torch.bfloat16)
    exact = declared(text, x.double())
    assert exact.dtype is torch.float64 and exact.shape == x.shape
    assert torch.equal(exact.to(torch.bfloat16), declared(text, x))


# ---- on a spec


def spec_of(module: nn.Module, x: torch.Tensor, text: str) -> KernelSpec:
    return KernelSpec.from_module(module, (x,), weights=text.partition(":")[0], activations=text)


@pytest.mark.parametrize("text", ["int8", "fp8"])
def test_a_spec_computes_what_it_declares(text: str) -> None:
    module, x = layer(4, 96, 24, torch.bfloat16)
    spec = spec_of(module, x, text)
    with torch.no_grad():
        weight = weight_form(text).declared(module[0].weight)
        expected = nn.functional.linear(declared(text, x), weight, module[0].bias)
        assert torch.equal(spec.module()(x), expected) and not torch.equal(expected, module(x))
        exact = spec.module(dtype=torch.float64)(x.double())
        assert exact.dtype is torch.float64 and (exact - expected).abs().max() < 0.05
    assert spec.declaration == f"weights {text}, activations {text}"
    assert make_task(spec, device="h100").declared == spec.declaration


def test_torch_compile_is_given_the_same_computation() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    spec, graphs = spec_of(module, x, "int8").module(), list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    read_declared(spec)
    with torch.no_grad():
        assert torch.equal(torch.compile(spec, backend=backend)(x), spec(x))
    assert len(graphs) == 1, "one graph without a break"


def test_the_declaration_belongs_to_the_digest_and_travels() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    weights = KernelSpec.from_module(module, (x,), weights="int8")
    specs = [weights, spec_of(module, x, "int8"), spec_of(module, x, "int8:tensor"), spec_of(module, x, "fp8")]
    assert len({s.digest for s in specs}) == 4 and weights.with_(activations="int8") == specs[1]
    found = KernelSpec.from_bytes(specs[2].to_bytes())
    assert found == specs[2] and torch.equal(found.module()(x), specs[2].module()(x))


@pytest.mark.parametrize(
    ("weights", "activations", "words"),
    [
        ("", "int8", "activations='int8' needs weights='int8' beside it, not weights=''"),
        ("int4", "int8", "activations='int8' needs weights='int8' beside it, not weights='int4:128'"),
        ("int8", "fp8", "activations='fp8' needs weights='fp8' beside it, not weights='int8'"),
        ("int8", "int4", "activations='int4': no such form of activations; known: fp8, int8"),
        ("fp8", "fp8:1x48", r"or for groups of a row \('fp8:1x128'; 32, 64, 128, 256\)"),
        ("int8", "int8:1x128", "a scale is for each row"),
        ("fp8", "fp8:128", r"a scale is for each row \('fp8'\) or for all rows \('fp8:tensor'\)"),
    ],
)
def test_a_wrong_declaration_is_one_clear_error(weights: str, activations: str, words: str) -> None:
    module, x = layer(4, 96, 24, torch.float32)
    with pytest.raises(SpecError, match=words):
        KernelSpec.from_module(module, (x,), weights=weights, activations=activations)
