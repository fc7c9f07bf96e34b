"""The names in a Python text: what a statement defines, what it reads from its module, and renaming.

Deals in syntax trees and positions, so that comments and layout stay. Knows nothing about kernels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCOPES = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)
_HEAD = re.compile(rb"(?:async\s+)?(?:def|class)\s+")


def bound(statement: ast.AST) -> set[str]:
    r"""Names that `statement` binds in the scope that it stands in.

    >>> sorted(bound(ast.parse("for i in x:\n    a, b = i\n    import c.d, e as f").body[0]))
    ['a', 'b', 'c', 'f', 'i']
    """
    names: set[str] = set()
    for node in _here(statement):
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def used(statement: ast.AST) -> set[str]:
    """Names of its module (or builtins) that `statement` reads, at any depth.

    >>> sorted(used(ast.parse("def f(x, n=N): return [g(i) for i in x], f'{h}'").body[0]))
    ['N', 'g', 'h']
    """
    return {name.id for name, _ in _module_names(statement) if isinstance(name.ctx, ast.Load)}


def renamed(text: str, new: Mapping[str, str]) -> str:
    r"""`text`, whose lines end in ``\n``, with names of the module changed wherever they mean the module's.

    >>> print(renamed("def f(x, n): return f(x, n=n), x.f, n, m, f'{m}'  # f", {"f": "gg", "n": "k", "m": "mm"}))
    def gg(x, n): return gg(x, n=n), x.f, n, mm, f'{mm}'  # f
    >>> renamed("from a import b, c", {"b": "d"})
    'from a import b as d, c'
    """
    tree = ast.parse(text)
    data = text.encode()
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits: dict[tuple[int, int], str] = {}
    strings: dict[int, ast.JoinedStr] = {}
    for name, string in _module_names(tree):
        if name.id in new:
            word = new[name.id]
            if string is None:
                at = starts[name.lineno - 1] + name.col_offset
                edits[at, at + len(name.id.encode())] = word
            else:  # before Python 3.12 the places inside of one are wrong: it is written anew
                name.id, strings[id(string)] = word, string
    for string in strings.values():
        edits[_span(string, starts)] = ast.unparse(string)
    for node in _here(tree):
        if isinstance(node, _DEFINITIONS) and node.name in new:
            head = _HEAD.match(data, starts[node.lineno - 1] + node.col_offset)
            assert head is not None
            edits[head.end(), head.end() + len(node.name.encode())] = new[node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom) and bound(node) & set(new):
            for alias in node.names:
                alias.asname = new.get(alias.asname or alias.name, alias.asname)
            edits[_span(node, starts)] = ast.unparse(node)
    for (at, end), word in sorted(edits.items(), reverse=True):
        data = data[:at] + word.encode() + data[end:]
    return data.decode()


def _span(node: ast.expr | ast.stmt, starts: Sequence[int]) -> tuple[int, int]:
    """Where `node` begins and ends in the text, in bytes."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _here(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is in it, but not what is inside of other scopes; in no order."""
    waiting = [node]
    while waiting:
        yield (found := waiting.pop())
        if not isinstance(found, _SCOPES):
            waiting.extend(ast.iter_child_nodes(found))


def _module_names(node: ast.AST) -> Iterator[tuple[ast.Name, ast.JoinedStr | None]]:
    """Names in `node` that mean the module's, and the outermost f-string that each is in; in no order."""
    waiting: list[tuple[ast.AST, frozenset[str], ast.JoinedStr | None]] = [(node, frozenset(), None)]
    while waiting:
        found, hidden, string = waiting.pop()
        if isinstance(found, ast.Name):
            if found.id not in hidden:
                yield found, string
            continue
        if isinstance(found, ast.JoinedStr):
            string = string or found
        inner, inside = hidden, frozenset[int]()
        if isinstance(found, _SCOPES):
            body, local = _scope(found)
            inner, inside = hidden | local, frozenset(map(id, body))
        for child in ast.iter_child_nodes(found):
            within = inner if id(child) in inside else hidden
            if isinstance(found, ast.ClassDef) and isinstance(child, _FUNCTIONS):
                within = hidden  # functions of a class do not see its names
            waiting.append((child, within, string))


def _scope(node: ast.AST) -> tuple[list[ast.AST], frozenset[str]]:
    """The parts of `node` that are a scope of their own, and the names that are bound there."""
    if isinstance(node, _COMPREHENSIONS):
        targets = [g.target for g in node.generators]
        parts = [p for p in ast.iter_child_nodes(node)]
        return parts, frozenset().union(*map(bound, targets))
    assert isinstance(node, (*_FUNCTIONS, ast.ClassDef))
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    names = set().union(*map(bound, body))
    if not isinstance(node, ast.ClassDef):
        a = node.args
        names |= {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p is not None}
    return body, frozenset(names)


__all__ = ["bound", "renamed", "used"]
