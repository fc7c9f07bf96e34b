"""Rows that several programs share, on the GPU: programs that wait for each other cannot run in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source
from qimeng.spec.origin import FunctionModule

HEADER = "import torch\nimport triton\nimport triton.language as tl\n"
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "softmax": (lambda x: functional.softmax(x, 1), ((300, 40_000),)),
    "softmax of an odd row": (lambda x: functional.log_softmax(x * 3, 1), ((37, 65_537),)),
    "two odd rows": (lambda x, y: (x + y) / (x + y).norm(dim=1, keepdim=True), ((61, 50_003), (61, 50_003))),
    "layer norm": (
        lambda x, w, b: functional.layer_norm(x, (33_000,), w, b), ((150, 33_000), (33_000,), (33_000,)),
    ),
    "residual and norm": (lambda x, y: functional.layer_norm(x + y, (50_000,)), ((64, 50_000), (64, 50_000))),
    "largest": (lambda x: x / x.abs().amax(1, keepdim=True), ((1000, 20_000),)),
    "one row": (lambda x: x / x.norm(), ((1_000_003,),)),
    "group norm": (lambda x: functional.group_norm(x, 4), ((9, 8, 100, 101),)),
}  # fmt: skip
SCHEDULES = [
    TileSchedule("wave", block_r=8192, lag=8, warps=8, stages=1),
    TileSchedule("wave", block_r=16384, lag=8, per_sm=3, warps=8, stages=1),
    *(
        TileSchedule("cooperative", block_r=r, per_sm=n, warps=w, stages=stages)
        for r, w, n in ((8192, 8, 2), (16384, 16, 1), (4096, 4, 4))
        for stages in (1, 2)
    ),
]


def test_programs_that_wait_for_each_other_refuse_the_interpreter() -> None:
    graph = capture(lambda: FunctionModule(CASES["one row"][0]), lambda: (torch.empty(100_003),))
    region = make_region(graph, [n.name for n in graph.ops()])
    made = TemplateCoder().print(region, SCHEDULES[-1])
    call = getattr(load_source(HEADER + made.source, "shared_row"), made.entry)
    with pytest.raises(ValueError, match="wait for each other"):
        call(torch.rand(100_003))


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_that_programs_share_are_right(case: str, schedule: TileSchedule) -> None:
    function, shapes = CASES[case]
    graph = capture(lambda: FunctionModule(function), lambda: tuple(torch.empty(s) for s in shapes))
    region = make_region(graph, [n.name for n in graph.ops()])
    made = TemplateCoder().print(region, schedule)
    call = getattr(load_source(HEADER + made.source, "shared_row"), made.entry)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = [torch.randn(s, device="cuda") for s in shapes]
        expected = function(*(x.double() for x in inputs))
        for _ in range(20):  # a missing wait shows now and then
            (found,) = call(*inputs)
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-6)
