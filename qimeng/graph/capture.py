"""From a module and fake inputs to an `OpGraph`, by torch.export.

Deals in export, decomposition and naming. Allocates nothing for inputs or weights. Knows nothing about what is done
with the graph; whether the graph is right is for `qimeng.graph.verify` to say.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value

KEPT = (
    "native_layer_norm native_group_norm _softmax _log_softmax logsumexp linalg_vector_norm gelu silu mish elu selu celu "
    "hardswish hardsigmoid hardtanh leaky_relu softplus relu relu6 sigmoid tanh log_sigmoid_forward linear addmm baddbmm "
    "var_mean scaled_dot_product_attention"
).split()
"""Operators kept whole although the default table takes them apart (`../shared/reference/capture.md`)."""


class CaptureError(SpecError):
    """The computation cannot be written as one static graph; it stays one PyTorch region."""


def capture(make_module: Callable[[], torch.nn.Module], make_inputs: Callable[[], tuple[Any, ...]]) -> OpGraph:
    """The graph of `make_module()(*make_inputs())`.

    Both run under fake tensors: nothing is allocated. Python floats among the inputs become 0-dimensional tensors so
    that the graph holds for any number; where that does not export they are specialised and guarded.

    Raises:
        CaptureError: torch.export refuses the computation; the message names the reason.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module, inputs = make_module(), tuple(make_inputs())
        for p in module.parameters():
            p.requires_grad_(False)
        leaves, in_spec = _pytree.tree_flatten((inputs, {}))
        floats = [i for i, x in enumerate(leaves) if isinstance(x, float)]
        if floats:
            try:
                as_tensors = list(leaves)
                for i in floats:
                    as_tensors[i] = torch.empty((), dtype=torch.float64)
                args, _ = _pytree.tree_unflatten(as_tensors, in_spec)
                return _convert(_export(module, args), in_spec, leaves, set(floats))
            except CaptureError:
                pass
        return _convert(_export(module, inputs), in_spec, leaves, set())


def _export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    table = torch.export.default_decompositions()
    for op in list(table):
        if isinstance(op, torch._ops.OpOverload) and op.name().split("::")[1].split(".")[0] in KEPT:
            table.pop(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(module, inputs, strict=False).run_decompositions(table)
        except Exception as error:  # torch.export raises many classes of its own, none of them public
            first = str(error).strip().splitlines() or [""]
            raise CaptureError(f"torch.export: {type(error).__name__}: {first[0][:300]}") from error


def _convert(exported: Any, in_spec: Any, leaves: list[Any], floats: set[int]) -> OpGraph:
    signature = exported.graph_signature
    kinds = torch.export.graph_signature.InputKind
    nodes: dict[str, Node] = {}
    rename: dict[str, Value] = {}
    sources = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
    users = [spec for spec in signature.input_specs if spec.kind == kinds.USER_INPUT]
    position = {spec.arg.name: i for i, spec in enumerate(users) if hasattr(spec.arg, "name")}
    for fx in exported.graph.nodes:
        if fx.op == "placeholder":
            node = _source(exported, fx, sources.get(fx.name), position, floats, kinds)
            if node is not None:
                nodes[fx.name] = node
                rename[fx.name] = Value(fx.name)
        elif fx.op == "call_function" and fx.target is operator.getitem:
            base, port = fx.args
            rename[fx.name] = Value(rename[base.name].node, int(port))
        elif fx.op == "call_function":
            nodes[fx.name] = _operator(fx, rename)
            rename[fx.name] = Value(fx.name)
        elif fx.op not in ("output",):
            raise CaptureError(f"graph node {fx.op} {fx.target} is not supported")
    out_kinds = torch.export.graph_signature.OutputKind
    outputs: list[Any] = []
    mutations: list[tuple[str, Value]] = []
    for spec in signature.output_specs:
        if spec.kind == out_kinds.BUFFER_MUTATION:
            mutations.append((spec.target, rename[spec.arg.name]))
        elif spec.kind == out_kinds.USER_OUTPUT:
            outputs.append(rename[spec.arg.name] if hasattr(spec.arg, "name") and spec.arg.name in rename else getattr(spec.arg, "value", None))
        else:
            raise CaptureError("the computation changes its inputs")
    scalars = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor) and i not in floats}
    graph = OpGraph(
        nodes=nodes,
        outputs=tuple(outputs),
        mutations=tuple(mutations),
        in_spec=_pytree.treespec_dumps(in_spec),
        out_spec=_pytree.treespec_dumps(exported.call_spec.out_spec),
        scalars=scalars,
        n_inputs=len(leaves),
    )
    return _prune(graph)


def _source(exported: Any, fx: Any, spec: Any, position: dict[str, int], floats: set[int], kinds: Any) -> Node | None:
    value = fx.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    metas = (_meta(value),)
    if spec.kind == kinds.PARAMETER:
        return Node(fx.name, "parameter", spec.target, metas=metas)
    if spec.kind == kinds.BUFFER:
        if not spec.persistent:
            raise CaptureError(f"buffer {spec.target} is not in the state_dict (persistent=False)")
        return Node(fx.name, "buffer", spec.target, metas=metas)
    if spec.kind == kinds.CONSTANT_TENSOR:
        raise CaptureError(f"the module holds a tensor that is no parameter or buffer ({spec.target})")
    index = position[fx.name]
    return Node(fx.name, "scalar" if index in floats else "input", str(index), metas=metas)


def _operator(fx: Any, rename: dict[str, Value]) -> Node:
    if not isinstance(fx.target, torch._ops.OpOverload):
        raise CaptureError(f"{fx.target} is not an ATen operator")

    def convert(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return rename[item.name]
        if isinstance(item, (list, tuple)):
            return tuple(convert(i) for i in item)
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError("a size depends on data")
        return item

    value = fx.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    target = str(fx.target)
    if target == "aten.scalar_tensor.default":
        return Node(fx.name, "constant", "", metas=(_meta(values[0]),), literal=fx.args[0])
    return Node(
        fx.name,
        "op",
        target,
        args=convert(fx.args),
        kwargs=tuple((k, convert(v)) for k, v in fx.kwargs.items()),
        metas=tuple(_meta(v) if isinstance(v, torch.Tensor) else None for v in values),
    )


def _meta(value: torch.Tensor) -> Meta:
    return Meta(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))


def _prune(graph: OpGraph) -> OpGraph:
    """Drop operators whose results nothing needs; sources stay, since they are the module's face."""
    needed = {v.node for v in graph.results()}
    for node in reversed(graph.nodes.values()):
        if node.name in needed:
            needed.update(v.node for v in node.operands())
    kept = {n.name: n for n in graph.nodes.values() if n.name in needed or n.kind in ("input", "parameter", "buffer", "scalar")}
    return OpGraph(kept, graph.outputs, graph.mutations, graph.in_spec, graph.out_spec, graph.scalars, graph.n_inputs)
