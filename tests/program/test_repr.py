"""What a debugger, a notebook or a failed test shows of large objects: a line that helps, never the whole graph."""

from __future__ import annotations

import pytest

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.testing import ScriptedPlanner, fake_task, sample_graph


def test_the_repr_of_a_large_object_is_short() -> None:
    task = fake_task(sample_graph())
    script = ScriptedPlanner(("lowering", "fusion", "lowering"))
    result = optimize(task, GreedySearch(script), Budget(evaluations=9))
    session = Session(task, Budget(evaluations=9))
    session.begin()
    program = result.program
    assert program is not None
    region = program.regions[0]
    shown = [sample_graph(), program, region, program.implementation(region), session.state, result, task.start]
    for thing in shown:
        assert len(repr(thing)) < 400 and "\n" not in repr(thing), type(thing)
    assert len(repr(task)) < 1500
    assert program.digest in repr(program) and region.label() in repr(program) and region.id in repr(region)
    assert result.headline in repr(result) and "'sample' on h200" in repr(result)
    assert repr(sample_graph()) == "<OpGraph: inputs 1, operators 5, outputs 1>"
    assert repr(session.state).startswith("<State after 0 accepted of 0 steps: ")


def test_a_program_of_many_regions_names_some_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.program.program.SHOWN", 2)
    assert repr(Program.start(sample_graph())).endswith(", and 3 more>")
    assert "left as it was written" in repr(Program(OpGraph({}, ()), (), {}, "x = 1"))
