"""Is a captured graph the module it was captured from?

Deals in running both, at reduced size where that is the same graph, and comparing everything that a call returns or
changes. Knows nothing about kernels or timing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.capture import CaptureError, ValuesNeeded, capture
from qimeng.graph.mode import mode_matters
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program, load_source
from qimeng.spec import KernelSpec, perturb_parameters
from qimeng.spec.reduce import RUNNABLE

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Differences between two orders of the same arithmetic; a graph that computes something else is far outside."""


def capture_spec(spec: KernelSpec, verify: bool = True) -> OpGraph:
    """The graph of `spec`, held against the module before it is trusted, unless `verify` is False.

    What is verified also says whether training and evaluation mode are different computations (`OpGraph.training`).
    Where verifying fails with Python numbers left free, they are specialised.

    Raises:
        CaptureError: the computation does not export, or the graph differs from the module; the message says how.
    """
    graph = _capture(spec)
    if not verify:
        return graph
    try:
        verify_graph(spec, graph)
    except CaptureError:
        if not _free(graph):
            raise
        graph = _capture(spec, specialise=True)
        verify_graph(spec, graph)
    return replace(graph, training=spec.training) if mode_matters(spec) else graph


def _capture(spec: KernelSpec, specialise: bool = False) -> OpGraph:
    """The graph; module and inputs are made in memory only where tensors outside the state_dict ask for it."""
    try:
        return capture(spec.module, lambda: spec.inputs(0), specialise)
    except ValuesNeeded:
        if not spec.is_small:
            raise
        return capture(spec.module, lambda: spec.inputs(0), specialise, values=True)


def _free(graph: OpGraph) -> set[int]:
    """Positions of the numbers that the graph holds for any value."""
    return {int(n.target) for n in graph.nodes.values() if n.kind == "scalar"}


def verify_graph(spec: KernelSpec, graph: OpGraph) -> None:
    """Compare the program of `graph`, all on PyTorch, with the module it was captured from.

    On two seeds, each called twice in a row so that state shows; the second with other parameters. Then with its
    Python numbers changed: those that the graph holds for any value must follow, others must be refused. Compared:
    structure, type, shape, stride, dtype, values, buffers, and that no output shares memory that the module's does
    not. At reduced size where that has the same operators in the same order; else as a whole, on the GPU where it
    is too large for the CPU.

    Raises:
        CaptureError: a difference, or no size at which the two can be compared; the message names it.
    """
    small, device = spec.reduced(), "cpu"
    reduced = graph if small is spec else _capture(small, specialise=not _free(graph))
    if [n.target for n in reduced.ops()] != [n.target for n in graph.ops()]:
        small, reduced = spec, graph
    if small is spec and _elements(graph) > RUNNABLE:
        if not torch.cuda.is_available():
            raise CaptureError(
                f"it has {_elements(graph)} elements and no smaller size does the same, so that the graph cannot be "
                "checked against the module without a GPU"
            )
        device = "cuda"
    module = small.module(device)
    with tempfile.TemporaryDirectory(prefix="qimeng_verify_") as folder:
        model = load_source(Program.start(reduced).source, "qimeng_verify", folder).Model().to(device)
    for seed in (1, 2):
        if seed == 2:
            perturb_parameters(module, seed)
        _load(model, module)
        inputs = small.inputs(seed, device)
        for _ in range(2):
            _compare(module, model, inputs)
    inputs = small.inputs(3, device)
    for changed in _other_numbers(inputs, reduced):
        _compare(module, model, changed, may_fail=True)
    for position, changed in _refused(inputs, reduced):
        try:
            _run(model, changed)
        except ValueError:
            continue
        raise CaptureError(f"the graph was made for one value of input {position} but takes another")


def _elements(graph: OpGraph) -> int:
    return sum(m.numel for n in graph.nodes.values() for m in n.metas if m is not None)


def _load(model: torch.nn.Module, module: torch.nn.Module) -> None:
    try:
        model.load_state_dict(module.state_dict())
    except RuntimeError as error:
        raise CaptureError(f"the graph does not take the module's state_dict: {error}") from error


def _run(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        torch.manual_seed(0)
        return module(*inputs)


def _compare(module: torch.nn.Module, model: torch.nn.Module, inputs: tuple[Any, ...], may_fail: bool = False) -> None:
    """One call of both; where the module itself may fail on `inputs`, that settles nothing."""
    try:
        expected = _run(module, inputs)
    except Exception as error:  # the user's module may raise anything
        if may_fail:
            return
        raise CaptureError(f"the module fails on its own inputs: {type(error).__name__}: {error}") from error
    try:
        found = _run(model, inputs)
    except Exception as error:  # a graph that does not run may fail in any operator
        raise CaptureError(f"the graph does not run: {type(error).__name__}: {error}") from error
    wanted, tree = _pytree.tree_flatten(expected)
    got, other = _pytree.tree_flatten(found)
    if tree != other:
        raise CaptureError(f"the module returns {tree}, the graph {other}")
    buffers = dict(model.named_buffers())
    state = {n: b for n, b in module.named_buffers() if n in buffers}
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        _same(f"output {i}", a, b)
    for name, buffer in state.items():
        _same(f"buffer {name}", buffer, buffers[name])
    here = [*_pytree.tree_leaves(inputs), *state.values()]
    there = [*_pytree.tree_leaves(inputs), *(buffers[n] for n in state)]
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if _shared(b, [*there, *got[:i]]) - _shared(a, [*here, *wanted[:i]]):
            raise CaptureError(f"output {i} shares memory with an input, buffer or other output, the module's does not")


def _same(what: str, a: Any, b: Any) -> None:
    """Refuse where `b`, from the graph, is not `a`, from the module."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a != b:
            raise CaptureError(f"{what} is {b!r} from the graph, {a!r} from the module")
        return
    for fact in ("shape", "dtype", "device"):
        if getattr(a, fact) != getattr(b, fact):
            raise CaptureError(
                f"{what} has {fact} {getattr(b, fact)} from the graph, {getattr(a, fact)} from the module"
            )
    if a.stride() != b.stride():
        raise CaptureError(f"{what} has strides {b.stride()} from the graph, {a.stride()} from the module")
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        if not torch.equal(a, b):
            raise CaptureError(f"{what} differs in {int((a != b).sum())} of {a.numel()} elements")
        return
    limit = TOLERANCE.get(a.dtype, 0.1)
    x, y = a.double(), b.double()
    finite = x[x.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if not torch.allclose(x, y, rtol=limit, atol=limit * scale, equal_nan=True):
        worst = float((x - y).abs().nan_to_num(torch.inf).max())
        raise CaptureError(f"{what} differs by up to {worst:.3g} where values reach {scale:.3g}")


def _shared(x: Any, others: list[Any]) -> set[int]:
    """Positions in `others` of the tensors that share memory with `x`."""

    def place(t: Any) -> int:
        return t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else 0

    return {i for i, t in enumerate(others) if place(x) and place(t) == place(x)}


def _other_numbers(inputs: tuple[Any, ...], graph: OpGraph) -> Iterator[tuple[Any, ...]]:
    """The inputs with other values of the numbers that the graph holds for any value."""
    leaves, tree = _pytree.tree_flatten(inputs)
    free = _free(graph)
    if not free:
        return
    for change in (lambda x: x * 1.5 + 0.25, lambda x: -x, lambda x: 2):
        yield tuple(_pytree.tree_unflatten([change(x) if i in free else x for i, x in enumerate(leaves)], tree))


def _refused(inputs: tuple[Any, ...], graph: OpGraph) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Position and inputs, for each Python value that the graph was specialised on and another in its place."""
    leaves, tree = _pytree.tree_flatten(inputs)
    for i, x in graph.scalars.items():
        other = not x if isinstance(x, bool) else x + 1 if isinstance(x, (int, float)) else 0
        if other != x or type(other) is not type(x):
            yield i, tuple(_pytree.tree_unflatten([other if j == i else y for j, y in enumerate(leaves)], tree))


__all__ = ["TOLERANCE", "capture_spec", "verify_graph"]
