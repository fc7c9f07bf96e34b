"""Large programs become small in one step, and get their kernels in another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.actions import Context, check_action, kind_named, legal_actions
from qimeng.actions.chains import chains_of
from qimeng.actions.large import MANY
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget
from qimeng.errors import IllegalAction
from qimeng.graph.groups import pointwise_groups
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Request
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.recipe import Recipe, RecipeStep
from qimeng.spec import KernelSpec
from qimeng.testing import ScriptedPlanner

X = torch.rand(8, 16)
CLUSTER = Action("cluster")
H200 = device_named("h200")
CONTEXT = Context(H200, TemplateCoder())


def steps(x: torch.Tensor, k: torch.Tensor, n: int = 20) -> Any:
    """An unrolled loop: 8 operators a step."""
    v = torch.zeros_like(x)
    for _ in range(n):
        v = v + 0.01 * (-k * x - 0.1 * v)
        x = x + 0.01 * v
    return x, v


def with_sums(x: torch.Tensor) -> torch.Tensor:
    """Chains of five pointwise operators, each with a sum after it."""
    for _ in range(20):
        x = (x.sin() * 0.5 + 1).exp() * 0.1
        x = x - x.sum(-1, keepdim=True)
    return x


class Layers(torch.nn.Module):
    """Equal layers: a normalization, a product, and what follows it."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linear:
            y = x / (x * x).mean(-1, keepdim=True).sqrt()
            x = x + functional.gelu(linear(y)) * 0.5
        return x


def start(thing: Any, *inputs: Any) -> Program:
    return Program.start(capture_spec(KernelSpec.of(thing, inputs)))


def clustered(program: Program, action: Action = CLUSTER) -> Program:
    return CONTEXT.coder.write(Request(program, action, H200)).apply(program)


def test_one_step_makes_an_unrolled_loop_one_region() -> None:
    task = make_task(steps, (X, torch.rand(16)), device="h200")
    assert len(task.start.regions) == 161
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"])), Budget(seconds=120, evaluations=3))
    assert [s.text.split(":")[0] for s in result.steps[:2]] == ["cluster", "lowering"]
    assert len(result.program.regions) == 1 and result.evaluation.ok and result.evaluation.generated_share == 1


def test_chains_end_at_operators_of_other_kinds() -> None:
    program = start(with_sums, X)
    groups = list(pointwise_groups(program.regions))
    assert len(groups) == 20 and {len(g) for g in groups} == {5, 6}, "the difference joins the next chain"
    assert [len(g) for g in chains_of(program, CONTEXT)] == [len(g) for g in groups]


def test_large_chains_are_cut_and_refused_ones_halved() -> None:
    program = start(steps, X, torch.rand(16))
    assert [len(g) for g in pointwise_groups(program.regions, most=50)] == [50, 50, 50, 11]

    class Small(TemplateCoder):
        def can_implement(self, region: Region) -> str | None:
            return "too large" if len(region.nodes) > 45 else super().can_implement(region)

    groups = chains_of(program, Context(H200, Small()))
    assert 4 <= len(groups) <= 8 and max(sum(len(r.nodes) for r in g) for g in groups) <= 45


def test_clusters_compute_the_same_and_every_one_can_be_coded() -> None:
    program = start(with_sums, X)
    after = clustered(program)
    assert len(after.regions) < 25 < len(program.regions), "each chain with the sum before or after it"
    x = torch.randn(8, 16)
    torch.testing.assert_close(after.load().Model()(x), with_sums(x))
    assert all(CONTEXT.coder.can_implement(r) is None for r in after.regions)
    with pytest.raises(IllegalAction, match="no regions on PyTorch that touch can be one region"):
        check_action(after, CLUSTER, CONTEXT)


def test_what_follows_a_product_joins_it_and_what_comes_before_does_not() -> None:
    after = clustered(start(Layers(), X))
    labels = Counter(r.label() for r in after.regions)
    products = [label for label in labels if "linear" in label or "addmm" in label]
    assert len(products) <= 2 and all(label.startswith(("linear+gelu", "addmm+gelu")) for label in products), labels


def test_one_cluster_may_be_made_alone_or_at_all_equal_places() -> None:
    program = start(Layers(), X)
    whole = clustered(program)
    offered = [a for a in legal_actions(program, CONTEXT) if a.kind == "cluster"]
    assert CLUSTER in offered
    everywhere = next(a for a in offered if a.param == "everywhere")
    alone = Action("cluster", everywhere.regions)
    assert alone in offered
    one, all_equal = clustered(program, alone), clustered(program, everywhere)
    made = next(r for r in one.regions if r not in program.regions)
    places = [r for r in whole.regions if r.signature == made.signature]
    assert len(places) >= 6
    assert {r.signature for r in all_equal.regions if r not in program.regions} == {made.signature}
    assert sum(r.signature == made.signature for r in all_equal.regions) == len(places)


def test_pairs_are_not_offered_among_very_many_regions() -> None:
    program = start(with_sums, X)
    assert len(program.regions) >= 96
    kinds = {a.kind for a in legal_actions(program, CONTEXT)}
    assert "cluster" in kinds and "fusion" not in kinds
    pair = Action("fusion", (program.regions[0].id, program.regions[1].id))
    check_action(program, pair, CONTEXT)
    assert "fusion" in {a.kind for a in legal_actions(start(lambda x: (x + 1).sin() * 2, X), CONTEXT)}


def test_small_programs_are_not_offered_them() -> None:
    program = start(lambda x: (x.sin() * 2 + 1).exp(), X)
    assert not [a for a in legal_actions(program, CONTEXT) if a.kind in ("cluster", "lower_all")]
    for kind in ("cluster", "lower_all"):
        with pytest.raises(IllegalAction, match=f"{kind} is for programs of {MANY} operators or more"):
            check_action(program, Action(kind), CONTEXT)
    many = start(lambda x: [x.kthvalue(2, i % 2).values for i in range(MANY)], X)
    with pytest.raises(IllegalAction, match="no regions on PyTorch that touch"):
        check_action(many, CLUSTER, CONTEXT)
    with pytest.raises(IllegalAction, match="0 unlike region"):
        check_action(many, Action("lower_all"), CONTEXT)


def test_all_regions_are_lowered_in_one_patch_equal_ones_once() -> None:
    program = clustered(start(Layers(), X))
    action = Action("lower_all")
    assert action in legal_actions(program, CONTEXT)
    patch = CONTEXT.coder.write(Request(program, action, H200))
    assert len(patch.others) == len({r.signature for r in program.regions}) < len(program.regions)
    after = patch.apply(program)
    assert all(after.implementation(r).generated for r in after.regions)
    rewrite = kind_named("lower_all").apply(program, action, CONTEXT)
    assert [r.id for r in rewrite.each] == [region for region, _ in patch.others]
    step = RecipeStep.of(action, patch)
    first = kind_named("cluster").apply(start(Layers(), X), CLUSTER, CONTEXT).patch()
    recipe = Recipe((RecipeStep.of(CLUSTER, first), step), after.digest)
    assert Recipe.from_json(recipe.to_json()).replay(program.graph).digest == after.digest
    offered = legal_actions(after, CONTEXT)
    assert Action("library", (after.regions[0].id,)) in offered, "several operators go back to PyTorch's calls"
    tuned = [a for a in offered if a.kind in ("tiling", "library") and a.regions]
    signatures = {(a.kind, a.param, after.region(a.regions[0]).signature) for a in tuned}
    assert len(signatures) == len(tuned), "what changes all equal regions is offered once"


def test_products_that_nothing_is_measured_beside_run_on_tensor_cores() -> None:
    program = clustered(start(Layers(), torch.rand(256, 16)))
    program = clustered(program, Action("lower_all"))
    (linear,) = {program.implementation(r).schedule for r in program.regions if "linear" in r.label()}
    assert linear is not None and linear.precision == "fp16x3", "plain fp32 is what lowering one region begins with"
