"""Attentions written with single operators, fused by actions into one region and held against PyTorch.

The interpreter must be chosen before triton is imported, so that the cases run in one process of their own (this file
as a script, with names of cases or none for all), which prints a JSON row a case.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.attention.schedule import AttentionSchedule
from qimeng.device import device_named
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from tests.contracted import contract
from tests.interpreted import rows_of
from tests.suite.problem import BF16, FP16, Table, normal
from tests.suite.run import Wrong, check, evaluate, spec_of

case = Table()
attend = functional.scaled_dot_product_attention


@case("products and a softmax", normal((2, 3, 40, 32), (2, 3, 56, 32), (2, 3, 56, 24)))
def products_and_a_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(32)).softmax(-1) @ v


@case("minGPT", normal((2, 70, 3 * 48)))
class MinGPT(nn.Module):
    heads = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(96, 96)).view(1, 1, 96, 96))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape[0], x.shape[1], 48
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in x.split(c, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = self.shares(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))) @ v
        return y.transpose(1, 2).contiguous().view(b, t, c)

    def shares(self, att: Tensor) -> Tensor:
        return functional.dropout(functional.softmax(att, dim=-1), 0.0)


@case("relu for softmax", normal((2, 70, 3 * 48)))
class Relu(MinGPT):
    def shares(self, att: Tensor) -> Tensor:
        return functional.relu(att)


@case("sigmoid in bf16", normal((2, 40, 32), (2, 56, 32), (2, 56, 24), dtype=BF16))
def sigmoid_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * 0.2 - 3) @ v


@case("grouped heads in bf16", normal((1, 4, 33, 32), (1, 2, 33, 32), (1, 2, 33, 32), dtype=BF16))
def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers writes it: heads expanded, scores scaled, a mask of the lowest number, a softmax in fp32."""

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, None].expand(1, 2, 2, 33, 32).reshape(1, 4, 33, 32)

    lowest = torch.finfo(q.dtype).min
    mask = torch.full((33, 33), lowest, dtype=q.dtype).triu(1)
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * 32**-0.5 + mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeated(v)).transpose(1, 2).contiguous()


@case("grouped heads, one operator", normal((2, 4, 70, 32), (2, 2, 70, 32), (2, 2, 70, 32)))
def grouped_heads_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True, enable_gqa=True)


@case("few queries of grouped heads", normal((2, 8, 3, 32), (2, 2, 90, 32), (2, 2, 90, 32), dtype=FP16))
def few_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True, enable_gqa=True)


@case("one query", normal((2, 4, 1, 40), (2, 4, 75, 40), (2, 4, 75, 40)))
def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


@case("boolean mask", lambda: (*(torch.randn(2, 2, 45, 16) for _ in range(3)), torch.rand(2, 1, 45, 45) > 0.3))
def boolean_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=mask)


@case("padded keys", lambda: (*(torch.randn(2, 2, 45, 16) for _ in range(3)), torch.rand(2, 1, 1, 45) > 0.3))
def padded_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=mask)


@case(
    "masks of batch elements", lambda: (*(torch.randn(2, 2, 75, 16) for _ in range(3)), torch.rand(2, 1, 75, 75) > 0.3)
)
def masks_of_the_batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Shared by the heads, so that it is looked at beforehand."""
    return attend(q, k, v, attn_mask=mask.tril() & torch.ones(75, 75, dtype=torch.bool).triu(-30))


@case("bias of positions", normal((2, 3, 37, 16), (2, 3, 41, 16), (2, 3, 41, 16), (1, 3, 37, 41)))
def bias_of_positions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=bias, scale=1.0)


@case("sliding window", normal((1, 2, 200, 16), (1, 2, 200, 16), (1, 2, 200, 16)))
def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(200)[:, None], torch.arange(200)[None, :]
    return attend(q, k, v, attn_mask=(j <= i) & (i - j < 50))


@case("causal, heads side by side", normal((2, 70, 3 * 48), dtype=FP16))
def heads_side_by_side(x: Tensor) -> Tensor:
    """Queries, keys and values are strided views, and sizes that no block divides."""
    q, k, v = (part.view(2, 70, 2, 24).transpose(1, 2) for part in x.split(48, dim=2))
    return attend(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 70, 48)


@case("causal, then more", normal((1, 2, 150, 32), (1, 2, 150, 32), (1, 2, 150, 32), (150, 64)))
def causal_then_more(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y = attend(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 150, 64)
    return y * torch.sigmoid(gate) + gate


@case("rotated before", normal((1, 2, 60, 32), (1, 2, 60, 32), (1, 2, 60, 32), (60, 32), (60, 32)))
def rotated_before(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 16:], x[..., :16]), -1) * sin

    return attend(turned(q), turned(k), v)


@case("divided by their sum", normal((2, 40, 32), (2, 56, 32), (2, 56, 24)))
def divided_by_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.sigmoid(q @ k.mT)
    return (weights / weights.sum(-1, keepdim=True)) @ v


@case("values first", normal((2, 40, 32), (2, 56, 32), (2, 24, 56)))
def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores by column, so that product 2 has its operands the other way round."""
    return v @ (k @ q.mT).softmax(-2)


def large(*shapes: tuple[int, ...], power: int = 20, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """Numbers whose scores are so large that their last place is thousands; one feature is larger than the others."""
    powers = lambda n: 2.0 ** (power - 3 * torch.arange(n).remainder(5))  # noqa: E731
    return lambda: tuple((torch.randn(s) * powers(s[-1])).to(dtype) for s in shapes)


@case("minGPT, large scores", large((2, 70, 3 * 48)))
class LargeMinGPT(MinGPT):
    """With a factor that is no power of two."""

    heads = 2


@case("causal, large scores", large(*[(2, 2, 75, 24)] * 3))
def causal_large(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


@case("causal in bf16, large scores", large(*[(2, 2, 75, 24)] * 3, dtype=BF16))
def causal_large_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


@case("temperatures, large scores", large((2, 40, 32), (2, 56, 32), (2, 56, 24), (2, 40, 1)))
def temperatures(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return ((q @ k.mT) * t.abs()).softmax(-1) @ v


@case("a sum of products, large scores", large((2, 40, 32), (2, 56, 32), (2, 56, 24), (40, 1), (1, 56)))
def sum_of_products(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.3 + a * b).softmax(-1) @ v


DEVICE = device_named("h200")
CASES = {p.name: p for p in case.problems}


def fused(program: Program) -> Program:
    """As few regions as the coder can have."""
    coder, more = TemplateCoder(), True
    while more:
        legal = (a for a in legal_actions(program, Context(DEVICE, coder)) if a.kind == "fusion" and not a.param)
        action = next(legal, None)
        more = action is not None
        program = coder.write(Request(program, action, DEVICE)).apply(program, 0) if action else program
    return program


def main(names: list[str]) -> None:
    """Print a row a case: the regions at the end, and what was wrong."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    contract()
    torch.set_num_threads(1)
    for problem in (CASES[n] for n in names or CASES):
        spec = spec_of(problem)
        graph = capture_spec(spec)
        program, wrong, coder = fused(Program.start(graph)), [], TemplateCoder()
        values = evaluate(graph, spec)
        for region in program.regions:
            try:
                patch = coder.write(Request(program, Action("lowering", (region.id,)), DEVICE))
                small = patch.alternatives[0].schedule.but(block_m=32, block_n=16)  # type: ignore[union-attr]
                several = small.but(splits=3, descriptors=True)  # type: ignore[call-arg]
                forms = [small, several]
                forms += [small.but(fast=not small.fast)]  # type: ignore[union-attr]
                if has_halves(region):
                    forms.append(small.but(descriptors=True, specialize=True))  # type: ignore[call-arg]
                for made in (patch.alternatives[0], *(coder.print(region, x) for x in forms)):
                    check(region, made, values)
            except Wrong as error:
                wrong.append(str(error))
        families = [coder.write(Request(program, Action("lowering", (r.id,)), DEVICE)) for r in program.regions]
        found = [p.alternatives[0].schedule.family for p in families]  # type: ignore[union-attr]
        print(json.dumps({"case": problem.name, "families": found, "wrong": wrong}), flush=True)


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in once("attention_values", lambda: rows_of(__file__))}


@pytest.mark.parametrize("name", CASES)
def test_one_region_gives_what_pytorch_gives(rows: dict[str, dict[str, Any]], name: str) -> None:
    by_list = name in ("minGPT", "minGPT, large scores", "relu for softmax")  # their masks are buffers
    assert rows[name]["families"] == ["masked" if by_list else "attention"]
    assert not rows[name]["wrong"]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_device(tmp_path: Path) -> None:
    """Every third case, as lowering prints it and, by turns, with keys that programs share or with descriptors."""
    coder, programs = TemplateCoder(), {}
    for number, problem in enumerate(case.problems[::3]):
        program = fused(Program.start(capture_spec(spec_of(problem), verify=False)))
        for region in program.regions:
            patch = coder.write(Request(program, Action("lowering", (region.id,)), DEVICE))
            schedule = patch.alternatives[0].schedule
            assert isinstance(schedule, AttentionSchedule)
            for s in (schedule, schedule.but(descriptors=True) if number % 2 else schedule.but(splits=3)):
                made = replace(patch, alternatives=(coder.print(region, s),))
                programs[f"{problem.name} {s}"] = made.apply(program, 0)
    found = Compilers(shared_server(), DEVICE, str(tmp_path)).programs(list(programs.values()))
    failed = {name: c.error for name, t in zip(programs, found, strict=True) for c in t.values() if c.failure}
    assert sum(map(len, found)) == 2 * len(case.problems[::3]) and not failed, json.dumps(failed, indent=1)
    assert not any(k.overlaps for t in found for c in t.values() for k in c.kernels), "a product may read too late"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_give_what_pytorch_gives(name: str) -> None:
    """Every schedule of lowering, on the GPU."""
    problem, coder = CASES[name], TemplateCoder()
    spec = spec_of(problem)
    graph = capture_spec(spec, device="cuda")
    program = fused(Program.start(graph))
    with torch.device("cuda"):
        values = evaluate(graph, spec, "cuda")
    for region in program.regions:
        patch = coder.write(Request(program, Action("lowering", (region.id,)), DEVICE))
        first = patch.alternatives[0].schedule
        assert isinstance(first, AttentionSchedule)
        copied = first.but(warps=4, block_m=max(first.block_m, 64), descriptors=True)
        forms = [copied, copied.but(specialize=True)] if has_halves(region) else []
        with torch.device("cuda"):
            for made in (*patch.alternatives, *(coder.print(region, s) for s in forms)):
                check(region, made, values)


def has_halves(region: Region) -> bool:
    """Whether it has half operands, which descriptors are for."""
    return any(region.graph.meta(v).dtype in ("float16", "bfloat16") for v in region.inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
