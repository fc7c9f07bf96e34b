"""Generated attentions beside PyTorch's own on a GPU: which blocks and forms are right, and how fast each is.

``python -m experiments.attention [shape …]`` prints a JSON row for each shape and schedule: milliseconds of PyTorch's
`scaled_dot_product_attention` (as PyTorch chooses its kernel, and cuDNN's), of the generated one, and the largest error
against float64 beside PyTorch's own; at the end a row for each shape with the fastest schedule that is right. Kernels
are compiled ahead by several processes. Needs a GPU. The sweeps of the attention family are chosen from these rows
(`qimeng.coder.template.families.attention.sweeps`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from qimeng.backend.registry import backend_named, implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device, current_device
from qimeng.family import covering, refusal
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.program.implementation import Implementation
from qimeng.program.program import load_source

SHAPES: dict[str, tuple[tuple[int, int, int, int], torch.dtype, bool]] = {
    "prefill 128": ((4, 16, 4096, 128), torch.bfloat16, False),
    "causal 128": ((4, 16, 4096, 128), torch.bfloat16, True),
    "fp32 96": ((32, 8, 512, 96), torch.float32, True),
    "fp32 64": ((8, 12, 1024, 64), torch.float32, False),
    "short 80": ((32, 16, 256, 80), torch.float16, False),
    "prefill 64": ((4, 32, 4096, 64), torch.bfloat16, False),
    "causal 64": ((4, 32, 4096, 64), torch.bfloat16, True),
}
"""Batch, heads, positions and depth; dtype; causal or not."""

Blocks = tuple[int, int, int, int]
"""block_m, block_n, warps, stages."""

POINTERS: tuple[Blocks, ...] = ((128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3))
DESCRIPTORS: tuple[Blocks, ...] = (
    (128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2),
    (128, 64, 8, 3), (128, 128, 4, 2), (128, 256, 8, 1), (64, 256, 4, 1),
)  # fmt: skip
SPECIALIZED: tuple[Blocks, ...] = (
    (128, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (64, 128, 4, 2),
    (64, 64, 4, 3),
)  # fmt: skip
FULL: tuple[Blocks, ...] = (
    (64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (128, 64, 8, 2),
)  # fmt: skip
"""Blocks beside those of lowering: half operands by pointers, by descriptors, with copying warps; fp32 operands."""

COMPILERS = 8
"""Processes that compile ahead."""


class Attention(torch.nn.Module):
    """One call of PyTorch's operator."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads of q, k and v."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def main(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each schedule of each shape named, of all without names; then the best of each."""
    device = current_device()
    if device is None:
        raise SystemExit("experiments.attention needs a GPU")
    made = {name: list(implementations(name, device)) for name in names or SHAPES}
    compile_ahead([(region_of(name), m) for name, found in made.items() for m in found], device)
    best: dict[str, dict[str, Any]] = {}
    for name, found in made.items():
        for row in rows(name, found):
            yield row
            right = "ms" in row and row["error"] <= 4 * row["torch_error"]
            if right and row["ms"] < best.get(name, row | {"ms": float("inf")})["ms"]:
                best[name] = row
    for name, row in best.items():
        fastest = min(t for t in (row["torch_ms"], row["cudnn_ms"]) if t is not None)
        yield {"best of": name, "schedule": row["schedule"], "ms": row["ms"], "of PyTorch": fastest / row["ms"]}


def region_of(name: str) -> Region:
    """The operator at that shape as a region."""
    shape, dtype, causal = SHAPES[name]
    graph = capture(partial(Attention, causal), partial(inputs_of, shape, dtype, "cpu"))
    return make_region(graph, [n.name for n in graph.ops()])


def implementations(name: str, device: Device) -> Iterator[Implementation]:
    """What lowering tries for that shape, and the schedules above, as far as the device takes them."""
    region, coder = region_of(name), TemplateCoder()
    family, plan = covering(region)
    start = family.default(plan, device, "default")
    found = [start, *family.guesses(plan, start, device, "default")]
    fields = ("block_m", "block_n", "warps", "stages")
    if SHAPES[name][1] is torch.float32:
        bases = {s.precision: s for s in found}.values()
        found += [s.but(**dict(zip(fields, blocks, strict=True))) for s in bases for blocks in FULL]
    else:
        for blocks, options in ((POINTERS, {}), (DESCRIPTORS, {"descriptors": True}), (SPECIALIZED, BOTH)):
            plain = start.but(splits=1, **{"descriptors": False, "specialize": False} | options)
            found += [plain.but(**dict(zip(fields, b, strict=True))) for b in blocks]
    for schedule in dict.fromkeys(s for s in found if refusal(family, plan, s, device) is None):
        yield coder.print(region, schedule)


BOTH = {"descriptors": True, "specialize": True}


def compile_ahead(work: Sequence[tuple[Region, Implementation]], device: Device) -> None:
    """Fill Triton's cache with the kernels, in processes that stand for the device."""
    jobs = [(made, [region.graph.meta(v) for v in region.inputs], device) for region, made in work]
    count = min(COMPILERS, os.cpu_count() or 1)
    # a compiler that dies is seen again when its kernel runs
    with suppress(BrokenProcessPool), ProcessPoolExecutor(count, get_context("spawn")) as pool:
        list(pool.map(_compiled, jobs))


def _compiled(job: Any) -> None:
    backend_named("triton").compile(*job)


def rows(name: str, found: Iterable[Implementation]) -> Iterator[dict[str, Any]]:
    """A row for each implementation of that shape."""
    from triton.testing import do_bench

    shape, dtype, causal = SHAPES[name]
    module = Attention(causal)
    q, k, v = inputs_of(shape, dtype, "cuda")
    exact = module(*(x[:1, :2].double() for x in (q, k, v)))
    own = float((module(q, k, v)[:1, :2] - exact).abs().max())
    times = {"torch_ms": do_bench(partial(module, q, k, v)), "cudnn_ms": None}
    if dtype is not torch.float32:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            times["cudnn_ms"] = do_bench(partial(module, q, k, v))
    for made in found:
        row = {"shape": name, "schedule": str(made.schedule), **times, "torch_error": own}
        try:
            run = getattr(load_source(implementation_source(made), "attention"), made.entry)
            error = float((run(q, k, v)[0][:1, :2] - exact).abs().max())
            yield {**row, "ms": do_bench(partial(run, q, k, v), warmup=10, rep=40), "error": error}
        except Exception as failure:  # noqa: BLE001 - a schedule that does not compile is a row like any other
            yield {**row, "failed": str(failure).splitlines()[0][:200]}


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Queries, keys and values of normal numbers."""
    return tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(3))


if __name__ == "__main__":
    with torch.no_grad():
        for found_row in main(sys.argv[1:]):
            print(json.dumps(found_row), flush=True)
