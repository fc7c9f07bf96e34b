"""The identity of a program: its graph, partition and implementations, not its printed text.

Deals in content hashes. The layout of `program.source`, its helpers, comments and docstrings do not count. Nor do the
names of nodes, which may change between exports, and what only estimates of time read (`OpGraph.shares`). Knows nothing
about the stores that use the hashes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import Node, OpGraph, Surroundings, Value, map_values
from qimeng.graph.region import Region
from qimeng.program.content import digest_of, digest_of_texts, list_of, text_of
from qimeng.program.implementation import Implementation, schedule_content, torch_implementation

IDENTITY = 2
"""Number of the rule by which programs are named; higher whenever one and the same program gets another digest.

1 was the hash of the printed text. Stores, trees and recipes say which one they were written under.
"""

_graphs: WeakKeyDictionary[OpGraph, str] = WeakKeyDictionary()


def program_digest(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]], launch: str = "") -> str:
    """Hash of `graph`, of the regions in the order in which they run, each with its implementation, and of the launch.

    Kernels that are launched one by one, as usual, add nothing.
    """
    known: dict[Any, str] = graph.memo.setdefault("contents", {})

    def part(region: Region, implementation: Implementation) -> str:
        """The text of one region; kept, since the programs of a search differ in few."""
        key = region.nodes, region.outputs, implementation
        if key not in known:
            number = graph.position
            nodes, outputs = [number[n] for n in region.nodes], [[number[v.node], v.port] for v in region.outputs]
            known[key] = text_of([nodes, outputs, implementation_content(region, implementation)])
        return known[key]

    texts = [text_of("program"), text_of(graph_digest(graph)), list_of(part(*it) for it in parts)]
    return digest_of_texts([*texts, *([text_of(launch)] if launch else [])])


def fallback_digest(text: str) -> str:
    """Hash of a program that is its own reference: what its code says, without comments, docstrings and layout."""
    return digest_of("fallback", _code(text))


def graph_digest(graph: OpGraph) -> str:
    """Hash of what is computed: operators with attributes, shapes, dtypes and strides, constants, inputs, results."""
    if graph not in _graphs:
        _graphs[graph] = _graph_digest(graph)
    return _graphs[graph]


def implementation_content(region: Region, implementation: Implementation) -> Any:
    """What stands for `implementation` of `region` in a program's hash.

    PyTorch's is known from the region. Of any other all fields count; names that were made from the region's signature,
    which is the hash of a text, stand there without it.
    """
    if implementation == torch_implementation(region):
        return "torch"
    i, signature = implementation, region.signature

    def unnamed(text: str) -> Any:
        if "\0" in text:  # the marks are unique to what is written here: two texts never become equal
            return ["as it is", text]
        return text.replace(signature, "\0whole\0").replace(signature[:8], "\0half\0")

    names = [unnamed(text) for text in (i.source, i.entry, i.prepare)]
    return [i.language, *names, list(i.prepare_inputs), schedule_content(i.schedule)]


def _graph_digest(graph: OpGraph) -> str:
    number = graph.position

    def numbered(tree: Any) -> Any:
        return map_values(tree, lambda v: Value(str(number[v.node]), v.port))

    def described(node: Node) -> list[Any]:
        attributes = [[k, numbered(v)] for k, v in node.kwargs if k != "device"]  # where it was captured
        return [node.kind, node.target, numbered(node.args), attributes, node.metas, node.literal]

    return digest_of(
        "graph",
        [described(node) for node in graph.nodes.values()],
        numbered(graph.outputs),
        [[key, numbered(value)] for key, value in graph.mutations],
        graph.in_spec if graph.in_spec.parts else "",
        graph.out_spec,
        graph.scalars,
        graph.n_inputs,
        graph.training,
        graph.call,
        *(["settles"] if graph.settles else []),
        *(["deterministic"] if graph.deterministic else []),
        *([] if graph.around is None else [_around(graph.around, number)]),
    )


def _around(around: Surroundings, number: dict[str, int]) -> list[Any]:
    return [sorted([number[v.node], v.port] for v in values) for values in (around.decides, around.shows)]


def _code(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


__all__ = ["IDENTITY", "fallback_digest", "graph_digest", "implementation_content", "program_digest"]
