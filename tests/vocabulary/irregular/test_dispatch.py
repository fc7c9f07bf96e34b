"""Layers that compute all experts: which are found, what the action makes of a program, values and kernels.

Values are computed in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from tests.vocabulary.irregular.samples import CONTEXT, AllExperts, SortedExperts, action_of, after, start_of
from tests.vocabulary.values import BF16, F32, FACTOR, FLOORS, check

FORMS = ("gated", "repeated", "plain", "biased")
SORTED = ("sorted", "others", "sorted, biased")


def start(form: str, dtype: torch.dtype = F32, rows: int = 12, **sizes: int) -> tuple[nn.Module, torch.Tensor, Program]:
    torch.manual_seed(0)
    name = {"sorted": "gated", "others": "gated", "sorted, biased": "biased"}.get(form, form)
    made = SortedExperts(name, **sizes) if form in SORTED else AllExperts(form, **sizes)
    made.form = "others" if form == "others" else name
    module, x = made.to(dtype), torch.randn(rows, sizes.get("width", 20)).to(dtype)
    return module, x, start_of(KernelSpec.from_module(module, (x,)))


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_layer_becomes_one_region(form: str) -> None:
    program = start(form)[2]
    dispatched = after(program, action_of(program, "dispatch"))
    (region,) = [r for r in dispatched.regions if "bmm" in r.label()]
    assert [r.label() for r in dispatched.regions if r != region] == ["linear", "_softmax", "topk", "sum", "div"]
    schedule = dispatched.schedule(region)
    assert schedule is not None and schedule.family == "routed"
    kinds = {a.kind for a in legal_actions(dispatched, CONTEXT)}
    assert {"tiling", "pipeline"} <= kinds and "dispatch" not in kinds
    with pytest.raises(IllegalAction, match="computes only the experts that count already"):
        check_action(dispatched, Action("dispatch", (region.id,)), CONTEXT)


@pytest.mark.parametrize("form", ["sorted", "sorted, biased"])
def test_a_layer_that_sorts_its_rows_becomes_one_region_too(form: str) -> None:
    program = start(form, BF16, width=24, inner=16)[2]
    dispatched = after(program, action_of(program, "dispatch"))
    (region,) = [r for r in dispatched.regions if "sort" in r.label()]
    schedule = dispatched.schedule(region)
    assert schedule is not None and schedule.family == "routed" and len(dispatched.called) <= 6
    assert not any("grouped_mm" in r.label() for r in dispatched.called if r != region)


def test_sums_of_other_rows_are_refused() -> None:
    program = start("others", BF16, width=24, inner=16)[2]
    assert "dispatch" not in {a.kind for a in legal_actions(program, CONTEXT)}


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow)])
def test_a_layer_of_transformers(dtype: torch.dtype) -> None:
    config = pytest.importorskip("transformers").MixtralConfig(
        hidden_size=32, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2
    )
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config._experts_implementation = "grouped_mm"
    module = MixtralSparseMoeBlock(config).to(dtype).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    program = start_of(KernelSpec.from_module(module, (torch.randn(2, 8, 32, dtype=dtype),)))
    dispatched = after(program, action_of(program, "dispatch"))
    assert "routed" in {s.family for r in dispatched.called if (s := dispatched.schedule(r)) is not None}


@pytest.mark.parametrize("ways", ["grouped_mm", "eager"])
def test_a_layer_of_transformers_with_biases(ways: str) -> None:
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=32, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2
    )
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    class Block(GptOssMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[0]  # the others are the router's

    config._experts_implementation = ways
    module = Block(config).to(BF16).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    program = start_of(KernelSpec.from_module(module, (torch.randn(2, 8, 32, dtype=BF16),)))
    dispatched = after(program, action_of(program, "dispatch"))
    assert "routed" in {s.family for r in dispatched.called if (s := dispatched.schedule(r)) is not None}


class Other(nn.Module):
    """Sums of weighted results that are not those of chosen experts."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.up, self.down = (nn.Parameter(torch.randn(6, 6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights, best = torch.topk(torch.softmax(x, -1), 2)
        zeros = torch.zeros_like(x) if self.form != "ones" else torch.ones_like(x)
        shares = zeros.scatter(1, chosen if self.form == "twice" else best, weights)
        rows = torch.bmm(x.expand(6, 6, 6), self.up)
        if self.form == "own rows":
            rows = torch.bmm(x.view(6, 1, 6) * x, self.up)
        if self.form == "transposed":
            rows = torch.bmm(x.unsqueeze(0).transpose(1, 2).expand(6, 6, 6), self.up)
        inner = torch.softmax(rows, -1) if self.form == "softmax" else torch.relu(rows)
        spread = shares.unsqueeze(-1) if self.form == "other way" else shares.t().unsqueeze(-1)
        return (torch.bmm(inner, self.down) * spread).sum(0)


def of_other(form: str) -> Program:
    torch.manual_seed(0)
    return start_of(KernelSpec.from_module(Other(form), (torch.randn(6, 6), torch.randint(0, 6, (6, 2)))))


@pytest.mark.parametrize("form", ["ones", "twice", "own rows", "transposed", "softmax", "other way"])
def test_what_is_no_layer_of_chosen_experts_is_refused(form: str) -> None:
    program = of_other(form)
    assert "dispatch" not in {a.kind for a in legal_actions(program, CONTEXT)}
    with pytest.raises(IllegalAction, match="adds up no results of experts that a topk chose and a scatter weighs"):
        check_action(program, Action("dispatch", (program.called[-1].id,)), CONTEXT)


VALUES = {
    "gated": ("gated", (F32, BF16), {}),
    "repeated": ("repeated", (F32, BF16), {}),
    "plain": ("plain", (F32,), {"best": 1}),
    "many rows": ("gated", (BF16,), {"rows": 90, "experts": 4}),
    "as many rows as experts and sizes": ("plain", (F32,), {"rows": 8, "experts": 8, "width": 8, "inner": 8}),
    "sorted": ("sorted", (BF16,), {"width": 24, "inner": 16}),
    "biases": ("biased", (F32, BF16), {}),
    "sorted, biases": ("sorted, biased", (BF16,), {"width": 24, "inner": 16}),
    "a plain layer of equal sizes": ("even", (F32,), {}),
}


def test_values() -> None:
    check("tests.vocabulary.irregular.test_dispatch", list(VALUES))


def test_the_printed_kernel(golden: Callable[[str, str], None]) -> None:
    program = start("gated", BF16)[2]
    dispatched = after(program, action_of(program, "dispatch"))
    region = next(r for r in dispatched.regions if dispatched.schedule(r))
    golden("routed.py.txt", dispatched.implementation(region).source)


@pytest.mark.parametrize(("form", "width"), [("biased", "BN * 2"), ("gated", "BN")])
def test_columns_that_take_turns_are_read_side_by_side(form: str, width: str) -> None:
    program = start(form, BF16)[2]
    dispatched = after(program, action_of(program, "dispatch"))
    (region,) = (r for r in dispatched.regions if dispatched.schedule(r))
    text = dispatched.implementation(region).source
    assert f"acc0 = tl.zeros([BM, {width}], tl.float32)" in text
    assert text.count("tl.dot(") == (2 if form == "biased" else 3)


@pytest.mark.parametrize(
    ("form", "dtype", "choice"), [("gated", BF16, 0), ("repeated", BF16, 4), ("plain", F32, 1), ("biased", BF16, 1)]
)
def test_it_compiles_within_what_it_says(form: str, dtype: torch.dtype, choice: int, tmp_path: Path) -> None:
    program = start(form, dtype, 64, width=256, inner=512)[2]
    dispatched = after(program, action_of(program, "dispatch"), choice)
    region = next(r for r in dispatched.regions if dispatched.schedule(r))
    made = dispatched.implementation(region)
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and made.schedule is not None
    family, plan = covering(region)
    said = family.needs(plan, made.schedule).shared_bytes
    for kernel in found.kernels:
        assert kernel.spills <= 8 and kernel.shared_bytes <= said


def rows(name: str) -> None:
    """Print errors against float64, relative to |result| + rms."""
    form, dtypes, sizes = VALUES[name]
    for dtype in dtypes:
        if form in FORMS + SORTED:
            module, x, program = start(form, dtype, **sizes)
            inputs: tuple[torch.Tensor, ...] = (x,)
        else:
            program, inputs = of_other(form), (torch.randn(6, 6), torch.zeros(6, 2, dtype=torch.int64))
            torch.manual_seed(0)
            module = Other(form)
        eager, state = module(*inputs), {k: v.clone() for k, v in module.state_dict().items()}
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = AllExperts.forward(module.double(), *wide) if form in SORTED else module.double()(*wide)
        scale = exact.abs() + exact.square().mean().sqrt()
        limit = max(FACTOR * float(((eager.double() - exact).abs() / scale).max()), FLOORS[dtype])
        patch = CONTEXT.coder.write(Request(program, action_of(program, "dispatch"), CONTEXT.device))
        for choice in (0, len(patch.alternatives) - 1):
            made = patch.apply(program, choice).load().Model()
            made.load_state_dict(state)
            error = float(((made(*inputs).double() - exact).abs() / scale).max())
            print(json.dumps({"case": name, "choice": choice, "error": error, "limit": limit}), flush=True)


if __name__ == "__main__":
    import sys

    from qimeng.envs.estimate.interpreter import mend

    mend()
    for one in sys.argv[1:]:
        rows(one)
