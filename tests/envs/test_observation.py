"""What a planner sees, and the shares of time that order its actions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qimeng.device import DEVICES
from qimeng.envs.gym.observation import FEATURES, action_texts, feature_bounds, features, main_family, render_text
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.time_shares import bound_ms, carried, ceilings, order_actions, region_times
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import make_region
from qimeng.interfaces import Action, Observation
from qimeng.testing import FakeEvaluator, fake_task


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
    golden("observation.txt", render_text(session.observe()) + "\n" + "\n".join(action_texts(session.observe())) + "\n")


def test_features_are_in_range_and_in_order(graph: OpGraph) -> None:
    session = started(graph)
    first = named(session.observe())
    assert first["speedup"] == 0 and first["best speedup"] == 0 and first["generated regions"] == 0
    assert first["regions"] == pytest.approx(np.log2(6)) and first["region 5 share"] == 0
    assert sum(first[f"region {i} share"] for i in range(8)) == pytest.approx(1)
    assert sum(first[f"region {i} gemm"] for i in range(8)) == 1
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


def test_bounds_are_the_longer_of_bytes_and_arithmetic(graph: OpGraph) -> None:
    regions = {main_family(r): r for r in started(graph).state.program.regions}
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
    assert slowest.id in shuffled[1].regions


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
