"""What each graph-level kind makes of a program, before anybody writes a kernel."""

from __future__ import annotations

import pytest

from qimeng.actions import Context, GraphRewrite, kind_named, rewritten
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program, torch_implementation
from qimeng.testing import sample_graph

CODER = TemplateCoder()
H200 = DEVICES["h200"]


@pytest.fixture
def program() -> Program:
    return Program.start(sample_graph())


def named(program: Program, label: str) -> str:
    return next(r.id for r in program.regions if r.label() == label)


def rewrite(program: Program, action: Action) -> GraphRewrite:
    return rewritten(Request(program, action, H200), CODER)


def after(program: Program, action: Action) -> Program:
    return CODER.write(Request(program, action, H200)).apply(program)


def test_a_fusion_of_pytorch_calls_leaves_nothing_to_write(program: Program) -> None:
    found = rewrite(program, Action("fusion", (named(program, "relu"), named(program, "mul"))))
    assert found.to_write is None and found.regions is not None
    assert [r.label() for r in found.regions] == ["linear", "relu+mul", "add", "_softmax"]
    assert found.patch().apply(program).regions == found.regions and found.note == "relu+mul as one region"


def test_a_fusion_with_a_kernel_asks_for_a_kernel(program: Program) -> None:
    relu, mul = named(program, "relu"), named(program, "mul")
    lowered = after(program, Action("lowering", (relu,)))
    found = rewrite(lowered, Action("fusion", (relu, mul)))
    assert found.to_write is not None and found.to_write.label() == "relu+mul" and not found.patch().alternatives
    fused = after(lowered, Action("fusion", (relu, mul)))
    assert fused.implementation(fused.region(found.to_write.id)).generated


def test_unfuse_and_library_go_back_to_pytorch(program: Program) -> None:
    relu, mul = named(program, "relu"), named(program, "mul")
    fused = after(program, Action("fusion", (relu, mul)))
    apart = rewrite(fused, Action("unfuse", (named(fused, "relu+mul"),)))
    assert apart.to_write is None and apart.regions == program.regions
    linear = named(program, "linear")
    lowered = after(program, Action("lowering", (linear,)))
    back = rewrite(lowered, Action("library", (linear,)))
    region = program.region(linear)
    assert back.to_write is None and back.patch().alternatives == (torch_implementation(region),)


def test_a_tuning_changes_no_graph_and_is_pure(program: Program) -> None:
    linear = named(program, "linear")
    lowered, action = after(program, Action("lowering", (linear,))), Action("tiling", (linear,), "taller")
    kind, context = kind_named("tiling"), Context(H200, CODER)
    first, second = (kind.apply(lowered, action, context) for _ in range(2))
    assert first == second == GraphRewrite(region=lowered.region(linear)) and first.to_write is not None
    assert kind_named("stop").apply(program, Action("stop"), context) == GraphRewrite()
