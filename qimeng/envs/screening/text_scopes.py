"""Names in a kernel's text: what a statement binds, what is local, what can be changed.

Deals in syntax trees. Knows nothing about what a text may do (`qimeng.envs.screening.allowed_text`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Scopes = tuple[frozenset[str], ...]
"""Names that the functions around a place bind, the innermost last."""


def bindings(node: ast.Import | ast.ImportFrom) -> Mapping[str, str]:
    """Local name to the dotted name that an import binds it to."""
    found = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif alias.asname:
            found[alias.asname] = alias.name
        else:
            found[alias.name.partition(".")[0]] = alias.name.partition(".")[0]
    return found


def stored(node: ast.stmt) -> list[str]:
    """Names that a statement of the file binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def bound(nodes: list[ast.stmt] | list[ast.expr]) -> frozenset[str]:
    """Names that statements bind in their own scope: not those of functions and comprehensions within."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, COMPREHENSIONS):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            found |= {n.target.id for n in inside}
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def is_global(name: str, scopes: Scopes) -> bool:
    """Whether no function around binds `name`."""
    return not any(name in scope for scope in scopes)


def root_of(node: ast.AST) -> ast.AST:
    """What an attribute or element is taken of, in the end."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def is_local(node: ast.AST, scopes: Scopes) -> bool:
    """Whether an expression is a local name, or an element of what one holds; an attribute's value may be kept."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return not is_global(node.id, scopes)
    return not isinstance(node, ast.Attribute)


def is_changeable(node: ast.AST | None) -> bool:
    """Whether a list, a table or a set is made in an expression; those of a `triton.Config` are its own."""
    if isinstance(node, (ast.List, ast.Dict, ast.Set, *COMPREHENSIONS)):
        return True
    if isinstance(node, ast.Lambda) or node is None:
        return False
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ("list", "dict", "set"):
            return True
        if name in ("Config", "tuple", "frozenset", "max", "min", "len"):
            return False
    return any(is_changeable(child) for child in ast.iter_child_nodes(node))


def elements(node: ast.expr) -> list[ast.expr]:
    """What a list, a table or a set is made of; of a comprehension also what it goes through."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    if isinstance(node, ast.Dict):
        return [*filter(None, node.keys), *node.values]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return made + [x for g in node.generators for x in elements(g.iter)]
    return [node]


__all__ = [
    "COMPREHENSIONS",
    "Scopes",
    "bindings",
    "bound",
    "elements",
    "is_changeable",
    "is_global",
    "is_local",
    "root_of",
    "stored",
]
