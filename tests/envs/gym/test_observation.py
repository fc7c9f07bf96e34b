"""What a planner sees, and the shares of time that order its actions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from qimeng.device import DEVICES
from qimeng.envs.gym.observation import FEATURES, TEXTS, action_texts, feature_bounds, features, render_text
from qimeng.envs.gym.words import WIDTH, mean_vector, vector
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.time_shares import (
    MAX_ACTIONS,
    bound_ms,
    carried,
    ceilings,
    order_actions,
    region_times,
    within_limit,
)
from qimeng.family import register_family, unregister_family, word_of
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region, make_region
from qimeng.interfaces import Action, Observation
from qimeng.testing import FakeEvaluator, fake_task
from tests.family import banded


def started(graph: OpGraph) -> Session:
    session = Session(
        fake_task(graph, FakeEvaluator(wrong=lambda p: "off by 3.0" if "num_warps=64" in p.source else None))
    )
    session.begin()
    return session


def take(session: Session, text: str) -> None:
    session.step(next(a for a in session.observe().actions if str(a).startswith(text)))


def named(observation: Observation) -> dict[str, float]:
    return {f.name: float(v) for f, v in zip(FEATURES, features(observation), strict=True)}


def test_the_text_of_a_state(graph: OpGraph, golden: Callable[[str, str], None]) -> None:
    session = started(graph)
    take(session, "fusion")
    take(session, "lowering")
    session.step(Action("tiling", ("r0",), "taller"))
    seen = session.observe()
    lines = [f"texts of version {TEXTS}", render_text(seen), *action_texts(seen)]
    golden("observation.txt", "\n".join(lines) + "\n")


def test_features_are_in_range_and_in_order(graph: OpGraph) -> None:
    session = started(graph)
    first = named(session.observe())
    assert first["speedup"] == 0 and first["best speedup"] == 0 and first["generated regions"] == 0
    assert first["regions"] == pytest.approx(np.log2(6)) and first["region 5 share"] == 0
    assert sum(first[f"region {i} share"] for i in range(8)) == pytest.approx(1)
    assert [first[f"region {i} present"] for i in range(8)] == [1] * 5 + [0] * 3
    words = [tuple(first[f"region {i} word {j}"] for j in range(WIDTH)) for i in range(8)]
    assert words.count(tuple(vector("gemm"))) == 1 and words[5:] == [(0.0,) * WIDTH] * 3
    for _ in range(4):
        take(session, "fusion")
    take(session, "lowering")
    then = named(session.observe())
    assert then["speedup"] > 0.2 and then["generated time"] == 1 and then["region 0 generated"] == 1
    assert then["steps left"] < first["steps left"]
    session.step(Action("tiling", ("r0",), "taller"))
    assert named(session.observe())["refusals"] == pytest.approx(1 / 8)
    low, high = feature_bounds()
    assert len(low) == len(high) == len(FEATURES) and (low < high).all()


@torch.library.custom_op("elsewhere::blend", mutates_args=())
def blend(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@blend.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def blended(x: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
    return torch.ops.elsewhere.blend(banded.banded(x, bands))


class Blended(torch.nn.Module):
    def forward(self, x: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
        return blended(x, bands)


class Called(banded.Banded):
    """A banded product whose word is what a test says."""

    def __init__(self, found: object):
        self.found = found

    def concerns(self, region: Region) -> bool:
        return any(n.packet in ("aten.unfold", "aten.sum") for n in region.ops)

    def word(self, region: Region) -> str:
        return self.found  # type: ignore[return-value]


def test_a_family_and_an_operator_of_another_package_change_no_shape() -> None:
    graph = capture(Blended, banded.inputs)
    before = started(graph).observe()
    register_family(Called("banded"))
    try:
        seen = started(graph).observe()
        named_now, text = named(seen), render_text(seen)
    finally:
        unregister_family("banded")
    assert features(before).shape == features(seen).shape and "banded" not in render_text(before)
    program = seen.program
    times = region_times(program, seen.evaluation, seen.device)
    ranked = sorted(program.regions, key=lambda r: (-times[r.id], r.id))
    for i, region in enumerate(ranked):
        word = next(line.split()[1] for line in text.splitlines() if line.startswith(region.id))
        assert word == ("banded" if Called("").concerns(region) else "other" if "blend" in region.label() else word)
        assert [named_now[f"region {i} word {j}"] for j in range(WIDTH)] == vector(word).tolist()
        operators = mean_vector(n.packet for n in region.ops).tolist()
        assert [named_now[f"region {i} operators {j}"] for j in range(WIDTH)] == operators
    assert "banded" in text and "elsewhere.blend" in {n.packet for r in ranked for n in r.ops}


@pytest.mark.parametrize("found", [3, "two words", ""])
def test_a_family_with_a_bad_word_is_named_in_the_notes(found: object) -> None:
    register_family(Called(found))
    try:
        session = started(capture(banded.Module, banded.inputs))
        assert " other " in render_text(session.observe())
        session.task.legal.clear()  # as at the next program
        session.observe()
    finally:
        unregister_family("banded")
    assert "its word returned" in session.ledger.faults["banded"]


def test_bounds_are_the_longer_of_bytes_and_arithmetic(graph: OpGraph) -> None:
    regions = {word_of(r): r for r in started(graph).state.program.regions}
    device = DEVICES["h200"]
    linear, pointwise = regions["gemm"], regions["pointwise"]
    work = 2 * 4096 * 512 * 512 * 1e3
    assert bound_ms(linear, device) == pytest.approx(work / (989e12 / 3))  # three products of half-precision planes
    moved = (2 * 4096 * 512 + 512 * 512 + 512) * 4 * 1e3
    assert bound_ms(linear, device, "high") == pytest.approx(moved / 4.8e12)  # one product takes less than its bytes
    assert bound_ms(linear, DEVICES["a100"]) == pytest.approx(work / (312e12 / 3))
    assert bound_ms(pointwise, device) == pytest.approx(2 * 4096 * 512 * 4 / 4.8e12 * 1e3)


def test_times_are_carried_over_a_change_of_the_partition(graph: OpGraph) -> None:
    session = started(graph)
    before = session.state
    take(session, "fusion")
    after = session.state
    assert before.evaluation is not None and after.evaluation is not None
    assert set(after.evaluation.region_ms) == {r.id for r in after.program.regions}
    assert sum(after.evaluation.region_ms.values()) == pytest.approx(sum(before.evaluation.region_ms.values()))
    assert carried(before.program, after.program, None, DEVICES["h200"]) is None
    take(session, "unfuse")
    assert session.state.evaluation is not None
    apart, once = session.state.evaluation.region_ms, before.evaluation.region_ms
    assert set(apart) == set(once) and sum(apart.values()) == pytest.approx(sum(once.values()))
    assert sorted(apart, key=apart.__getitem__)[-1] == sorted(once, key=once.__getitem__)[-1]


def test_without_times_the_roofline_orders_the_actions(graph: OpGraph) -> None:
    session = started(graph)
    program, device = session.state.program, session.task.context.device
    assert region_times(program, None, device) == {r.id: bound_ms(r, device) for r in program.regions}
    actions = session.observe().actions
    shuffled = order_actions(reversed(actions), program, None, device)
    assert shuffled == order_actions(actions, program, None, device)
    assert shuffled[0].kind == "stop"
    slowest = max(program.regions, key=lambda r: bound_ms(r, device))
    first = next(a for a in shuffled if a.regions)  # those without are about the whole program
    assert slowest.id in first.regions


def test_what_an_action_may_save_at_most(graph: OpGraph) -> None:
    """One region: its time becomes its bound. Two: the bound of both as one kernel. Nothing: nothing."""
    seen = started(graph).observe()
    o, program = seen, seen.program
    times = region_times(program, o.evaluation, o.device)
    total = sum(times.values())
    found = dict(zip(o.actions, ceilings(o.actions, program, o.evaluation, o.device, o.mode), strict=True))
    assert found[Action("stop")] == 1
    lowered = [a for a in o.actions if a.kind == "lowering"]
    for action in lowered:
        region = program.region(action.regions[0])
        spared = times[region.id] - min(bound_ms(region, o.device, o.mode), times[region.id])
        assert found[action] == pytest.approx(total / (total - spared))
    fusions = [a for a in o.actions if a.kind == "fusion" and not a.param]
    assert lowered and fusions
    for action in fusions:
        one, other = (program.region(r) for r in action.regions)
        both = make_region(graph, {*one.nodes, *other.nodes})
        spared = times[one.id] + times[other.id] - bound_ms(both, o.device, o.mode)
        assert found[action] == pytest.approx(total / (total - spared))
    text = dict(zip(o.actions, action_texts(o), strict=True))
    best = max(lowered, key=lambda a: found[a])
    assert f"lowering, bound -{100 * (1 - 1 / found[best]):.0f}%: {best.regions[0]} " in text[best]
    assert text[Action("stop")] == "stop"


def test_what_is_done_to_a_region_is_done_to_its_equals() -> None:
    class Equal(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().exp().exp() + x.sum()

    seen = started(capture(Equal, lambda: (torch.empty(512, 512),))).observe()
    times = region_times(seen.program, seen.evaluation, seen.device)
    equal = [r for r in seen.program.regions if r.label() == "exp"]
    assert len(equal) == 3 and len({r.signature for r in equal}) == 1
    spared = sum(times[r.id] - min(bound_ms(r, seen.device, seen.mode), times[r.id]) for r in equal)
    (gain,) = ceilings([Action("lowering", (equal[1].id,))], seen.program, seen.evaluation, seen.device, seen.mode)
    assert gain == pytest.approx(sum(times.values()) / (sum(times.values()) - spared)) and spared > 0


def test_a_cut_leaves_some_of_every_intent() -> None:
    many = [Action("fusion", (f"a{n}", f"b{n}")) for n in range(MAX_ACTIONS)]
    more = [Action("fusion", (f"a{n}", f"b{n}"), "recompute") for n in range(200)]
    few = [Action("lowering", (f"a{n}",)) for n in range(100)]
    one = [Action("library", (), "inductor")]
    kept = within_limit([*many, *more, *few, *one])
    assert len(kept) == MAX_ACTIONS
    assert one[0] in kept and sum(a.kind == "lowering" for a in kept) == 85
    assert list(kept) == [a for a in [*many, *more, *few, *one] if a in set(kept)]
    assert within_limit(few) == tuple(few)
