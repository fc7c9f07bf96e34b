"""How much GPU memory a problem takes while it is optimized, so that problems worked on at once fit beside each other.

Deals in sizes from the captured graph. A rough bound with room to spare: what runs out of memory is a failure that says
nothing about a kernel. Knows nothing about how problems are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qimeng.bench.suite import Problem
from qimeng.errors import SpecError
from qimeng.graph.capture import CaptureError, capture
from qimeng.graph.opgraph import Value
from qimeng.spec import KernelSpec

COPIES = 6
"""Times that inputs, parameters and outputs are held at once: by the judge (in float64 too), the baselines, the worker.
Measured: about 80 GiB in three processes for inputs of 6 GiB and outputs of 6 GiB."""

CONTEXTS = 3 << 30
"""Bytes of the CUDA contexts of those processes."""

SHARE = 0.9
"""Share of the device's memory that may be planned."""


def footprint(problem: Problem, dtype: str) -> int:
    """Bytes that `problem` takes at most; 0 where it cannot be captured and so is not known."""
    try:
        spec = KernelSpec.from_file(problem.path, dtype=dtype)
        graph = capture(spec.module, lambda: spec.inputs(0))
    except (SpecError, CaptureError):
        return 0
    held = [Value(n.name) for n in graph.nodes.values() if n.kind in ("input", "parameter", "buffer")]
    return COPIES * sum(graph.meta(v).bytes for v in (*held, *graph.results())) + CONTEXTS


def fitting(memory_bytes: int, dtype: str) -> Callable[[Problem, Sequence[Problem]], bool]:
    """Whether a problem may start beside those that run, on a device of `memory_bytes`; alone it always may."""
    known: dict[str, int] = {}

    def size(problem: Problem) -> int:
        if problem.id not in known:
            known[problem.id] = footprint(problem, dtype)
        return known[problem.id]

    def may_start(problem: Problem, running: Sequence[Problem]) -> bool:
        return not running or size(problem) + sum(map(size, running)) <= SHARE * memory_bytes

    return may_start
