"""How long every schedule takes that lowering tries on a matrix product: what its guesses and thresholds are held to.

The shapes are one of each kind: rows that are not aligned, operands or results that bind, few results of a long sum,
and plain ones of every mode. Each schedule is checked against float64 on normal and positive inputs and timed beside
PyTorch. One line of JSON a schedule; those that OUT has already are passed over, so that a run goes on where it ended.
Without a GPU the kernels run in Triton's interpreter on sizes divided by SHRINK: that shows that they are right, and no
times.

    python benchmarks/product_schedules.py OUT [SHRINK]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

SHAPES = (
    ((8205, 2949), (2949, 5921)),  # rows not aligned
    ((3000, 4101), (4101, 4096)),  # those of one operand
    ((256, 524288), (524288, 256)),  # few results of a long sum
    ((512, 65536), (65536, 384)),
    ((64, 131072), (131072, 64)),
    ((128, 512, 1024), (128, 1024, 2048)),  # operands as long to read as to multiply
    ((16384, 2048), (2048, 768)),
    ((262144, 256), (256, 768)),  # results
    ((32768, 64), (64, 32768)),
    ((4096, 4096), (4096, 4096)),  # arithmetic
    ((1024, 8192), (8192, 8192)),
)
CASES = (("default", "float32"), ("high", "float32"), ("default", "bfloat16"))
ERRORS_OF = 4096
"""Rows of the result that are compared with float64."""


class Product(torch.nn.Module):
    """x @ y."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x @ y


def made(kind: str, shapes: Any, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Inputs from a fixed seed, normal or positive."""
    generator = torch.Generator(device).manual_seed(7)
    draw = torch.randn if kind == "normal" else torch.rand
    return [draw(s, generator=generator, device=device, dtype=dtype) for s in shapes]


def error(y: torch.Tensor, x: list[torch.Tensor]) -> float:
    """Largest error of the first rows, as a share of |result| + rms of its row."""
    left = x[0][..., :ERRORS_OF, :][:2] if x[0].dim() == 3 else x[0][:ERRORS_OF]
    right = x[1][:2] if x[1].dim() == 3 else x[1]
    r = left.double() @ right.double()
    got = (y[:2] if y.dim() == 3 else y[:ERRORS_OF]).double()
    return ((got - r).abs() / (r.abs() + r.pow(2).mean(-1, keepdim=True).sqrt())).max().item()


def milliseconds(run: Callable[[], Any], flush: torch.Tensor) -> float:
    """Median of twenty calls, the L2 cache flushed before each."""
    times = []
    for _ in range(23):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host's lead, so that its way to the kernel is not timed
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def main(out: str, shrink: int = 1) -> None:
    """Every case and schedule that `out` does not have yet."""
    from qimeng.actions import Context
    from qimeng.backend.load import implementation_source, load_kernels
    from qimeng.coder.template.analysis import analyse
    from qimeng.coder.template.coder import TemplateCoder, default_schedule, guesses
    from qimeng.device import target_device
    from qimeng.envs.interpreter import mend
    from qimeng.graph.capture import capture
    from qimeng.graph.region import make_region

    if not ON_GPU:
        mend()
    place, device, coder = "cuda" if ON_GPU else "cpu", target_device(), TemplateCoder()
    rows = [json.loads(line) for line in Path(out).read_text().splitlines()] if Path(out).exists() else []
    done = {(str(r["shapes"]), r["mode"], r["dtype"], r["schedule"]) for r in rows}
    flush = torch.empty(256 << 20 if ON_GPU else 1, dtype=torch.uint8, device=place)
    environment = {"device": torch.cuda.get_device_name() if ON_GPU else "interpreter", "torch": torch.__version__}
    for full in SHAPES:
        shapes = [[max(8, n // shrink) + (n % 2 if shrink > 1 else 0) for n in s] for s in full]
        for mode, dtype in CASES:
            torch.backends.cuda.matmul.allow_tf32 = mode == "high"
            kind, eager_ms = getattr(torch, dtype), None
            with torch.device("meta"):
                graph = capture(Product, lambda: tuple(torch.empty(s, dtype=kind) for s in full))  # noqa: B023
            plain = analyse(make_region(graph, [n.name for n in graph.ops()]))
            context = Context(device, coder, mode)
            tried = [default_schedule(plain, device, mode)]
            tried += guesses(plain, tried[0], context)
            graph = capture(Product, lambda: tuple(torch.empty(s, dtype=kind, device="meta") for s in shapes))  # noqa: B023
            region = make_region(graph, [n.name for n in graph.ops()])
            for schedule in tried:
                if (str(shapes), mode, dtype, str(schedule)) in done:
                    continue
                row: dict[str, Any] = {"shapes": shapes, "mode": mode, "dtype": dtype, "schedule": str(schedule)}
                try:
                    implementation = coder.print(region, schedule)
                    run = getattr(load_kernels(implementation_source(implementation), None), implementation.entry)
                    for inputs in ("normal", "positive"):
                        x = made(inputs, shapes, kind, place)
                        row[f"error_{inputs}"], row[f"eager_error_{inputs}"] = (
                            error(run(*x)[0], x),
                            error(x[0] @ x[1], x),
                        )
                    if ON_GPU:
                        eager_ms = eager_ms or milliseconds(lambda: x[0] @ x[1], flush)  # noqa: B023
                        row |= {"ms": milliseconds(lambda: run(*x), flush), "eager_ms": eager_ms}  # noqa: B023
                except Exception as failure:  # noqa: BLE001  one schedule's failure is a row of its own
                    row["failure"] = f"{type(failure).__name__}: {str(failure)[:300]}"
                with Path(out).open("a") as file:
                    file.write(json.dumps({**row, "environment": environment}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
