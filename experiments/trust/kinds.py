"""What the expressions of a kernel are: indices, addresses, masks or values.

Deals in the syntax trees of ``@triton.jit`` functions. A guess from how names are made, good enough to tell a mistake
in an index from one in a formula. Knows nothing about mutations.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_INDEX_CALLS = frozenset("program_id num_programs arange cdiv multiple_of max_contiguous range".split())
_SAME_AS_ARGUMENT = frozenset("minimum maximum broadcast_to where reshape trans".split())


def is_jit(function: ast.FunctionDef) -> bool:
    """Whether `function` is a kernel, or part of one."""
    return any("jit" in ast.unparse(d) for d in function.decorator_list)


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The kernels at the top of a module, in the order of the text."""
    return [s for s in tree.body if isinstance(s, ast.FunctionDef) and is_jit(s)]


class Kinds:
    """Tells expressions apart.

    An expression is an ``"index"``, a ``"pointer"``, a ``"mask"`` (indices compared), a ``"flag"`` (values compared), a
    ``"start"`` (zeros, before anything is added to them) or a ``"value"``.

    Args:
        functions: all kernels of a module; what one passes to another is followed.
    """

    def __init__(self, functions: Sequence[ast.FunctionDef]):
        self._functions = {f.name: f for f in functions}
        self._tables = {f.name: _parameters(f) for f in functions}
        self._names: dict[str, str] = {}
        self._values: list[str] = []
        for _ in range(2):  # a function may be called below its own text
            for function in functions:
                self._names = self._tables[function.name]
                for statement in ast.walk(function):
                    self._note(statement)
        self._at = ""

    def enter(self, function: ast.FunctionDef, statement: ast.stmt) -> None:
        """Go on to `statement` of `function`; the statements of a function come in the order of its text."""
        if self._at != function.name:
            self._at, self._values = function.name, []
        self._names = self._tables[function.name]
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if self._names.get(name) == "value" and name not in self._values:
                self._values.append(name)

    def other_value(self, name: str) -> str | None:
        """A value made before the statement at hand, other than `name` and its own target; None where there is none."""
        others = [v for v in self._values[:-1] if v != name]
        return others[-1] if others else None

    def of(self, node: ast.AST) -> str:
        """What `node` is."""
        if isinstance(node, ast.Constant):
            return "index" if type(node.value) is int else "value"
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "value")
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.of(node.value)
        if isinstance(node, ast.UnaryOp):
            return self.of(node.operand)
        if isinstance(node, ast.Compare):
            return "mask" if all(self.of(x) == "index" for x in (node.left, *node.comparators)) else "flag"
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return "value"

    def _binary(self, node: ast.BinOp) -> str:
        both = {self.of(node.left), self.of(node.right)}
        for kind in ("pointer", "mask", "flag"):
            if kind in both:
                return kind
        return "index" if both == {"index"} and not isinstance(node.op, ast.Div) else "value"

    def _call(self, node: ast.Call) -> str:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _INDEX_CALLS:
            return "index"
        if name in ("zeros", "full"):
            return "start"
        if name == "to" and isinstance(node.func, ast.Attribute):
            return self.of(node.func.value)
        if name in _SAME_AS_ARGUMENT and node.args:
            return self.of(node.args[1 if name == "where" and len(node.args) > 1 else 0])
        return "value"

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._names[target.id] = self.of(node.value)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            self._names[node.target.id] = "index"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._functions:
            called = self._functions[node.func.id]
            for parameter, argument in zip(called.args.args, node.args, strict=False):
                self._tables[called.name][parameter.arg] = self.of(argument)


def _parameters(function: ast.FunctionDef) -> dict[str, str]:
    found = {}
    for argument in function.args.args:
        constexpr = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
        found[argument.arg] = "index" if constexpr else "pointer" if argument.arg.endswith("_ptr") else "value"
    return found


__all__ = ["Kinds", "is_jit", "jit_functions"]
