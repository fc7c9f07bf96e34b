"""What a run must know of a problem before it starts: its family, and how much GPU memory optimizing it takes.

Deals in captured graphs, without allocating anything. The memory is a rough bound with room to spare: what runs out of
memory is a failure that says nothing about a kernel. Knows nothing about how problems are scheduled or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qimeng.bench.families import Classification, classify
from qimeng.bench.suite import Problem
from qimeng.errors import SpecError
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.verify import capture_spec
from qimeng.spec import KernelSpec

COPIES = 6
"""Times that inputs, parameters and outputs are held at once: by the judge (in float64 too), eager, the worker.
Measured: about 80 GiB in three processes for inputs of 6 GiB and outputs of 6 GiB."""

POOL_TRIALS, POOL_BYTES = 8, 14 << 30
"""Trials whose outputs the judge keeps for the next candidate, and the most bytes that these take (see
`qimeng.envs.memory_plan.POOL_SHARE`; of an H200)."""

MODE_COPIES = 1
"""Times more for each mode of torch.compile, which has a process of its own (CUDA graphs keep inputs and outputs)."""

CONTEXTS, MODE_CONTEXT = 3 << 30, 1 << 29
"""Bytes of the CUDA contexts of those processes."""

SHARE = 0.9
"""Share of the device's memory that may be planned."""


ALONE = 0.25
"""A problem that takes more than this share of the device's memory runs alone on it: its checks keep the memory busy by
themselves (two problems of 100 GiB each on an H200: 11 s of checks a problem where one alone takes 4 s)."""


@dataclass(frozen=True)
class Facts:
    """What is known of a problem before it runs.

    Attributes:
        found: its family; None where it cannot be captured.
        memory_bytes: what it takes at most on the device; 0 where it cannot be captured and so is not known.
    """

    found: Classification | None = None
    memory_bytes: int = 0


def survey(problem: Problem, dtype: str = "float32", modes: int = 0) -> Facts:
    """The facts of `problem`.

    Args:
        problem: the problem.
        dtype: what it is cast to.
        modes: number of torch.compile's modes that are measured beside it.
    """
    try:
        spec = KernelSpec.from_file(problem.path, dtype=dtype)
        graph = capture_spec(spec, verify=False)
    except (SpecError, CaptureError):
        return Facts()
    outputs = sum(graph.meta(v).bytes for v in graph.results())
    copies = (COPIES + MODE_COPIES * modes) * (_input_bytes(graph) + outputs)
    pool = min(POOL_TRIALS * outputs, POOL_BYTES)
    return Facts(classify(graph), copies + pool + CONTEXTS + MODE_CONTEXT * modes)


def _input_bytes(graph: OpGraph) -> int:
    """Bytes of inputs, parameters and buffers."""
    held = [Value(n.name) for n in graph.nodes.values() if n.kind in ("input", "parameter", "buffer")]
    return sum(graph.meta(v).bytes for v in held)


def fitting(memory_bytes: int, known: Mapping[Problem, Facts]) -> Callable[[Problem, Sequence[Problem]], bool]:
    """Whether a problem may start beside those that run on a device of `memory_bytes`; alone it always may."""

    def may_start(problem: Problem, running: Sequence[Problem], /) -> bool:
        planned = [known.get(p, Facts()).memory_bytes for p in (problem, *running)]
        return not running or (sum(planned) <= SHARE * memory_bytes and max(planned) <= ALONE * memory_bytes)

    return may_start
