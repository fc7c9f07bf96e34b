"""The measurement of layers with declared weights: its cases, and what it says without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from experiments import lowprecision
from qimeng import KernelSpec, plan_and_code
from qimeng.device import current_device
from qimeng.spec.declared import weight_form
from tests.experiments.scripts import run


def test_the_cases_have_few_and_many_rows_of_every_form() -> None:
    assert len(lowprecision.CASES) >= 12
    for weights in ("int8", "int4"):
        rows = {r for w, r, _ in lowprecision.CASES.values() if w == weights}
        assert {1, 8, 64, 2048} <= rows
    assert {layer for _, _, layer in lowprecision.CASES.values()} == set(lowprecision.LAYERS)
    for weights in ("fp8a", "int8a"):
        assert {r for w, r, _ in lowprecision.CASES.values() if w == weights} == {16, 64, 512, 2048, 8192}
    assert lowprecision.declared("fp8a") == {"weights": "fp8", "activations": "fp8"}


def test_each_library_fails_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(256, 64, bias=False).to(torch.bfloat16), torch.randn(2, 256, dtype=torch.bfloat16)
    monkeypatch.setattr(lowprecision, "layer_of", lambda case: (layer, x, case))
    monkeypatch.setattr(lowprecision, "in_turns", lambda calls: (dict.fromkeys(calls, 1.0), {}))
    monkeypatch.setattr(lowprecision, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torchao", None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, "gemlite", None)
    with torch.no_grad():
        row = lowprecision.beside("fp8", {})
    assert set(row["turns_ms"]) == {"eager"} and set(row["not_timed"]) == {"torchao", "gemlite"}
    assert all("torchao" in text or "gemlite" in text for text in row["not_timed"].values())


@pytest.mark.parametrize("weights", ["fp8a", "int8a"])
def test_products_of_codes_have_pytorchs_own_as_rivals(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(256, 64, bias=False).to(torch.bfloat16), torch.randn(32, 256, dtype=torch.bfloat16)
    monkeypatch.setattr(lowprecision, "layer_of", lambda case: (layer, x, case))
    monkeypatch.setattr(lowprecision, "in_turns", lambda calls: (dict.fromkeys(calls, 1.0), {}))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with torch.no_grad():
        row = lowprecision.beside(weights, {})
    names = row["turns_ms"].keys() | row["not_timed"].keys()  # a CPU may not have each of them
    product = "_int_mm" if weights == "int8a" else "_scaled_mm rows, fast"
    assert {"eager", "bf16 linear", product} <= names and any(n.startswith("quantize + ") for n in names)
    assert row["rms_difference_over_rms"]["eager"] < 0.005 < row["rms_difference_over_rms"]["bf16 linear"]
    if weights == "int8a":
        assert row["rms_difference_over_rms"]["quantize + _int_mm + scale, compiled"] < 0.005


def test_codes_go_to_gemlite_as_they_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """GemLite itself needs a GPU; what it is given is held against the declared weight."""
    given: dict[str, torch.Tensor] = {}

    class Takes:
        def __init__(self, device: str, dtype: torch.dtype):
            assert device == "cuda" and dtype is torch.bfloat16

        def from_weights(self, codes: torch.Tensor, scales: torch.Tensor, *more: Any) -> nn.Module:
            given.update(codes=codes, scales=scales, zeros=more[0] if more else torch.zeros(()))
            return nn.Identity()

    helper = SimpleNamespace(A16Wn=Takes, A16W8_INT8=Takes, A16W8_FP8=Takes)
    monkeypatch.setitem(sys.modules, "gemlite", SimpleNamespace(helper=helper))
    layer = nn.Linear(256, 64, bias=False).to(torch.bfloat16)
    for weights in ("int4", "int8", "fp8"):
        with torch.no_grad():
            lowprecision._gemlite(layer, weights)
            declared = weight_form(weights).declared(layer.weight).float()
        groups = given["scales"].shape[1]
        codes = given["codes"].float().view(64, groups, -1)
        zeros = given["zeros"].float()[..., None] if weights == "int4" else 0.0
        found = ((codes - zeros) * given["scales"].float()[..., None]).view(64, 256)
        assert (found - declared).abs().max() <= declared.abs().max() * 2.0**-7


@pytest.mark.skipif(current_device() is not None, reason="there is a GPU")
def test_it_asks_for_a_gpu(tmp_path: Path) -> None:
    done = run("lowprecision", tmp_path / "rows.jsonl")
    assert done.returncode != 0 and "this needs a GPU" in done.stderr


def test_what_the_judge_found_is_a_row() -> None:
    layer = nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    spec = KernelSpec.from_module(layer, (torch.randn(8, 128, dtype=torch.bfloat16),), weights="int8")
    row = lowprecision.judged(plan_and_code(spec, planner="heuristic", seconds=20, evaluations=2, device="h100"))
    assert json.loads(json.dumps(row)).keys() == row.keys() and "weights int8 as declared" in row["headline"]
    assert row["steps"][0][0].startswith("dequantize") and row["accuracy"]["max_error"] <= row["accuracy"]["max_budget"]
