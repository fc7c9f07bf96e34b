"""Converts an exported program to an `OpGraph`.

Deals in what torch.export's graphs are made of: sources of values, operators, views of what an operator splits, odd
parts. Knows nothing about how a program was exported.
"""

from __future__ import annotations

import base64
import hashlib
import operator
import zlib
from collections.abc import Collection
from typing import Any

import networkx as nx
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from qimeng.errors import SpecError
from qimeng.graph.leaves import STANDS_FOR, call_named
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.parts import IGNORED, SYMBOLS, NoPart, Part, parts_of
from qimeng.graph.structure import Structure, UnknownStructure, structure_of
from qimeng.spec.layers import STANDS_FOR as LAYERS


class CaptureError(SpecError):
    """The computation cannot be written as one static graph; it stays one PyTorch region.

    Attributes:
        where: name of the submodule whose code torch.export refused; empty where that is the module itself, or unknown.
        by_values: whether Python code there depends on the values of a tensor.
    """

    code = "capture"

    where = ""
    by_values = False


class ValuesNeeded(CaptureError):
    """The module holds a tensor outside its state_dict, whose values the program must carry."""


_COPIES = ("aten.clone.default", "aten.lift_fresh_copy.default", "aten.detach.default", "aten.alias.default")

_TRAINED_NORM = "aten._native_batch_norm_legit_functional.default"
"""Returns running statistics of the dtype in which it got them. PyTorch's fake tensors say float32."""


def converted(
    exported: Any,
    others: dict[str, str],
    in_spec: Structure,
    leaves: list[Any],
    floats: set[int],
    attributes: Collection[str] = (),
) -> OpGraph:
    """The graph of `exported`.

    Args:
        exported: a decomposed `torch.export.ExportedProgram`.
        others: other names of buffers that the module holds under several, to the one that is used in the graph.
        in_spec: how positional and keyword inputs are put together.
        leaves: the flattened inputs.
        floats: positions of the numbers among them that the graph holds for any value.
        attributes: buffers that are left out where nothing reads them.

    Raises:
        ValuesNeeded: there are tensors outside the state_dict, and their values are not known.
        CaptureError: something in it cannot be written into a file; the message names it.
    """
    signature = exported.graph_signature
    kinds = torch.export.graph_signature.InputKind
    nodes: dict[str, Node] = {}
    rename: dict[str, Value] = {}
    sources = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
    _check_sources(exported, kinds)
    _copies_alone(exported)
    unread = _unread(exported, attributes)
    users = [spec for spec in signature.input_specs if spec.kind == kinds.USER_INPUT]
    position = {spec.arg.name: i for i, spec in enumerate(users) if hasattr(spec.arg, "name")}
    for fx in _items(exported):
        if isinstance(fx, Part):
            part = _part(fx, rename)
            nodes[part.name] = part
            rename |= {made.name: Value(part.name, port) for port, made in enumerate(fx.outputs)}
        elif fx.op == "placeholder" and fx.name not in unread:
            node = _source(exported, fx, sources.get(fx.name), position, floats, kinds)
            if node is not None:
                nodes[fx.name] = node
                rename[fx.name] = Value(fx.name)
        elif fx.op == "call_function" and fx.target is operator.getitem:
            piece = _piece(fx, rename)
            if piece is not None:
                nodes[fx.name] = piece
            rename[fx.name] = Value(fx.name) if piece is not None else Value(rename[fx.args[0].name].node, fx.args[1])
        elif (
            fx.op == "call_function"
            and str(fx.target) in _COPIES
            and nodes[rename[fx.args[0].name].node].literal is not None
            and nodes[rename[fx.args[0].name].node].kind != "op"
        ):
            rename[fx.name] = rename[fx.args[0].name]
        elif fx.op == "call_function":
            nodes[fx.name] = _operator(fx, rename)
            rename[fx.name] = Value(fx.name)
        elif fx.op not in ("placeholder", "output"):
            raise CaptureError(f"graph node {fx.op} {fx.target} is not supported")
    outputs, mutations = _results(signature, rename, others)
    try:
        out_spec = structure_of(exported.call_spec.out_spec)
    except UnknownStructure as error:
        raise CaptureError(
            f"the module returns a {error}; return tuples, lists, dicts, named tuples or dataclasses"
        ) from None
    scalars = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor) and i not in floats}
    graph = OpGraph(
        nodes=nodes,
        outputs=tuple(outputs),
        mutations=tuple((key, value) for key, value in mutations if key not in unread.values()),
        in_spec=in_spec,
        out_spec=out_spec,
        scalars=scalars,
        n_inputs=len(leaves),
    )
    return _prune(graph)


def _results(
    signature: Any, rename: dict[str, Value], others: dict[str, str]
) -> tuple[list[Any], list[tuple[str, Value]]]:
    """What it returns, and the buffers that it updates."""
    out_kinds = torch.export.graph_signature.OutputKind
    outputs: list[Any] = []
    mutations: list[tuple[str, Value]] = []
    for spec in signature.output_specs:
        if spec.kind == out_kinds.BUFFER_MUTATION:
            names = [spec.target, *(other for other, known in others.items() if known == spec.target)]
            mutations += [(name, rename[spec.arg.name]) for name in names]
        elif spec.kind == out_kinds.USER_OUTPUT:
            name = getattr(spec.arg, "name", None)
            outputs.append(rename[name] if name in rename else getattr(spec.arg, "value", None))
        elif spec.kind != out_kinds.TOKEN:
            raise CaptureError(_changed(spec))
    return outputs, mutations


def _copies_alone(exported: Any) -> None:
    """Let a copy over a whole buffer (``self.state.copy_(x)``) be a copy of what is written, which reads no buffer."""
    specs, kind = exported.graph_signature.input_specs, torch.export.graph_signature.InputKind.BUFFER
    buffers = {spec.arg.name for spec in specs if spec.kind == kind}
    for fx in exported.graph.nodes:
        if str(fx.target) == "aten.copy.default" and fx.args[0].name in buffers:
            source, made = fx.args[1].meta["val"], fx.meta["val"]
            if (source.shape, source.dtype, source.stride()) == (made.shape, made.dtype, made.stride()):
                fx.target, fx.args, fx.kwargs = torch.ops.aten.clone.default, (fx.args[1],), {}


def _unread(exported: Any, attributes: Collection[str]) -> dict[str, str]:
    """Node and name of each buffer in `attributes` that nothing reads."""
    read = {fx.name for fx in exported.graph.nodes if any(str(user.target) not in IGNORED for user in fx.users)}
    held = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target in attributes}
    return {name: target for name, target in held.items() if name not in read}


def _items(exported: Any) -> list[Any]:
    """The nodes of the exported graph in an order in which they can run, the odd ones as parts."""
    graph = exported.graph
    named = {spec.arg.name for spec in exported.graph_signature.output_specs if hasattr(spec.arg, "name")}
    try:
        parts = parts_of(graph, exported.graph_module, [n for n in graph.nodes if n.name in named])
    except NoPart as error:
        raise CaptureError(str(error)) from None
    plain = [n for n in graph.nodes if n.op != "output" and str(n.target) not in IGNORED]
    if not parts:
        return plain
    home = {n: part for part in parts for n in part.nodes}
    flow, rank = nx.DiGraph(), {n: i for i, n in enumerate(plain)}
    for node in plain:
        flow.add_node(home.get(node, node))
        flow.add_edges_from((home.get(s, s), home.get(node, node)) for s in node.all_input_nodes)
    flow.remove_edges_from(list(nx.selfloop_edges(flow)))
    first = {part: rank[part.nodes[0]] for part in parts}
    return list(nx.lexicographical_topological_sort(flow, key=lambda item: first.get(item) or rank.get(item, 0)))


def _part(part: Part, rename: dict[str, Value]) -> Node:
    metas = tuple(_meta(fx.meta["val"]) for fx in part.outputs)
    digest = hashlib.blake2b(part.text.encode(), digest_size=4).hexdigest()
    name = f"part_{part.outputs[0].name}"
    args = tuple(rename[fx.name] for fx in part.inputs)
    return Node(name, "op", f"torch.{part.label}.{digest}", args, metas=metas, literal=part.text)


def _changed(spec: Any) -> str:
    """What an exported program changes besides buffers, in words, and what to do."""
    if spec.kind == torch.export.graph_signature.OutputKind.PARAMETER_MUTATION:
        return (
            f"it changes its parameter {spec.target} at every call. To have it optimized, do that outside of forward "
            "(an embedding's max_norm, for example), or keep what changes in a buffer"
        )
    return "it changes its inputs. To have it optimized, change a copy and return that"


def _check_sources(exported: Any, kinds: Any) -> None:
    """A program holds no objects but tensors."""
    held = (kinds.USER_INPUT, kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR, kinds.TOKEN)
    for spec in exported.graph_signature.input_specs:
        if spec.kind not in held:
            kind = type(exported.constants.get(spec.target)).__name__
            raise CaptureError(f"the module holds an object that is no tensor ({spec.target}, a {kind})")


def _source(exported: Any, fx: Any, spec: Any, position: dict[str, int], floats: set[int], kinds: Any) -> Node | None:
    value = fx.meta.get("val")
    if not isinstance(value, torch.Tensor) or spec.kind == kinds.TOKEN:
        return None
    if value.layout is not torch.strided:
        raise CaptureError(
            f"{spec.target or 'an input'} is sparse ({value.layout}), which a program cannot hold. To have it "
            "optimized, keep a dense tensor, or its indices and values"
        )
    metas = (_meta(value),)
    if spec.kind == kinds.PARAMETER:
        return Node(fx.name, "parameter", spec.target, metas=metas)
    if spec.kind == kinds.BUFFER:
        held = None if spec.persistent else _bytes(exported.constants[spec.target], spec.target)
        return Node(fx.name, "buffer", spec.target, metas=metas, literal=held)
    if spec.kind == kinds.CONSTANT_TENSOR:
        held = exported.constants[spec.target]
        if held.dim():
            return Node(fx.name, "buffer", spec.target, metas=metas, literal=_bytes(held, spec.target))
        return Node(fx.name, "constant", "", metas=metas, literal=_number(held, spec.target))
    index = position[fx.name]
    return Node(fx.name, "scalar" if index in floats else "input", str(index), metas=metas)


def _number(tensor: torch.Tensor, name: str) -> Any:
    """The number that a constant of no dimensions holds."""
    known = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    if known is None:
        raise ValuesNeeded(f"the module holds a tensor that is neither parameter nor buffer ({name})")
    with no_dispatch():
        return known.item()


MOST_BYTES = 1 << 28
"""Largest tensor that a program carries in its text."""

MOST_TEXT = 1 << 22
"""Most characters that its contents may take there, packed."""


def _bytes(tensor: torch.Tensor, name: str) -> str:
    """The contents of a tensor that is not in the state_dict, as text (zlib, base64)."""
    size, text = tensor.numel() * tensor.element_size(), ""
    if size <= MOST_BYTES:
        if isinstance(tensor, FakeTensor):
            raise ValuesNeeded(f"tensor {name} is not in the state_dict; make it a persistent buffer")
        with no_dispatch():
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
            text = base64.b64encode(zlib.compress(plain.numpy().tobytes(), 9)).decode()
    if size > MOST_BYTES or len(text) > MOST_TEXT:
        raise CaptureError(
            f"tensor {name} of {size} B is not in the state_dict and too large for the text of a program "
            f"(at most {MOST_TEXT} characters, packed); make it a persistent buffer"
        )
    return text


def _piece(fx: Any, rename: dict[str, Value]) -> Node | None:
    """One result of a split as a view of what is split; None for the result of another operator."""
    base, port = fx.args
    target = str(base.target)
    where: tuple[int, ...]
    if target == "aten.unbind.int":
        dim = base.args[1] if len(base.args) > 1 else 0
        view, where = "aten.select.int", (port,)
    elif target in ("aten.split_with_sizes.default", "aten.split.Tensor"):
        dim = base.args[2] if len(base.args) > 2 else 0
        sizes = [int(v.shape[dim]) for v in base.meta["val"]]
        view, where = "aten.slice.Tensor", (sum(sizes[:port]), sum(sizes[: port + 1]))
    else:
        return None
    whole = rename[base.args[0].name]
    return Node(fx.name, "op", view, args=(whole, dim, *where), metas=(_meta(fx.meta["val"]),))


def _operator(fx: Any, rename: dict[str, Value]) -> Node:
    if not isinstance(fx.target, torch._ops.OpOverload):
        raise CaptureError(f"{fx.target} is not an ATen operator")

    def convert(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return rename[item.name]
        if isinstance(item, (list, tuple)):
            return tuple(convert(i) for i in item)
        if isinstance(item, SYMBOLS):
            raise CaptureError(f"a size depends on data ({target})")
        return item

    target = str(fx.target)
    if target == STANDS_FOR:
        return _submodule(fx, rename)
    value = fx.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    if target == _TRAINED_NORM:
        values = (*values[:3], *(running.meta["val"] for running in fx.args[3:5]))
    sizes = [s for v in values if isinstance(v, torch.Tensor) for s in (*v.shape, *v.stride())]
    if any(isinstance(v, SYMBOLS) for v in (*values, *sizes)):
        raise CaptureError(f"a number or size depends on data ({target})")
    if target == "aten.scalar_tensor.default":
        return Node(fx.name, "constant", "", metas=(_meta(values[0]),), literal=fx.args[0])
    return Node(
        fx.name,
        "op",
        LAYERS.get(target, target),
        args=convert(fx.args),
        kwargs=tuple((k, convert(v)) for k, v in fx.kwargs.items()),
        metas=tuple(_meta(v) if isinstance(v, torch.Tensor) else None for v in values),
    )


def _submodule(fx: Any, rename: dict[str, Value]) -> Node:
    """The call of a submodule that stays as it is."""
    tensors, key = fx.args
    call = call_named(key)
    metas = tuple(_meta(v) for v in fx.meta["val"])
    args = tuple(rename[t.name] for t in tensors)
    return Node(fx.name, "op", f"torch.{call.label}.{key}", args, metas=metas, literal=call.text)


def _meta(value: torch.Tensor) -> Meta:
    return Meta(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))


def _prune(graph: OpGraph) -> OpGraph:
    """Drop operators whose results are not used. Sources stay, since they are the module's interface."""
    needed = {v.node for v in graph.results()}
    for node in reversed(graph.nodes.values()):
        if node.name in needed:
            needed.update(v.node for v in node.operands())
    kept = {
        n.name: n
        for n in graph.nodes.values()
        if n.name in needed or n.kind in ("input", "parameter", "buffer", "scalar")
    }
    return OpGraph(kept, graph.outputs, graph.mutations, graph.in_spec, graph.out_spec, graph.scalars, graph.n_inputs)


__all__ = ["CaptureError", "ValuesNeeded", "converted"]
