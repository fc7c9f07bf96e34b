from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.time_shares import ceilings
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action
from qimeng.planner import make_search
from qimeng.testing import fake_task


def kinds_taken(graph: OpGraph, planner: str, budget: Budget) -> tuple[list[str], list[Action], str]:
    result = optimize(fake_task(graph), make_search("greedy", planner), budget)
    actions = [s.action for s in result.steps]
    return [a.kind for a in actions], actions, result.stopped


def test_lower_only_lowers_every_region_once_in_order_and_stops(graph: OpGraph) -> None:
    kinds, actions, stopped = kinds_taken(graph, "lower-only", Budget())
    regions = [r.id for r in Session(fake_task(graph)).state.program.regions]
    assert kinds == ["lowering"] * len(regions) + ["stop"] and stopped == "stop"
    assert [a.regions[0] for a in actions[:-1]] == regions


def test_a_sweep_takes_every_rewrite_of_a_schedule_once(graph: OpGraph) -> None:
    kinds, actions, stopped = kinds_taken(graph, "sweep", Budget(evaluations=500, steps=500))
    lowered = kinds.count("lowering")
    assert kinds[:lowered] == ["lowering"] * lowered and stopped == "stop"
    rest = actions[lowered:-1]
    assert rest and all(isinstance(kind_named(a.kind), ScheduleKind) for a in rest)
    assert len(set(rest)) == len(rest)


def test_by_the_roofline_all_is_fused_and_launched_at_once_then_lowered_where_most_is_to_gain(graph: OpGraph) -> None:
    kinds, actions, stopped = kinds_taken(graph, "roofline", Budget())
    assert (
        kinds == sorted(kinds[:-1], key=("cluster", "fusion", "launch", "lowering").index) + ["stop"]
        and stopped == "stop"
    )
    session, gains = Session(fake_task(graph)), list[float]()
    for action in actions[:-1]:
        o = session.observe()
        if action.kind == "lowering":
            lowerings = [a for a in o.actions if a.kind == "lowering"]
            found = dict(zip(lowerings, ceilings(lowerings, o.program, o.evaluation, o.device, o.mode), strict=True))
            assert found[action] == max(found.values())
            gains.append(found[action])
        session.step(action)
    assert gains
