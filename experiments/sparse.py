"""Linear layers whose weights have zeros, on a GPU, beside PyTorch's dense and sparse products and torch.compile.

    python -m experiments.sparse rows.jsonl --seconds 240 --only "csr"
    TRITON_INTERPRET=1 python -m experiments.sparse rows.jsonl --tiny

A row of JSON for each layer (form, share that is not zero, rows, sizes), written as soon as it is known: in turns, with
a cold L2, milliseconds of each configuration that the action `sparsify` begins with and of each form of `storage`, of
the dense product in eager mode and from torch.compile, and of torch.sparse on the same weight as CSR (cuSPARSE) and,
for blocks, as BSR, or as 2:4. Where a call does not go into a CUDA graph, it is timed without one and named so. Each
result's distance from float64 is written down. ``--tiny`` tries the script on the CPU at small sizes, with Triton's
interpreter; its times mean nothing. Deals in running and writing down.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from experiments.case_rows import Place, write_rows
from experiments.graphs import GRAPHS
from experiments.products import CALLS, ROUNDS, timer
from qimeng import IllegalAction, KernelSpec
from qimeng.actions import Context, check_action, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec.declared import weight_form
from qimeng.vocabulary.sparse.forms import grid
from qimeng.vocabulary.sparse.pairs import paired

PERCENT = (1, 2, 5, 10, 20, 50)
"""Shares of blocks, or of elements, that are not zero."""

FORMS = {"bsr:32": 32, "bsr:64": 64, "bsr:16": 16, "bsr:128": 128, "csr": 1}
"""Form to the side of its blocks."""


PAIRS = "2:4"
"""The form of which two of each four neighbours are kept."""

NAMED = {
    "torch csr": "cuSPARSE through torch.sparse",
    "torch bsr": "PyTorch's own Triton kernel for blocks",
    "torch bsr mm": "the same, or cuSPARSE where it does not apply",
    "torch semi-structured": "cuSPARSELt, or CUTLASS without it, by torch.sparse.to_sparse_semi_structured",
}
"""What computes in each of PyTorch's sparse products."""


@dataclass(frozen=True)
class Case:
    """One layer: its form and share, rows of activations, depth and outputs, and where its blocks lie.

    Attributes:
        pattern: one of `GRAPHS`, of as many nodes as the weight has rows of blocks; empty for places drawn evenly.
    """

    form: str
    percent: int
    rows: int
    depth: int
    columns: int
    pattern: str = ""

    @property
    def weights(self) -> str:
        """The declaration."""
        return self.form if self.form == PAIRS else f"{self.form}:{self.percent}"

    @property
    def name(self) -> str:
        """Declaration, pattern, rows, depth and outputs."""
        pattern = f" {self.pattern}" if self.pattern else ""
        return f"{self.weights}{pattern} {self.rows}x{self.depth}x{self.columns}"


def cases(tiny: bool) -> list[Case]:
    """Every case; of several sizes those that say most come first."""
    sizes = [(8, 128, 128)] if tiny else [(512, 4096, 4096), (16, 4096, 4096), (4096, 4096, 4096), (64, 4096, 14336)]
    shares = (5, 20) if tiny else PERCENT
    forms = ("bsr:16", "bsr:32", "csr") if tiny else tuple(FORMS)
    found = [Case(form, percent, *size) for size, form, percent in itertools.product(sizes, forms, shares)]
    drawn = [("csr", 1), ("bsr:32", 5)] if tiny else [("csr", 1), ("csr", 5), ("bsr:32", 5)]
    square = [size for size in sizes if size[1] == size[2]]
    found += [Case(*one, *size, pattern) for pattern in GRAPHS for one in drawn for size in square[:2]]
    more = [] if tiny else [(rows, *layer) for layer in PAIRED for rows in (16, 512, 2048, 8192)]
    return found + [Case(PAIRS, 50, *size) for size in dict.fromkeys([*sizes, *more])]


PAIRED = ((4096, 4096), (4096, 14336), (14336, 4096))
"""Depth and outputs of Llama 3 8B's layers."""


SHOWN = ("failed", "refused", "best_ms", "best_schedule", "over", "over_torch_sparse", "not_timed")
"""Of a row, what is printed as well."""

Calls = dict[str, Callable[[], Tensor]]


def layer_of(case: Case, device: str) -> tuple[nn.Linear, Tensor]:
    """The layer, as many of its blocks as declared at places drawn at random, and its input.

    In bf16; in fp32 on the CPU, where torch.sparse has no products of half types.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = nn.Linear(case.depth, case.columns, bias=False, device=device, dtype=dtype).requires_grad_(False)
    x = torch.randn(case.rows, case.depth, device=device, dtype=dtype)
    if case.form == PAIRS:
        layer.weight.copy_(paired(layer.weight))
        return layer, x
    block = FORMS[case.form]
    rows, columns = grid((case.columns, case.depth), block)
    count = max(1, rows * columns * case.percent // 100)
    kept = torch.zeros(rows * columns, device=device, dtype=dtype)
    places = torch.randperm(rows * columns, device=device)[:count]
    if case.pattern:
        source, target = GRAPHS[case.pattern](rows, count).to(device)
        places = target * columns + source
    kept[places] = 1
    mask = kept.view(rows, columns).repeat_interleave(block, 0).repeat_interleave(block, 1)
    layer.weight.mul_(mask[: case.columns, : case.depth])
    if not torch.equal(weight_form(case.weights).declared(layer.weight), layer.weight):
        raise RuntimeError(f"{case.name}: the declared weight is not the weight itself")
    return layer, x


def libraries(case: Case, layer: nn.Linear, x: Tensor) -> Calls:
    """PyTorch's products with the same weight, each made ready when it is first called."""
    compiled = torch.compile(layer)
    calls: Calls = {"eager": lambda: functional.linear(x, layer.weight), "torch.compile": lambda: compiled(x)}
    if case.form == PAIRS:
        compressed: list[Tensor] = []

        def structured() -> Tensor:
            if not compressed:  # where it fails, that is this call's own failure
                compressed.append(torch.sparse.to_sparse_semi_structured(layer.weight))
            return functional.linear(x, compressed[0])

        return calls | {"torch semi-structured": structured}
    csr = layer.weight.to_sparse_csr()
    calls["torch csr"] = lambda: (csr @ x.t()).t()
    block = FORMS[case.form]
    if block > 1 and case.depth % block == case.columns % block == 0:
        bsr = layer.weight.to_sparse_bsr((block, block))
        calls["torch bsr"] = lambda: functional.linear(x, bsr)
        calls["torch bsr mm"] = lambda: (bsr @ x.t()).t()
    return calls


def candidates(case: Case, layer: nn.Linear, x: Tensor, device: Device, place: str) -> tuple[Calls, str]:
    """The configurations that `sparsify` begins with, and each form of `storage`, by their schedules; or why not."""
    spec = KernelSpec.from_module(layer, (x,), weights=case.weights)
    start, context = Program.start(capture_spec(spec, verify=False, device=place)), Context(device, TemplateCoder())
    action = Action("sparsify", (start.called[0].id,))
    if action not in legal_actions(start, context):
        try:
            check_action(start, action, context)
        except IllegalAction as refusal:
            return {}, str(refusal)
    patch = context.coder.write(Request(start, action, device))
    programs = [patch.apply(start, number) for number in range(len(patch.alternatives))]
    for form in (a for a in legal_actions(programs[0], context) if a.kind == "storage"):
        more = context.coder.write(Request(programs[0], form, device))
        programs += [more.apply(programs[0], number) for number in range(len(more.alternatives))]
    calls: Calls = {}
    for program in programs:
        module = program.load().Model().to(place)
        module.load_state_dict(layer.state_dict())
        schedule = next((s for r in program.called if (s := program.schedule(r)) is not None), None)
        calls[str(schedule or "sparse by the library")] = partial(module, x)
    return calls, ""


def by_clock(run: Callable[[], Any], place: str) -> Callable[[], float]:
    """A function that gives the median milliseconds of a few calls without a CUDA graph."""
    run()
    cold = torch.empty(1 << 28, dtype=torch.int8, device=place) if place == "cuda" else None

    def on_gpu() -> float:
        assert cold is not None
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
        for start, end in events:
            cold.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events))

    def on_cpu() -> float:
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    return on_cpu if cold is None else on_gpu


def in_turns(calls: Calls, place: str) -> dict[str, Any]:
    """Median milliseconds of each call, all taking turns; which ran without a graph; why others could not be timed."""
    ready: dict[str, Callable[[], float]] = {}
    plain, failed = [], {}
    for name, call in calls.items():
        try:
            if place == "cuda":
                try:
                    ready[name] = timer(call)
                    continue
                except Exception:  # noqa: BLE001 - a call that waits for the GPU cannot be recorded, and says so anyhow
                    torch.cuda.synchronize()
            ready[name] = by_clock(call, place)
            plain.append(name)
        except Exception as error:  # noqa: BLE001 - a library may raise anything for what it does not take
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    rounds = ROUNDS if place == "cuda" else 1  # elsewhere times mean nothing
    taken = [{name: take() for name, take in ready.items()} for _ in range(rounds)]
    times = {name: statistics.median(t[name] for t in taken) for name in ready}
    return {"turns_ms": times, "without_graph": plain, "not_timed": failed}


def measured(case: Case, device: Device, place: str) -> dict[str, Any]:
    """Times, distances from float64 and the shares of the best times."""
    layer, x = layer_of(case, place)
    own, refusal = candidates(case, layer, x, device, place)
    calls = own | libraries(case, layer, x)
    row = in_turns(calls, place)
    exact = functional.linear(x.double(), layer.weight.double())
    scale = exact.square().mean().sqrt()
    times = row["turns_ms"]
    row["largest_difference_over_rms"] = {
        name: float((calls[name]().double() - exact).abs().max() / scale) for name in times
    }
    if best := min((name for name in own if name in times), key=times.__getitem__, default=""):
        over = {name: ms / times[best] for name, ms in times.items() if name not in own}
        sparse = min((share for name, share in over.items() if name.startswith("torch ")), default=None)
        row |= {"best_ms": times[best], "best_schedule": best, "over": over, "over_torch_sparse": sparse}
    row["libraries"] = {name: NAMED[name] for name in calls if name in NAMED}
    return row | ({"refused": refusal} if refusal else {})


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="After so many no further case is begun.")] = 240.0,
    only: Annotated[str, typer.Option(help="Words in a case's name, such as 'csr' or 'bsr:32:10'.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small sizes on the CPU, to try the script.")] = False,
) -> None:
    """Measure the layers one after the other."""
    place = Place.of(tiny)
    warnings.filterwarnings("ignore", "Sparse .* support is in beta")
    dtype = "float32" if tiny else "bfloat16"
    chosen = [c for c in cases(tiny) if only in c.name]
    heads = [{"case": c.name, "block": FORMS.get(c.form, 0), **asdict(c), "dtype": dtype} for c in chosen]
    measures = [partial(measured, c, place.device, place.name) for c in chosen]
    write_rows(out, zip(heads, measures, strict=True), place, seconds, SHOWN)


if __name__ == "__main__":
    typer.run(main)
