"""Every operator that the templates claim, printed as a kernel, against PyTorch at special values of every dtype.

A result agrees where it is PyTorch's (on this device or on the CPU, whose kernels differ: by a plain number a GPU
divides as by a product with its rounded inverse) or float64's: the same NaN, the same infinities, zeros of the same
sign, the same integers, finite numbers within a few ulp. Deals in cases and rows; the rules are walked, so that a rule
without a case shows. Kernels run in Triton's interpreter on the CPU, compiled on a GPU. Knows nothing about files of
rows.
"""

from __future__ import annotations

import contextlib
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from experiments.trust.journal import Data
from experiments.trust.operator_cases import Case, cases
from experiments.trust.special_values import DTYPES, operands
from qimeng.backend.registry import implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.rules.table import RULES
from qimeng.device import Device, device_named
from qimeng.family import Unsupported, covering
from qimeng.graph.capture import CaptureError, capture
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import Region
from qimeng.program.program import load_source
from qimeng.program.schedule import Schedule

SHOWN = 3
"""Mismatches of a case that its row shows."""

HALF_ULPS = 2.0


class _All(torch.nn.Module):
    """The results of several cases, from tensors by letter."""

    def __init__(self, chosen: Sequence[Case], letters: Sequence[str]):
        super().__init__()
        self.chosen, self.letters = chosen, letters

    def forward(self, *tensors: Tensor) -> list[Any]:
        given = dict(zip(self.letters, tensors, strict=True))
        return [leaf for case in self.chosen for leaf in _leaves(case.call(*(given[t] for t in case.takes)))]


def _leaves(results: Any) -> list[Any]:
    return list(_pytree.tree_leaves(tuple(results) if isinstance(results, tuple) else results))


def rows(
    dtypes: Sequence[str] = DTYPES, only: str = "", device: str = "cpu", forms: bool = True, share: float = 1.0
) -> Iterator[Data]:
    """A row for each case and dtype that PyTorch computes.

    Args:
        dtypes: those to try.
        only: a word in the names of the cases wanted.
        device: ``"cpu"``, for which this process must run Triton's interpreter, or ``"cuda"``.
        forms: also try the other forms of reductions and the fast forms of special functions; without them, several
            pointwise cases share a kernel.
        share: of the cases that are tried, the same ones every time, others in each dtype.
    """
    every = [case for case in cases() if only in case.name]
    for dtype in dtypes:
        wanted = random.Random(dtype).sample(every, round(share * len(every))) if share < 1 else every
        tensors = operands(dtype, device)
        expected = {case: made for case in wanted if (made := _eager(case, tensors)) is not None}
        at_home = operands(dtype) if device != "cpu" else None
        captured = list(_captured({case: len(leaves) for case, leaves in expected.items()}, tensors))
        ready = {} if forms else _together(captured, tensors)
        for found in captured:
            case = found.case
            row = {"case": case.name, "operator": case.operator, "dtype": dtype, "device": device}
            try:
                several = [expected[case]]
                if at_home is not None and (more := _eager(case, at_home)) is not None:
                    several.append([x.to(device) if isinstance(x, Tensor) else x for x in more])
                row |= _judge(found, tensors, several, forms, ready.get(case))
            except Unsupported as reason:
                row |= {"left": str(reason)}
            except Exception:  # noqa: BLE001 - whatever a kernel does, the row must come back
                row |= {"raised": traceback.format_exc()[-1500:]}
            yield row


def _eager(case: Case, tensors: dict[str, Tensor]) -> list[Any] | None:
    """PyTorch's results, on the device of the tensors; None where it computes none of this dtype."""
    computed = contextlib.suppress(RuntimeError, TypeError, NotImplementedError, IndexError, ValueError)
    with computed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance without degrees of freedom warns
        return _leaves(case.call(*(tensors[t].clone() for t in case.takes)))
    return None


def unreached(found: Sequence[Data]) -> list[str]:
    """Operators that have a rule but that none of these rows computed."""
    seen = {op for row in found for op in row.get("operators", ())}
    return sorted(op for op in (rule.removeprefix("aten.") for rule in RULES) if op not in seen)


@dataclass(frozen=True)
class Captured:
    """A case in a graph: its outputs there, and the letter of each of the graph's inputs."""

    case: Case
    graph: OpGraph
    outputs: list[Value]
    letters: list[str]


def _captured(counts: dict[Case, int], tensors: dict[str, Tensor]) -> Iterator[Captured]:
    """Each case, of so many outputs, with a graph: one graph for all, halved where that cannot be captured."""
    chosen = list(counts)
    if not chosen:
        return
    letters = sorted({t for case in chosen for t in case.takes})
    shapes = [(tuple(tensors[t].shape), tensors[t].dtype) for t in letters]
    device = tensors["x"].device
    try:
        graph = capture(
            lambda: _All(chosen, letters), lambda: tuple(torch.empty(s, dtype=d, device=device) for s, d in shapes)
        )
    except (CaptureError, AssertionError):
        if len(chosen) > 1:
            yield from _captured({case: counts[case] for case in chosen[: len(chosen) // 2]}, tensors)
            yield from _captured({case: counts[case] for case in chosen[len(chosen) // 2 :]}, tensors)
        return
    outputs = iter(graph.outputs)
    for case, count in counts.items():
        found = [next(outputs) for _ in range(count)]
        yield Captured(case, graph, [v for v in found if isinstance(v, Value)], letters)


def _region(graph: OpGraph, outputs: list[Value]) -> Region:
    """All that the outputs need, as one region."""
    needed: set[str] = set()
    stack = [v.node for v in outputs]
    while stack:
        node = graph.nodes[stack.pop()]
        if node.kind == "op" and node.name not in needed:
            needed.add(node.name)
            stack.extend(v.node for v in node.operands())
    return Region(graph, tuple(n for n in graph.nodes if n in needed), tuple(dict.fromkeys(outputs)))


Run = tuple[Schedule, dict[Value, Tensor]]
"""A schedule, and the values that kernels under it gave."""

TOGETHER = 16
"""Pointwise cases that share a kernel."""


def _together(captured: list[Captured], tensors: dict[str, Tensor]) -> dict[Case, list[Run]]:
    """The results of pointwise cases, several by one kernel; those of a kernel that fails are left out."""
    kinds: dict[tuple[int, bool], list[Captured]] = {}
    for found in captured:
        with contextlib.suppress(Unsupported):
            plan = covering(_region(found.graph, found.outputs))[1]
            if isinstance(plan, TilePlan) and not plan.passes and _elements(plan) == tensors["x"].numel():
                kinds.setdefault((id(found.graph), bool(plan.special)), []).append(found)
    ready: dict[Case, list[Run]] = {}
    for group in kinds.values():
        for k in range(0, len(group), TOGETHER):
            part = group[k : k + TOGETHER]
            region = _region(part[0].graph, [v for found in part for v in found.outputs])
            try:
                if _elements(covering(region)[1]) != tensors["x"].numel():
                    continue  # constants with axes of their own
                schedule = _schedules(region, False)[0]
                results = _run(region, schedule, _arguments(part[0], region, tensors))
            except Exception:  # noqa: BLE001 - each of them is tried alone, which says what is wrong
                continue
            ready |= {found.case: [(schedule, results)] for found in part}
    return ready


def _elements(plan: TilePlan) -> int:
    return plan.row_count * plan.column_count


def _arguments(found: Captured, region: Region, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[found.letters[int(found.graph.nodes[v.node].target)]] for v in region.inputs]


def _judge(
    found: Captured, tensors: dict[str, Tensor], several: list[list[Any]], forms: bool, ready: list[Run] | None
) -> Data:
    """What came of one case, under each schedule; `several` are what PyTorch may give, this device's first."""
    case, graph = found.case, found.graph
    region = _region(graph, found.outputs)
    packets = {node.packet.removeprefix("aten.") for node in region.ops}
    if not case.composed and case.operator not in packets:
        return {"left": f"captured as {', '.join(sorted(packets))}"}
    if ready is None:
        arguments = _arguments(found, region, tensors)
        ready = [(s, _run(region, s, arguments)) for s in _schedules(region, forms)]
    exact = _in_double(case, tensors)
    given = [tensors[t] for t in case.takes]
    row: Data = {"operators": sorted(packets), "schedules": len(ready), "values": 0, "mismatches": 0, "shown": []}
    for schedule, results in ready:
        scale, ulps = case.scale(*(t.double() for t in given)) if case.scale else None, case.ulps
        fast = bool(getattr(schedule, "fast", False))
        if fast:
            scale, ulps = case.size_when_fast(*given), 4 * case.ulps
        for port, value in enumerate(found.outputs):
            y = results[value]
            bad = torch.ones((), dtype=torch.bool, device=y.device)
            for eager in several:
                reference = exact[port] if exact else None
                bad = bad & disagrees(y, eager[port], reference, ulps, scale, case.zeros, fast)
            row["values"] += y.numel()
            row["mismatches"] += int(bad.sum())
            row["shown"] += [f"{schedule}: {text}" for text in _shown(bad, y, several[0][port], given)]
    row["shown"] = row["shown"][:SHOWN]
    return row


def _run(region: Region, schedule: Schedule, arguments: list[Tensor]) -> dict[Value, Tensor]:
    """The region's outputs by the kernels that the coder prints."""
    made = TemplateCoder().print(region, schedule)
    loaded = load_source(implementation_source(made), "differential")
    copies = [t.clone() for t in arguments]
    buffers = getattr(loaded, made.prepare)(*[copies[i] for i in made.prepare_inputs]) if made.prepare else ()
    return dict(zip(region.outputs, getattr(loaded, made.entry)(*copies, *buffers), strict=True))


def _in_double(case: Case, tensors: dict[str, Tensor]) -> list[Any] | None:
    """The results in float64, not rounded; None where nothing floating goes in or it does not run."""
    given = [tensors[t] for t in case.takes]
    if not any(t.is_floating_point() for t in given):
        return None
    return _eager(case, {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()})


def _schedules(region: Region, forms: bool) -> list[Schedule]:
    device: Device = device_named("h200")
    family, plan = covering(region)
    base = family.default(plan, device, "default")
    if not forms:
        return [base]
    several: list[Schedule] = [base]
    if not isinstance(base, TileSchedule):
        return several
    if plan.passes:
        several += [
            base.but(form="loop", block_p=4, block_r=16),
            base.but(form="split", block_p=4, block_r=8, splits=3),
        ]
    if plan.special and not base.fast:
        several.append(base.but(fast=True))
    return several


def disagrees(
    y: Tensor,
    eager: Tensor,
    exact: Tensor | None,
    ulps: float,
    scale: Tensor | None = None,
    zeros: bool = True,
    fast: bool = False,
) -> Tensor:
    """Where `y` is neither PyTorch's result nor float64's, elementwise.

    Args:
        y: the result.
        eager: PyTorch's, of the same shape and dtype, or all disagrees.
        exact: float64's, not rounded.
        ulps: how far finite numbers may be apart; of half types at most `HALF_ULPS`, as they are computed in fp32.
        scale: what those ulp are of, where that is larger than the result.
        zeros: whether zeros must have the same sign.
        fast: what is below the smallest normal fp32 number may be 0, as the approximate units make it.
    """
    if y.shape != eager.shape or y.dtype != eager.dtype:
        return torch.ones(y.shape, dtype=torch.bool, device=y.device)
    good = _same(y, eager, zeros)
    if y.is_floating_point():
        good |= _near(y, eager.double(), ulps, scale)
    if exact is not None and exact.is_floating_point() == y.is_floating_point():
        good |= _same(y, exact.to(y.dtype), zeros)
        if y.is_floating_point():
            good |= _near(y, exact.double(), ulps, scale)
    if fast and y.is_floating_point():
        tiny = torch.finfo(torch.float32).tiny
        good |= (y.double().abs() < tiny) & (eager.double().abs() < tiny)
    return ~good


def _same(y: Tensor, r: Tensor, zeros: bool) -> Tensor:
    """Whether they are equal, NaN equal to NaN and, if `zeros`, a zero only to one of its sign."""
    if not y.is_floating_point():
        return y == r
    signs = (torch.signbit(y) == torch.signbit(r)) if zeros else torch.ones_like(y, dtype=torch.bool)
    return ((y == r) & signs) | (torch.isnan(y) & torch.isnan(r))


def _near(y: Tensor, r: Tensor, ulps: float, scale: Tensor | None) -> Tensor:
    """Whether both are finite, or one overflows by a rounding, and a few ulp apart; not across zero without a scale."""
    facts = torch.finfo(y.dtype)
    size = r.abs().clamp(min=facts.smallest_normal)
    signs = torch.signbit(y) == torch.signbit(r)
    if scale is not None:
        size, signs = torch.maximum(size, scale.nan_to_num(0.0, 0.0).expand(r.shape)), (y != 0) | (r != 0)
    a = y.double().clamp(-facts.max, facts.max)  # an infinite y may be a finite r that overflows when rounded
    b = r.clamp(-facts.max, facts.max)
    limit = (min(ulps, HALF_ULPS) if facts.bits == 16 and scale is None else ulps) * facts.eps
    return torch.isfinite(r) & signs & ((a - b).abs() <= limit * size)


def _shown(bad: Tensor, y: Tensor, eager: Tensor, given: Sequence[Tensor]) -> Iterator[str]:
    """The first mismatches in words."""
    if y.shape != eager.shape or y.dtype != eager.dtype:
        yield f"{tuple(y.shape)} {y.dtype}, not {tuple(eager.shape)} {eager.dtype}"
        return
    for at in bad.nonzero()[:SHOWN].tolist():
        place = tuple(at)
        beside = [f"{t[place].item()}" for t in given if t.shape == y.shape]
        yield f"at {at}{' of ' + ', '.join(beside) if beside else ''}: {y[place].item()}, not {eager[place].item()}"


__all__ = ["disagrees", "rows", "unreached"]
