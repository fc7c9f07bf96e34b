"""Values of half types whose rounding is a part of the computation, whatever regions it is divided into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import partition
from qimeng.graph.rounding import shown_halves
from qimeng.spec.origin import FunctionModule


def graph_of(function: Callable[..., Any]) -> OpGraph:
    given = (torch.empty(8, 8), torch.empty(8, 8, dtype=torch.float16))
    return capture(lambda: FunctionModule(function), lambda: given)


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda x, h: (x.half() * 3).float() + x, {"_to_copy", "mul"}),
        (lambda x, h: (x.half() * 3).float().half(), set()),  # no finer result
        (lambda x, h: (x.half() * h).float(), {"_to_copy"}),  # a half input may keep its digits
        (lambda x, h: (h * 3).float() + x, set()),
        (lambda x, h: ((x.half() * 3).view(-1).float(), (x.bfloat16() + 1)), {"_to_copy", "mul", "view"}),
    ],
)
def test_only_roundings_by_choice_that_reach_a_finer_result_show(function: Callable[..., Any], shown: set[str]) -> None:
    assert {v.node for v in shown_halves(graph_of(function))} == shown


def test_a_region_that_rounds_is_another_one() -> None:
    kept, free = (graph_of(f) for f in (lambda x, h: (x.half() * 3).float(), lambda x, h: (h * 3).float()))
    products = [next(r for r in partition(g) if r.label() == "mul") for g in (kept, free)]
    assert products[0].signature != products[1].signature
