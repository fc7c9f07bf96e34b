"""Layers of graph networks, bags, segments, experts and sorts on a GPU, beside PyTorch, torch.compile and libraries.

    python -m experiments.irregular rows.jsonl --seconds 400 --only "gnn rmat"
    TRITON_INTERPRET=1 python -m experiments.irregular rows.jsonl --tiny

A row of JSON for each case, written as soon as it is known: in turns, with a cold L2, milliseconds of each
configuration that the actions `aggregate`, `dispatch`, `route` and `lowering` begin with and of each form of
`irregular`, of PyTorch in eager mode, of torch.compile, and of what a library offers for the same: torch.sparse for
weighted sums over a graph, PyTorch's grouped products (torch._grouped_mm) and a loop over the experts in use. Where a
call does not go into a CUDA graph, it is timed without one and named so. Each result's distance from float64 is written
down. ``--tiny`` tries the script on the CPU at small sizes, with Triton's interpreter; its times mean nothing. Deals in
running and writing down.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from experiments.case_rows import Place, write_rows
from experiments.graphs import GRAPHS
from experiments.sparse import Calls, in_turns
from qimeng import KernelSpec
from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES, concerned
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec

FAMILIES = ("irregular", "grouped", "routed", "sort")
"""Families that this is about."""

SHOWN = ("failed", "best_ms", "best_schedule", "over", "over_best_library", "not_timed")
"""Of a row, what is printed as well."""


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        group: ``"gnn"``, ``"bag"``, ``"segment"``, ``"moe"`` or ``"sort"``.
        kind: of graph, of bag, of reduction, how experts are written, or what is put in order.
        sizes: by name.
        held: whether the edges are a buffer, so that their order is found once.
        dtype: of floating tensors.
    """

    group: str
    kind: str
    sizes: dict[str, int] = field(hash=False)
    held: bool = True
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Group, kind, sizes."""
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        given = " given" if self.group == "gnn" and not self.held else ""
        return f"{self.group} {self.kind}{given} {sizes}"


class Layer(nn.Module):
    """A layer of a graph network: a linear map, messages weighted by edge, and their reduction at each node."""

    def __init__(self, reduce: str, width: int, edges: Tensor | None):
        super().__init__()
        self.reduce = reduce
        self.linear = nn.Linear(width, width)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, weights: Tensor, edges: Tensor | None = None) -> Tensor:
        """[nodes, width] to [nodes, width]."""
        pairs: Tensor = self.get_buffer("edges") if edges is None else edges
        source, target = pairs
        h = self.linear(x)
        messages = h.index_select(0, source) * weights.unsqueeze(-1)
        if self.reduce == "sum":
            return torch.zeros_like(h).index_add_(0, target, messages)
        spread = target.unsqueeze(-1).expand_as(messages)
        return torch.zeros_like(h).scatter_reduce_(0, spread, messages, self.reduce, include_self=False)


class Segmented(nn.Module):
    """Neighbouring rows, gated, and reduced by segments of known lengths."""

    def __init__(self, reduce: str):
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor, gate: Tensor, lengths: Tensor) -> Tensor:
        """[rows, width] to [segments, width]."""
        return torch.segment_reduce(x * torch.sigmoid(gate), self.reduce, lengths=lengths, axis=0)


class Experts(nn.Module):
    """A layer of experts: the best two of each row are chosen, and their results weighted."""

    def __init__(self, form: str, experts: int, width: int, inner: int):
        super().__init__()
        self.form = form
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)
        if form == "biased":
            self.up_bias, self.down_bias = (nn.Parameter(torch.randn(experts, n)) for n in (inner, width))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the two best experts of each row."""
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        return (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1), chosen

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [rows, width]."""
        weights, chosen = self.choose(x)
        if self.form in ("all", "biased"):  # all experts for all rows, most weighed by zero
            shares = x.new_zeros(len(x), len(self.up)).scatter(1, chosen, weights.squeeze(-1))
            inner = torch.matmul(x, self.up.transpose(1, 2))
            if self.form == "biased":
                found = torch.matmul(functional.silu(inner + self.up_bias[:, None]), self.down.transpose(1, 2))
                return ((found + self.down_bias[:, None]) * shares.t().unsqueeze(-1)).sum(0)
            return (torch.matmul(functional.silu(inner), self.down.transpose(1, 2)) * shares.t().unsqueeze(-1)).sum(0)
        if self.form == "einsum":
            inner = functional.silu(torch.einsum("td,tkhd->tkh", x, self.up[chosen]))
            return (torch.einsum("tkh,tkdh->tkd", inner, self.down[chosen]) * weights).sum(1)
        flat = chosen.view(-1)
        inner = torch.bmm(x.repeat_interleave(2, 0).unsqueeze(1), self.up[flat].transpose(1, 2))
        found = torch.bmm(functional.silu(inner), self.down[flat].transpose(1, 2))
        return (found.view(len(x), 2, -1) * weights).sum(1)


class Ordered(nn.Module):
    """Rows in order, or their largest elements, with their places."""

    def __init__(self, kind: str, count: int):
        super().__init__()
        self.kind, self.count = kind, count

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, width] to values and places."""
        if self.kind == "topk":
            values, places = torch.topk(x, self.count)
        else:
            values, places = torch.sort(x, dim=-1, stable=self.kind == "stable", descending=True)
        return values, places


def cases(tiny: bool) -> list[Case]:
    """Every case; those that say most come first in their group."""
    if tiny:
        small = {"nodes": 60, "edges": 300, "width": 16}
        return [
            Case("gnn", "rmat sum", small),
            Case("gnn", "banded mean", small, held=False),
            Case("bag", "sum", {"rows": 100, "bags": 12, "each": 5, "width": 16}),
            Case("segment", "mean", {"segments": 9, "rows": 80, "width": 16}),
            Case("moe", "einsum", {"experts": 4, "rows": 12, "width": 32, "inner": 48}),
            Case("moe", "all", {"experts": 4, "rows": 12, "width": 32, "inner": 48}),
            Case("moe", "biased", {"experts": 4, "rows": 12, "width": 32, "inner": 48}),
            Case("sort", "stable", {"rows": 8, "width": 50}),
        ]
    sizes = [(10_000, 160_000, 128), (100_000, 1_600_000, 64), (20_000, 2_000_000, 128)]
    found = [
        Case("gnn", f"{graph} {reduce}", dict(zip(("nodes", "edges", "width"), size, strict=True)), held)
        for size in sizes
        for graph, reduce in (("rmat", "sum"), ("banded", "mean"), ("powerlaw", "amax"))
        for held in ((True, False) if graph == "rmat" else (True,))
    ]
    found += [
        Case("bag", kind, dict(zip(("rows", "bags", "each", "width"), size, strict=True)), dtype=dtype)
        for kind, dtype, size in (
            ("sum", "float32", (1_000_000, 8192, 32, 64)),
            ("weighted", "float32", (1_000_000, 8192, 32, 64)),
            ("mean", "float16", (100_000, 4096, 100, 128)),
            ("max", "float32", (100_000, 16_384, 10, 128)),
            ("sum", "bfloat16", (1_000_000, 4096, 64, 128)),
            ("mean", "float32", (50_000, 65_536, 4, 32)),
            ("sum", "float32", (200_000, 1024, 256, 96)),
            ("weighted", "float16", (500_000, 16_384, 16, 64)),
            ("max", "bfloat16", (1_000_000, 8192, 20, 256)),
        )
    ]
    found += [
        Case("segment", kind, dict(zip(("segments", "rows", "width"), size, strict=True)))
        for kind, size in (
            ("sum", (4096, 400_000, 128)),
            ("mean", (65_536, 500_000, 64)),
            ("max", (512, 200_000, 256)),
            ("sum", (100, 300_000, 64)),
            ("mean", (20_000, 200_000, 256)),
            ("max", (4096, 400_000, 32)),
        )  # fmt: skip
    ]
    found += [
        Case("moe", form, {"experts": e, "rows": t, "width": 1024, "inner": 2048}, dtype="bfloat16")
        for form, e, t in (
            ("einsum", 8, 64), ("einsum", 16, 128), ("einsum", 64, 128), ("bmm", 32, 256), ("einsum", 8, 8),
            ("all", 8, 1024), ("all", 64, 1024), ("all", 32, 128), ("all", 16, 4096),
            ("biased", 8, 1024), ("biased", 32, 256), ("bmm", 8, 64), ("biased", 16, 4096),
        )
    ]  # fmt: skip
    found += [
        Case("sort", kind, dict(zip(("rows", "width", "count"), size, strict=False)), dtype=dtype)
        for kind, dtype, size in (
            ("sort", "float32", (16_384, 1024)), ("sort", "float32", (131_072, 128)),
            ("stable", "bfloat16", (8192, 4096)),
            ("topk", "float32", (16_384, 1024, 64)), ("topk", "float32", (4096, 4096, 8)),
            ("sort", "float32", (262_144, 64)), ("stable", "float32", (65_536, 256)),
            ("sort", "bfloat16", (65_536, 128)),
            ("sort", "float32", (32_768, 512)), ("topk", "bfloat16", (65_536, 256, 8)),
            ("topk", "float32", (131_072, 64, 6)), ("topk", "bfloat16", (16_384, 2048, 32)),
        )
    ]  # fmt: skip
    return found


def made(case: Case, place: str) -> tuple[nn.Module, tuple[Any, ...], Calls]:
    """The module, its inputs, and what libraries offer for the same."""
    torch.manual_seed(0)
    n, dtype = case.sizes, getattr(torch, case.dtype)
    calls: Calls = {}
    if case.group == "gnn":
        graph, reduce = case.kind.split()
        edges = GRAPHS[graph](n["nodes"], n["edges"]).to(place)
        layer = Layer(reduce, n["width"], edges if case.held else None).to(place, dtype)
        module: nn.Module = layer.requires_grad_(False)
        x = torch.randn(n["nodes"], n["width"], device=place, dtype=dtype)
        inputs: tuple[Any, ...] = (x, torch.rand(n["edges"], device=place, dtype=dtype))
        inputs += () if case.held else (edges,)
        if reduce == "sum":
            calls["torch.sparse"] = summed(layer, edges, inputs)
    elif case.group == "bag":
        numbers = torch.randint(0, n["rows"], (n["bags"] * n["each"],), device=place)
        steps = torch.randint(0, 2 * n["each"], (n["bags"],), device=place).cumsum(0)
        offsets = (steps - steps[0]).clamp(max=len(numbers))
        mode = "sum" if case.kind == "weighted" else case.kind
        module = nn.EmbeddingBag(n["rows"], n["width"], mode=mode, device=place, dtype=dtype).requires_grad_(False)
        weights = (torch.rand(len(numbers), device=place, dtype=dtype),) if case.kind == "weighted" else ()
        inputs = (numbers, offsets, *weights)
    elif case.group == "segment":
        shares = torch.rand(n["segments"], device=place).square()
        lengths = 1 + (shares / shares.sum() * (n["rows"] - n["segments"])).long()
        lengths[0] += n["rows"] - lengths.sum()
        x, gate = (torch.randn(n["rows"], n["width"], device=place, dtype=dtype) for _ in range(2))
        module, inputs = Segmented(case.kind), (x, gate, lengths)
    elif case.group == "sort":
        module = Ordered(case.kind, n.get("count", n["width"]))
        inputs = (torch.randn(n["rows"], n["width"], device=place, dtype=dtype),)
    else:
        experts = Experts(case.kind, n["experts"], n["width"], n["inner"]).to(place, dtype)
        module = experts.requires_grad_(False)
        inputs = (torch.randn(n["rows"], n["width"], device=place, dtype=dtype),)
        calls["experts in a loop"] = partial(looped, experts, *inputs)
        if case.kind != "biased" and place == "cuda" and hasattr(torch, "_grouped_mm"):
            calls["torch._grouped_mm"] = partial(sorted_products, experts, *inputs)
    return module, inputs, calls


def summed(module: Layer, edges: Tensor, inputs: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The layer by a product with the graph's matrix in CSR, made ready before."""
    x, weights = inputs[:2]
    matrix = (
        torch.sparse_coo_tensor(edges.flip(0), weights, (len(x), len(x)), check_invariants=True)
        .coalesce()
        .to_sparse_csr()
    )
    return lambda: matrix @ module.linear(x)


def looped(module: Experts, x: Tensor) -> Tensor:
    """Experts in turn, each on the rows that chose it; the host waits for their numbers."""
    weights, chosen = module.choose(x)
    out = torch.zeros_like(x)
    for e in range(len(module.up)):
        row, which = torch.where(chosen == e)
        biases = (module.up_bias[e], module.down_bias[e]) if module.form == "biased" else (None, None)
        inner = functional.silu(functional.linear(x[row], module.up[e], biases[0]))
        out.index_add_(0, row, functional.linear(inner, module.down[e], biases[1]) * weights[row, which])
    return out


def sorted_products(module: Experts, x: Tensor) -> Tensor:
    """Rows in the order of their experts, multiplied by PyTorch's grouped products."""
    weights, chosen = module.choose(x)
    own, order = torch.sort(chosen.view(-1))
    ends = torch.searchsorted(own, torch.arange(1, len(module.up) + 1, device=x.device), out_int32=True)
    rows = order // 2
    inner = functional.silu(torch._grouped_mm(x[rows], module.up.transpose(1, 2), offs=ends))
    found = torch._grouped_mm(inner, module.down.transpose(1, 2), offs=ends) * weights.view(-1, 1)[order]
    return torch.zeros_like(x).index_add_(0, rows, found)


def begun(program: Program, context: Context) -> Action | None:
    """The next action that brings a region to one of `FAMILIES`; None where all of theirs are there."""
    waiting = [r for r in program.called if not program.implementation(r).generated]
    mine = {r.id for r in waiting if (f := concerned(r)) is not None and f.name in FAMILIES}
    offered = legal_actions(program, context)
    for kind in ("aggregate", "dispatch", "route", "lowering"):
        found = [a for a in offered if a.kind == kind and (kind in ("dispatch", "route") or a.regions[0] in mine)]
        if found:
            return found[0]
    return None


def candidates(module: nn.Module, inputs: tuple[Any, ...], device: Device, place: str) -> Calls:
    """The configurations that the actions begin with, and the forms of the first, by their schedules."""
    spec = KernelSpec.from_module(module, inputs)
    start, context = Program.start(capture_spec(spec, verify=False, device=place)), Context(device, TemplateCoder())
    programs: list[Program] = []
    for choice in range(MAX_ALTERNATIVES):
        program, most = start, 0
        while (action := begun(program, context)) is not None:
            patch = context.coder.write(Request(program, action, device))
            most = max(most, len(patch.alternatives))
            program = patch.apply(program, min(choice, len(patch.alternatives) - 1))
        programs += [program] if choice < most else []
    for action in legal_actions(programs[0], context) if programs else ():
        if action.kind == "irregular":
            programs.append(context.coder.write(Request(programs[0], action, device)).apply(programs[0], 0))
    calls: Calls = {}
    for program in programs:
        ready = program.load().Model().to(place)
        ready.load_state_dict(module.state_dict())
        found = [program.schedule(r) for r in program.called]
        calls[" + ".join(str(s) for s in found if s is not None)] = partial(ready, *inputs)
    return calls


def measured(case: Case, device: Device, place: str) -> dict[str, Any]:
    """Times, distances from float64 and the shares of the best times."""
    module, inputs, libraries = made(case, place)
    compiled = torch.compile(module)
    own = candidates(module, inputs, device, place)
    others: Calls = {"eager": partial(module, *inputs), "torch.compile": partial(compiled, *inputs), **libraries}
    row = in_turns(own | others, place)
    state = {k: v.double() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = exact_of(module, state, wide)
    scale, times = exact.square().mean().sqrt(), row["turns_ms"]
    row["largest_difference_over_rms"] = {
        name: float((values_of((own | others)[name]()).double() - exact).abs().max() / scale) for name in times
    }
    if best := min((name for name in own if name in times), key=times.__getitem__, default=""):
        over = {name: ms / times[best] for name, ms in times.items() if name not in own}
        row |= {"best_ms": times[best], "best_schedule": best, "over": over}
        row["over_best_library"] = min((s for name, s in over.items() if name in libraries), default=over.get("eager"))
    return row


def values_of(result: Any) -> Tensor:
    """The result, or the first one: of a sort, the values."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def exact_of(module: nn.Module, state: dict[str, Tensor], inputs: list[Any]) -> Tensor:
    """The computation in float64; what a row's experts are is decided in the module's own dtype."""
    if not isinstance(module, Experts):
        return values_of(torch.func.functional_call(module, state, tuple(inputs)))
    (x,) = inputs
    weights, chosen = module.choose(x.to(module.up.dtype))
    inner = functional.silu(torch.stack([x @ w.mT for w in state["up"]]))
    results = torch.stack([h @ w.mT for h, w in zip(inner, state["down"], strict=True)])
    rows = torch.arange(len(x), device=x.device).unsqueeze(-1)
    return (results[chosen, rows] * weights).sum(1)


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="After so many no further case is begun.")] = 400.0,
    only: Annotated[str, typer.Option(help="Words in a case's name, such as 'gnn rmat' or 'moe'.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small sizes on the CPU, to try the script.")] = False,
) -> None:
    """Measure the cases one after the other."""
    place = Place.of(tiny)
    warnings.filterwarnings("ignore", "Sparse ")
    chosen = [c for c in cases(tiny) if only in c.name]
    measures = [({"case": c.name, **asdict(c)}, partial(measured, c, place.device, place.name)) for c in chosen]
    write_rows(out, measures, place, seconds, SHOWN)


if __name__ == "__main__":
    typer.run(main)
