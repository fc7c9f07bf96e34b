"""Reductions over windows and convolutions of single channels beside PyTorch on a GPU: which blocks are fast.

``python -m experiments.windows [SECONDS]`` prints a JSON row for each case and schedule: milliseconds of eager PyTorch,
of torch.compile and of the generated kernel, and the largest difference from eager. Needs a GPU. The blocks of
`qimeng.coder.template.families.tile.defaults` are to be chosen from these rows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qimeng.bench.environment import environment
from qimeng.coder.template.families.tile.defaults import default_schedule
from qimeng.coder.template.families.tile.plan import plan_tile
from qimeng.coder.template.families.tile.printer import print_tile
from qimeng.device import current_device
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source

Shape = tuple[int, ...]

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Shape, ...], torch.dtype]] = {
    "maximum of 8, 1D, fp32": (
        lambda x: functional.max_pool1d(x, 8, 1, 4, 3), ((16, 192, 65536),), torch.float32
    ),
    "mean of 11 x 11, fp32": (lambda x: functional.avg_pool2d(x, 11), ((4, 64, 2048, 2048),), torch.float32),
    "mean of 3 x 3 x 3, fp32": (lambda x: functional.avg_pool3d(x, 3, 2, 1), ((8, 32, 128, 128, 128),), torch.float32),
    "maximum of 3 x 3, bf16": (lambda x: functional.max_pool2d(x, 3, 2, 1), ((32, 64, 112, 112),), torch.bfloat16),
    "convolution of 7 x 7 single channels, bf16": (
        lambda x, w: functional.conv2d(x, w, padding=3, groups=x.shape[1]),
        ((32, 384, 28, 28), (384, 1, 7, 7)),
        torch.bfloat16,
    ),
    "convolution of 3 x 3 single channels, fp32": (
        lambda x, w: functional.conv2d(x, w, padding=1, groups=x.shape[1]),
        ((16, 64, 512, 512), (64, 1, 3, 3)),
        torch.float32,
    ),
}  # fmt: skip
"""What is computed, shapes of its operands, and their dtype."""

BLOCKS = ((128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 8))
"""Rows and warps of a program."""

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n"


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *operands: Tensor) -> Tensor:
        return self.function(*operands)


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each schedule; no case is begun after `seconds`."""
    end, device = time.monotonic() + seconds, current_device()
    if device is None:
        raise SystemExit("this needs a CUDA GPU")
    here = vars(environment(device))
    for name, (function, shapes, dtype) in CASES.items():
        if time.monotonic() > end:
            return
        operands = tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
        with torch.backends.cudnn.flags(allow_tf32=False):
            expected = function(*operands)
            compiled = torch.compile(function)
            compiled(*operands)
            known = {"eager_ms": _ms(partial(function, *operands)), "compiled_ms": _ms(partial(compiled, *operands))}
        inputs = partial(_empty, shapes, dtype)
        graph = capture(partial(_Module, function), inputs)
        plan = plan_tile(make_region(graph, [n.name for n in graph.ops()]))
        base = default_schedule(plan, device)
        others = [base.but(form="loop", block_p=p, block_r=1, warps=w, stages=1) for p, w in BLOCKS]
        for schedule in dict.fromkeys([base, *others]):
            made = print_tile(plan, schedule, "k")
            run = partial(getattr(load_source(HEADER + made.source, "windows"), made.entry), *operands)
            error = float((run()[0].double() - expected.double()).abs().max())
            yield {
                "what": "beside", "case": name, "schedule": str(schedule), **known, "ms": _ms(run), "error": error,
                "environment": here,
            }  # fmt: skip


def _empty(shapes: tuple[Shape, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


def _ms(run: Callable[[], Any]) -> float:
    """Median milliseconds of a call, its operands out of the L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=25, return_mode="median"))


if __name__ == "__main__":
    for row in rows(float(sys.argv[1]) if len(sys.argv) > 1 else 90.0):
        print(json.dumps(row), flush=True)
