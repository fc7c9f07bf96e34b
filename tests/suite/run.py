"""Puts problems of the suite through capture, verification and the template coder.

A script that prints a JSON row a problem. Without a GPU kernels run in Triton's interpreter:
``TRITON_INTERPRET=1 python -m tests.suite.run [--steps N --seed S] [names]``; with one:
``python -m tests.suite.run --device cuda --workers 14 [--steps N --seed S] [names]``.
Each region of the starting program is lowered and held against its PyTorch text in float64; with ``--steps`` the rest
of a random trajectory of legal actions follows, where every alternative of every patch is checked so.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.actions import Context, legal_actions
from qimeng.backend.registry import implementation_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.float64 import move
from qimeng.envs.estimate.interpreter import mend
from qimeng.envs.workers import tensor_bits
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import Region, make_region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Implementation, Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.addresses import watched
from tests.suite.problem import Problem, problems

DEVICE = device_named("h200")
LOOSE = {"bf16x3": 2e-4, "tf32": 8e-3, "fp16": 8e-3}
"""Error of a precision that the judge may refuse: two planes of bf16 keep 16 bits of 24. Those of 11 bits are offered
where eager takes TF32 on a GPU, as it does for convolutions; here it does not."""

LEFT_OUT = ("stop", "library")
"""Kinds that no trajectory takes. A library's results are for the judge, and differ from eager's in places."""


class Wrong(Exception):
    """A kernel that does not compute what its region says."""


def spec_of(problem: Problem) -> KernelSpec:
    """The spec as a user makes it."""
    return KernelSpec.of(problem.make(), problem.examples(), **problem.options)


def run(problem: Problem, steps: int, seed: int, device: str = "cpu") -> dict[str, Any]:
    """What came of one problem: regions lowered and left, with reasons, and what was wrong."""
    began = time.perf_counter()
    row: dict[str, Any] = {"problem": problem.name, "lowered": 0, "left": {}, "wrong": [], "whole": "", "actions": 0}
    spec = spec_of(problem)
    spec.check()
    try:
        graph = capture_spec(spec, device=device)
    except CaptureError as error:
        return {**row, "whole": str(error), "seconds": round(time.perf_counter() - began, 2)}
    torch.set_default_device(device if device != "cpu" else None)
    values = evaluate(graph, spec, device)
    program, coder = Program.start(graph), TemplateCoder()
    for region in program.regions:
        if program.implementation(region).generated:
            continue  # equal to one that was lowered
        reason = coder.can_implement(region)
        if reason is not None:
            row["left"][region.label()] = reason
            continue
        program = step(program, Action("lowering", (region.id,)), coder, values, row, None)
        row["lowered"] += 1
    choose = random.Random(f"{problem.name} {seed}")
    for _ in range(steps):
        legal = [a for a in legal_actions(program, Context(DEVICE, coder)) if a.kind not in LEFT_OUT]
        if not legal:
            break
        every = sorted({a.kind for a in legal})
        kind = "fusion" if "fusion" in every and choose.random() < 0.5 else choose.choice(every)
        action = choose.choice([a for a in legal if a.kind == kind])
        program = step(program, action, coder, values, row, choose)
        if program.graph is not graph:  # rewritten, with values of its own
            graph, values = program.graph, evaluate(program.graph, spec, device)
        row["actions"] += 1
    return {**row, "seconds": round(time.perf_counter() - began, 2)}


def step(
    program: Program,
    action: Action,
    coder: TemplateCoder,
    values: dict[Value, Any],
    row: dict[str, Any],
    choose: random.Random | None,
) -> Program:
    """`program` after `action`, with the patch's alternatives checked; unchanged where the first is wrong.

    Of the schedules that lowering and fusion measure, two are checked, for time's sake: the one that is taken and one
    drawn.
    """
    try:
        patch = coder.write(Request(program, action, DEVICE))
        count = max(1, len(patch.alternatives))
        taken = choose.randrange(count) if choose else 0
        drawn = random.Random(str(action)).randrange(count)
        after = patch.apply(program, taken)
        if patch.target is not None:
            region = after.region(patch.target)
            for number, implementation in enumerate(patch.alternatives):
                if action.kind not in ("lowering", "fusion") or number in (taken, drawn):
                    check(region, implementation, values)
        return after
    except Exception as error:  # noqa: BLE001 - whatever a kernel does, the row must come back
        where = "".join(traceback.format_exception(error)[-3:])
        text = str(error) if isinstance(error, Wrong) else where
        row["wrong"].append(f"{action.kind} {action.param} {program.region(action.regions[0]).label()}: {text}")
        return program


def evaluate(graph: OpGraph, spec: KernelSpec, device: str = "cpu") -> dict[Value, Any]:
    """Every value of the graph in an eager run on `device`, operator by operator."""
    inputs, model = spec.inputs(5, device), Program.start(graph).load("suite_start").Model()
    model.load_state_dict(spec.module().state_dict())
    model.to(device)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = _pytree.tree_leaves(inputs)
    values: dict[Value, Any] = {}
    for node in graph.nodes.values():
        if node.kind in ("parameter", "buffer"):
            values[Value(node.name)] = state[node.target].clone()
        elif node.kind in ("input", "scalar"):
            values[Value(node.name)] = leaves[int(node.target)]
        elif node.kind == "op":
            region = make_region(graph, [node.name])
            found = function_of(region)(*[values[v] for v in region.inputs])
            values.update(zip(region.outputs, found, strict=True))
    return values


def function_of(region: Region) -> Any:
    """The region's PyTorch text as a function."""
    space: dict[str, Any] = {"torch": torch}
    exec(region.function(), space)
    return space["region"]


def _steps(x: torch.Tensor) -> list[int]:
    """The strides along which there is more than one element."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def check(region: Region, implementation: Implementation, values: dict[Value, Any]) -> None:
    """Hold `implementation` against the text of `region`.

    Raises:
        Wrong: it differs; the message says how.
        Exception: in Triton's interpreter, a kernel reached for memory of others (`tests.addresses`).
    """
    arguments = [values[v] for v in region.inputs]
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    loaded = load_source(implementation_source(implementation), "suite")
    buffers = ()
    with watched():
        if implementation.prepare:
            buffers = getattr(loaded, implementation.prepare)(*[arguments[i] for i in implementation.prepare_inputs])
        found = getattr(loaded, implementation.entry)(*arguments, *buffers)
    function = function_of(region)
    schedule = implementation.schedule
    precision = str(getattr(schedule, "precision", ""))
    eager, exact, moved = function(*arguments), *in_double(function, arguments)
    for x, before in zip(arguments, given, strict=True):
        if isinstance(x, torch.Tensor) and not tensor_bits.same(x, before):
            raise Wrong("an input was changed")
    for i, (y, e, r, m) in enumerate(zip(found, eager, exact or eager, moved or eager, strict=True)):
        where = f"output {i} under {implementation.schedule}"
        if (y.shape, y.dtype, _steps(y)) != (e.shape, e.dtype, _steps(e)):
            raise Wrong(f"{where} is {y.shape} {y.stride()} {y.dtype}, not {e.shape} {e.stride()} {e.dtype}")
        if not accuracy.is_float(e):
            if not torch.equal(y, e):
                raise Wrong(
                    f"{where}: {int((y != e).sum())} of {y.numel()} differ, {y.flatten()[:3]} {e.flatten()[:3]}"
                )
            continue
        longest = max((x.numel() for x in arguments if isinstance(x, torch.Tensor)), default=1)
        low = error_budget.floor(e.dtype, error_budget.roundings(longest), accuracy.measure(m.to(r.dtype), r))
        error, own = accuracy.measure(y, r, e), accuracy.measure(e, r)
        limit = max(low.max, 4 * own.max if own.max < 1 else 0.0, LOOSE.get(precision, 0.0))
        if not error.max <= limit:
            raise Wrong(f"{where}: error {error.max:.3g}, allowed {limit:.3g}; {y.flatten()[:4]} for {r.flatten()[:4]}")


def is_floating(x: Any) -> bool:
    """Whether `x` is a floating tensor."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def in_double(function: Any, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The outputs in float64, and the same from inputs moved by one ulp; None twice where float64 does not run."""
    raised = [x.clone().double() if is_floating(x) else x for x in arguments]
    try:
        exact = [x.clone() for x in function(*raised)]
        for x, given in zip(raised, arguments, strict=True):
            if is_floating(x):
                move([x], torch.finfo(given.dtype).eps)
        return exact, [x.clone() for x in function(*raised)]
    except (RuntimeError, TypeError):
        return None, None


def row_of(name: str, steps: int, seed: int, device: str) -> dict[str, Any]:
    """The row of the problem `name`, whatever happens."""
    problem = next(p for p in problems() if p.name == name)
    torch.set_num_threads(1)
    torch.set_default_device(None)
    try:
        with torch.no_grad():
            return run(problem, steps, seed, device)
    except Exception as error:  # noqa: BLE001 - the other problems must still be seen
        return {"problem": problem.name, "raised": "".join(traceback.format_exception(error)[-4:])}


def rows(names: Sequence[str], workers: int, *options: Any) -> Iterator[dict[str, Any]]:
    """The rows, as they come; each in a process of its own where there are `workers`."""
    on_cpu = "cpu" in options
    if not workers:
        if on_cpu:
            mend()
        yield from (row_of(name, *options) for name in names)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), mend if on_cpu else None, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(row_of, name, *options) for name in names]):
            yield done.result()


def main() -> None:
    """Run the problems named on the command line, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 runs all in this one")
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    names = [p.name for p in problems() if not chosen.names or p.name in chosen.names]
    for row in rows(names, chosen.workers, chosen.steps, chosen.seed, chosen.device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
