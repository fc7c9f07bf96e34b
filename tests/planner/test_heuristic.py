"""What the planner by rule tries first, seen from one observation at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Evaluation, Gate, Observation, Request, Step, Timing
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.heuristic_facts import floor_ms
from qimeng.program.program import Program


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


CONTEXT = Context(device_named("h200"), TemplateCoder())


def lowered(function: Callable[..., torch.Tensor], shape: tuple[int, ...] = (4096, 4096)) -> Program:
    program = Program.start(capture(lambda: Module(function), lambda: (torch.empty(shape),)))
    action = Action("lowering", (program.regions[0].id,))
    return CONTEXT.coder.write(Request(program, action, CONTEXT.device)).apply(program)


def seen(program: Program, share: float, *tried: Action) -> Observation:
    """The program at this share of the roofline, after `tried`."""
    region = program.regions[0]
    history = tuple(Step(a, Evaluation(Gate.REGION, "slower", "wrong"), False) for a in tried)
    blank = Observation(program, (), None, None, 1.0, history, CONTEXT.device)
    ms = floor_ms(region, blank) / share
    found = Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(1.0), region_ms={region.id: ms})
    return Observation(program, legal_actions(program, CONTEXT), found, ms, 1.0, history, CONTEXT.device)


def test_special_functions_are_tried_once_where_memory_does_not_bind_the_kernel():
    program = lowered(torch.tanh)
    fast = Action("special", (program.regions[0].id,), "fast")
    choose = HeuristicPlanner().choose
    assert choose(seen(program, 0.6)) == fast
    assert choose(seen(program, 0.6, fast)).kind not in ("special", "stop")
    assert choose(seen(program, 0.9)).kind not in ("special", "stop")
    assert choose(seen(program, 0.99)).kind == "stop"
    quick = CONTEXT.coder.write(Request(program, fast, CONTEXT.device)).apply(program)
    assert choose(seen(quick, 0.6, fast)).kind not in ("special", "stop"), "nor is it taken back"


def test_a_product_that_takes_hardly_any_time_is_lowered_after_what_takes_it():
    """As the one of a recurrent layer is, beside the loop over its steps."""
    program = Program.start(capture(lambda: Module(lambda x, w: (x.cumsum(1) @ w).cumsum(0)), lambda: (
        torch.empty(64, 64), torch.empty(64, 64)
    )))  # fmt: skip
    scan, product, _ = (region.id for region in program.regions)
    actions = tuple(a for a in legal_actions(program, CONTEXT) if a.kind in ("lowering", "stop"))

    def chosen(of_scan: float, of_product: float) -> Action:
        times = dict.fromkeys((r.id for r in program.regions), 0.001) | {scan: of_scan, product: of_product}
        found = Evaluation(Gate.PASSED, timing=Timing(1.0), eager=Timing(1.0), region_ms=times)
        return HeuristicPlanner().choose(Observation(program, actions, found, 1.0, 1.0, (), CONTEXT.device))

    assert chosen(1.0, 0.003) == Action("lowering", (scan,))
    assert chosen(1.0, 0.3) == Action("lowering", (product,))


def test_a_product_whose_kernel_is_much_slower_goes_back_to_the_library():
    """As convolutions of groups that PyTorch computes in fp32, which a kernel on tensor cores may not."""
    program = lowered(lambda x: (x @ x).relu() @ x, (64, 64))
    region, other = program.regions[0], program.regions[-1]
    step, back = Action("lowering", (region.id,)), Action("library", (region.id,))

    def chosen(ms: float) -> Action:
        times = dict.fromkeys((r.id for r in program.regions), 0.1) | {region.id: ms, other.id: 1.0}
        found = Evaluation(Gate.PASSED, timing=Timing(sum(times.values())), eager=Timing(3.0), region_ms=times)
        history, actions = (Step(step, found, True),), (back, Action("tiling", (region.id,), "taller"), Action("stop"))
        return HeuristicPlanner().choose(Observation(program, actions, found, 3.0, 3.0, history, CONTEXT.device))

    assert chosen(10.0) == back and chosen(0.5).kind != "library"


@pytest.mark.parametrize("function", [torch.relu, lambda x: x / torch.sqrt((x * x).sum(1, keepdim=True))])
def test_without_special_functions_they_are_not_tried(function):
    program = lowered(function)
    assert HeuristicPlanner().choose(seen(program, 0.6)).kind != "special"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_is_fused_before_anything_is_lowered(dtype):
    """Although the library is fast at the products of half operands alone."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.mT * 0.125
        return scores.masked_fill(scores > 4, -1e9).softmax(-1) @ x

    made = lambda: (torch.empty(4, 128, 64, dtype=dtype),)  # noqa: E731
    program, context = Program.start(capture(lambda: Module(attention), made)), CONTEXT
    while (action := HeuristicPlanner().choose(_unmeasured(program))).kind == "fusion":
        program = context.coder.write(Request(program, action, context.device)).apply(program)
    assert [r.label() for r in program.regions] == ["bmm+mul+gt+where+_softmax+bmm"] and action.kind == "lowering"


def _unmeasured(program: Program) -> Observation:
    return Observation(program, legal_actions(program, CONTEXT), None, None, 1.0, (), CONTEXT.device)


def test_algebra_comes_before_anything_is_written():
    class Summed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum(1)

    program = Program.start(capture(Summed, lambda: (torch.empty(128, 64),)))
    early = Action("algebra", (), "early")
    assert HeuristicPlanner().choose(_unmeasured(program)) == early
    after = CONTEXT.coder.write(Request(program, early, CONTEXT.device)).apply(program)
    assert HeuristicPlanner().choose(_unmeasured(after)).kind == "fusion"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_become_one_where_the_library_computes_them(dtype):
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.a(x)) * self.b(x)

    program = Program.start(capture(Gated, lambda: (torch.empty(128, 64, dtype=dtype),)))
    together = Action("algebra", (), "together")
    assert (HeuristicPlanner().choose(_unmeasured(program)) == together) == (dtype == torch.bfloat16)


def test_the_whole_program_comes_last():
    program = Program.start(capture(lambda: Module(lambda x: torch.tanh(x) * 2), lambda: (torch.empty(4096, 4096),)))
    a, b = (r.id for r in program.regions)
    for action in (Action("fusion", (a, b)), None):
        action = action or Action("lowering", (program.regions[0].id,))
        program = CONTEXT.coder.write(Request(program, action, CONTEXT.device)).apply(program)
    choose = HeuristicPlanner().choose
    inductor = Action("library", (program.regions[0].id,), "inductor")
    assert choose(seen(program, 0.99)) == inductor
    assert choose(seen(program, 0.99, inductor)).kind == "stop"


def test_many_kernels_are_launched_at_once_and_one_by_one_again_where_that_is_slower():
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.cumsum(x, 0).sort(0).values
        return x

    program = Program.start(capture(lambda: Module(chain), lambda: (torch.empty(64, 64),)))
    times = dict.fromkeys((r.id for r in program.regions), 1e-9)  # nothing is worth tuning
    record, back = Action("launch", (), "cuda-graph"), Action("launch", (), "one-by-one")

    def chosen(program: Program, ms: float, best_ms: float, *tried: Action) -> Action:
        lower = tuple(a for a in legal_actions(program, CONTEXT) if a.kind in ("lowering", "fusion"))
        history = tuple(Step(a, Evaluation(Gate.REGION, "slower", "wrong"), False) for a in (*lower, *tried))
        found = Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(1.0), region_ms=times)
        offered = legal_actions(program, CONTEXT)
        return HeuristicPlanner().choose(Observation(program, offered, found, best_ms, 1.0, history, CONTEXT.device))

    assert chosen(program, 1.0, 1.0) == record
    recorded = CONTEXT.coder.write(Request(program, record, CONTEXT.device)).apply(program)
    assert chosen(recorded, 2.0, 1.0, record) == back
    assert chosen(recorded, 1.02, 1.0, record) == Action("library", (), "inductor"), "it does not wait for the host"
    assert chosen(recorded, 0.5, 0.5, record) == Action("library", (), "inductor")


def test_kernels_that_wait_for_the_host_are_launched_at_once_before_any_is_tuned():
    program = Program.start(capture(lambda: Module(lambda x: x.cumsum(0).sort(0).values), lambda: (torch.empty(8, 8),)))
    record = Action("launch", (), "cuda-graph")
    lower = tuple(a for a in legal_actions(program, CONTEXT) if a.kind in ("lowering", "fusion"))

    def chosen(ms: float, *tried: Action) -> Action:
        history = tuple(Step(a, Evaluation(Gate.REGION, "slower", "wrong"), False) for a in (*lower, *tried))
        times = dict.fromkeys((r.id for r in program.regions), 0.1)
        found = Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(1.0), region_ms=times)
        offered = legal_actions(program, CONTEXT)
        return HeuristicPlanner().choose(Observation(program, offered, found, ms, 1.0, history, CONTEXT.device))

    assert len(program.called) == 2 and chosen(0.5) == record
    assert record not in (chosen(0.25), chosen(0.5, record))


def test_an_epilogue_goes_before_a_prologue():
    """The activation between two products is computed with the first, although the second takes longer."""

    def layers(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x[:, :64]) @ x[:64].repeat(1, 4)

    program = Program.start(capture(lambda: Module(layers), lambda: (torch.empty(512, 512),)))
    observed = _unmeasured(program)
    chosen = HeuristicPlanner().choose(replace(observed, actions=observed.actions[::-1]))
    first, second = (program.region(r).label() for r in chosen.regions)
    assert chosen.kind == "fusion" and (first, second) == ("mm", "relu")


def test_fusion_ends_where_the_steps_are_needed_for_lowering():
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).softmax(1).cumsum(1).exp()

    program = Program.start(capture(lambda: Module(chain), lambda: (torch.empty(64, 512),)))
    seen_now = _unmeasured(program)
    kinds = [HeuristicPlanner().choose(replace(seen_now, steps_left=n)).kind for n in (0, 4, 5)]
    assert kinds == ["fusion", "lowering", "fusion"]
