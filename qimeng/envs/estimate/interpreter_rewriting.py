"""How Triton's interpreter gets the text that it runs, without reading it twice.

The interpreter turns each kernel into a function whose assignments make tensors. For each it splits the file into
tokens, twice, and visits every expression. Here a file is parsed once, statements alone are visited, and a text that
other files have as well (helpers stand in every printed program) is compiled once. Deals in text and code; knows
nothing about what is computed.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any


def rewrite_quickly() -> None:
    """Replace how Triton's interpreter rewrites functions; what cannot be found is left to its own way."""
    from triton.runtime import interpreter

    rewriter: Any = interpreter.FunctionRewriter
    slowly = rewriter.rewrite_ast

    def rewrite_ast(self: Any) -> Any:
        found = _compiled(self.fn.__code__, self.fn.__globals__)
        if found is None:
            return slowly(self)
        space, names = {**self.kwargs}, self.fn.__globals__
        for key, value in vars(interpreter).items():
            names.setdefault(key, value)
        exec(found, names, space)
        return space[self.fn.__name__]

    rewriter.rewrite_ast = rewrite_ast


def _compiled(code: CodeType, names: dict[str, Any]) -> CodeType | None:
    """What defines the function of `code` anew; None where its text is not to be found."""
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, names)
    place = _places(code.co_filename, "".join(lines)).get((code.co_name, code.co_firstlineno))
    if place is None:
        return None
    first, last = place
    return _placed(_of_text("".join(lines[first - 1 : last])), code.co_filename, first - 1)


@lru_cache(maxsize=8)
def _places(file: str, text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """The first and last line of the functions at the top of `text`, by name and line of the first decorator."""
    try:
        tree = ast.parse(text, file)
    except (SyntaxError, ValueError):
        return {}
    return {
        (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): (node.lineno, node.end_lineno or 0)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@lru_cache(maxsize=4096)
def _of_text(text: str) -> CodeType:
    """The function that `text` begins with, as the interpreter runs it, in lines from 1 of a file without a name."""
    tree = ast.parse(text)
    for statement in _statements(tree):
        if isinstance(statement, ast.Assign):
            if len(statement.targets) > 1:
                raise ValueError("Multiple assignments are not supported")
            statement.value = _as_tensor(statement.value)
    return compile(tree, "", "exec")


def _statements(node: Any) -> Iterator[ast.stmt]:
    for part in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(node, part, ()):
            yield statement
            yield from _statements(statement)


def _as_tensor(value: ast.expr) -> ast.Call:
    """``interpreter_semantic.to_tensor(value, False)``, at the place of `value`."""
    name = ast.Name("interpreter_semantic", ast.Load())
    call = ast.Call(ast.Attribute(name, "to_tensor", ast.Load()), [value, ast.Constant(False)], [])
    for made in (call, call.func, name, call.args[1]):
        ast.copy_location(made, value)
    return call


def _placed(code: CodeType, file: str, lines: int) -> CodeType:
    """`code`, and what is defined in it, `lines` further below in `file`."""
    parts = tuple(_placed(part, file, lines) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_filename=file, co_firstlineno=code.co_firstlineno + lines, co_consts=parts)


__all__ = ["rewrite_quickly"]
