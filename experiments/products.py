"""Generated bf16 products beside PyTorch's own (cuBLAS) on a GPU: which forms are right, and how fast each is.

``python -m experiments.products`` prints a JSON row for each shape and schedule: milliseconds of both (device time of a
CUDA graph with a cold L2, median of rounds in which all take turns), the ratio, the share of the roofline, and the
largest error against float64 beside PyTorch's own; then a row with the best of each shape. Takes about 90 s on an H200.
``--compile`` needs no GPU: what the compiler says of each for an H200 (registers, spilled bytes, copies and products in
the text). Names of shapes choose among them. The sweeps of the gemm family are to be chosen from these rows
(`qimeng.coder.template.families.gemm.sweeps`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qimeng.backend.compiled import Compiled
from qimeng.backend.registry import implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device, current_device, device_named
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering, refusal
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.program.implementation import Implementation
from qimeng.program.program import load_source
from qimeng.program.schedule import Schedule

SECONDS, ROUNDS, CALLS = 95.0, 3, 12
"""After so many seconds no further shape is begun; rounds in which all take turns; calls of each in a round."""

Inputs = tuple[Tensor, ...]


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x, w)


def _gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, w, b))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


SHAPES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[int, int, int, int]]] = {
    "4096x4096x4096": (torch.mm, ((4096, 4096), (4096, 4096)), (1, 4096, 4096, 4096)),
    "8192x4096x4096 linear gelu": (_gelu, ((8192, 4096), (4096, 4096), (4096,)), (1, 8192, 4096, 4096)),
    "2048x11008x4096 linear": (_linear, ((2048, 4096), (11008, 4096)), (1, 2048, 11008, 4096)),
    "512x4096x4096 linear": (_linear, ((512, 4096), (4096, 4096)), (1, 512, 4096, 4096)),
    "32x1024x1024x64 batched": (_scores, ((32, 1024, 64), (32, 1024, 64)), (32, 1024, 1024, 64)),
}
"""What is computed, shapes of the inputs, and batch, M, N and K."""

FLAT = {"persistent": True, "flat": True, "stores": True}
FORMS: list[dict[str, Any]] = [
    {"block_n": 256, "stages": 4, "stores": True},
    {"block_n": 256, "stages": 4, "persistent": True},
    {"block_n": 256, "stages": 4, "persistent": True, "stores": True},
    {"block_n": 256, "stages": 3, "persistent": True, "flat": True},
    {**FLAT, "block_n": 256, "stages": 4},
    {**FLAT, "block_n": 256, "stages": 3},
    {**FLAT, "block_n": 256, "stages": 4, "group_m": 16},
    {**FLAT, "block_n": 256, "stages": 4, "group_m": 4},
    {**FLAT, "block_m": 256, "stages": 4},
    {**FLAT, "stages": 4},
    {**FLAT, "stages": 4, "warps": 4},
    {"stages": 3, "warps": 4, "stores": True},
]
"""Forms beside those of lowering: changes to 128 x 128 tiles of 8 warps read through descriptors."""


class Product(torch.nn.Module):
    """One of the computations."""

    def __init__(self, name: str):
        super().__init__()
        self.compute = SHAPES[name][0]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs as `SHAPES` has them."""
        return self.compute(*inputs)


def region_of(name: str) -> Region:
    """The computation as one region."""
    graph = capture(partial(Product, name), partial(inputs_of, name, "meta"))
    return make_region(graph, [n.name for n in graph.ops()])


def inputs_of(name: str, device: str) -> Inputs:
    """Normal inputs; those of products are scaled so that results are of order 1."""
    depth = SHAPES[name][2][3]
    torch.manual_seed(0)
    made = [torch.randn(s, dtype=torch.float32, device=device) for s in SHAPES[name][1]]
    return tuple((x * depth**-0.25).to(torch.bfloat16) for x in made)


def schedules_of(region: Region, device: Device) -> list[Schedule]:
    """What lowering tries today, then `FORMS`, as far as they fit."""
    family, plan = covering(region)
    start = family.default(plan, device, "default")
    base = start.but(block_m=128, block_n=128, block_k=64, warps=8, descriptors=True, splits=1)
    found = [start, *family.guesses(plan, start, device, "default"), *(base.but(**form) for form in FORMS)]
    return [s for s in dict.fromkeys(found) if refusal(family, plan, s, device) is None]


def told(found: Compiled) -> dict[str, Any]:
    """What the compiler says of the product's kernel."""
    if found.error is not None:
        return {"failed": found.error.splitlines()[0][:200]}
    facts = next(k for k in found.kernels if k.name.endswith("_product"))
    return {k: asdict(facts)[k] for k in ("registers", "spills", "shared_bytes", "warps", "warpgroup", "overlaps")}


def rows(names: list[str], device: Device, run: bool) -> Iterator[dict[str, Any]]:
    """A row for each schedule of each shape, then one for the best of each."""
    begin, coder, jobs = time.monotonic(), TemplateCoder(), []
    for name in names or list(SHAPES):
        region = region_of(name)
        for schedule in schedules_of(region, device):
            row = {"shape": name, "schedule": str(schedule)}
            try:
                made = coder.print(region, schedule)
                jobs.append((row, made, job_of(region, made)))
            except Exception as refused:  # noqa: BLE001 - a form that a shape does not allow is a row like any other
                yield {**row, "failed": str(refused).splitlines()[0][:200]}
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="products")  # where this process finds the kernels too
    compilers = Compilers(shared_server(), device, os.environ["TRITON_CACHE_DIR"], sandbox="basic")
    facts = compilers.compile([job for _, _, job in jobs])
    ready = [({**row, **told(found)}, made) for (row, made, _), found in zip(jobs, facts, strict=True)]
    if not run:
        yield from (row for row, _ in ready)
        return
    best = []
    for name in dict.fromkeys(row["shape"] for row, _ in ready):
        if time.monotonic() - begin > SECONDS:
            yield {"shape": name, "failed": f"left out after {SECONDS} s"}
            continue
        measured = measure(name, [entry for entry in ready if entry[0]["shape"] == name], device)
        yield from measured
        right = [row for row in measured if "ms" in row and row["error"] <= 2 * row["torch_error"]]
        best += sorted(right, key=lambda row: row["ms"])[:1]
    for row in best:
        kept = ("shape", "schedule", "ms", "torch_ms", "over_torch", "of_roofline", "torch_of_roofline", "tflops")
        yield {"best": True, **{k: row[k] for k in kept}}


def measure(name: str, entries: list[tuple[dict[str, Any], Implementation]], device: Device) -> list[dict[str, Any]]:
    """Rows of one shape: every kernel checked, then all of them and PyTorch's own timed by turns."""
    inputs, module = inputs_of(name, "cuda"), Product(name)
    exact = module(*(x.double() for x in inputs))
    scale = exact.abs() + exact.pow(2).mean(-1, keepdim=True).sqrt()
    own = float(((module(*inputs) - exact).abs() / scale).max())
    timed: dict[int, Callable[[], float]] = {-1: timer(partial(module, *inputs))}
    found = []
    for number, (row, made) in enumerate(entries):
        row = {**row, "torch_error": own}
        found.append(row)
        if "failed" in row:
            continue
        try:
            run = partial(getattr(load_source(implementation_source(made), f"product_{number}"), made.entry), *inputs)
            first = run()[0]
            row["error"] = float(((first - exact).abs() / scale).max())
            row["same_again"] = all(bool(torch.equal(first, run()[0])) for _ in range(4))
            timed[number] = timer(run)
        except Exception as failure:  # noqa: BLE001 - a schedule that does not run is a row like any other
            row["failed"] = str(failure).splitlines()[0][:200]
    times: dict[int, list[float]] = {number: [] for number in timed}
    for _ in range(ROUNDS):
        for number, take in timed.items():
            times[number].append(take())
    batch, m, n, k = SHAPES[name][2]
    work = 2 * batch * m * n * k
    moved = sum(x.numel() * x.element_size() for x in inputs) + exact.numel() * 2
    roofline_ms = max(work / (device.half_tflops * 1e9), moved / (device.bandwidth_gbs * 1e6))
    torch_ms = statistics.median(times[-1])
    for number, row in enumerate(found):
        if number in times:
            ms = statistics.median(times[number])
            row |= {"ms": ms, "torch_ms": torch_ms, "over_torch": torch_ms / ms, "tflops": work / ms * 1e-9}
            row |= {"of_roofline": roofline_ms / ms, "torch_of_roofline": roofline_ms / torch_ms}
    return found


def timer(run: Callable[[], Any]) -> Callable[[], float]:
    """A function that gives the median device time of `CALLS` calls in milliseconds, each with a cold L2."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]  # else it thinks it is still recorded
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        raise
    cold = _cold()

    def take() -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
        graph.replay()
        for start, end in events:
            cold.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events))

    return take


@cache
def _cold() -> Tensor:
    """Memory that fills the L2 cache several times over."""
    return torch.empty(2**28, dtype=torch.int8, device="cuda")


if __name__ == "__main__":
    without = "--compile" in sys.argv
    here = device_named("h200") if without else current_device()
    if here is None:
        raise SystemExit("experiments.products needs a GPU; --compile does not")
    for found_row in rows([a for a in sys.argv[1:] if not a.startswith("--")], here, not without):
        print(json.dumps(found_row), flush=True)
