"""Facts about a problem before its run: its family, and the GPU memory that optimizing it takes.

Deals in captured graphs, without allocating anything. The memory is a rough upper bound, because running out of memory
would be a failure that says nothing about a kernel. Knows nothing about how problems are scheduled or measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qimeng.bench.families import Classification, classify
from qimeng.bench.suite import Problem
from qimeng.device import DEVICES
from qimeng.envs.cost.memory_plan import Sizes, free_host_bytes, memory_plan
from qimeng.envs.cost.roofline import product_flops
from qimeng.envs.steps.capturing import captured
from qimeng.envs.workers.stopwatch import SETS
from qimeng.errors import SpecError
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import category
from qimeng.spec import KernelSpec

STATE_COPIES = 6
"""Times that parameters and buffers are held beyond what the judge's own plan counts: by eager, the worker (its packed
operands with them) and the worker that waits, each with a copy to set them back from."""

POOL_TRIALS = 8
"""Trials whose outputs the judge keeps for the next candidate (see `qimeng.envs.cost.memory_plan.POOL_SHARE`)."""

MODE_COPIES, MODE_CONTEXT = 1, 1 << 29
"""Times that everything is held more for each mode of torch.compile, which has a process of its own (CUDA graphs keep
inputs and outputs), and bytes of its CUDA context."""

SHARE = 0.9
"""Share of the device's memory that may be planned."""

ALONE = 0.42
"""A problem that takes more than this share of the device's memory runs alone on it: its checks keep the memory busy by
themselves (two problems of 100 GiB each on an H200: 11 s of checks a problem where one alone takes 4 s). Alone, one of
40 to 60 GiB leaves the device idle for a third of its time, while it compiles."""


@dataclass(frozen=True)
class Facts:
    """What is known of a problem before it runs.

    Attributes:
        found: its family; None where it cannot be captured.
        memory_bytes: what it takes at most on the device; 0 where it cannot be captured and so is not known.
    """

    found: Classification | None = None
    memory_bytes: int = 0


def survey(problem: Problem, dtype: str = "float32", modes: int = 0, device_bytes: int = 0) -> Facts:
    """The facts of `problem`.

    Args:
        problem: the problem.
        dtype: what it is cast to; ``"own"`` for the spec's own.
        modes: number of torch.compile's modes that are measured beside it.
        device_bytes: memory of the device; that of an H200 by default.
    """
    try:
        spec = problem.spec(dtype)
        graph = captured(spec, verify=False)
    except (SpecError, CaptureError):
        return Facts()
    sizes = _sizes(graph, spec)
    plan = memory_plan(sizes, device_bytes or DEVICES["h200"].memory_bytes, free_host_bytes())
    held = sizes.inputs + sizes.state + sizes.outputs
    beside = (SETS - 1) * sizes.inputs + STATE_COPIES * sizes.state + sizes.outputs + sizes.temporaries
    of_modes = modes * (MODE_COPIES * held + MODE_CONTEXT)
    return Facts(
        classify(graph), plan.peak_bytes + min(plan.pool_bytes, POOL_TRIALS * sizes.outputs) + beside + of_modes
    )


def _sizes(graph: OpGraph, spec: KernelSpec) -> Sizes:
    """Bytes of the computation; of what eager holds on the way, those of the two largest results of an operator."""
    results = set(graph.results())
    made = (m.bytes for n in graph.ops() if category(n) != "view" for m in n.metas if m is not None)
    return Sizes(
        inputs=_bytes(graph, "input"),
        state=_bytes(graph, "parameter", "buffer"),
        outputs=sum(graph.meta(v).bytes for v in results),
        temporaries=sum(heapq.nlargest(2, made)),
        itemsize=min(getattr(torch, spec.dtype).itemsize, 8),
        flop=sum(product_flops(graph, n) for n in graph.ops()),
    )


def _bytes(graph: OpGraph, *kinds: str) -> int:
    return sum(graph.meta(Value(n.name)).bytes for n in graph.nodes.values() if n.kind in kinds)


def fitting(memory_bytes: int, known: Mapping[Problem, Facts]) -> Callable[[Problem, Sequence[Problem]], bool]:
    """Whether a problem may start beside those that run on a device of `memory_bytes`; alone it always may."""

    def may_start(problem: Problem, running: Sequence[Problem], /) -> bool:
        planned = [known.get(p, Facts()).memory_bytes for p in (problem, *running)]
        return not running or (sum(planned) <= SHARE * memory_bytes and max(planned) <= ALONE * memory_bytes)

    return may_start


__all__ = ["ALONE", "Facts", "fitting", "survey"]
