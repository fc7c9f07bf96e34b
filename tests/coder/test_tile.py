"""The tile family in Triton's interpreter: every form on small, odd shapes, against float64.

The interpreter must be chosen before triton is imported, so the cases run in one process of their own (this file as a
script), which prints a JSON row a case.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.interpreted import rows_of

LIMIT = 2e-6
"""Relative to the largest value: 16 ulp of float32."""

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu": (lambda x: functional.gelu(x) * 2, ((33, 70),)),
    "broadcast": (lambda x, b: torch.tanh(x + b), ((5, 33, 70), (33, 1))),
    "permuted": (lambda x, b: x.permute(0, 2, 1) + b, ((5, 33, 70), (33,))),
    "sliced": (lambda x: x[:, 1:] * 2, ((33, 70),)),
    "softmax": (lambda x: functional.softmax(x, 1), ((9, 150),)),
    "log_softmax": (lambda x: functional.log_softmax(x, -1), ((9, 130),)),
    "softmax_columns": (lambda x: functional.softmax(x, 0), ((20, 37),)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), ((9, 150),)),
    "sum_middle": (lambda x: x.sum(1), ((3, 33, 22),)),
    "mean_all": (lambda x: (x * x).mean(), ((50, 70),)),
    "max": (lambda x: x.max(1)[0], ((3, 33, 22),)),
    "argmax": (lambda x: x.argmax(1), ((3, 33, 22),)),
    "argmin_all": (lambda x: x.argmin(), ((5, 33, 7),)),
    "group_norm": (lambda x: functional.group_norm(x, 4, torch.full((16,), 1.5, dtype=x.dtype)), ((3, 16, 5, 7),)),
    "layer_norm": (lambda x, w: functional.layer_norm(x, (6, 7), w), ((9, 6, 7), (6, 7))),
    "batch_norm": (lambda x: functional.batch_norm(x, None, None, training=True), ((5, 6, 7, 5),)),
    "rms_norm": (lambda x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5), ((3, 16, 5, 5),)),
    "frobenius": (lambda x: x / torch.norm(x, p="fro"), ((3, 16, 5, 5),)),
    "l1": (lambda x: x / x.abs().mean(1, keepdim=True), ((9, 197),)),
    "quotients": (lambda x: x / 7 + torch.floor(x / x.amax(1, keepdim=True)), ((13, 33),)),
    "odd_softmax": (lambda x: functional.softmax(x, 1), ((9, 131),)),
    "odd_norm": (lambda x, y: functional.layer_norm(x + y, (37,)), ((3, 3, 37), (3, 3, 37))),
    "std": (lambda x: x.std(1), ((11, 333),)),
    "prod": (lambda x: x.prod(1), ((4, 33),)),
    "triu": (lambda x: torch.triu(x), ((34, 33),)),
    "range": (lambda x: x.amax() - x.amin(), ((34, 33),)),
    "two_outputs": (lambda x: (x * 2, x.sum(1)), ((13, 33),)),
    "matrix_vector": (lambda x, y: x @ y, ((34, 330), (330, 1))),
    "activations": (
        lambda x: functional.mish(x) + functional.softplus(x) + functional.selu(x) + functional.hardswish(x),
        ((34, 330),),
    ),
    "bytes": (lambda x: (lambda b: b // b.clamp(3))((x.abs() * 20).to(torch.uint8)), ((9, 13),)),
    "two_levels": (lambda x: functional.softmax(functional.layer_norm(x, (50,)), 1), ((7, 50),)),
}  # fmt: skip


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def _rows() -> Iterator[dict[str, Any]]:
    from qimeng.coder.template.families.tile import split
    from qimeng.coder.template.families.tile.defaults import default_schedule
    from qimeng.coder.template.families.tile.plan import plan_tile
    from qimeng.coder.template.families.tile.printer import print_tile
    from qimeng.coder.template.triton.row_edges import edges_of
    from qimeng.device import device_named
    from qimeng.graph.capture import capture
    from qimeng.graph.region import make_region
    from qimeng.program.program import load_source

    monkeypatch = pytest.MonkeyPatch()
    header = "import torch\nimport triton\nimport triton.language as tl\n"
    for name, (function, shapes) in CASES.items():
        torch.manual_seed(0)
        inputs = [torch.randn(s) for s in shapes]
        graph = capture(lambda f=function: _Module(f), lambda s=shapes: tuple(torch.empty(i) for i in s))
        region = make_region(graph, [n.name for n in graph.ops()])
        plan = plan_tile(region)
        base = default_schedule(plan, device_named("h200"))
        width = 1 << (plan.column_count - 1).bit_length()
        schedules = [base]
        if plan.passes:
            schedules += [
                base.but(form="loop", block_p=4, block_r=32),
                base.but(form="split", block_p=4, block_r=16, splits=3),
                base.but(form="resident", block_p=2, block_r=width),
            ]
        if plan.passes and plan.full and plan.column_count >= 128:  # so many steps that the outputs get a program each
            schedules.append(base.but(form="split", block_p=8, block_r=8, splits=2))
        if plan.passes == 1 and plan.full:
            schedules.append(base.but(form="wave", block_p=2, block_r=32, lag=3))
            if edges_of(plan):
                schedules.append(base.but(form="wave", block_p=1, block_r=32, lag=3))
                schedules += [base.but(form="cooperative", block_p=1, block_r=width, stages=n) for n in (1, 2)]
            # the interpreter runs programs one after the other: a group of one
            schedules += [base.but(form="cooperative", block_p=2, block_r=width, stages=n) for n in (1, 2)]
        expected = function(*(x.double() for x in inputs))
        expected = expected if isinstance(expected, tuple) else (expected,)
        combined = [s for s in schedules if s.form == "split" and plan.passes]  # by a program a row, in kernels between
        for schedule, wide in [*((s, split.WIDE) for s in schedules), *((s, 1) for s in combined)]:
            row: dict[str, Any] = {"case": name, "schedule": f"{schedule}, {wide} partial results at a time"}
            try:
                monkeypatch.setattr(split, "WIDE", wide)
                made = print_tile(plan, schedule, f"k_{name}")
                found = getattr(load_source(header + made.source, name), made.entry)(*inputs)
                row["error"] = max(
                    float((a.double() - b.double()).abs().max() / (b.double().abs().max() + 1e-30))
                    for a, b in zip(found, expected, strict=True)
                )
                row["layout"] = all(
                    a.shape == b.shape and a.stride() == b.stride() for a, b in zip(found, expected, strict=True)
                )
            except Exception:  # noqa: BLE001  a row must come back whatever a kernel does
                row["raised"] = traceback.format_exc()[-1500:]
            yield row


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once("tile", lambda: rows_of(__file__))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_form_is_right(rows: list[dict[str, Any]], case: str) -> None:
    mine = [r for r in rows if r["case"] == case]
    assert mine
    for row in mine:
        assert "raised" not in row, f"{row['schedule']}: {row['raised']}"
        assert row["error"] < LIMIT, row
        assert row["layout"], row


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for result in _rows():
        print(json.dumps(result), flush=True)
