"""The recurrent family: what it covers, what it refuses, its schedules, the kernels that it prints, and their results.

Results are those of Triton's interpreter, which must be chosen before triton is imported: the cases run in one process
of their own (this file as a script), which prints a JSON row a case. There a step is a launch of its own; programs that
wait for each other run on a GPU alone.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.actions import Context, legal_actions
from qimeng.backend.registry import implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.recurrent.defaults import candidates, exact, takes_tf32
from qimeng.coder.template.families.recurrent.family import AtOnce, Recurrent
from qimeng.coder.template.families.recurrent.plan import RecurrentPlan, Term, plan_recurrent
from qimeng.coder.template.families.recurrent.printer import print_recurrent
from qimeng.coder.template.families.recurrent.schedule import RecurrentSchedule
from qimeng.device import device_named
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import Unsupported, covering, word_of
from qimeng.graph.capture import capture
from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import Name, is_loop, loop_of
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.region import Region, make_region
from qimeng.graph.rewrites import find_rewrites
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program, load_source
from tests.graph.loops.test_roll import LOOPS, Selective
from tests.interpreted import rows_of

H200 = device_named("h200")
GOLDEN = Path(__file__).parent / "golden" / "recurrent_gru.py.txt"
Shape = tuple[int, ...]
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Shape, ...]]] = {
    "lstm": (lambda: nn.LSTM(5, 20, batch_first=True), ((3, 7, 5),)),
    "lstm both ways": (lambda: nn.LSTM(5, 20, bidirectional=True), ((4, 3, 5),)),
    "gru": (lambda: nn.GRU(5, 16, bias=False), ((5, 6, 5), (1, 6, 16))),
    "rnn of one sequence": (lambda: nn.RNN(5, 33), ((9, 1, 5),)),
    "by hand": LOOPS["by hand"][:2],
    "selective scan": (Selective, ((2, 6, 30, 4), (2, 6, 30, 4), (2, 30, 4))),
    "a stack of lstm": (lambda: nn.LSTM(5, 12, 3, batch_first=True), ((5, 6, 5),)),
    "a stack of gru": (lambda: nn.GRU(5, 16, 2), ((5, 3, 5), (2, 3, 16))),
    "gru both ways": (lambda: nn.GRU(5, 16, bidirectional=True), ((4, 3, 5),)),
    "gru in bf16": (lambda: nn.GRU(8, 24, dtype=torch.bfloat16), ((6, 5, 8),)),
    "lstm in fp64": (lambda: nn.LSTM(8, 24, dtype=torch.float64), ((6, 5, 8),)),
}
INFINITE = {"a stack of gru"}
"""Layers whose first state has an infinity, which products that do not read it must not meet as NaN."""
SCHEDULES = [
    RecurrentSchedule(block_p=1, block_r=64, block_k=64, warps=4),
    RecurrentSchedule(block_p=4, block_r=8, block_k=64, warps=4),
    RecurrentSchedule(block_p=2, block_r=16, block_k=8, warps=1),
    RecurrentSchedule(block_p=4, block_r=8, block_k=64, warps=4, by_result=True),
    RecurrentSchedule(block_p=1, block_r=16, block_k=8, warps=4, by_result=True),
    RecurrentSchedule(block_p=16, block_r=16, block_k=64, warps=4, dot=True),
    RecurrentSchedule(block_p=16, block_r=8, block_k=64, warps=4, dot=True, by_value=True),
    RecurrentSchedule(block_p=2, block_r=16, block_k=16, warps=1, by_value=True),
    RecurrentSchedule(block_p=16, block_r=32, block_k=64, warps=4, dot=True, precision="tf32"),
]


def rewritten(make: Callable[[], nn.Module], *shapes: Shape) -> Program:
    dtype = next((p.dtype for p in make().parameters()), torch.float32)
    graph = capture(make, lambda: tuple(torch.empty(s, dtype=dtype) for s in shapes))
    return Program.start(graph).with_rewrites(find_rewrites(graph, "layers")[0])


def loops(program: Program) -> list[Region]:
    return [r for r in program.regions if any(is_loop(n) for n in r.ops)]


def plan_of(name: str, make: Callable[[], nn.Module], *shapes: Shape) -> tuple[Program, Region, RecurrentPlan]:
    program = rewritten(make, *shapes)
    region = loops(program)[0]
    return program, region, plan_recurrent(region)


def step(write: Callable[[LoopBuilder, Name, Name, Name], Name], state: Shape = (3, 8)) -> Region:
    """A loop whose step `write` says, from a state, a part of `x` and a weight."""
    b = LoopBuilder(4)
    h = b.state(Value("h"))
    b.follow(h, new := write(b, h, b.step(Value("x")), b.input(Value("w"))))
    b.keep(new)
    shapes = {"h": state, "x": (4, *state), "w": (state[-1], state[-1])}
    with torch.no_grad():
        graph = capture(_Three, lambda: tuple(torch.empty(s) for s in shapes.values()))
    metas = dict(
        zip(shapes, (graph.meta(Value(n.name)) for n in graph.nodes.values() if n.kind == "input"), strict=True)
    )
    nodes = {name: Node(name, "input", str(i), metas=(m,)) for i, (name, m) in enumerate(metas.items())}
    node = b.done().node("loop", b.values, [metas[v.node] for v in b.values])
    graph = OpGraph(nodes | {"loop": node}, (Value("loop"),), n_inputs=3)
    return make_region(graph, ["loop"])


class _Three(nn.Module):
    def forward(self, h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return h.sum() + x.sum() + w.sum()


# -- the plan


def test_a_layer_is_covered_with_all_its_gates() -> None:
    program, region, plan = plan_of("lstm", *LAYERS["lstm both ways"][:1], *LAYERS["lstm both ways"][1])
    family, _ = covering(region)
    assert family.name == "recurrent" and word_of(region) == "recurrent"
    assert (plan.row_count, plan.column_count, plan.loop.count) == (3, 20, 4)
    assert len(plan.products) == 4 and plan.exchanged == (0,)  # the cells are no one else's business
    assert plan.group_count == 2 and not plan.coupled
    assert {p.place.step for p in plan.parts if p.place} == {1, -1}


def test_the_layers_of_a_stack_take_their_steps_at_the_same_time() -> None:
    _, _, plan = plan_of("a stack of gru", *LAYERS["a stack of gru"][:1], *LAYERS["a stack of gru"][1])
    assert (plan.group_count, plan.row_count, plan.column_count, plan.loop.count) == (2, 3, 16, 5 + 1)
    below, own = Term(0, 1), Term(0)
    assert plan.coupled and sorted(p.terms for p in plan.products) == [(own,), (below,), (below, own), (below, own)]


def linear(b: LoopBuilder, x: Name, w: Name) -> Name:
    return b.op("aten.linear.default", x, w)


@pytest.mark.parametrize(
    ("write", "state", "reason"),
    [
        (lambda b, h, x, w: linear(b, b.op("aten.tanh.default", h), w), (3, 8), "something else than a state"),
        (lambda b, h, x, w: b.op("aten.cumsum.default", h, 1), (3, 8), "products of states and pointwise"),
        (lambda b, h, x, w: linear(b, h, w), (2, 3, 8), "products of states of shape (2, 3, 8)"),
    ],
    ids=["inner product", "scan", "rank"],
)
def test_what_is_refused_says_why(
    write: Callable[[LoopBuilder, Name, Name, Name], Name], state: Shape, reason: str
) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        plan_recurrent(step(write, state))


def test_a_loop_is_printed_again_with_fewer_steps() -> None:
    program, coder = rewritten(*LAYERS["selective scan"][:1], *LAYERS["selective scan"][1]), TemplateCoder()
    (region,) = loops(program)
    lowered = coder.write(Request(program, Action("lowering", (region.id,)), H200)).apply(program)
    fewer = coder.reprint(
        lowered, capture(Selective, lambda: tuple(torch.empty(s) for s in LOOPS["selective scan"][1]))
    )
    (twin,) = loops(fewer)
    (node,) = [n for n in twin.ops if is_loop(n)]
    assert fewer.implementation(twin).generated and loop_of(node).count == 24 < 30


# -- schedules


def test_programs_that_wait_run_at_the_same_time() -> None:
    _, _, plan = plan_of("lstm", lambda: nn.LSTM(128, 256), (64, 10, 128))
    found = candidates(plan, H200)
    family = Recurrent()
    assert found and all(family.needs(plan, s).refusal(H200) is None for s in found[:6])
    small = RecurrentSchedule(block_p=1, block_r=2, block_k=256)
    assert "1280 programs wait for each other" in str(family.needs(plan, small).refusal(H200))
    assert AtOnce(programs=132).refusal(H200) is None


def test_lanes_have_results_of_their_own_where_weights_are_held() -> None:
    _, _, plan = plan_of("lstm", lambda: nn.LSTM(128, 256), (64, 10, 128))
    first, second, *_ = exact(plan, H200)
    assert first.by_result and not second.by_result
    assert first.holds(plan.tiles, 256), "neither reads weights in each step"
    assert not first.but(block_k=128).holds(plan.tiles, 256)
    texts = [print_recurrent(plan, first.but(by_result=form), "k").source for form in (True, False)]
    assert ["first >> 30" in text for text in texts] == [True, False]


@pytest.mark.parametrize("mode", ["default", "highest", "high"])
def test_tf32_is_for_products_that_eager_may_round(mode: str) -> None:
    _, _, layer = plan_of("stack", lambda: nn.LSTM(128, 256, 6), (64, 10, 128))
    _, _, loop = plan_of("by hand", LOOPS["by hand"][0], *LOOPS["by hand"][1])
    _, _, half = plan_of("half", lambda: nn.GRU(64, 128, dtype=torch.bfloat16), (64, 10, 64))
    assert [takes_tf32(p, mode) for p in (layer, loop, half)] == [mode != "highest", mode == "high", False]
    for plan, precision in ((layer, "fp16x3"), (half, "")):
        first = candidates(plan, H200)[0]
        assert first.dot and Recurrent().needs(plan, first).refusal(H200) is None
        assert ("k_halves" in print_recurrent(plan, first, "k").source) is bool(precision)


def test_cuts_too_small_for_tensor_cores_are_refused_before_they_are_printed() -> None:
    _, _, plan = plan_of("layer", lambda: nn.RNN(8, 64), (16, 12, 8))
    first = next(s for s in candidates(plan, H200) if s.dot)
    small = Recurrent().needs(plan, first.but(block_r=8)).refusal(H200)
    assert small is not None and "larger blocks than 16 sequences, 8 units" in small


def test_many_sequences_of_a_stack_have_programs_that_fit() -> None:
    _, _, plan = plan_of("stack", lambda: nn.LSTM(8, 16, 6), (30, 4000, 8))
    assert candidates(plan, H200)


def test_programs_wait_for_a_count_or_for_values() -> None:
    _, _, plan = plan_of("stack", lambda: nn.GRU(64, 128, 2), (16, 12, 64))
    first = candidates(plan, H200)[0]
    (other,) = Recurrent().moves["pipeline"].schedules(plan, first, "stages", H200)
    assert other == first.but(by_value=False)
    count, value = (print_recurrent(plan, s, "k").source for s in (other, first))
    assert "flags_ptr" in count and "tl.atomic_add" in count
    assert "atomic" not in value and "flags" not in value and "z0[1:].view(torch.int32).fill_" in value
    assert "launch_cooperative_grid" in value, "all programs run at the same time"


def test_every_move_leads_to_kernels_that_fit() -> None:
    program, region, _ = plan_of("gru", lambda: nn.GRU(64, 128), (16, 12, 64))
    coder = TemplateCoder()
    lowered = program.with_implementation(
        region.id, coder.print(region, Recurrent().default(plan_recurrent(region), H200, "default"))
    )
    kinds = {a.kind for a in legal_actions(lowered, Context(H200, coder)) if a.regions == (region.id,)}
    assert {"tiling", "split", "pipeline"} <= kinds


# -- the text


def test_the_text_is_what_it_was(request: pytest.FixtureRequest) -> None:
    _, _, plan = plan_of("gru", lambda: nn.GRU(32, 64), (16, 12, 32))
    text = print_recurrent(plan, RecurrentSchedule(block_p=2, block_r=16, block_k=64, warps=4), "k").source
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


# -- results


def some(number: int) -> list[RecurrentSchedule]:
    """The cuts of a layer in the interpreter: all but one, by turns."""
    return [schedule for i, schedule in enumerate(SCHEDULES) if i != number % len(SCHEDULES)]


def takes(plan: RecurrentPlan, schedules: list[RecurrentSchedule]) -> list[RecurrentSchedule]:
    """Those that `plan` has products, and as many units, for."""
    found = [s for s in schedules if not s.dot or s.block_r * len(plan.products) > 8 and plan.itemsize < 8]
    return [s for s in found if not s.by_value or plan.returned and plan.itemsize < 8]


def _rows(device: str, rounds: int = 1) -> Iterator[dict[str, Any]]:
    for number, (name, (make, shapes)) in enumerate(LAYERS.items()):
        program, region, plan = plan_of(name, make, *shapes)
        torch.manual_seed(0)
        metas = [program.graph.meta(v) for v in region.inputs]
        drawn = [torch.randn(m.shape, device=device) / 2 for m in metas]
        inputs = [
            x > 0 if m.dtype == "bool" else x.to(getattr(torch, m.dtype)) for x, m in zip(drawn, metas, strict=True)
        ]
        inputs = [
            torch.empty_strided(m.shape, m.stride, dtype=x.dtype, device=device).copy_(x)
            for x, m in zip(inputs, metas, strict=True)
        ]
        space: dict[str, Any] = {"torch": torch}
        exec(region.function(), space)
        start = region.inputs.index(plan.node.args[int(plan.loop.starts[0][1:])]) if name in INFINITE else 0
        for schedule in takes(plan, SCHEDULES if device == "cuda" else some(number)):
            row: dict[str, Any] = {"case": name, "schedule": str(schedule)}
            given = [x.clone(memory_format=torch.preserve_format) for x in inputs]
            if name in INFINITE:
                given[start].view(-1)[1] = torch.inf
            wanted = space["region"](*(x.double() if x.is_floating_point() else x for x in given))
            try:
                made = print_recurrent(plan, schedule, "k")
                call = getattr(load_source(implementation_source(made), "recurrent"), made.entry)
                for _ in range(rounds):
                    pairs = list(zip(call(*given), wanted, strict=True))
                    yield row | {
                        "error": max(error_of(a, b) for a, b in pairs),
                        "layout": all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs),
                    }
            except Exception:  # noqa: BLE001 - a row must come back whatever a kernel does
                yield row | {"raised": traceback.format_exc()[-1500:]}


def error_of(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; infinite where one is no number, or infinite, and the other is not."""
    off = (actual.double() - wanted).abs().nan_to_num(torch.inf, torch.inf)
    return float(torch.where((actual == wanted) | (actual.isnan() & wanted.isnan()), 0.0, off).max())


def limit(row: dict[str, Any]) -> float:
    case, rounded = row["case"], "tf32" in row["schedule"]
    return 2e-2 if "bf16" in case or rounded else 1e-12 if "fp64" in case else 4e-6


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return list(once("recurrent", lambda: rows_of(__file__, timeout=300)))


@pytest.mark.parametrize("case", LAYERS)
def test_every_cut_is_right(rows: list[dict[str, Any]], case: str) -> None:
    mine = [r for r in rows if r["case"] == case]
    assert len(mine) >= len(SCHEDULES) - 5
    for row in mine:
        assert "raised" not in row, f"{row['schedule']}: {row['raised']}"
        assert row["error"] < limit(row) and row["layout"], row


@pytest.mark.gpu
def test_programs_that_wait_are_right() -> None:
    found = list(_rows("cuda", rounds=20))  # a missing wait shows now and then
    assert not [r for r in found if "raised" in r or r["error"] > 4 * limit(r) or not r["layout"]]


@pytest.mark.slow
def test_every_cut_compiles_for_a_device(tmp_path: Path) -> None:
    """Each layer in one cut, each cut with every third layer."""
    programs: dict[str, Program] = {}
    for number, (name, (make, shapes)) in enumerate(LAYERS.items()):
        program, region, plan = plan_of(name, make, *shapes)
        for schedule in takes(plan, SCHEDULES[number % 3 :: 3]):
            printed = print_recurrent(plan, schedule, f"k{len(programs)}")
            programs[f"{name} {schedule}"] = Program(program.graph, (region,)).with_implementation(region.id, printed)
    found = Compilers(shared_server(), H200, str(tmp_path)).programs(list(programs.values()))
    failed = {name: c.error for name, t in zip(programs, found, strict=True) for c in t.values() if c.failure}
    assert all(found) and not failed, failed


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for result in _rows("cpu"):
        print(json.dumps(result), flush=True)
