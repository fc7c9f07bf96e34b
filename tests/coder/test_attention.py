"""The attention family: what it covers, what it refuses, its schedules and the kernels that it prints.

Results are checked in `tests/suite/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng.actions import Context, check_action, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported, covering, refusal
from qimeng.graph.capture import capture
from qimeng.graph.ops import flops
from qimeng.graph.region import Region, make_region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.spec.origin import FunctionModule

H200 = device_named("h200")
attend = functional.scaled_dot_product_attention


def program(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Program:
    inputs = lambda: tuple(torch.empty(s, dtype=dtype) for s in shapes)  # noqa: E731
    return Program.start(capture(lambda: FunctionModule(function), inputs))


def whole(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Region:
    graph = program(function, *shapes, dtype=dtype).graph
    return make_region(graph, [n.name for n in graph.ops()])


QKV = ((2, 4, 96, 32),) * 3


def test_an_attention_is_one_nest_of_two_products() -> None:
    family, plan = covering(whole(attend, *QKV))
    assert family.name == "attention"
    assert len(plan.nest.dots) == 2 and plan.nest.dot is plan.output
    assert plan.scores.level == 0 and plan.output.level == 2  # the softmax's pass over the keys, then the product's
    assert plan.shape == (8, 96, 96, 32, 32)
    assert not set(plan.keys) & plan.output.depends and set(plan.keys) <= plan.weights.scores.depends


@pytest.mark.parametrize("name", ["causal_fp32", "causal_bf16"])
def test_the_printed_kernel(name: str, golden: Callable[[str, str], None]) -> None:
    dtype = torch.float32 if name.endswith("fp32") else torch.bfloat16
    causal = lambda q, k, v: attend(q, k, v, is_causal=True)  # noqa: E731
    family, plan = covering(whole(causal, *[(2, 4, 200, 48)] * 3, dtype=dtype))
    schedule = family.default(plan, H200, "default")
    golden(f"attention_{name}.py.txt", f"# {schedule}\n{family.print(plan, schedule, 'k').source}")


def test_tiles_are_copied_by_warps_of_their_own(golden: Callable[[str, str], None]) -> None:
    """One loop, tiles through descriptors, and three times the warps to be accounted for."""
    causal = lambda q, k, v: attend(q, k, v, is_causal=True)  # noqa: E731
    family, plan = covering(whole(causal, *[(2, 4, 200, 48)] * 3, dtype=torch.bfloat16))
    schedule = family.default(plan, H200, "default").but(descriptors=True, specialize=True)  # type: ignore[attr-defined]
    golden("attention_copied_bf16.py.txt", f"# {schedule}\n{family.print(plan, schedule, 'k').source}")
    assert family.needs(plan, schedule).warps == 12
    moved = family.moves["pipeline"].schedules(plan, schedule.but(specialize=False), "warps", H200)
    assert schedule.but(block_n=128) in moved
    older = family.moves["pipeline"].schedules(plan, schedule.but(specialize=False), "warps", device_named("a100"))
    assert not any(s.specialize for s in older)  # type: ignore[attr-defined]


def test_descriptors_need_aligned_rows_of_halves() -> None:
    """Rows of 20 bytes, or fp32 operands, are read by pointers."""

    def refused(*shapes: tuple[int, ...], dtype: torch.dtype, device: str = "h200") -> str:
        family, plan = covering(whole(attend, *shapes, dtype=dtype))
        schedule = family.default(plan, H200, "default")
        with pytest.raises(IllegalAction) as raised:
            family.moves["layout"].check(plan, schedule, "descriptors", device_named(device), "default")
        copied = schedule.but(descriptors=True, specialize=True)  # type: ignore[attr-defined]
        assert "TensorDescriptor" not in family.print(plan, copied, "k").source
        return str(raised.value)

    assert "multiples of 16 bytes" in refused(*[(2, 4, 64, 10)] * 3, dtype=torch.float16)
    assert "these are float32" in refused(*QKV, dtype=torch.float32)
    family, plan = covering(whole(attend, *QKV, dtype=torch.float16))
    with pytest.raises(IllegalAction, match="a100 copies no tiles"):
        family.moves["layout"].check(
            plan, family.default(plan, H200, "default"), "descriptors", device_named("a100"), "default"
        )


def test_the_factor_of_the_scores_goes_into_the_exponent() -> None:
    """Unless a mask is added to the scores, which it would change."""
    causal = lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3)  # noqa: E731
    biased = lambda q, k, v, m: attend(q, k, v, attn_mask=m, scale=0.3)  # noqa: E731
    for function, shapes, folded in ((causal, QKV, True), (biased, (*QKV, (96, 96)), False)):
        family, plan = covering(whole(function, *shapes, dtype=torch.bfloat16))
        source = family.print(plan, family.default(plan, H200, "default"), "k").source
        assert ("m *= 0.3" in source, "s * 0.3" in source) == (folded, not folded)


def test_tunings_fit_the_device_and_say_why_not() -> None:
    start = program(attend, *[(1, 2, 512, 128)] * 3, dtype=torch.bfloat16)
    coder = TemplateCoder()
    context = Context(H200, coder)
    lowered = coder.write(Request(start, Action("lowering", (start.regions[0].id,)), H200)).apply(start, 0)
    region = lowered.regions[0]
    kinds = {a.kind for a in legal_actions(lowered, context)}
    assert {"tiling", "pipeline", "special"} <= kinds and "precision" not in kinds
    with pytest.raises(IllegalAction, match="these are bfloat16"):
        check_action(lowered, Action("precision", (region.id,), "tf32"), context)
    family, plan = covering(region)
    schedule = lowered.schedule(region)
    assert schedule is not None and refusal(family, plan, schedule, H200) is None
    far = refusal(family, plan, schedule.but(block_m=256, block_n=256, stages=4), H200)
    assert far is not None and "B of shared memory" in far and "h200 allows" in far


def test_what_the_assembler_miscompiles_is_left_out() -> None:
    """8 warps on 64 queries by 16 keys in TF32 in parts made illegal memory accesses on an H200."""
    coder, found = TemplateCoder(), {}
    start = program(attend, *[(2, 4, 256, 64)] * 3)
    region = start.regions[0]
    family, plan = covering(region)
    schedule = family.default(plan, H200, "default").but(block_m=64, block_n=32, warps=4, precision="tf32x3")
    lowered = start.with_implementation(region.id, coder.print(region, schedule))
    for name in ("h200", "a100"):
        request = Request(lowered, Action("tiling", (region.id,), "smaller"), device_named(name))
        found[name] = {a.schedule for a in coder.write(request).alternatives}
    bad = schedule.but(block_n=16, warps=8)
    assert schedule.but(block_n=16) in found["h200"] and found["a100"] - found["h200"] == {bad}
    assert "CUDA 12.8 miscompiles" in (refusal(family, plan, bad, H200) or "")
    for right in (bad.but(block_n=32), bad.but(block_m=128), bad.but(block_m=32), bad.but(precision="ieee")):
        assert refusal(family, plan, right, H200) is None
    _, few = covering(whole(attend, (2, 4, 256, 64), *[(2, 4, 16, 64)] * 2))
    assert family.reduced(few, bad.but(block_n=32)).warps == 4  # type: ignore[attr-defined]
    guesses = family.guesses(few, family.default(few, H200, "default"), H200, "default")
    tried = {(s.block_m, s.block_n, s.warps) for s in guesses}  # type: ignore[attr-defined]
    assert (64, 16, 4) in tried and (64, 16, 8) not in tried


def test_tf32_is_for_mode_high() -> None:
    family, plan = covering(whole(attend, *QKV))
    assert family.default(plan, H200, "default").precision == "ieee"  # type: ignore[attr-defined]
    assert {s.precision for s in family.guesses(plan, family.default(plan, H200, "default"), H200, "default")} == {  # type: ignore[attr-defined]
        "tf32x3"
    }
    with pytest.raises(IllegalAction, match="mode 'default' asks for fp32"):
        family.moves["precision"].check(plan, family.default(plan, H200, "default"), "tf32", H200, "default")


def test_keys_are_shared_where_queries_are_few() -> None:
    """One query of 8 heads over 8192 keys would leave most of 132 multiprocessors idle."""
    family, plan = covering(whole(attend, (1, 8, 1, 64), *[(1, 8, 8192, 64)] * 2, dtype=torch.bfloat16))
    schedule = family.default(plan, H200, "default")
    assert (schedule.block_m, schedule.splits) == (16, 132 // 8)  # type: ignore[attr-defined]
    assert "_merge[(8,)]" in family.print(plan, schedule, "k").source
    family, plan = covering(whole(attend, *[(8, 32, 1024, 64)] * 3, dtype=torch.bfloat16))
    assert family.default(plan, H200, "default").splits == 1  # type: ignore[attr-defined]


def test_flops_of_an_attention_leave_out_what_causality_hides() -> None:
    graph = program(attend, *[(2, 3, 8, 4)] * 3).graph
    causal = program(lambda q, k, v: attend(q, k, v, is_causal=True), *[(2, 3, 8, 4)] * 3).graph
    assert [flops(graph, n) for n in graph.ops()] == [2 * 6 * 64 * 8]
    assert [flops(causal, n) for n in causal.ops()] == [2 * 6 * 36 * 8]


def test_blocks_that_a_mask_hides_are_left_out() -> None:
    """By its position alone, by what is loaded, or not at all where each head has a mask of its own."""
    masked = lambda q, k, v, m: attend(q, k, v, attn_mask=m > 0)  # noqa: E731
    causal = covering(whole(lambda q, k, v: attend(q, k, v, is_causal=True), *QKV))[1].bounds
    shared = covering(whole(masked, *QKV, (1, 1, 96, 96)))[1].bounds
    own = covering(whole(masked, *QKV, (2, 4, 96, 96)))[1].bounds
    assert (causal.high, causal.low, causal.conditions) == (0, None, ()) and len(causal.masks) == 1
    assert len(shared.conditions) == 1 and shared.high is None
    assert not own


def test_a_window_is_bounded_on_both_sides() -> None:
    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(96)[:, None], torch.arange(96)
        return attend(q, k, v, attn_mask=(j <= i) & (j > i - 20))

    family, plan = covering(whole(window, *QKV))
    assert (plan.bounds.high, plan.bounds.low) == (0, -19)
    assert plan.seen == sum(min(q + 1, 20) for q in range(96)) / 96**2
    assert family.cost(plan, family.default(plan, H200, "default")).padded < 0.5


REFUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "a deep head": (attend, ((1, 1, 32, 300),) * 3, "at most 256"),
    "keys made again and again": (
        lambda q, k, v: attend(q, k * 2 + 1, v),
        ((1, 2, 700, 32),) * 3,
        "keys that would be computed 6 times over",
    ),
    "values of an exponential": (
        lambda q, k, v: attend(q, k, v.exp()),
        ((1, 2, 200, 32),) * 3,
        "values that would be computed 2 times over",
    ),
    "a bias of logarithms": (
        lambda q, k, v, x: attend(q, k, v, attn_mask=x.log()),
        (*((8, 2, 32, 16),) * 3, (2, 32, 32)),
        "log in a mask that would be computed 8 times over",
    ),
    "weights returned": (
        lambda q, k, v: (w := (q @ k.mT).softmax(-1), w @ v),
        ((2, 32, 16),) * 3,
        "3 matrix products in one region",  # the weights for themselves take another
    ),
    "chained products": (lambda q, k, v: (q @ k.mT) @ v @ v.mT, ((2, 32, 16),) * 3, "3 matrix products in one region"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    function, shapes, words = REFUSED[name]
    with pytest.raises(Unsupported, match=words):
        covering(whole(function, *shapes))


def test_a_linear_map_of_a_softmax_is_none() -> None:
    """Its operand beside the weights is a parameter."""
    layers = lambda: torch.nn.Sequential(torch.nn.Softmax(-1), torch.nn.Linear(32, 48))  # noqa: E731
    graph = capture(layers, lambda: (torch.empty(64, 32),))
    with pytest.raises(Unsupported, match="a reduction or a product inside an operand of a matrix product"):
        covering(make_region(graph, [n.name for n in graph.ops()]))
