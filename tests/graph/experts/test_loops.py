"""Python loops over experts: which become batches of products, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.graph.capture import CaptureError, capture
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from tests.graph.experts.samples import (
    COUNTS,
    LOOPS,
    Asks,
    AsksOther,
    Hits,
    Loop,
    Mixes,
    OneHot,
    OtherTurns,
    Unweighted,
)
from tests.vocabulary.irregular.samples import CONTEXT, action_of, after, start_of


def graph_of(module: nn.Module) -> OpGraph:
    """The graph, not compared with the module."""
    return capture(lambda: module.eval(), lambda: (torch.randn(12, 16),), values=True)


def packets(graph: OpGraph) -> list[str]:
    return [n.packet.removeprefix("aten.") for n in graph.ops()]


@pytest.mark.parametrize("form", LOOPS)
def test_a_loop_becomes_a_batch_of_products(form: str) -> None:
    found = packets(graph_of(Loop(form)))
    assert found.count("bmm") == (2 if form == "stacked" else 3) and found.count("scatter") == 1
    assert found.count("stack") == (0 if form == "stacked" else 3)
    assert not any(p.startswith("torch.") or p in ("eq", "index", "nonzero") for p in found)


@pytest.mark.parametrize("form", ["numel", "len", "item", "count", "integer"])
def test_a_turn_may_be_left_out_where_it_has_no_rows(form: str) -> None:
    found = packets(graph_of(Asks(form)))
    assert found.count("bmm") == 3 and found.count("scatter") == 1
    assert not any(p.startswith("torch.") or p in ("eq", "any", "index", "nonzero") for p in found)


@pytest.mark.parametrize(
    "module",
    [Hits("product"), Hits("where"), Hits("mask"), OneHot("range", experts=2)],
    ids=["product", "where", "mask", "one hot"],
)
def test_a_mask_may_be_the_index_and_may_be_made_twice(module: nn.Module) -> None:
    found = packets(graph_of(module))
    assert found.count("bmm") == 3 and found.count("scatter") == 1
    assert not any(p.startswith("torch.") or p in ("eq", "any", "index", "nonzero") for p in found)


def test_another_loop_that_skips_turns_without_rows_keeps_them() -> None:
    found = packets(graph_of(Hits("product", sets=True)))
    assert "bmm" not in found and sum(p.startswith("torch.nonzero") for p in found) == 2


@pytest.mark.parametrize("between", [0, 2])
def test_a_turn_that_is_skipped_for_the_rows_of_another_is_refused(between: int) -> None:
    with pytest.raises(CaptureError, match="its Python code depends on the values of a tensor"):
        graph_of(AsksOther(between))


@pytest.mark.parametrize("otherwise", ["adds", "returns", "flag"])
def test_a_turn_that_does_something_without_rows_is_refused(otherwise: str) -> None:
    with pytest.raises(CaptureError, match="its Python code depends on the values of a tensor"):
        graph_of(Asks("numel", otherwise))


@pytest.mark.parametrize("form", COUNTS)
def test_a_turn_that_depends_on_how_many_rows_it_has_is_refused(form: str) -> None:
    with pytest.raises(CaptureError, match="its Python code depends on the values of a tensor"):
        graph_of(Asks(form))


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_only_the_experts_that_count(bias: bool) -> None:
    module = Loop("hit", bias=bias).to(torch.bfloat16).eval()
    program = start_of(KernelSpec.from_module(module, (torch.randn(12, 16, dtype=torch.bfloat16),)))
    made = after(program, action_of(program, "dispatch"))
    schedules = [s for r in made.called if (s := made.schedule(r)) is not None]
    assert [s.family for s in schedules] == ["routed"]
    assert "dispatch" not in {a.kind for a in legal_actions(made, CONTEXT)}


@pytest.mark.parametrize("module", [Mixes("range", experts=2), Unweighted("range", experts=2)])
def test_another_loop_over_all_experts_stays_as_it_is(module: nn.Module) -> None:
    found = packets(graph_of(module))
    assert "bmm" not in found
    assert sum(p.startswith("torch.nonzero") for p in found) == 2


@pytest.mark.parametrize("module", [Mixes("hit"), OtherTurns("hit")])
def test_another_loop_over_chosen_experts_is_refused_as_before(module: nn.Module) -> None:
    with pytest.raises(CaptureError, match="its Python code depends on the values of a tensor"):
        graph_of(module)


@pytest.mark.parametrize(
    "module", [Loop("hit"), Asks("any"), Hits("mask"), Hits("mean")], ids=["hit", "asks", "mask", "kept"]
)
def test_the_graph_computes_what_the_module_does(module: nn.Module) -> None:
    """Also where a row has no weight at all, and where an expert has no row."""
    module.eval()
    spec = KernelSpec.from_module(module, (torch.randn(12, 16),))
    model = load_source(Program.start(capture_spec(spec)).source, "loops").Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        for x in (torch.randn(12, 16), torch.randn(1, 16).expand(12, 16).contiguous(), torch.zeros(12, 16)):
            torch.testing.assert_close(model(x), module(x))
