"""The scan family: what it covers, what it refuses, its schedules, the kernels that it prints, and their results.

Results are those of Triton's interpreter, which must be chosen before triton is imported: the cases run in one process
of their own (this file as a script), which prints a JSON row a case. `tests/suite/scans.py` has more.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng.actions import Context, check_action, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.scan.defaults import default_schedule
from qimeng.coder.template.families.scan.family import Scans
from qimeng.coder.template.families.scan.plan import ScanPlan, cut_nest, plan_scan
from qimeng.coder.template.families.scan.printer import print_scan
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.nest.ir import Source
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.nest.scans import PARTS, Scan, neutral
from qimeng.coder.template.rules.builder import Builder
from qimeng.device import device_named
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported, covering, word_of
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program, load_source
from qimeng.spec.origin import FunctionModule
from tests.interpreted import rows_of

H200 = device_named("h200")
Shape = tuple[int, ...]


def program(function: Callable[..., Any], *shapes: Shape) -> Program:
    return Program.start(capture(lambda: FunctionModule(function), lambda: tuple(torch.empty(s) for s in shapes)))


def whole(function: Callable[..., Any], *shapes: Shape) -> Region:
    graph = program(function, *shapes).graph
    return make_region(graph, [n.name for n in graph.ops()])


def reverse(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)


def exclusive(x: Tensor) -> Tensor:
    return functional.pad(x.cumsum(1)[:, :-1], (1, 0))


# -- the nest


def test_a_scan_keeps_its_axis_and_needs_no_pass_of_its_own() -> None:
    plan = plan_scan(whole(lambda x: (x * 2).cumsum(1) / x.sum(1, keepdim=True), (5, 70)))
    (scan,), nest = plan.scans, plan.nest
    assert scan.param == Scan("sum") and scan.level == 0
    assert nest.ordered == frozenset(scan.reduced) == nest.reduced
    assert nest.ordered <= scan.depends and nest.outputs[0][0].level == 1  # the sum's pass comes first
    assert (plan.row_count, plan.column_count, plan.passes) == (5, 70, 1)


@pytest.mark.parametrize(
    ("function", "backwards", "positions"),
    [
        (reverse, True, 0),
        (exclusive, False, 1),
        (lambda x: x.flip(1).cumsum(1), False, 1),
        (lambda x: x.cumsum(1).flip(1), True, 1),
        (lambda x: functional.pad(reverse(x)[:, 1:], (0, 1)), True, 1),
        (lambda x: x.cumsum(1)[:, :9], False, 0),
    ],
    ids=["reverse", "exclusive", "of a flip", "flipped", "exclusive and reverse", "beginning"],
)
def test_a_scan_that_is_read_elsewhere_is_a_scan_of_what_is_read_there(
    function: Callable[..., Any], backwards: bool, positions: int
) -> None:
    plan = plan_scan(whole(function, (3, 20)))
    (scan,) = plan.scans
    assert scan.param == Scan("sum", backwards)
    loads = [e for e in plan.nest.exprs if e.op == "load"]
    assert len(loads) == 1 and len(loads[0].access.steps if loads[0].access else ()) == positions


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x: x.cumsum(0).cumsum(1), [(5, 7)], "scans along different axes in one region"),
        (lambda x: x.cumsum(0) / x.sum(1, keepdim=True), [(5, 7)], "a scan and a reduction along different axes"),
        (lambda x: x.cumsum(1)[:, 2:] * 2, [(5, 7)], "a part of a scan without its beginning"),
        (lambda x: x.cumsum(1)[:, ::2] * 2, [(5, 7)], "other positions than one after the other"),
        (lambda x: x.cumsum(0) * torch.ones_like(x).T, [(5, 5)], ""),
        (lambda x, y: x.cumsum(0) + y, [(7,), (9, 7)], "would be computed 9 times over"),
        (lambda x, y: (x @ y).cumsum(1), [(32, 32), (32, 32)], "a scan beside a matrix product"),
        (
            lambda x: x.cumsum(1) + reverse(x),
            [(2, 40000)],
            "scans in both directions need the whole row at once, and a row of 40000 elements does not stay in "
            "registers, which hold 32768",
        ),
    ],
)
def test_what_is_refused_and_why(function: Callable[..., Any], shapes: list[Shape], reason: str) -> None:
    region = whole(function, *shapes)
    if not reason:
        assert covering(region)[0].name == "scan"
        return
    with pytest.raises(Unsupported, match=reason):
        covering(region)


@pytest.mark.parametrize("kind", PARTS)
def test_neutral_operands_change_nothing(kind: str) -> None:
    operators: dict[str, Callable[..., tuple[Any, ...]]] = {
        "sum": lambda a, b: (a + b,),
        "prod": lambda a, b: (a * b,),
        "product": lambda a, i, b, j: (a * b, i + j),
        "max": lambda a, b: (max(a, b),),
        "min": lambda a, b: (min(a, b),),
        "argmax": lambda a, i, b, j: (b, j) if b >= a and j >= 0 else (a, i),
        "argmin": lambda a, i, b, j: (b, j) if b <= a and j >= 0 else (a, i),
        "sumexp": lambda a, s, b, t: (max(a, b), s * (a >= b) + t * (b >= a)),
        "linear": lambda a, x, b, y: (a * b, b * x + y),
    }
    for dtype, value in (("float32", 1.5), ("float32", float("inf")), ("float32", float("-inf")), ("int64", 7)):
        if kind == "linear" and value in (float("inf"), float("-inf")):
            continue
        item = tuple({"at": 3, "sum": 1}.get(part, value) for part in PARTS[kind])
        none = tuple(neutral(kind, part, "int64" if part == "at" else dtype) for part in PARTS[kind])
        assert operators[kind](*item, *none) == item == operators[kind](*none, *item)


# -- schedules


@pytest.mark.parametrize(
    ("shape", "dim", "form"),
    [
        ((4096, 1000), 1, "resident"),
        ((4096, 32768), 1, "loop"),
        ((4, 1 << 20), 1, "split"),
        ((64, 12, 4096), 1, "resident"),
        ((64, 2048, 1024), 1, "loop"),
        ((1, 65536, 64), 1, "split"),
    ],
)
def test_default_forms(shape: Shape, dim: int, form: str) -> None:
    plan = plan_scan(whole(lambda x: x.cumsum(dim), shape))
    schedule = default_schedule(plan, H200)
    assert schedule.form == form
    assert plan.contiguous == ("r" if dim == len(shape) - 1 else "p")
    found = [schedule, *Scans().guesses(plan, schedule, H200, "default")]
    assert all(Scans().needs(plan, s).refusal(H200) is None and not s.fault() for s in found)
    assert form == "resident" or {"loop", form} <= {s.form for s in found}


def test_moves_that_a_region_has_no_form_for_say_so() -> None:
    def refused(function: Callable[..., Any], shape: Shape, action: str) -> str:
        start, coder = program(function, shape), TemplateCoder()
        region = make_region(start.graph, [n.name for n in start.graph.ops()])
        start = Program(start.graph, (region,))
        patch = coder.write(Request(start, Action("lowering", (region.id,)), H200))
        with pytest.raises(IllegalAction) as error:
            check_action(patch.apply(start), Action("split", (region.id,), action), Context(H200, coder))
        return str(error.value)

    assert "no form 'resident' for 40000 elements" in refused(lambda x: x.cumsum(1), (4, 40000), "resident")
    four = lambda x: (x.cummax(1), x.cummin(1))  # noqa: E731
    assert "for 20000 elements: a row of 20000 elements does not stay in registers, which hold 16384" in refused(
        four, (4, 20000), "resident"
    )
    both = lambda x: x.cumsum(1) + reverse(x)  # noqa: E731
    assert "scans in both directions need the whole row at once" in refused(both, (4, 100), "loop")
    normalized = lambda x: x.cumsum(1) / x.sum(1, keepdim=True)  # noqa: E731
    assert "1 passes of reductions come before the scan" in refused(normalized, (4, 9000), "split")


def test_every_tuning_that_is_offered_is_printed() -> None:
    start, coder = program(lambda x: x.cumsum(1), (64, 9000)), TemplateCoder()
    (region,) = start.regions
    assert word_of(region) == "scan"
    lowered = coder.write(Request(start, Action("lowering", (region.id,)), H200)).apply(start)
    kinds = {"tiling", "pipeline", "split", "vectorization"}
    offered = [a for a in legal_actions(lowered, Context(H200, coder)) if a.kind in kinds]
    assert {a.kind for a in offered} == kinds
    for action in offered:
        assert len(coder.write(Request(lowered, action, H200)).alternatives) > 1, action


def test_reverse_scans_walk_the_axis_from_its_end_or_turn_each_tile() -> None:
    plan = plan_scan(whole(reverse, (64, 9000)))
    schedule = default_schedule(plan, H200)
    assert schedule.backwards and schedule.but(backwards=False) in Scans().guesses(plan, schedule, H200, "default")
    more = Scans().moves["vectorization"].schedules(plan, schedule, "more", H200)
    assert any(not s.backwards for s in more)
    with pytest.raises(Unsupported, match="not all scans begin at the end"):
        print_scan(plan_scan(whole(exclusive, (64, 9000))), schedule, "k")


def test_tiles_loaded_ahead_have_to_fit_shared_memory() -> None:
    plan = plan_scan(whole(lambda x: x.cumsum(1), (64, 90_000)))
    large = ScanSchedule(form="loop", block_r=32768, warps=16)
    assert Scans().needs(plan, large).refusal(H200) is None
    refused = Scans().needs(plan, large.but(stages=3)).refusal(H200)
    assert refused == "needs 262272 B of shared memory, h200 allows 232448 B a block"


# -- kernels


GOLDEN = {
    "rows": (lambda x: x.cumsum(1), (64, 1000), ScanSchedule(block_p=2, block_r=1024)),
    "reverse": (reverse, (64, 9000), ScanSchedule(form="loop", block_r=2048)),
    "backwards": (reverse, (64, 9000), ScanSchedule(form="loop", block_r=2048, backwards=True)),
    "columns": (lambda x: x.cumsum(1), (4, 1000, 96), ScanSchedule(form="loop", block_p=64, block_r=32)),
    "shares": (exclusive, (4, 100_000), ScanSchedule(form="split", block_r=2048, splits=16)),
    "extremes": (lambda x: x.cummax(1), (4, 100_000), ScanSchedule(form="split", block_r=2048, splits=16)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_kernels(name: str, golden: Callable[[str, str], None]) -> None:
    function, shape, schedule = GOLDEN[name]
    golden(f"scan_{name}.py.txt", print_scan(plan_scan(whole(function, shape)), schedule, "k").source)


def mixed(x: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x, 1).cumsum(1), x.cumsum(1) / (x.abs().sum(1, keepdim=True) + 1)


def with_a_row(x: Tensor) -> tuple[Tensor, Tensor]:
    first = x[:, :1] * 2
    return first, x.cumsum(1) + first


def out_and_back(x: Tensor) -> Tensor:
    """Products that fp32 does not hold in the middle of a row."""
    each = x.abs().clamp(0.5, 2.0)
    return torch.where(torch.arange(43, device=x.device) < 21, each * 2.0**-30, each * 2.0**30).cumprod(1)


def lost_before_infinity(x: Tensor) -> Tensor:
    """Products that are 0 in fp32 and in float64 before a number is infinite; in one row too few factors for that."""
    at = torch.arange(43, device=x.device)
    row = torch.arange(3, device=x.device)[:, None]
    each = x.abs().clamp(0.5, 2.0) * 2.0**-60
    return torch.where((at == 33) | (at == 1) & (row == 1), float("-inf"), each).cumprod(1)


CASES: dict[str, tuple[Callable[..., Any], Shape]] = {
    "with a row": (with_a_row, (3, 43)),
    "sum": (lambda x: (x * 2).cumsum(1) + 1, (3, 43)),
    "columns": (lambda x: x.cumsum(1), (2, 43, 3)),
    "outer": (lambda x: x.cumsum(0), (43, 1, 3)),
    "product": (lambda x: (1 + x / 9).cumprod(1), (3, 43)),
    "product out of range and back": (out_and_back, (3, 43)),
    "product lost before infinity": (lost_before_infinity, (3, 43)),
    "maximum": (lambda x: x.round().cummax(1), (3, 43)),
    "minimum": (lambda x: x.round().flip(1).cummin(1), (3, 43)),
    "logcumsumexp": (lambda x: (x * 40).logcumsumexp(1), (3, 43)),
    "reverse": (reverse, (3, 43)),
    "exclusive": (exclusive, (3, 43)),
    "exclusive and reverse": (lambda x: functional.pad(reverse(x)[:, 1:], (0, 1)), (3, 43)),
    "normalized": (mixed, (3, 43)),
    "twice": (lambda x: x.cumsum(1).cumsum(1), (3, 43)),
    "both ways": (lambda x: x.cumsum(1) + reverse(x), (3, 43)),
    "total": (lambda x: (x.cumsum(1).amax(1), x.cumsum(1)), (3, 43)),
    "cut": (lambda x: x.permute(1, 0, 2).reshape(3, 38).cumsum(1).reshape(3, 2, 19) * 2, (2, 3, 19)),
}


def schedules(plan: ScanPlan) -> list[ScanSchedule]:
    """Every form that the plan has, at sizes that cut rows and columns unevenly."""
    width = 1 << (plan.column_count - 1).bit_length()
    found = {
        "resident": [ScanSchedule(block_p=2, block_r=width), ScanSchedule(block_p=1, block_r=width)],
        "loop": [ScanSchedule(form="loop", block_p=p, block_r=16) for p in (1, 2)],
        "split": [ScanSchedule(form="split", block_p=p, block_r=16, splits=2) for p in (1, 2)],
    }
    ways = (False, True) if plan.turns else (False,)
    return [s.but(backwards=way) for form in plan.forms for s in found[form] for way in ways]


def some(found: list[ScanSchedule], number: int) -> list[ScanSchedule]:
    """Half of them: each form, with one of its sizes and directions by turns."""
    return [schedule for i, schedule in enumerate(found) if (i + i // 2 + number) % 2 == 0]


def recurrence() -> tuple[ScanPlan, Callable[..., Tensor]]:
    """h[t] = a[t] h[t - 1] + b[t], a scan of pairs that no single operator of PyTorch is."""
    region = whole(lambda a, b: (a * b).cumsum(1), (3, 43), (3, 43))
    b = Builder()
    b.nest.sources = [Source(i, (43, 1), (3, 43), "float32") for i in range(2)]
    pair = b.scan(Scan("linear"), [b.load(s) for s in b.nest.sources], 1, "float32")
    b.nest.outputs = [(b.part(pair, "state"), (3, 43), (43, 1), "float32")]
    b.nest.finish()
    loads = Loads(dict(zip(region.inputs, b.nest.sources, strict=True)), {0: "x0", 1: "x1"}, ())

    def expected(a: Tensor, b: Tensor) -> Tensor:
        states = [b[:, 0]]
        for t in range(1, 43):
            states.append(a[:, t] * states[-1] + b[:, t])
        return torch.stack(states, 1)

    return cut_nest(region, b.nest, loads), expected


def _rows(device: str) -> Iterator[dict[str, Any]]:
    planned = {name: (plan_scan(whole(f, shape)), f, [shape]) for name, (f, shape) in CASES.items()}
    planned["recurrence"] = (*recurrence(), [(3, 43)] * 2)
    for number, (name, (plan, function, shapes)) in enumerate(planned.items()):
        torch.manual_seed(0)
        inputs = [torch.randn(s).to(device) for s in shapes]
        wanted = function(*(x.double() for x in inputs))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for schedule in some(schedules(plan), number) if device == "cpu" else schedules(plan):
            row: dict[str, Any] = {"case": name, "schedule": str(schedule), "form": schedule.form}
            try:
                yield row | _run(plan, schedule, inputs, wanted)
            except Exception:  # noqa: BLE001 - a row must come back whatever a kernel does
                yield row | {"raised": traceback.format_exc()[-1500:]}


def _run(plan: ScanPlan, schedule: ScanSchedule, inputs: list[Tensor], wanted: tuple[Tensor, ...]) -> dict[str, Any]:
    made = print_scan(plan, schedule, "k")
    header = "import torch\nimport triton\nimport triton.language as tl\n"
    found = getattr(load_source(header + made.source, "scan"), made.entry)(*inputs)
    pairs = list(zip(found, wanted, strict=True))
    return {
        "error": max(_error(a.double(), b.double()) for a, b in pairs),
        "layout": all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs),
    }


def _error(found: Tensor, wanted: Tensor) -> float:
    """The largest over the largest finite number; what is infinite or no number has to be the same."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    off = torch.where(same, 0.0, (found - wanted).abs()).nan_to_num(float("inf"))
    return float(off.max() / wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())


@pytest.mark.slow
def test_every_form_compiles_for_a_device(tmp_path: Path) -> None:
    """Each case under every third schedule, each schedule with every third case."""
    programs: dict[str, Program] = {}
    for number, (name, (function, shape)) in enumerate(CASES.items()):
        region = whole(function, shape)
        for schedule in schedules(plan_scan(region))[number % 3 :: 3]:
            printed = print_scan(plan_scan(region), schedule, f"k{len(programs)}")
            programs[f"{name} {schedule}"] = Program(region.graph, (region,)).with_implementation(region.id, printed)
    found = Compilers(shared_server(), H200, str(tmp_path)).programs(list(programs.values()))
    failed = {name: c.error for name, t in zip(programs, found, strict=True) for c in t.values() if c.failure}
    assert len(programs) > 26 and all(found) and not failed, failed


@pytest.mark.gpu
def test_every_form_is_right_on_a_gpu() -> None:
    found = [row for row in _rows("cuda") if "raised" in row or row["error"] > 4e-6 or not row["layout"]]
    assert not found, found


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return list(once("scan", lambda: rows_of(__file__, timeout=300)))


@pytest.mark.parametrize("case", [*CASES, "recurrence"])
def test_every_form_is_right(rows: list[dict[str, Any]], case: str) -> None:
    mine = [r for r in rows if r["case"] == case]
    alone = {"normalized": {"resident", "loop"}, "twice": {"resident", "loop"}}
    alone |= {"both ways": {"resident"}, "total": {"resident"}}
    assert {r["form"] for r in mine} == alone.get(case, {"resident", "loop", "split"})
    for row in mine:
        assert "raised" not in row, f"{row['schedule']}: {row['raised']}"
        assert row["error"] < 4e-6 and row["layout"], row


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for result in _rows("cpu"):
        print(json.dumps(result), flush=True)
