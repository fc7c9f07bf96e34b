"""The sizes that stand in a file of KernelBench's form.

Deals in finding and changing them in the text. Knows nothing about whether the changed file runs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any


def rewritten(text: str, table: Mapping[int, int]) -> tuple[str, list[int]]:
    """The file with its sizes changed by `table`, and the sizes that stand in it.

    Sizes are integers, or sums and products of integers, in assignments at the top of the file and in the two
    functions that make inputs; what is derived from names follows by itself, and the module is left alone.
    """
    tree, rewrite = ast.parse(text), _Sizes(table)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            node.value = rewrite.visit(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"):
            node.body = [rewrite.visit(statement) for statement in node.body]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", rewrite.seen


class _Sizes(ast.NodeTransformer):
    def __init__(self, table: Mapping[int, int]):
        self.table, self.seen = table, list[int]()

    def visit(self, node: ast.AST) -> Any:
        value = _integer(node)
        if value is None:
            return self.generic_visit(node)
        self.seen.append(value)
        return ast.Constant(self.table.get(value, value))


def _integer(node: ast.AST) -> int | None:
    """The value of an expression of integers alone."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _integer(node.left), _integer(node.right)
        if left is not None and right is not None and not (isinstance(node.op, ast.FloorDiv) and right == 0):
            return _ARITHMETIC[type(node.op)](left, right)
    return None


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


__all__ = ["rewritten"]
