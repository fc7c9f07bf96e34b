"""The list of legal actions of a large program costs what changed: answers about equal regions are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qimeng.actions import Context, Kind, kind_named, legal_actions, register, unregister
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.family import Unsupported, families, plan_of, uncovered
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Asked(Kind):
    """Count what is asked.

    rewrite: nothing
    """

    name = "asked"
    local = True

    def __init__(self) -> None:
        self.count = 0

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal."""
        self.count += 1


class Whole(Asked):
    """The same, with a look at the whole program.

    rewrite: nothing
    """

    name = "whole"

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal in programs of any size."""
        self.count += bool(program.regions)


@pytest.fixture
def counting() -> Iterator[tuple[Asked, Asked]]:
    kinds = Asked(), Whole()
    for kind in kinds:
        register(kind)
    yield kinds
    for kind in kinds:
        unregister(kind.name)


def chain(x: torch.Tensor) -> Any:
    for _ in range(6):
        x = torch.tanh(x).softmax(-1)
    return x


def test_answers_about_equal_regions_are_kept_for_later_steps(counting: tuple[Asked, Asked]) -> None:
    local, whole = counting
    program = Program.start(capture_spec(KernelSpec.of(chain, (torch.rand(4, 8),))))
    context = Context(device_named("h200"), TemplateCoder())
    regions, unlike = program.regions, len({r.signature for r in program.regions})
    offered = legal_actions(program, context)
    assert local.count == unlike < len(regions) == whole.count
    assert {a.regions for a in offered if a.kind == "asked"} == {(r.id,) for r in regions}
    fusion = Action("fusion", (regions[0].id, regions[1].id))
    program = kind_named("fusion").apply(program, fusion, context).patch().apply(program)
    again = legal_actions(program, context)
    assert local.count == unlike + 1 and whole.count == 2 * len(regions) - 1
    assert {a.regions for a in again if a.kind == "asked"} == {(r.id,) for r in program.regions}
    lowering = Action("lowering", (program.regions[0].id,))
    lowered = context.coder.write(Request(program, lowering, context.device)).apply(program)
    legal_actions(lowered, context)
    assert local.count == unlike + 2, "another implementation is another question"


def test_a_kept_refusal_holds_nothing_that_was_worked_on() -> None:
    program = Program.start(capture_spec(KernelSpec.of(lambda x: x.kthvalue(2, -1).values, (torch.rand(4, 8),))))
    region, family = program.regions[0], families()["gemm"]
    assert uncovered(region) and uncovered(region) == uncovered(region)
    depths = []
    for _ in range(3):
        with pytest.raises(Unsupported) as caught:
            plan_of(family, region)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1 and caught.value.__context__ is None
