"""Similar patches: only what was accepted and judged, nearest first, never from an excluded specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qimeng.actions import legal_actions
from qimeng.coder.llm.similar import Library, Traits, similarity, traits_of
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.steps.session import Session
from qimeng.graph.capture import capture
from qimeng.interfaces import Request
from qimeng.program.program import Program
from qimeng.store import Store
from qimeng.testing import FakeEvaluator, fake_task


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, dim=1)


class Gated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


def start(module: type[torch.nn.Module], *shape: int) -> Program:
    return Program.start(capture(module, lambda: (torch.empty(shape),)))


def explore(store: Store, program: Program, spec: str, mode: str = "default", wrong: str = "") -> None:
    """Fuse, lower and retile, every step into the store; programs whose source holds `wrong` are refused."""
    evaluator = FakeEvaluator(wrong=lambda p: "differs" if wrong and wrong in p.source else None)
    task = fake_task(program.graph, evaluator, TemplateCoder(), mode=mode)
    session = Session(replace(task, conditions=replace(task.conditions, spec=spec, mode=mode)), store=store)
    for kind in ("fusion", "lowering", "tiling"):
        action = next((a for a in session.observe().actions if a.kind == kind), None)
        if action is not None:
            session.step(action)


@pytest.fixture(scope="module")
def store() -> Store:
    store = Store()
    explore(store, start(Scaled, 64, 1000), "softmax")
    explore(store, start(Gated, 64, 1000), "gated")
    explore(store, start(Scaled, 64, 1001), "loose", mode="high")
    explore(store, start(Gated, 32, 1000), "refused", wrong="triton")
    return store


def asked(program: Program, mode: str = "default") -> Request:
    device, coder = DEVICES["h200"], TemplateCoder()
    task = fake_task(program.graph, coder=coder, mode=mode)
    for kind in ("fusion",):
        action = next(a for a in legal_actions(program, task.context) if a.kind == kind)
        program = coder.write(Request(program, action, device)).apply(program)
    action = next(a for a in legal_actions(program, task.context) if a.kind == "lowering")
    return Request(program, action, device, mode)


def test_the_nearest_comes_first(store: Store) -> None:
    found = Library(store).nearest(asked(start(Scaled, 128, 500)))
    assert [f.spec for f in found] == ["softmax"] * 2
    assert found[0].traits == Traits(("mul", "_softmax"), (((64, 1000), "float32"),), "lowering")
    assert "def region(x0)" in found[0].source() and "tl.exp" in found[0].source()
    assert found[0].before is None and found[1].before is not None and found[1].traits.kind == "tiling"


def test_an_evaluation_leaves_its_own_specifications_out(store: Store) -> None:
    request = asked(start(Scaled, 64, 1000))
    assert {f.spec for f in Library(store).nearest(request)} == {"softmax"}
    assert "softmax" not in {f.spec for f in Library(store, exclude=["softmax"]).nearest(request, 9)}


def test_only_the_same_mode_and_only_what_passed(store: Store) -> None:
    assert {f.spec for f in Library(store).nearest(asked(start(Scaled, 64, 1000), "high"), 9)} == {"loose"}
    every = [f for items in Library(store)._by_mode.values() for f in items]
    assert {f.spec for f in every} == {"softmax", "gated", "loose"}


def test_the_present_code_is_no_news(store: Store) -> None:
    request = asked(start(Scaled, 64, 1000))
    first = Library(store).nearest(request, 1)[0]
    program = request.program.with_implementation(request.program.regions[0].id, first.implementation)
    again = Library(store).nearest(replace(request, program=program), 9)
    assert first.implementation.digest not in {f.implementation.digest for f in again}


def test_similarity_falls_with_each_difference() -> None:
    base = Traits(("mul", "_softmax"), (((64, 1000), "float32"),), "tiling", "taller")
    others = [
        base,
        replace(base, outputs=(((64, 4000), "float32"),)),
        replace(base, param="wider"),
        replace(base, kind="lowering", param=""),
        replace(base, ops=("add", "_softmax")),
        replace(base, ops=("sum",)),
    ]
    scores = [similarity(base, o) for o in others]
    assert scores[0] == 1.0 and scores == sorted(scores, reverse=True) and scores[-1] == 0.5
    assert similarity(base, replace(base, outputs=())) < 0.9
    assert traits_of(asked(start(Scaled, 8, 8))).text() == "mul+_softmax [8x8 float32], lowering"
