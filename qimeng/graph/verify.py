"""Is a captured graph the module it was captured from?

Deals in running both at reduced size and comparing everything that a call returns or changes. Knows nothing about
kernels, timing or devices other than the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.capture import CaptureError, capture
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Differences between two orders of the same arithmetic; a graph that computes something else is far outside."""


def capture_spec(spec: KernelSpec, verify: bool = True) -> OpGraph:
    """The graph of `spec`, held against the module at reduced size before it is trusted.

    Raises:
        CaptureError: the computation does not export, or the graph differs from the module; the message says how.
    """
    graph = capture(spec.module, lambda: spec.inputs(0))
    if verify:
        verify_graph(spec, graph)
    return graph


def verify_graph(spec: KernelSpec, graph: OpGraph) -> None:
    """Run the graph and the module on two seeds, twice in a row each, and with Python numbers changed.

    Raises:
        CaptureError: the operators change with the sizes, or a result or buffer differs.
    """
    small = spec.reduced()
    reduced = graph if small is spec else capture(small.module, lambda: small.inputs(0))
    if [n.target for n in reduced.ops()] != [n.target for n in graph.ops()]:
        raise CaptureError("the operators depend on the sizes")
    model = Program.start(reduced).load("qimeng_verify").Model()
    module = small.module()
    state = module.state_dict()
    own = model.state_dict()
    if set(own) - set(state):
        raise CaptureError(f"the graph has parameters that the module's state_dict lacks: {sorted(set(own) - set(state))}")
    model.load_state_dict({k: state[k] for k in own})
    for seed in (1, 2):
        inputs = small.inputs(seed)
        for variant in (inputs, _numbers_changed(inputs)):
            if variant is None:
                continue
            for _ in range(2):
                _same_call(module, model, variant, spec.dtype)


def _same_call(module: torch.nn.Module, model: torch.nn.Module, inputs: tuple[Any, ...], dtype: str) -> None:
    with torch.no_grad():
        torch.manual_seed(0)
        expected = module(*inputs)
        try:
            torch.manual_seed(0)
            found = model(*inputs)
        except ValueError:
            return  # a number that the graph was specialised on: refused, as it should be
    wanted, tree = _pytree.tree_flatten(expected)
    got, other = _pytree.tree_flatten(found)
    if tree != other:
        raise CaptureError("the graph returns another structure than the module")
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        _same(f"output {i}", a, b, dtype)
    buffers = dict(module.named_buffers())
    for name, b in model.named_buffers():
        _same(f"buffer {name}", buffers[name], b, dtype)


def _same(what: str, a: Any, b: Any, dtype: str) -> None:
    if not isinstance(a, torch.Tensor):
        if a != b:
            raise CaptureError(f"{what} is {b!r} from the graph, {a!r} from the module")
        return
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        raise CaptureError(
            f"{what} has shape {tuple(b.shape)}, stride {b.stride()}, {b.dtype} from the graph, "
            f"{tuple(a.shape)}, {a.stride()}, {a.dtype} from the module"
        )
    limit = TOLERANCE.get(dtype, 1e-4)
    scale = float(a.double().abs().max()) if a.numel() and a.is_floating_point() else 0.0
    close = torch.allclose(a.double(), b.double(), rtol=limit, atol=limit * max(scale, 1e-30), equal_nan=True)
    if not close:
        raise CaptureError(f"{what} differs between the graph and the module (random operators, or data decides what is computed)")


def _numbers_changed(inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    flat, tree = _pytree.tree_flatten(inputs)
    if not any(isinstance(x, float) for x in flat):
        return None
    return tuple(_pytree.tree_unflatten([x * 1.5 + 0.25 if isinstance(x, float) else x for x in flat], tree))
