"""What needs no state, before and after the loop."""

from __future__ import annotations

import pytest
import torch

from qimeng.family import covering
from qimeng.graph.loops.loop import is_loop
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program
from tests.graph.loops.test_roll import LOOPS, captured

LABELS = {
    "lstm": ["linear", "torch.recurrence", "clone", "add"],
    "two layers of gru": ["linear", "torch.recurrence", "linear", "torch.recurrence", "clone", "add"],
    "selective scan": ["torch.recurrence", "matmul", "clone"],
    "by hand": ["linear", "torch.recurrence", "linear"],
    "zeros of another dtype": ["_to_copy", "torch.recurrence", "sin", "mul", "clone"],
}


@pytest.mark.parametrize("name", LOOPS)
def test_products_without_states_are_computed_for_all_steps_at_once(name: str) -> None:
    make, shapes, *_ = LOOPS[name]
    graph = captured(name)
    found, reasons = find_rewrites(graph, "layers")
    assert [r.rule for r in found] == ["hoist"], reasons
    program = Program.start(graph).with_rewrites(found)
    assert [r.label() for r in program.called if r.label() != "full"] == LABELS[name]
    loops = [r for r in program.regions if any(is_loop(n) for n in r.ops)]
    assert all(covering(r)[0].name == "recurrent" for r in loops)
    torch.manual_seed(0)
    module, inputs = make(), [torch.randn(s) / 2 for s in shapes]
    model = program.load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        wanted, got = module(*inputs), model(*inputs)
    for a, b in zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert a.stride() == b.stride()
