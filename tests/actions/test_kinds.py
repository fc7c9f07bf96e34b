"""Each kind before and after (golden files), its refusals with their numbers, and a kind from outside the package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng import plugins
from qimeng.actions import (
    Context,
    ScheduleKind,
    action_text,
    check_action,
    kinds,
    legal_actions,
    register,
    unregister,
)
from qimeng.actions.large import MANY
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device, device_named
from qimeng.errors import IllegalAction, QimengError
from qimeng.family import family_of, plan_of, refusal
from qimeng.graph.capture import capture
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.linear(x))


class Softmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x * 2, dim=1)


class Pointwise(torch.nn.Module):
    def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + b)


class Flat(torch.nn.Module):
    """A root for each row, but none for each element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(1, keepdim=True))


PROGRAMS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[tuple[int, ...], ...]]] = {
    "linear": (Linear, ((128, 256),)),
    "softmax": (Softmax, ((64, 100_000),)),
    "pointwise": (Pointwise, ((64, 1000), (1000,))),
}


def make(name: str) -> Program:
    module, shapes = (PROGRAMS | {"flat": (Flat, ((64, 1000),))})[name]
    return Program.start(capture(module, lambda: tuple(torch.empty(s) for s in shapes)))


@pytest.fixture
def context() -> Context:
    return Context(device_named("h200"), TemplateCoder())


def fused_and_lowered(name: str, context: Context) -> Program:
    program = make(name)
    for kind in ("fusion", "lowering"):
        while True:
            action = next((a for a in legal_actions(program, context) if a.kind == kind), None)
            if action is None:
                break
            program = context.coder.write(Request(program, action, context.device)).apply(program)
    return program


def how(program: Program, region: Region) -> str:
    """What computes `region`, in words."""
    on_torch = {"torch": "PyTorch", "library": "a library"}
    return str(program.schedule(region) or on_torch[program.implementation(region).language])


@pytest.mark.parametrize("name", PROGRAMS)
def test_before_and_after(name: str, context: Context, golden: Callable[[str, str], None]) -> None:
    lines = []
    for title, program in (("on PyTorch", make(name)), ("fused and lowered", fused_and_lowered(name, context))):
        state = "; ".join(f"{r.label()}: {how(program, r)}" for r in program.regions)
        lines.append(f"== {title}: {state}")
        for action in sorted(legal_actions(program, context)):
            if action.kind == "stop":
                continue
            patch = context.coder.write(Request(program, action, context.device))
            after = patch.apply(program)
            regions = "; ".join(f"{r.label()}: {how(after, r)}" for r in after.regions)
            regions += f", launched as a {after.launch}" if after.launch else ""
            lines.append(f"{action_text(action, program)}\n    before: {state}\n    after:  {regions}")
            lines += [f"    or:     {a.schedule}" for a in patch.alternatives[1:]]
    golden(f"{name}.txt", "\n".join(lines) + "\n")


def test_a_patch_is_a_diff_of_the_source(context: Context, golden: Callable[[str, str], None]) -> None:
    program = make("pointwise")
    add = program.regions[0]
    patch = context.coder.write(Request(program, Action("lowering", (add.id,)), context.device))
    golden("lowering.diff", patch.diff(program))


@pytest.mark.parametrize(
    ("name", "action", "message"),
    [
        ("linear", Action("precision", ("?",), "tf32"), r"tf32 keeps 11 bits of 24; mode 'default' asks for fp32"),
        ("linear", Action("unfuse", ("nowhere",)), "no region nowhere; this program has"),
        (
            "linear",
            Action("nothing", ("?",)),
            "unknown kind of action 'nothing'; known: aggregate, algebra, cluster, dequantize",
        ),
        ("softmax", Action("reordering", ("?",), "grouped"), "kernels of the family 'tile' have no reordering"),
        ("softmax", Action("split", ("?",), "resident"), "nothing to change"),
        ("pointwise", Action("lowering", ("?",)), "has a generated kernel already"),
        ("pointwise", Action("library", ("?",)), r"is not one library operator \(2 operators\)"),
        ("pointwise", Action("fusion", ("?",)), r"needs 2 region\(s\), got 1"),
        ("pointwise", Action("special", ("?",), "accurate"), "tanh accurate is what the region has"),
        ("linear", Action("special", ("?",), "fast"), "kernels of the family 'gemm' have no special"),
        ("flat", Action("special", ("?",), "fast"), "no element of the region takes a special function"),
    ],
)
def test_refusals_say_why(name: str, action: Action, message: str, context: Context) -> None:
    program = fused_and_lowered(name, context)
    first = program.regions[0].id
    action = Action(action.kind, tuple(first if r == "?" else r for r in action.regions), action.param)
    with pytest.raises(IllegalAction, match=message):
        check_action(program, action, context)


def test_special_functions_need_a_gpu_that_has_the_units(context: Context) -> None:
    program = fused_and_lowered("pointwise", context)
    fast = Action("special", (program.regions[0].id,), "fast")
    check_action(program, fast, context)
    other = Context(device_named("mi300x"), context.coder)
    with pytest.raises(IllegalAction, match="NVIDIA's instructions, not mi300x's"):
        check_action(program, fast, other)
    patch = context.coder.write(Request(program, fast, context.device))
    quick = patch.apply(program)
    assert [a.param for a in legal_actions(quick, context) if a.kind == "special"] == ["accurate"]
    assert "rsqrt" in quick.source and "rsqrt" not in program.source


def test_limits_come_with_their_numbers(context: Context) -> None:
    program = fused_and_lowered("linear", context)
    region = program.regions[0]
    schedule = program.schedule(region)
    assert schedule is not None
    big = schedule.but(block_m=256, block_n=256, block_k=256, stages=5, precision="fp16x3")
    plan = plan_of(family_of(schedule), region)
    for refused, numbers in (
        (big, "B of shared memory, h200 allows 232448 B a block"),
        (schedule.but(block_m=256, block_n=256, stages=2), "a thread has 255 registers"),
        (schedule.but(block_m=128, block_n=128, warps=2), "256 a thread"),
        (schedule.but(warps=64), "a block has at most 1024"),
    ):
        assert numbers in str(refusal(family_of(schedule), plan, refused, context.device))


def test_everything_offered_can_be_coded(context: Context) -> None:
    for name in PROGRAMS:
        for program in (make(name), fused_and_lowered(name, context)):
            for action in legal_actions(program, context):
                if action.kind != "stop":
                    patch = context.coder.write(Request(program, action, context.device))
                    assert len(patch.alternatives) <= 8
                    compile(patch.apply(program).source, name, "exec")


def test_unfuse_undoes_fusion(context: Context) -> None:
    program = make("softmax")
    fuse = next(a for a in legal_actions(program, context) if a.kind == "fusion")
    fused = context.coder.write(Request(program, fuse, context.device)).apply(program)
    assert len(fused.regions) == 1
    apart = context.coder.write(Request(fused, Action("unfuse", (fused.regions[0].id,)), context.device)).apply(fused)
    assert [r.nodes for r in apart.regions] == [r.nodes for r in program.regions]


class Shared(torch.nn.Module):
    """A result that two others are made of."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shared = torch.exp(x)
        return shared, functional.softmax(shared, dim=1), shared.sum(1)


def test_a_fusion_takes_no_kernel_from_another_region(context: Context) -> None:
    """The first of the regions that compute a value yields it to others: here the softmax, were the sum fused."""
    graph = capture(Shared, lambda: (torch.empty(8, 64),))

    def step(program: Program, kind: str, *labels: str, param: str = "") -> Program:
        by_label = {r.label(): r.id for r in program.regions}
        action = Action(kind, tuple(by_label[x] for x in labels), param)
        check_action(program, action, context)
        return context.coder.write(Request(program, action, context.device)).apply(program)

    program = step(Program.start(graph), "fusion", "exp", "_softmax", param="recompute")
    assert step(program, "fusion", "exp", "sum")
    lowered = step(program, "lowering", "exp+_softmax")
    with pytest.raises(IllegalAction, match="exp.*would have to yield other values, and lose its kernel"):
        step(lowered, "fusion", "exp", "sum")


class Doubled(ScheduleKind):
    """Twice the rows a program.

    rewrite: ``block_p = 1`` -> ``block_p = 2``
    """

    name = "doubled"
    family = "tile"

    def rewrite(self, schedule: Any, plan: Any, device: Device, param: str) -> tuple[Schedule, ...]:
        return (schedule.but(block_p=schedule.block_p * 2),) if schedule.block_p < plan.row_count else ()


def test_a_kind_from_outside_is_offered_and_coded(context: Context) -> None:
    register(Doubled())
    try:
        program = fused_and_lowered("softmax", context)
        region = program.regions[0]
        before = program.schedule(region)
        action = next(a for a in legal_actions(program, context) if a.kind == "doubled")
        after = context.coder.write(Request(program, action, context.device)).apply(program)
        new = after.schedule(region)
        assert before is not None and new is not None and new.block_p == 2 * before.block_p
        with pytest.raises(ValueError, match="registered already"):
            register(Doubled())
    finally:
        unregister("doubled")
    assert "doubled" not in kinds()


def test_a_broken_package_is_named_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import qimeng.actions.registry as base

    points = [_Here("doubled", "here:Doubled", base.GROUP), EntryPoint("lost", "no.such:Kind", base.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == base.GROUP else [])
    monkeypatch.setattr(base._installed, "_taken", set())
    monkeypatch.setattr(base._installed, "_done", False)
    try:
        for _ in range(2):
            with pytest.raises(QimengError, match="'lost' of the installed package no.such:Kind cannot be used"):
                kinds()
        points.pop()
        assert "doubled" in kinds()
    finally:
        unregister("doubled")


class _Here(EntryPoint):
    """An entry point of this very file, which pytest does not import by name."""

    def load(self) -> type[Doubled]:
        return Doubled


def test_every_kind_documents_its_rewrite() -> None:
    for kind in kinds().values():
        assert kind.__doc__ and "rewrite:" in kind.__doc__ and "->" in kind.__doc__, kind.name


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_what_is_looked_up_by_region_is_what_each_kind_says(name: str, context: Context) -> None:
    for begun in (make, lambda name: fused_and_lowered(name, context)):
        for large in (False, True):
            program = begun(name)
            program.graph.memo.clear()
            program.graph.memo["operators"] = MANY if large else 2
            asked = []
            for action in dict.fromkeys(a for k in kinds().values() for a in k.proposals(program, context)):
                with suppress(IllegalAction):
                    check_action(program, action, context)
                    asked.append(action)
            for _ in range(2):
                assert list(legal_actions(program, context)) == asked
