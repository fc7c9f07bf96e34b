"""The action that reads kept blocks: where it is offered, what it makes of a program, and the search with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.time_shares import bound_ms, ceilings
from qimeng.interfaces import Action
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.program import Program
from qimeng.testing import ScriptedPlanner, fake_task
from qimeng.vocabulary.sparse.kept import kept_blocks
from qimeng.vocabulary.sparse.sparsify import Sparsify
from tests.vocabulary.sparse.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of

BF16 = torch.bfloat16


def kinds_of(program: Program) -> set[str]:
    return {a.kind for a in legal_actions(program, CONTEXT)}


def test_nothing_is_offered_without_a_declaration() -> None:
    module, x = layer(8, 256, 64, BF16)
    for spec in (KernelSpec.from_module(module, (x,)), spec_of(module, x, "int8")):
        program = start_of(spec)
        assert "sparsify" not in kinds_of(program)
        with pytest.raises(IllegalAction, match="multiplies by no weight that a declaration makes of kept blocks"):
            check_action(program, Action("sparsify", (program.called[0].id,)), CONTEXT)


@pytest.mark.parametrize(("text", "block", "count"), [("bsr:32:10", 32, 1), ("csr:5", 1, 819)])
def test_the_region_then_reads_blocks_and_indices(text: str, block: int, count: int) -> None:
    module, x = layer(8, 256, 64, BF16, bias=False)
    start = start_of(spec_of(module, x, text))
    assert [r.label() for r in start.regions] == ["settled", "linear"]
    program = after(start, action_of(start, "sparsify"))
    region = reading(program)
    shapes = {program.graph.meta(v).shape for v in region.inputs}
    assert shapes == {(8, 256), (count, block, block), (count,), (64 // block + 1,)}
    made = program.implementation(region)
    assert made.schedule is not None and made.schedule.family == "sparse" and not made.prepare
    with pytest.raises(IllegalAction, match="reads the blocks of its weight already"):
        check_action(program, Action("sparsify", (region.id,)), CONTEXT)
    assert {"tiling", "pipeline", "unfuse"} <= kinds_of(program)
    back = after(program, action_of(program, "unfuse"))
    assert "sparsify" in kinds_of(back)


def test_what_it_may_save_follows_from_what_is_kept() -> None:
    module, x = layer(4096, 1024, 1024, BF16, bias=False)
    found = {}
    for text in ("bsr:32:5", "bsr:32:50"):
        start = start_of(spec_of(module, x, text))
        actions = (action_of(start, "sparsify"), action_of(start, "lowering"))
        found[text] = ceilings(actions, start, None, CONTEXT.device)
        remainder = Sparsify().remains(start, actions[0])
        assert remainder.work == pytest.approx(int(text[7:]) / 100, abs=0.01)
        bound = bound_ms(start.called[0], CONTEXT.device)  # by peak rates, which the times are without a judge
        least = remainder.region.bytes_moved() / (CONTEXT.device.bandwidth_gbs * 1e6)
        assert found[text][0] == pytest.approx(bound / max(least, remainder.work * bound), rel=0.02)
    assert found["bsr:32:5"][0] > found["bsr:32:50"][0] > found["bsr:32:50"][1] == 1.0


def test_too_many_blocks_are_refused_with_the_numbers() -> None:
    module, x = layer(8, 128, 64, BF16)
    for text, words in (
        ("bsr:16:90", r"keeps 28 of 32 blocks of 16 x 16 \(87.5 %\): 14468 B with their indices; at most 75% of"),
        (
            "csr:50",
            r"keeps 4096 of 8192 weights \(50 %\): 24836 B with their indices; at most 75% of the weight's 16384 B",
        ),
    ):
        program = start_of(spec_of(module, x, text))
        assert "sparsify" not in kinds_of(program)
        with pytest.raises(IllegalAction, match=words):
            check_action(program, Action("sparsify", (program.called[0].id,)), CONTEXT)


def test_blocks_are_found_by_what_the_form_computes() -> None:
    module, x = layer(8, 128, 64, BF16)
    graph = start_of(spec_of(module, x, "bsr:16:10")).graph
    weight = next(n for n in graph.ops() if n.packet == "aten.linear").operands()[1]
    kept = kept_blocks(graph, weight)
    assert kept.count == 3 and graph.meta(kept.at).dtype == "int32"
    assert "aten.sort" not in {graph.nodes[name].packet for name in kept.widening}


def test_indices_that_others_make_are_not_trusted() -> None:
    class Own(nn.Module):
        """Puts blocks at places of its own, which nobody has checked."""

        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.randn(4, 16, 16))
            self.register_buffer("places", torch.tensor([0, 3, 5, 31]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            blocks = torch.zeros_like(self.values[:1]).repeat(32, 1, 1).index_put((self.places,), self.values)
            return nn.functional.linear(x, blocks.view(4, 8, 16, 16).transpose(1, 2).reshape(64, 128))

    program = start_of(KernelSpec.from_module(Own(), (torch.randn(8, 128),)))
    assert "sparsify" not in kinds_of(program)


def test_equal_layers_change_together() -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).to(BF16)
    start = start_of(spec_of(module, torch.randn(8, 128, dtype=BF16), "bsr:16:10"))
    program = after(start, action_of(start, "sparsify"))
    made = [program.implementation(r) for r in program.called if "linear" in r.label()]
    assert len(made) == 2 and made[0] is made[1] and made[0].generated
    assert "sparsify" not in kinds_of(program)


def test_the_planner_by_rules_begins_with_it_where_peak_rates_say_so() -> None:
    for text, rows, first in (("bsr:32:10", 4096, True), ("csr:5", 8, True), ("csr:10", 4096, False)):
        module, x = layer(rows, 512, 512, BF16)
        task = fake_task(start_of(spec_of(module, x, text)).graph, coder=CONTEXT.coder)
        task = replace(task, declared=f"weights={text}")
        result = optimize(task, GreedySearch(HeuristicPlanner()))
        assert (result.steps[0].action.kind == "sparsify") is first, (text, rows)
        told = [n for n in result.notes if "sparsify was not tried" in n]
        assert bool(told) is not first and all(f"of {rows} rows is faster than reading" in n for n in told)


def test_a_scripted_search_takes_it_and_tunes_it() -> None:
    module, x = layer(64, 512, 256, BF16, after=nn.GELU())
    task = fake_task(start_of(spec_of(module, x, "bsr:32:10")).graph, coder=CONTEXT.coder)
    result = optimize(task, GreedySearch(ScriptedPlanner(["sparsify", "fusion", "tiling smaller"])))
    assert [s.action.kind for s in result.steps if s.accepted][:3] == ["sparsify", "fusion", "tiling"]


def test_one_row_is_read_where_it_lies() -> None:
    module, x = layer(1, 256, 64, BF16)
    for text in ("csr:5", "bsr:16:20"):
        start = start_of(spec_of(module, x, text))
        program = after(start, action_of(start, "sparsify"))
        assert "_pack_a" not in program.implementation(reading(program)).source
