"""How many blocks of a mask hold anything, and what estimates make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from qimeng import KernelSpec
from qimeng.envs.cost.kernel_time import cost_of
from qimeng.graph.block_shares import seen_share, shares_of
from tests.vocabulary.lowprecision.samples import action_of, after, start_of

LENGTH = 256


def blocks() -> torch.Tensor:
    """The first quarter of the keys alone is seen."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, : LENGTH // 4] = True
    return mask


def test_blocks_are_counted() -> None:
    found = shares_of(blocks())
    assert found.some == (0.25, 0.25, 0.25, 0.5) and found.none == (0.75, 0.75, 0.75, 1.0)
    assert found.of((64, 32)) == 0.25 and found.of((128, 256), seen=False) == 1.0
    assert shares_of(torch.eye(100)).some[0] == pytest.approx(7 / 49)  # the last ones overhang


class Masked(nn.Module):
    """A product or an attention under a mask that buffers hold."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.register_buffer("mask", blocks())
        self.register_buffer("own", torch.arange(LENGTH) // 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        mask, own = self.get_buffer("mask"), self.get_buffer("own")
        if self.form == "times":
            return (x @ y.t()) * mask
        if self.form == "where":
            return torch.where(mask, x @ y.t(), 0.0)
        if self.form == "hidden":
            return (x @ y.t()).masked_fill(mask, 0.0)
        heads = x[None, None], y[None, None], y[None, None]
        seen = own[:, None] == own if self.form == "documents" else mask
        return functional.scaled_dot_product_attention(*heads, attn_mask=seen)


@pytest.mark.parametrize(
    ("form", "share"),
    [("times", 0.25), ("where", 0.25), ("hidden", 0.75), ("attention", 0.25), ("documents", 0.25)],
)
def test_an_estimate_knows_what_a_mask_leaves(form: str, share: float) -> None:
    inputs = torch.randn(LENGTH, 64), torch.randn(LENGTH, 64)
    program = start_of(KernelSpec.from_module(Masked(form), inputs))
    while len(program.called) > 1:
        program = after(program, action_of(program, "fusion"))
    program = after(program, action_of(program, "lowering"))
    (region,) = program.called
    made = program.implementation(region)
    assert made.schedule is not None and made.schedule.family in ("masked", "sampled")
    assert seen_share(region, (64, 64)) == share
    size = made.schedule.block_m, made.schedule.block_n  # type: ignore[attr-defined]
    assert cost_of(region, made).padded <= 1.0 and seen_share(region, size) in (share, 0.5)
