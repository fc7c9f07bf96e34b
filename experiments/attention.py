"""Generated attentions beside PyTorch's own on a GPU: which blocks and precisions are right, and how fast each is.

``python -m experiments.attention`` prints a JSON row for each shape and schedule: milliseconds of PyTorch's
`scaled_dot_product_attention` (whichever of its kernels it takes) and of the generated one, and the largest error
against float64 beside PyTorch's own. Needs a GPU. The sweeps of the attention family are to be chosen from these rows
(`qimeng.coder.template.families.attention.sweeps`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qimeng.backend.load import implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import current_device
from qimeng.family import covering, refusal
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source

SHAPES: dict[str, tuple[tuple[int, int, int, int], torch.dtype, bool]] = {
    "prefill 64": ((4, 32, 4096, 64), torch.bfloat16, False),
    "causal 64": ((4, 32, 4096, 64), torch.bfloat16, True),
    "prefill 128": ((4, 16, 4096, 128), torch.bfloat16, False),
    "causal 128": ((4, 16, 4096, 128), torch.bfloat16, True),
    "short 80": ((32, 16, 256, 80), torch.float16, False),
    "fp32 96": ((32, 8, 512, 96), torch.float32, True),
    "fp32 64": ((8, 12, 1024, 64), torch.float32, False),
}
"""Batch, heads, positions and depth; dtype; causal or not."""

MORE = [
    {"block_m": m, "block_n": n, "warps": w, "stages": s}
    for m, n, w in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4), (64, 32, 4), (128, 32, 8))
    for s in (1, 2, 3, 4)
]
"""Blocks beside those of lowering."""


class Attention(torch.nn.Module):
    """One call of PyTorch's operator."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads of q, k and v."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each schedule of each shape named, of all without names."""
    from triton.testing import do_bench

    device, coder = current_device(), TemplateCoder()
    if device is None:
        raise SystemExit("experiments.attention needs a GPU")
    for name in names or SHAPES:
        shape, dtype, causal = SHAPES[name]
        module = Attention(causal)
        graph = capture(partial(Attention, causal), partial(_inputs, shape, dtype, "cpu"))
        region = make_region(graph, [n.name for n in graph.ops()])
        family, plan = covering(region)
        start = family.default(plan, device, "default")
        found = [start, *family.guesses(plan, start, device, "default")]
        found += [s.but(**more) for s in {s.precision: s for s in found}.values() for more in MORE]
        q, k, v = _inputs(shape, dtype, "cuda")
        exact = module(*(x[:1, :2].double() for x in (q, k, v)))
        eager = module(q, k, v)
        ms = do_bench(partial(module, q, k, v))
        own = float((eager[:1, :2] - exact).abs().max())
        for schedule in dict.fromkeys(s for s in found if refusal(family, plan, s, device) is None):
            row = {"shape": name, "schedule": str(schedule), "torch_ms": ms, "torch_error": own}
            try:
                made = coder.print(region, schedule)
                run = getattr(load_source(implementation_source(made), "attention"), made.entry)
                error = float((run(q, k, v)[0][:1, :2] - exact).abs().max())
                yield {**row, "ms": do_bench(partial(run, q, k, v)), "error": error}
            except Exception as failure:  # noqa: BLE001 - a schedule that does not compile is a row like any other
                yield {**row, "failed": str(failure).splitlines()[0][:200]}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(3))


if __name__ == "__main__":
    for found_row in rows(sys.argv[1:]):
        print(json.dumps(found_row), flush=True)
