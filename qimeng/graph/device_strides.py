"""Gives a graph the memory layout that its values have on a GPU.

A graph is captured on the CPU. How the result of an operator lies in memory may depend on the device: on a GPU the
kernel that PyTorch chooses decides on the layout of an attention, and cuDNN's on that of a convolution. What reads or
writes such a tensor must know, and so must what is computed from it. Deals in strides. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from qimeng.graph.convert import CaptureError
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.graph.ops import POINTWISE, RANDOM, VIEWS
from qimeng.spec.fake import fake_tensors

ATTENTION = "aten.scaled_dot_product_attention"
"""The operator, which is captured whole."""

COPYING = ("aten.view.default", "aten._unsafe_view.default")
"""Views that `aten.reshape` stands in for where the elements have to be copied."""

Metas = tuple[Meta | None, ...]

Rule = Callable[[OpGraph, Node], Metas | None]
"""What an operator returns on the device, given a graph with the layouts of what it reads; None where it is as the
operator itself says for any device. Raises `Refused` where the operator does not run there on such operands."""


class Refused(Exception):
    """A device does not run an operator on operands that lie as they do."""


def with_strides(graph: OpGraph, rule: Rule) -> OpGraph:
    """`graph` with its values laid out by `rule`, and what is computed from them laid out as PyTorch then does.

    A view that cannot be had there copies; another operator that does not run there reads copies with the strides that
    were captured, or contiguous ones. A copy into contiguous memory that needs none there is left out.

    Raises:
        CaptureError: an operator does not run on the other layout; the message names it.
    """
    nodes, moved, same = dict[str, Node](), set[Value](), dict[Value, Value]()
    found = replace(graph, nodes=nodes)
    for node in graph.nodes.values():
        node = _renamed(node, same)
        metas: Metas = node.metas
        if node.kind == "op" and node.literal is None:
            if (held := _needless(found, node, moved)) is not None and Value(node.name) not in graph.results():
                same[Value(node.name)] = held
                continue
            node, learnt = _learnt(found, nodes, node, rule)
            if learnt is not None:
                metas = learnt
            elif moved.intersection(node.operands()):
                node, metas = _run_again(graph, nodes, node)
        made = tuple(b if _moved(a, b) else a for a, b in zip(node.metas, metas, strict=True))
        nodes[node.name] = replace(node, metas=made)
        moved |= {Value(node.name, i) for i, m in enumerate(made) if m != node.metas[i]}
    if not moved:
        return graph
    outputs = map_values(graph.outputs, lambda v: same.get(v, v))
    mutations = tuple((key, same.get(v, v)) for key, v in graph.mutations)
    return replace(graph, nodes=nodes, outputs=outputs, mutations=mutations)


def seen_on(device: str) -> Rule:
    """The rule of `device`, learnt from one call of each operator with operands of the same layout.

    Views and operators on single elements are not called: they do the same everywhere. Nor are random ones, which would
    advance the device's generator. Operands hold ones, indices zeros.
    """
    known: dict[Any, list[tuple[int, ...] | None] | None] = {}
    refused = set[Any]()

    def rule(graph: OpGraph, node: Node) -> Metas | None:
        if node.packet in VIEWS | POINTWISE | RANDOM or not node.operands() or "assert" in node.packet:
            return None
        key = node.target, repr(map_values((node.args, node.kwargs), lambda v: _form(graph, v)))
        if key not in known and key not in refused:
            try:
                with torch.no_grad():
                    known[key] = _strides(_call(graph, node, device))
            except torch.AcceleratorError:  # the GPU can no longer be used, which must not be hidden
                raise
            except torch.OutOfMemoryError:  # the judge will say so
                known[key] = None
            except Exception:  # noqa: BLE001 - operators raise errors of any class
                refused.add(key)
        if key in refused:
            raise Refused(node.target)
        strides = known[key]
        return None if strides is None or len(strides) != len(node.metas) else _with(node, strides)

    return rule


def heads_inside(graph: OpGraph, node: Node) -> Metas | None:
    """The memory-efficient attention's rule where PyTorch takes it on recent GPUs: for fp32 operands and for masks.

    It stands in for a GPU that is not there, as when stored answers of one are replayed.
    """
    if node.packet != ATTENTION:
        return None
    found, query = node.metas[0], graph.meta(node.operands()[0])
    masked = len(node.args) > 3 and node.args[3] is not None or dict(node.kwargs).get("attn_mask") is not None
    grouped = dict(node.kwargs).get("enable_gqa", False)
    if found is None or len(found.shape) != 4 or grouped or not (masked or query.dtype == "float32"):
        return node.metas
    batch, heads, rows, columns = found.shape
    b, s, h, d = row_major((batch, rows, heads, columns))
    return (Meta(found.shape, (b, h, s, d), found.dtype), *node.metas[1:])


def _renamed(node: Node, same: dict[Value, Value]) -> Node:
    """`node`, which reads what stands for copies that were left out."""
    if not same.keys() & set(node.operands()):
        return node
    args, kwargs = map_values((node.args, node.kwargs), lambda v: same.get(v, v))
    return replace(node, args=args, kwargs=kwargs)


def _learnt(graph: OpGraph, nodes: dict[str, Node], node: Node, rule: Rule) -> tuple[Node, Metas | None]:
    """The operator and what `rule` says of it; it reads contiguous copies where it runs on nothing else.

    PyTorch's group normalization copies a channels-last operand on a GPU alone: a graph of the CPU has no copy.
    """
    try:
        return node, rule(graph, node)
    except Refused:
        strided = [v for v in dict.fromkeys(node.operands()) if _is_strided(graph, v)]
    tried = dict(nodes)
    changed = _reading_copies(tried, node, strided)
    try:
        learnt = rule(replace(graph, nodes=tried), changed)
    except Refused:  # not for these values, whatever their layout: the judge will say so
        return node, None
    if strided:
        nodes.update(tried)
    return changed, learnt


def _is_strided(graph: OpGraph, value: Value) -> bool:
    meta = graph.nodes[value.node].metas[value.port]
    return meta is not None and not meta.is_contiguous


def _reading_copies(nodes: dict[str, Node], node: Node, values: Sequence[Value]) -> Node:
    """`node`, which reads contiguous copies of `values`; the copies enter `nodes`."""
    copies: dict[Value, Value] = {}
    for value in values:
        meta = nodes[value.node].metas[value.port]
        assert meta is not None
        name = f"{node.name}_{len(copies)}_contiguous"
        kwargs = (("memory_format", torch.contiguous_format),)
        lies = replace(meta, stride=row_major(meta.shape))
        nodes[name] = Node(name, "op", "aten.clone.default", (value,), kwargs, (lies,))
        copies[value] = Value(name)
    return _renamed(node, copies)


def _needless(graph: OpGraph, node: Node, moved: set[Value]) -> Value | None:
    """What `node` copies into contiguous memory, where that lies so on the device already, unlike on the CPU."""
    if node.target != "aten.clone.default" or dict(node.kwargs).get("memory_format") is not torch.contiguous_format:
        return None
    (operand,) = node.operands()
    meta = graph.meta(operand)
    return operand if operand in moved and not _moved(meta, replace(meta, stride=row_major(meta.shape))) else None


def _run_again(graph: OpGraph, nodes: dict[str, Node], node: Node) -> tuple[Node, Metas]:
    """The operator and the layouts of its results, changed so that it runs; copies that it needs enter `nodes`."""
    found = replace(graph, nodes=nodes)
    errors = []
    for changed in _tries(graph, nodes, node):
        try:
            with fake_tensors():
                return changed, _with(node, _strides(_call(found, changed, "cpu")))
        except Exception as error:  # noqa: BLE001 - operators raise errors of any class
            errors.append(error)
    raise CaptureError(f"{node.target} does not run on the memory layout that this device gives it: {errors[0]}")


def _tries(graph: OpGraph, nodes: dict[str, Node], node: Node) -> Iterator[Node]:
    yield node
    if node.target in COPYING:
        yield replace(node, target="aten.reshape.default")
        return
    read = [v for v in dict.fromkeys(node.operands()) if v.node in graph.nodes]
    moved = [v for v in read if nodes[v.node].metas[v.port] != graph.meta(v) and graph.meta(v).is_contiguous]
    if moved:
        yield _reading_copies(nodes, node, moved)


def _call(graph: OpGraph, node: Node, device: str) -> Any:
    def tensor(value: Value) -> Any:
        source = graph.nodes[value.node]
        if source.kind == "scalar":
            return 1.0
        meta = graph.meta(value)
        dtype = getattr(torch, meta.dtype)
        if source.kind == "constant":
            return torch.scalar_tensor(source.literal, dtype=dtype, device=device)
        span = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True)) if meta.numel else 0
        fill = torch.ones if dtype.is_floating_point or dtype.is_complex else torch.zeros
        return fill(span, dtype=dtype, device=device).as_strided(meta.shape, meta.stride)

    namespace, name, overload = node.target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    given = {k: map_values(v, tensor) for k, v in node.kwargs if k != "device"}
    return operator(*map_values(node.args, tensor), **given)


def _form(graph: OpGraph, value: Value) -> tuple[bool, Any, Meta | None]:
    node = graph.nodes[value.node]
    return node.kind == "scalar", node.literal if node.kind == "constant" else None, node.metas[value.port]


def _strides(results: Any) -> list[tuple[int, ...] | None]:
    tensors = results if isinstance(results, (tuple, list)) else (results,)
    return [tuple(x.stride()) if isinstance(x, torch.Tensor) else None for x in tensors]


def _with(node: Node, strides: list[tuple[int, ...] | None]) -> Metas:
    """The metas of `node` with these strides."""
    return tuple(
        replace(meta, stride=stride) if meta is not None and stride is not None else meta
        for meta, stride in zip(node.metas, strides, strict=True)
    )


def _moved(a: Meta | None, b: Meta | None) -> bool:
    """Whether elements of the one lie otherwise than those of the other."""
    if a is None or b is None or not a.numel:
        return False
    return any(n > 1 and s != t for n, s, t in zip(a.shape, a.stride, b.stride, strict=True))


__all__ = ["Refused", "Rule", "heads_inside", "seen_on", "with_strides"]
