"""Recipes: replaying gives the same program, and a misfit is one clear error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.state import Budget
from qimeng.errors import ReplayError
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces.records import program_from_json, program_to_json
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.recipe import Recipe
from qimeng.testing import FakeCoder, ScriptedPlanner, fake_task, sample_graph


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


@pytest.fixture(scope="module")
def recipe(graph: OpGraph) -> Recipe:
    script = ("fusion", "lowering", "tiling", "fusion", "lowering", "pipeline")
    return optimize(fake_task(graph), GreedySearch(ScriptedPlanner(script)), Budget(evaluations=99)).recipe


@pytest.mark.parametrize("seed", range(4))
def test_replaying_gives_the_same_program_without_a_coder(
    graph: OpGraph, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = optimize(fake_task(graph), GreedySearch(RandomPlanner(seed)), Budget(evaluations=15))
    monkeypatch.setattr(FakeCoder, "write", None)
    assert result.program is not None
    again = Recipe.from_json(result.recipe.to_json()).replay(graph)
    assert again.digest == result.program.digest
    assert again.source == result.program.source
    assert [again.schedule(r) for r in again.regions] == [result.program.schedule(r) for r in result.program.regions]


def test_a_recipe_is_one_line_of_json(recipe: Recipe) -> None:
    text = recipe.to_json()
    assert "\n" not in text and len(recipe) >= 3
    assert Recipe.from_json(text) == recipe
    assert Recipe.from_json(text).to_json() == text


def test_equality_ignores_times(recipe: Recipe) -> None:
    assert recipe == replace(recipe, steps=tuple(replace(s, ms=123.0) for s in recipe.steps))
    assert recipe != replace(recipe, steps=recipe.steps[:-1])


def test_a_changed_patch_is_refused(graph: OpGraph, recipe: Recipe) -> None:
    data = json.loads(recipe.to_json())
    step = next(s for s in data["steps"] if s["patch"]["alternatives"])
    step["patch"]["alternatives"][0]["source"] += "# tampered\n"
    with pytest.raises(ReplayError, match="has hash"):
        Recipe.from_json(json.dumps(data)).replay(graph)


def test_another_graph_is_refused(recipe: Recipe) -> None:
    other = capture(torch.nn.ReLU, lambda: (torch.empty(8),))
    with pytest.raises(ReplayError, match="no node"):
        recipe.replay(other)


def test_a_missing_step_is_noticed(graph: OpGraph, recipe: Recipe) -> None:
    with pytest.raises(ReplayError):
        replace(recipe, steps=recipe.steps[:-1]).replay(graph)
    with pytest.raises(ReplayError):
        replace(recipe, steps=recipe.steps[1:]).replay(graph)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"steps": [1], "program": ""}'])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ReplayError, match="not a recipe"):
        Recipe.from_json(text)


def test_programs_travel_as_json(graph: OpGraph, recipe: Recipe) -> None:
    program = recipe.replay(graph)
    again = program_from_json(program_to_json(program), graph)
    assert again.digest == program.digest and again.implementations == program.implementations
