"""The numbers of actions: shares of the time, and how steps alike went before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qimeng.envs.gym.action_features import ACTION_FEATURES, ALIKE, action_feature_bounds, action_features
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.time_shares import ceilings, region_times
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Observation, Step
from qimeng.testing import fake_task


class Mixed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp().exp() @ x).sum(1).tanh()


@pytest.fixture
def seen() -> Observation:
    graph = capture(Mixed, lambda: (torch.empty(512, 512),))
    session = Session(fake_task(graph))
    session.begin()
    return session.observe()


def named(observation: Observation) -> dict[Action, dict[str, float]]:
    rows = action_features(observation)
    return {
        action: {f.name: float(v) for f, v in zip(ACTION_FEATURES, row, strict=True)}
        for action, row in zip(observation.actions, rows, strict=True)
    }


def region_of(observation: Observation, label: str) -> str:
    return next(r.id for r in observation.program.regions if r.label() == label)


def test_shares_of_the_time_are_those_of_all_equal_regions(seen: Observation) -> None:
    times = region_times(seen.program, seen.evaluation, seen.device)
    bounds = ceilings(seen.actions, seen.program, seen.evaluation, seen.device, seen.mode)
    for (action, numbers), bound in zip(named(seen).items(), bounds, strict=True):
        equal = {seen.program.region(r).signature for r in action.regions}
        share = sum(times[r.id] for r in seen.program.regions if r.signature in equal) / sum(times.values())
        found = [2.0 ** (4 * (numbers[name] - 2)) for name in ("saved", "touched")]
        assert found == pytest.approx([1 - 1 / bound if action.regions else 0.0, share], abs=2**-15)


def test_steps_alike_are_counted_by_kind_word_and_operators(seen: Observation) -> None:
    exp, tanh = (Action("lowering", (region_of(seen, label),)) for label in ("exp", "tanh"))
    before = named(seen)
    assert before[exp]["tried"] == before[exp]["went well"] == 0
    right = Step(exp, seen.evaluation, True)
    gone = Step(Action("lowering", ("r00000000",)), seen.evaluation, False)
    unjudged = Step(tanh, None, True)
    after = named(replace(seen, history=(right, right, gone, unjudged)))
    assert after[exp]["tried"] == after[tanh]["tried"] == pytest.approx(np.log2(3) / 2)
    assert after[exp]["went well"] == pytest.approx(2 * 2.5 / 3 - 1)
    wrong = named(replace(seen, history=(replace(right, accepted=False),)))
    assert wrong[tanh]["went well"] == -0.5
    others = [a for a in seen.actions if a.kind != "lowering" or seen.program.region(a.regions[0]).label() == "sum"]
    assert others and all(after[a]["tried"] == 0 for a in others)


def test_what_is_expected_counts_what_went_well(seen: Observation) -> None:
    tanh = Action("lowering", (region_of(seen, "tanh"),))
    exp = Step(Action("lowering", (region_of(seen, "exp"),)), seen.evaluation, False)
    before, after = named(seen)[tanh], named(replace(seen, history=(exp, exp)))[tanh]
    assert before["expected"] == pytest.approx(before["saved"] - 1 / 4)
    assert after["expected"] == pytest.approx(before["saved"] + np.log2(0.5 / 3) / 4)


def test_what_the_last_step_on_a_region_brought(seen: Observation) -> None:
    exp, tanh = (Action("lowering", (region_of(seen, label),)) for label in ("exp", "tanh"))

    def took(action: Action, ms: float, accepted: bool = True) -> Step:
        assert seen.evaluation is not None and seen.evaluation.timing is not None
        return Step(action, replace(seen.evaluation, timing=replace(seen.evaluation.timing, device_ms=ms)), accepted)

    ms = seen.eager_ms
    assert ms
    found = named(replace(seen, history=(took(exp, ms / 2**0.05), took(tanh, ms / 2**0.02), took(exp, ms / 8, False))))
    assert found[exp]["brought"] == pytest.approx(8 * 0.05, rel=1e-3)
    assert found[tanh]["brought"] == pytest.approx(-8 * 0.03, rel=1e-3)
    assert all(f["brought"] == 0 for a, f in found.items() if not {*a.regions} & {*exp.regions, *tanh.regions})


def test_what_going_back_to_pytorch_saves_is_known(seen: Observation) -> None:
    here = region_of(seen, "tanh")
    write, back = Action("lowering", (here,)), Action("library", (here,))
    seen = replace(seen, actions=(back,))

    def after(*taken: tuple[Action, float]) -> dict[str, float]:
        assert seen.evaluation is not None and seen.evaluation.timing is not None
        steps = [
            Step(a, replace(seen.evaluation, timing=replace(seen.evaluation.timing, device_ms=ms)), True)
            for a, ms in taken
        ]
        return named(replace(seen, history=tuple(steps)))[back]

    ms = seen.eager_ms
    assert ms
    slower = after((write, ms * 1.1), (Action("tiling", (here,), "wider"), ms * 1.05))
    assert slower["saved"] == slower["expected"] == pytest.approx(2 + np.log2(1 - 1 / 1.05) / 4)
    assert after((write, ms / 2))["saved"] == -2  # it would be slower again
    bound = named(seen)[back]["saved"]
    assert bound > -2
    assert after((write, ms * 1.1), (back, ms))["saved"] == bound
    assert after((write, ms * 1.1), (Action("launch", (), "cuda-graph"), ms))["saved"] == bound


def test_a_longer_region_is_less_alike(seen: Observation) -> None:
    fusion = next(a for a in seen.actions if a.kind == "fusion" and not a.param)
    operators = sum(len(seen.program.region(r).ops) for r in fusion.regions)
    three = Step(replace(fusion, regions=(*fusion.regions, fusion.regions[0])), seen.evaluation, True)
    found = named(replace(seen, history=(three,)))[fusion]
    more = operators + len(seen.program.region(fusion.regions[0]).ops)
    assert found["operators"] == pytest.approx(np.log2(1 + operators) / 4)
    assert found["tried"] == pytest.approx(np.log2(1 + ((1 + operators) / (1 + more)) ** ALIKE) / 2)


def test_numbers_stay_in_their_range(seen: Observation) -> None:
    exp = Action("lowering", (region_of(seen, "exp"),))
    rows = action_features(replace(seen, history=(Step(exp, seen.evaluation, True),) * 200))
    low, high = action_feature_bounds()
    assert rows.shape == (len(seen.actions), len(low)) and rows.dtype == np.float32
    assert (low <= rows).all() and (rows <= high).all()
