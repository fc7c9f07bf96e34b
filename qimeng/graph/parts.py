"""Parts of an exported graph that no operator of fixed sizes can express: each becomes one piece of PyTorch code.

Examples are sizes and numbers that depend on data, control flow inside the graph (cond, while_loop, scan …) and error
checks. Such nodes are grouped so that every input and output of a group is a tensor of fixed size. The group's text
runs as it is. Knows nothing about the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch

from qimeng.graph import refusals

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that are known only once the computation runs."""

IGNORED = (
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)
"""What torch.export notes about sizes; a run on real values needs none of it."""

_SIGNS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=",
    operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_CALLS = {operator.neg: "-", operator.not_: "not ", operator.pos: "+"}


class NoPart(ValueError):
    """The odd nodes cannot be written as a piece of code; the message says why."""


@dataclass(frozen=True)
class Part:
    """A group of odd nodes.

    Attributes:
        nodes: of the exported graph, in order.
        inputs: nodes outside whose values it reads.
        outputs: its nodes whose values are read outside.
        text: a Python function ``part`` of the inputs' values that returns a tuple of the outputs' values.
        label: its operators in short.
    """

    nodes: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    text: str
    label: str


def _label(nodes: Iterable[Any]) -> str:
    names = [name_of(n.target) for n in nodes if n.op == "call_function" and n.target is not operator.getitem]
    return "_".join(dict.fromkeys(n for n in names if n.isidentifier()))[:60]


def name_of(target: Any) -> str:
    """An operator's name without its overload."""
    return str(getattr(target, "__name__", target)).split(".")[0]


def parts_of(graph: Any, home: torch.nn.Module, results: Iterable[Any]) -> list[Part]:
    """The parts of an exported graph (`torch.fx.Graph`).

    Args:
        graph: after decomposition.
        home: the module that holds the graphs of branches and loops.
        results: nodes whose values the computation returns or stores.

    Raises:
        NoPart: a result's size depends on data, or an operator has no text.
    """
    calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr") and str(n.target) not in IGNORED]
    odd = {n for n in calls if _is_odd(n)}
    if not odd:
        return []
    together = nx.Graph()
    together.add_nodes_from(odd)
    for node in odd:
        for source in node.all_input_nodes:
            if source in odd and (_is_dynamic(source) or not _is_tensor(source)):
                together.add_edge(source, node)
            elif _is_effect(node) and source.op == "call_function" and not _is_token(source):
                together.add_edges_from((node, made) for made in _made_with(source))  # checked where it is made
    member = {n: i for i, group in enumerate(nx.connected_components(together)) for n in group}
    found = []
    for group in _acyclic(calls, member):
        if any(_is_odd(n) and n.op == "call_function" for n in group):
            found.append(_part(home, group, set(results)))
    return found


def _acyclic(calls: Sequence[Any], member: dict[Any, int]) -> list[list[Any]]:
    """The groups of two or more, or of one odd node, made larger where something lies between two nodes of one."""
    flow = nx.DiGraph()
    home = {n: ("group", member[n]) if n in member else n for n in calls}
    for node in calls:
        flow.add_node(home[node])
        flow.add_edges_from((home[s], home[node]) for s in node.all_input_nodes if s in home and home[s] != home[node])
    whole = {place: i for i, places in enumerate(nx.strongly_connected_components(flow)) for place in places}
    groups: dict[int, list[Any]] = {}
    for node in calls:
        groups.setdefault(whole[home[node]], []).append(node)
    return [g for g in groups.values() if any(n in member for n in g)]


def _part(home: torch.nn.Module, nodes: list[Any], results: set[Any]) -> Part:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside and not _is_token(s)))
    read = {n: n in results or any(str(u.target) not in IGNORED for u in set(n.users) - inside) for n in nodes}
    outputs = tuple(n for n in nodes if read[n] and n.op == "call_function" and not _is_token(n))
    for n in outputs:
        if _is_dynamic(n) or not _is_tensor(n):
            raise NoPart(refusals.of_result(n))
    if not outputs:
        raise NoPart("an operator has an effect besides its results, such as an error check or a print")
    kept = _needed(nodes, outputs)
    names = {n: f"x{i}" for i, n in enumerate(inputs)}
    anchor = next((names[n] for n in inputs if _is_tensor(n)), "")
    lines = [f"def part({', '.join(names.values())}):"]
    lines += _body(home, kept, names, f"{anchor}.device" if anchor else "torch.get_default_device()")
    lines.append(f"    return ({''.join(f'{names[n]}, ' for n in outputs)})")
    return Part(tuple(nodes), inputs, outputs, "\n".join(lines) + "\n", _label(kept))


def _made_with(node: Any) -> list[Any]:
    """`node`, and where it is one of several results, the operator and all of them."""
    if node.target is not operator.getitem:
        return [node]
    return [node.args[0], *(u for u in node.args[0].users if u.target is operator.getitem)]


def _needed(nodes: list[Any], outputs: Iterable[Any]) -> list[Any]:
    """Those that `outputs` or an effect need; torch.export also computes what only its own checks read."""
    wanted = {*outputs, *(n for n in nodes if _is_effect(n))}
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [n for n in nodes if n in wanted]


# ---- what is odd


def _is_odd(node: Any) -> bool:
    if node.op == "get_attr":
        return isinstance(getattr(node.graph.owning_module, node.target, None), torch.nn.Module)
    if node.target is operator.getitem:
        return _is_odd(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return _is_dynamic(node) or any(_is_dynamic(s) for s in node.all_input_nodes)


def _is_dynamic(node: Any) -> bool:
    """Whether its value is a number that is known only at run time, or has such a size; a sparse tensor has one."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if any(t.layout is not torch.strided for t in tensors):
        return True
    sizes = [s for t in tensors for s in (*t.shape, *t.stride())]
    return any(isinstance(v, SYMBOLS) for v in (*values, *sizes))


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_effect(node: Any) -> bool:
    return name_of(node.target) == "with_effects"


def _is_token(node: Any) -> bool:
    if node.op == "placeholder":
        return str(node.name).startswith("token")
    return node.target is operator.getitem and _is_effect(node.args[0]) and node.args[1] == 0


# ---- as text


def _body(home: Any, nodes: Iterable[Any], names: dict[Any, str], device: str, indent: str = "    ") -> list[str]:
    """The statements of `nodes`; every one's text is entered into `names`."""
    lines: list[str] = []
    for node in nodes:
        name = f"v{len(names)}"
        if node.op == "get_attr":
            name = f"f{len(names)}"
            lines += _function(getattr(home, node.target), name, device, indent)
        elif node.target is operator.getitem:
            name = f"{names[node.args[0]]}[{node.args[1]}]"
        else:
            lines += [indent + line for line in _statements(node, name, names, device)]
        names[node] = name
    return lines


def _function(module: Any, name: str, device: str, indent: str) -> list[str]:
    """The graph of a branch or a loop's body as a function."""
    graph = module.graph
    given = [n for n in graph.nodes if n.op == "placeholder"]
    names = {n: f"a{i}" for i, n in enumerate(given)}
    lines = [f"{indent}def {name}({', '.join(names.values())}):"]
    rest = [n for n in graph.nodes if n.op in ("call_function", "get_attr") and str(n.target) not in IGNORED]
    lines += _body(module, rest, names, device, indent + "    ")
    out = next(n for n in graph.nodes if n.op == "output")
    return [*lines, f"{indent}    return {_text(out.args[0], names, device)}"]


def _statements(node: Any, name: str, names: dict[Any, str], device: str) -> list[str]:
    def text(item: Any) -> str:
        return _text(item, names, device)

    target, args = node.target, node.args
    if target in _SIGNS:
        return [f"{name} = ({text(args[0])} {_SIGNS[target]} {text(args[1])})"]
    if target in _CALLS:
        return [f"{name} = ({_CALLS[target]}{text(args[0])})"]
    keywords = [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    given = ", ".join([*map(text, args), *keywords])
    if isinstance(target, torch._ops.OpOverload):
        return [f"{name} = torch.ops.{target}({given})"]
    short = name_of(target)
    if short == "with_effects":
        inner = ", ".join([*map(text, args[2:]), *keywords])
        made = len(args[1]._schema.returns)
        return [f"{name} = torch.ops.{args[1]}({inner})", f"{name} = (None, {'*' if made > 1 else ''}{name})"]
    if short == "cond":
        chosen = f"{text(args[1])} if {text(args[0])} else {text(args[2])}"
        return [f"{name} = ({chosen})({', '.join(map(text, args[3]))})"]
    if short == "while_loop":
        more = "".join(f", {text(a)}" for a in args[3])
        return [
            f"{name} = {text(tuple(args[2]))}",
            f"while {text(args[0])}(*{name}{more}):",
            f"    {name} = {text(args[1])}(*{name}{more})",
        ]
    if short == "scan":
        kept, over, more = len(args[1]), text(tuple(args[2])), "".join(f", {text(a)}" for a in args[3])
        return [
            f"{name}, s{name} = list({text(tuple(args[1]))}), []",
            f"for i in range({over}[0].shape[0]):",
            f"    r{name} = {text(args[0])}(*{name}, *[x[i] for x in {over}]{more})",
            f"    {name} = list(r{name}[:{kept}])",
            f"    s{name}.append(r{name}[{kept}:])",
            f"{name} = (*{name}, *[torch.stack(y) for y in zip(*s{name})])",
        ]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return [f"{name} = torch.ops.higher_order.{short}({given})"]
    if getattr(torch, short, None) is target:
        return [f"{name} = torch.{short}({given})"]
    raise NoPart(f"{target} is not an ATen operator")


def _text(item: Any, names: dict[Any, str], device: str) -> str:
    from qimeng.graph.region import literal

    if isinstance(item, torch.fx.Node):
        return "None" if _is_token(item) else names[item]
    if isinstance(item, (tuple, list)):
        inner = "".join(f"{_text(i, names, device)}, " for i in item)
        return f"({inner})" if isinstance(item, tuple) else f"[{inner}]"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v, names, device)}" for k, v in item.items()) + "}"
    if isinstance(item, torch.device):
        return device
    if isinstance(item, SYMBOLS):
        raise NoPart("a size depends on data in a way that has no text")
    return literal(item)


__all__ = ["IGNORED", "SYMBOLS", "NoPart", "Part", "name_of", "parts_of"]
