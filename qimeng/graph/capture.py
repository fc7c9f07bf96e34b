"""From a module and fake inputs to an `OpGraph`, by torch.export.

Deals in export, decomposition and naming. Allocates nothing for inputs or weights. Knows nothing about what is done
with the graph; whether the graph is right is for `qimeng.graph.verify` to say.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import operator
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch

from qimeng.errors import SpecError
from qimeng.graph.decompose import decomposed
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.spec.fake import fake_tensors


class CaptureError(SpecError):
    """The computation cannot be written as one static graph; it stays one PyTorch region."""


class ValuesNeeded(CaptureError):
    """The module holds a tensor outside its state_dict, whose values the program must carry."""


def capture(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], tuple[Any, ...]],
    specialise: bool = False,
    values: bool = False,
) -> OpGraph:
    """The graph of `make_module()(*make_inputs())`.

    Both run under fake tensors, so that nothing is allocated, unless `values` is set. Python floats among the inputs
    become 0-dimensional tensors so that the graph holds for any number; where that does not export, or a number does
    not meet a floating tensor in plain arithmetic (its dtype would then decide the result's), they are specialised and
    guarded.

    Args:
        make_module: makes the module.
        make_inputs: makes its positional inputs.
        specialise: specialise all numbers.
        values: make module and inputs in memory, which tensors need that are not in the state_dict.

    Raises:
        ValuesNeeded: there are such tensors and `values` is not set.
        CaptureError: the computation does not run under fake tensors, or torch.export refuses it; the message names
            the reason.
    """
    mode = contextlib.nullcontext() if values else fake_tensors()
    with mode, torch.no_grad():
        try:
            module, inputs = make_module(), tuple(make_inputs())
        except Exception as error:  # user code under fake tensors raises errors of any class
            raise CaptureError(f"cannot be made without allocating memory: {type(error).__name__}: {error}") from error
        module.requires_grad_(False)
        leaves, in_spec = _pytree.tree_flatten((inputs, {}))
        _check_inputs(inputs, leaves)
        floats = [] if specialise else [i for i, x in enumerate(leaves) if type(x) is float]
        if floats:
            try:
                as_tensors = list(leaves)
                for i in floats:
                    as_tensors[i] = torch.empty((), dtype=torch.float64)
                args, _ = _pytree.tree_unflatten(as_tensors, in_spec)
                graph = _convert(_export(module, args), in_spec, leaves, set(floats))
                if _numbers_in_plain_arithmetic(graph):
                    return graph
            except CaptureError:
                pass  # specialised below
        return _convert(_export(module, inputs), in_spec, leaves, set())


def _check_inputs(inputs: tuple[Any, ...], leaves: list[Any]) -> None:
    for x in leaves:
        if not isinstance(x, (torch.Tensor, bool, int, float, str, type(None), torch.dtype)):
            raise CaptureError(f"an input is a {type(x).__name__}, neither a tensor nor a plain number or string")
    _check_structure(inputs, "takes")


def _check_structure(tree: Any, verb: str) -> None:
    """Only tuples, lists and dicts with plain keys can be written into a standalone file."""
    if type(tree) is dict:
        for key, item in tree.items():
            if type(key) not in (str, int):
                raise CaptureError(f"the module {verb} a dict with a key of type {type(key).__name__}")
            _check_structure(item, verb)
    elif type(tree) in (tuple, list):
        for item in tree:
            _check_structure(item, verb)
    elif _pytree.tree_structure(tree).num_children:
        raise CaptureError(f"the module {verb} a {type(tree).__name__}; only tuples, lists and dicts are supported")


def _numbers_in_plain_arithmetic(graph: OpGraph) -> bool:
    """Whether each number only goes into operators of two tensors of which the other is floating.

    There a Python number may stand for a tensor, on any device, and the other's dtype is the result's.
    """
    for node in graph.ops():
        operands = [graph.nodes[v.node] for v in node.operands()]
        if any(o.kind == "scalar" for o in operands):
            packet, overload = node.target.removeprefix("aten.").rsplit(".", 1)
            schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
            kinds = [str(a.type) for a in schema.arguments if "Tensor" in str(a.type)]
            others = [graph.meta(v).dtype for v, o in zip(node.operands(), operands, strict=True) if o.kind != "scalar"]
            if kinds != ["Tensor", "Tensor"] or not any("float" in dtype for dtype in others):
                return False
    return not any(graph.nodes[v.node].kind == "scalar" for v in graph.results())


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without what torch logs (in its part `name`) and prints on a failed export, since that raises as well."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Without the look at values that torch.distributions takes at its arguments, which no graph can hold.

    PyTorch leaves it out itself where Python's assertions are off.
    """
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


def _export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    with warnings.catch_warnings(), _quiet("torch.fx.experimental.symbolic_shapes"), _unchecked_distributions():
        warnings.simplefilter("ignore")
        try:
            return decomposed(torch.export.export(module, inputs, strict=False))
        except Exception as error:  # torch.export raises many classes of its own, none of them public
            first, name = str(error).strip().splitlines() or [""], type(error).__name__
            plain = "what it does depends on the values of a tensor; " if "DataDependent" in name else ""
            raise CaptureError(f"torch.export: {plain}{name}: {first[0][:300]}") from error


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_COPIES = ("aten.clone.default", "aten.lift_fresh_copy.default", "aten.detach.default", "aten.alias.default")


def _convert(exported: Any, in_spec: Any, leaves: list[Any], floats: set[int]) -> OpGraph:
    signature = exported.graph_signature
    kinds = torch.export.graph_signature.InputKind
    nodes: dict[str, Node] = {}
    rename: dict[str, Value] = {}
    sources = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
    _check_sources(signature, kinds)
    users = [spec for spec in signature.input_specs if spec.kind == kinds.USER_INPUT]
    position = {spec.arg.name: i for i, spec in enumerate(users) if hasattr(spec.arg, "name")}
    for fx in exported.graph.nodes:
        if fx.op == "placeholder":
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
        ):
            rename[fx.name] = rename[fx.args[0].name]
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
            name = getattr(spec.arg, "name", None)
            outputs.append(rename[name] if name in rename else getattr(spec.arg, "value", None))
        else:
            raise CaptureError("the computation changes its inputs")
    out_spec = exported.call_spec.out_spec
    _check_structure(_pytree.tree_unflatten([0] * out_spec.num_leaves, out_spec), "returns")
    scalars = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor) and i not in floats}
    graph = OpGraph(
        nodes=nodes,
        outputs=tuple(outputs),
        mutations=tuple(mutations),
        in_spec=_pytree.treespec_dumps(in_spec),
        out_spec=_pytree.treespec_dumps(out_spec),
        scalars=scalars,
        n_inputs=len(leaves),
    )
    return _prune(graph)


def _check_sources(signature: Any, kinds: Any) -> None:
    """A program cannot order effects (tokens: an error check, a print) and holds no objects but tensors."""
    for spec in signature.input_specs:
        if spec.kind == kinds.TOKEN:
            raise CaptureError("an operator has an effect besides its results, such as an error check or a print")
        if spec.kind not in (kinds.USER_INPUT, kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
            raise CaptureError(f"the module holds an object that is no tensor ({spec.target})")


def _source(exported: Any, fx: Any, spec: Any, position: dict[str, int], floats: set[int], kinds: Any) -> Node | None:
    value = fx.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
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
    if known.is_complex():
        raise CaptureError(f"the module holds a complex number ({name})")
    with no_dispatch():
        return known.item()


MOST_BYTES = 1 << 20
"""Largest tensor that a program carries in its text."""


def _bytes(tensor: torch.Tensor, name: str) -> str:
    """The contents of a tensor that is not in the state_dict, as text (zlib, base64)."""
    size = tensor.numel() * tensor.element_size()
    if size > MOST_BYTES:
        raise CaptureError(
            f"tensor {name} of {size} B is not in the state_dict, and a program carries at most {MOST_BYTES} B of "
            "such; make it a persistent buffer"
        )
    if isinstance(tensor, FakeTensor):
        raise ValuesNeeded(f"tensor {name} is not in the state_dict; make it a persistent buffer")
    with no_dispatch():
        plain = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        return base64.b64encode(zlib.compress(bytes(plain.tolist()), 9)).decode()


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
        if isinstance(item, _SYMBOLS):
            raise CaptureError(f"a size depends on data ({target})")
        return item

    target = str(fx.target)
    value = fx.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = [s for v in values if isinstance(v, torch.Tensor) for s in (*v.shape, *v.stride())]
    if any(isinstance(v, _SYMBOLS) for v in (*values, *sizes)):
        raise CaptureError(f"a number or size depends on data ({target})")
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
    kept = {
        n.name: n
        for n in graph.nodes.values()
        if n.name in needed or n.kind in ("input", "parameter", "buffer", "scalar")
    }
    return OpGraph(kept, graph.outputs, graph.mutations, graph.in_spec, graph.out_spec, graph.scalars, graph.n_inputs)
