"""Attention under masks that buffers hold: what is found, refused and printed, and its values in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Request
from qimeng.program.program import Program
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, start_of
from tests.vocabulary.sparse.changed_masks import check, row_of, run

LENGTH = 150
SLOW = pytest.mark.slow


def window(rows: int = LENGTH, keys: int = LENGTH) -> Tensor:
    """A band, one column that all see, and one row that sees all."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    return ((i - j).abs() < 20) | (j == 0) | (i == rows - 1)


class Attention(nn.Module):
    """Attention under a mask, written in one of several ways."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.register_buffer("mask", window())
        if form in ("all", "none"):
            self.get_buffer("mask").fill_(form == "all")
        self.register_buffer("documents", torch.arange(LENGTH) // 40)
        heads = torch.stack([window(), window().flip(0)])
        self.register_buffer("heads", heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask, attend = self.get_buffer("mask"), functional.scaled_dot_product_attention
        if self.form in ("one operator", "all", "none"):
            return attend(q, k, v, attn_mask=mask)
        if self.form == "a part":
            return attend(q, k, v, attn_mask=mask[None, None, : q.shape[2], : k.shape[2]])
        if self.form == "by head":
            return attend(q, k, v, attn_mask=self.get_buffer("heads"))
        if self.form == "documents":
            own = self.get_buffer("documents")
            return attend(q, k, v, attn_mask=(own[:, None] == own[None, :]))
        if self.form == "hidden rows":
            return attend(q, k, v, attn_mask=mask & (self.get_buffer("documents") % 2 == 0)[:, None])
        scores = (q @ k.transpose(-2, -1) * 0.2).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v


def inputs(dtype: torch.dtype = torch.float32, keys: int = LENGTH) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 2, n, 32).to(dtype) for n in (LENGTH, keys, keys))


def lowered(form: str, dtype: torch.dtype = torch.float32, keys: int = LENGTH) -> Program:
    """The attention with all that makes its mask in one region, lowered."""
    program = start_of(KernelSpec.from_module(Attention(form), inputs(dtype, keys)))
    while len(program.called) > 1:
        program = after(program, action_of(program, "fusion"))
    return after(program, action_of(program, "lowering"))


FORMS = ("one operator", "a part", "by head", "documents", "hidden rows", "by hand")


@pytest.mark.parametrize("form", [*FORMS[:3], *(pytest.param(f, marks=SLOW) for f in FORMS[3:])])
def test_the_blocks_of_a_mask_in_a_buffer_are_listed_once(form: str) -> None:
    program = lowered(form)
    made = program.implementation(program.called[0])
    assert made.schedule is not None and made.schedule.family == "masked"
    (region,) = program.called
    given = [program.graph.nodes[region.inputs[i].node].kind for i in made.prepare_inputs]
    assert given and set(given) == {"buffer"}


class Given(nn.Module):
    """Attention under a mask that is an input, that is added, that positions make; or beside sums of weights."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.register_buffer("mask", window())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        if self.form == "input":
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.form == "none":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.form == "added":
            bias = torch.zeros(LENGTH, LENGTH).masked_fill(~self.get_buffer("mask"), -1e4)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        weights = (q @ k.transpose(-2, -1)).masked_fill(~self.get_buffer("mask"), 0.0)
        return (weights / (weights.sum(-1, keepdim=True).abs() + 1)) @ v


@pytest.mark.parametrize("form", ["input", "none", "sums", "added"])
def test_other_masks_are_left_to_the_attention_family(form: str) -> None:
    program = start_of(KernelSpec.from_module(Given(form), (*inputs(), window())))
    while (fusion := next((a for a in legal_actions(program, CONTEXT) if a.kind == "fusion"), None)) is not None:
        program = after(program, fusion)
    names = {covering(region)[0].name for region in program.called}
    assert "masked" not in names and "attention" in names


def test_lowering_measures_the_plain_attention_beside_it() -> None:
    program = start_of(KernelSpec.from_module(Attention("one operator"), inputs(torch.bfloat16)))
    patch = CONTEXT.coder.write(Request(program, action_of(program, "lowering"), CONTEXT.device))
    found = [made.schedule.family for made in patch.alternatives if made.schedule is not None]
    assert found[0] == "masked" and "attention" in found


def test_no_tuning_gives_the_copies_warps_of_their_own() -> None:
    program = lowered("one operator", torch.bfloat16)
    (region,), family = program.called, covering(program.called[0])[0]
    schedule, plan = program.schedule(region), covering(region)[1]
    found = family.moves["pipeline"].schedules(plan, schedule, "warps", CONTEXT.device)
    assert found and not any(s.specialize for s in found)  # type: ignore[attr-defined]


def test_the_printed_kernel(golden: Callable[[str, str], None]) -> None:
    program = lowered("by head", torch.bfloat16)
    golden("masked.py.txt", program.implementation(program.called[0]).source)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"descriptors": True}, marks=SLOW),
        pytest.param({"splits": 2}, marks=SLOW),
        pytest.param({"block_m": 128, "warps": 8}, marks=SLOW),
    ],
)
def test_it_compiles_without_spills(changes: dict[str, Any], tmp_path: Path) -> None:
    program = lowered("by head", torch.bfloat16)
    (region,) = program.called
    schedule = program.schedule(region)
    assert schedule is not None
    made = CONTEXT.coder.print(region, schedule.but(**changes))
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and all(k.spills == 0 and not k.overlaps for k in found.kernels)
    family, plan = covering(region)
    assert made.schedule is not None
    most = family.needs(plan, made.schedule).shared_bytes
    assert max(k.shared_bytes for k in found.kernels) <= most


# -- values, in a process of its own where Triton interprets


CASES = {
    **{form: (torch.float32, {}) for form in FORMS},
    "halves": (torch.bfloat16, {}),
    "shared": (torch.float32, {"splits": 3, "block_m": 32, "block_n": 32}),
    "copied": (torch.float16, {"descriptors": True}),
    "all": (torch.float32, {"block_m": 64, "block_n": 64}),
    "none": (torch.float32, {"block_m": 64, "block_n": 64}),
    "not finite": (torch.float32, {"block_m": 64, "block_n": 32}),
}
"""The masks ``all`` and ``none`` hide nothing and everything at first."""

QUICK = ["one operator", "shared", "not finite", "none"]


def rows(name: str) -> dict[str, Any]:
    """The largest errors of the program and of PyTorch, relative to |result| + rms, after a change of the mask too."""
    form = name if name in (*FORMS, "all", "none") else "by head"
    dtype, changes = CASES[name]
    program, module = lowered(form, dtype), Attention(form)
    (region,) = program.called
    schedule = program.schedule(region)
    assert schedule is not None
    made = CONTEXT.coder.print(region, schedule.but(**changes))
    program = program.with_implementation(region.id, made)
    model = program.load().Model()
    given = inputs(dtype)
    if name == "not finite":
        given[2][0, 1, 70, 3] = float("inf")
    return row_of(name, model, module, given, change)


def change(module: nn.Module) -> None:
    """Other places are hidden."""
    module.get_buffer("mask").copy_(window().roll(33, 1))
    module.get_buffer("heads").copy_(module.get_buffer("heads").flip(0))


def test_quick_values() -> None:
    check("tests.vocabulary.sparse.test_masked", QUICK)


@pytest.mark.slow
def test_other_values() -> None:
    check("tests.vocabulary.sparse.test_masked", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    run(rows, sys.argv[1:])
