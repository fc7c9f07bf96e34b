"""`torch.compile(model, backend="qimeng")`: each graph that Dynamo captures runs a generated program.

Deals in Dynamo's graphs. PyTorch finds `compile_graph` by an entry point. Source:
https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_custom_backends.html.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from qimeng.errors import QimengError
from qimeng.integration.dispatch import Dispatch, FallbackWarning, attach
from qimeng.integration.models import check_names, optimize
from qimeng.integration.parts import WHOLE
from qimeng.integration.variant import Variant
from qimeng.program.load import load_source

SECONDS = 120.0
"""Wall-clock budget of a graph."""
INSTANCES = 256
"""Sets of parameters, such as those of equal layers, for which a graph keeps a program; the oldest gives way."""


class Lifted(nn.Module):
    """A graph that takes parameters as inputs, as a module that has them.

    Args:
        graph: Dynamo's graph.
        tensors: its parameters, by their position among the inputs.
    """

    def __init__(self, graph: torch.fx.GraphModule, tensors: Mapping[int, nn.Parameter]):
        super().__init__()
        self.graph, self.positions = graph, tuple(tensors)
        for position, tensor in tensors.items():
            self.register_parameter(f"input_{position}", tensor)

    def forward(self, *others: torch.Tensor) -> Any:
        """What the graph returns for the inputs that are no parameters."""
        inputs = list(others)
        for position in self.positions:
            inputs.insert(position, getattr(self, f"input_{position}"))
        return self.graph(*inputs)


class CompiledGraph:
    """A graph with programs; the graph itself runs where none fits, as where gradients are needed.

    Args:
        graph: Dynamo's graph.
        inputs: example inputs, parameters among them.
        options: arguments of `optimize`.
    """

    def __init__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]):
        self.graph = graph
        self.positions = tuple(i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter))
        self.modules: dict[tuple[int, ...], Lifted] = {}
        self.variants: list[Variant] = []
        module = self.module(inputs)
        optimize(module, self._others(inputs), inplace=True, **{"seconds": SECONDS, "parts": WHOLE, **options})
        dispatch = module.__dict__.get("forward")
        found = dispatch.variants.values() if isinstance(dispatch, Dispatch) else ()
        self.variants = [v for v in found if isinstance(v, Variant)]
        if not self.variants:
            self.modules.clear()  # a recording of the graph would serve these parameters alone

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What the graph returns."""
        if not self.variants:
            return self.graph(*inputs)
        return self.module(inputs)(*self._others(inputs))

    def module(self, inputs: Sequence[Any]) -> Lifted:
        """The graph with the parameters among `inputs`, and with the programs that were found."""
        key = tuple([id(inputs[i]) for i in self.positions])
        found = self.modules.get(key)
        if found is None:
            if len(self.modules) >= INSTANCES:
                del self.modules[next(iter(self.modules))]
            found = self.modules[key] = Lifted(self.graph, {i: inputs[i] for i in self.positions})
            for v in self.variants:
                attach(found, Variant(v.key, load_source(v.source).Model(), v.source, v.form, v.outputs))
        return found

    def _others(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple([x for i, x in enumerate(inputs) if i not in self.positions])


def compile_graph(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Optimize one graph of Dynamo's.

    Args:
        graph: Dynamo's graph.
        inputs: its example inputs. Graphs with sizes that may change stay on PyTorch: ``dynamic=False`` prevents them.
        options: arguments of `qimeng.optimize`, given as ``torch.compile(..., options={"seconds": 60})``; by default
            120 seconds a graph.
        mode: ``torch.compile``'s; this backend has none.

    Returns:
        What computes the graph.

    Raises:
        ValueError: a mode.
        TypeError: an option that `qimeng.optimize` does not have.
    """
    own = inspect.signature(optimize).parameters
    check_names({name: option for name, option in (options or {}).items() if name not in own})
    if mode is not None:
        raise ValueError(f"backend qimeng has no mode {mode!r}; a precision mode goes into options={{'mode': 'high'}}")
    if not all(type(x) in (torch.Tensor, nn.Parameter) for x in inputs) or not inputs:
        kind = "sizes that may change" if any(isinstance(x, torch.SymInt) for x in inputs) else "no plain tensors"
        kind = "no values" if any(isinstance(x, FakeTensor) for x in inputs) else kind
        warnings.warn(f"a graph stays on PyTorch: its inputs have {kind}", FallbackWarning, stacklevel=2)
        return graph.forward
    try:
        return CompiledGraph(graph, inputs, options or {})
    except QimengError as error:
        warnings.warn(f"a graph stays on PyTorch: {error}", FallbackWarning, stacklevel=2)
        return graph.forward


__all__ = ["CompiledGraph", "Lifted", "compile_graph"]
