"""Checks that a kernel's text uses only allowed constructs; if not, gives the line and what to do instead.

A program could be wrong only after many calls, at some time of day, under another parent process or outside a sandbox.
No test run finds that. So untrusted text may only compute from its arguments. It may import, call and read only listed
names (`qimeng.envs.screening.allowed_names`), and keeps nothing between calls:

- a file holds imports, functions, small classes and constants, and constants are never changed;
- attributes are set only in the `__init__` of their own class; no `global`, no mutable defaults, no own decorators;
- no private attributes, addresses, clocks, random numbers, or names built at run time.

Buffers that are made once from parameters belong in `prepare`. Deals in syntax trees and scopes; runs nothing. What
expressions may do is `qimeng.envs.screening.allowed_expressions`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from qimeng.envs.screening.allowed_cuda import embedded_violations
from qimeng.envs.screening.allowed_expressions import Expressions, Violation
from qimeng.envs.screening.allowed_names import CUDA_FUNCTIONS, DUNDERS, may_import, may_use
from qimeng.envs.screening.text_scopes import Scopes, bound, elements, is_changeable, is_global, root_of, stored
from qimeng.envs.workers.plain_text import plain_text

HEADER = {"torch": "torch", "triton": "triton", "tl": "triton.language"}
"""What every implementation finds imported."""
CUDA_HEADER = {"torch": "torch"} | {name: name for name in CUDA_FUNCTIONS}
"""What one in CUDA C++ finds instead."""
_DECORATORS = frozenset(
    "triton.jit triton.autotune triton.heuristics torch.no_grad torch.library.custom_op torch.library.triton_op "
    "dataclasses.dataclass staticmethod classmethod property".split()
)
_BASES = frozenset("object enum.Enum enum.IntEnum typing.NamedTuple torch.autograd.Function".split())
_MAKES = frozenset(
    "triton.Config triton.language.constexpr triton.cdiv triton.next_power_of_2 collections.namedtuple tuple int float "
    "bool str min max len range frozenset abs round dict list set functools.partial typing.TypeVar enum.auto "
    "dataclasses.field".split()
)
"""What may be called to make a constant of the file."""


@lru_cache(512)
def violations(source: str, language: str = "triton") -> tuple[Violation, ...]:
    """What `source` does that no kernel's text may do, in the order of its lines.

    Args:
        source: Python text of an implementation.
        language: what it is written in; of ``"cuda"`` the CUDA C++ that it holds is looked at as well.
    """
    if plain_text(source) != source:
        number = next(i for i, line in enumerate(source.split("\n"), 1) if plain_text(line) != line)
        return (Violation(number, "a control character", "use plain line ends, and characters that can be seen"),)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return (Violation(getattr(error, "lineno", None) or 1, "syntax", f"this is no Python: {str(error)[:200]}"),)
    try:
        found = set(_File(tree, HEADER if language != "cuda" else CUDA_HEADER).look())
        if language == "cuda":
            found |= {Violation(*v) for v in embedded_violations(tree)}
    except RecursionError:
        return (Violation(1, "expressions", "they are nested deeper than any kernel needs"),)
    return tuple(sorted(found))


class _File(Expressions):
    """One text: what it imports and defines, and what its statements do with that."""

    def look(self) -> Iterator[Violation]:
        """Every violation."""
        for statement in self.tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.defined.add(statement.name)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                for name in stored(statement):
                    self.defined.add(name)
                    value = statement.value
                    dotted = self.dotted(value) if value is not None else None
                    if dotted is not None and not isinstance(value, ast.Name):
                        self.aliases[name] = dotted
                    elif is_changeable(value):
                        self.tables.add(name)
        seen: set[str] = set()
        for statement in self.tree.body:
            yield from self._top(statement)
            for name in stored(statement) if not isinstance(statement, (ast.Import, ast.ImportFrom)) else ():
                if name in self.imported and self.header.get(name) != self.imported[name] or name in self.header:
                    yield Violation(statement.lineno, name, "is the name of a module; give it another name")
                if name in seen and isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    yield Violation(statement.lineno, name, "is defined twice; give each its own name")
                seen.add(name)

    # -- statements of the file

    def _top(self, node: ast.stmt) -> Iterator[Violation]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self._import(node)
        elif isinstance(node, ast.FunctionDef):
            yield from self._function(node, ())
        elif isinstance(node, ast.ClassDef):
            yield from self._class(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if not isinstance(target, ast.Name):
                    yield Violation(node.lineno, ast.unparse(target)[:60], "a file may set names of its own only")
            if node.value is not None:
                yield from self._constant(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) or isinstance(node, ast.Pass):
            return
        else:
            text = "a file is imports, functions, classes and constants; nothing runs when it is loaded"
            yield Violation(node.lineno, ast.unparse(node).splitlines()[0][:60], text)

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Violation]:
        for alias in node.names:
            if isinstance(node, ast.Import):
                good, shown = may_import(alias.name), alias.name
            else:
                module = node.module or ""
                shown = f"{module}.{alias.name}"
                good = (
                    not node.level
                    and alias.name != "*"
                    and (may_import(shown) or (may_import(module) and may_use(shown)))
                )
            if not good:
                yield Violation(node.lineno, f"import of {shown}", "a kernel imports torch, triton and math only")

    def _constant(self, node: ast.expr) -> Iterator[Violation]:
        """A value that the file keeps: nothing in it can change, and making it asks nobody."""
        if isinstance(node, ast.Constant):
            return
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            for item in elements(node):
                yield from self._constant(item)
                yield from self._inner(item)
            return
        if isinstance(node, ast.Lambda):
            yield from self._function(node, ())
            return
        if isinstance(node, ast.Call):
            name = self.dotted(node.func) or (node.func.id if isinstance(node.func, ast.Name) else "")
            if name not in _MAKES and name not in self.records and name not in self.header:
                text = "nothing is computed when the file is loaded; compute it at every call, or in `prepare`"
                yield Violation(node.lineno, ast.unparse(node.func)[:60], text)
                return
            for item in (*node.args, *(k.value for k in node.keywords)):
                yield from self._constant(item)
                if name != "triton.Config":
                    yield from self._inner(item)
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            yield from self._expression(node, ())
            for item in elements(node):
                yield from self._inner(item)
            return
        if isinstance(node, (ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.JoinedStr, ast.Subscript)):
            yield from self._expression(node, ())
            return
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield from self._expression(node, ())
            return
        yield Violation(node.lineno, ast.unparse(node)[:60], "is no constant")

    def _inner(self, node: ast.expr) -> Iterator[Violation]:
        if is_changeable(node):
            yield Violation(node.lineno, ast.unparse(node)[:60], "a constant holds tuples, no lists, tables or sets")

    def _class(self, node: ast.ClassDef) -> Iterator[Violation]:
        for base in node.bases:
            name = self.dotted(base) or (base.id if isinstance(base, ast.Name) else "")
            if name not in _BASES:
                yield Violation(node.lineno, f"class of {ast.unparse(base)[:40]}", "a kernel needs no such class")
        for keyword in node.keywords:
            yield Violation(node.lineno, f"class with {keyword.arg}", "a kernel needs no such class")
        yield from self._decorators(node, ())
        made = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        if node.decorator_list and not made & {"__init__", "__post_init__"}:
            self.records.add(node.name)  # a dataclass: what it holds is what it is given
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                yield from self._function(statement, (), owner=True)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and all(
                isinstance(t, ast.Name)
                for t in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            ):
                if statement.value is not None:
                    yield from self._constant(statement.value)
                    yield from self._inner(statement.value)
                    for call in ast.walk(statement.value):
                        if isinstance(call, ast.keyword) and call.arg == "default_factory":
                            yield Violation(statement.lineno, "default_factory", "a record of the file keeps constants")
            elif not (isinstance(statement, ast.Pass) or _is_text(statement)):
                yield Violation(statement.lineno, ast.unparse(statement)[:60], "a class is functions and constants")

    def _decorators(self, node: ast.FunctionDef | ast.ClassDef, scopes: Scopes) -> Iterator[Violation]:
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = self.dotted(call) or (call.id if isinstance(call, ast.Name) else ast.unparse(call)[:40])
            registers = isinstance(call, ast.Attribute) and call.attr in ("register_fake", "setup_context")
            if name not in _DECORATORS and not registers:
                text = "a decorator may keep what it sees; call functions where they are needed"
                yield Violation(decorator.lineno, f"@{name}", text)
            if isinstance(decorator, ast.Call):
                if name.startswith("torch.library"):
                    yield from self._namespace(decorator)
                for item in (*decorator.args, *(k.value for k in decorator.keywords)):
                    yield from self._expression(item, scopes, bare=True)

    def _namespace(self, node: ast.Call) -> Iterator[Violation]:
        name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        home = str(name).partition("::")[0]
        if "::" not in str(name) or home in ("aten", "prim", "prims", "quantized", "c10d", "triton") or "torch" in home:
            yield Violation(node.lineno, f"operator {str(name)[:40]!r}", "an operator has a namespace of its own")

    # -- functions and expressions

    def _function(self, node: ast.FunctionDef | ast.Lambda, scopes: Scopes, owner: bool = False) -> Iterator[Violation]:
        """A function: its decorators and defaults outside, its body in a scope of its own.

        Args:
            node: the function.
            scopes: names of the functions around it, innermost last.
            owner: whether it is a method.
        """
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        names = frozenset(a.arg for a in every)
        for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            yield from self._expression(default, scopes) if scopes else self._constant(default)
            if not scopes and is_changeable(default):
                yield Violation(default.lineno, "a changeable default", "it would be kept from one call to the next")
        if isinstance(node, ast.Lambda):
            yield from self._expression(node.body, (*scopes, names | bound([node.body])))
            return
        if node.name.startswith("__") and not (owner and node.name in DUNDERS):
            yield Violation(node.lineno, node.name, "no kernel needs it")
        yield from self._decorators(node, scopes)
        inner = (*scopes, names | bound(node.body))
        first = every[0].arg if owner and every and node.name in ("__init__", "__post_init__") else ""
        for name in sorted(inner[-1] & self.imported.keys()):
            yield Violation(node.lineno, name, "is the name of a module; give it another name")
        for statement in node.body:
            yield from self._statement(statement, inner, first)

    def _statement(self, node: ast.stmt, scopes: Scopes, own: str) -> Iterator[Violation]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self._import(node)
            return
        if isinstance(node, ast.FunctionDef):
            yield from self._function(node, scopes)
            return
        if isinstance(node, (ast.ClassDef, ast.Global, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)):
            yield Violation(
                node.lineno, ast.unparse(node).splitlines()[0][:60], "a function may not keep or define that"
            )
            return
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.With):
            targets = [i.optional_vars for i in node.items if i.optional_vars is not None]
        for target in targets:
            yield from self._target(target, scopes, own)
        for name, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.expr) and name == "iter":
                    yield from self._expression(item, scopes, bare=True)
                elif name not in ("annotation", "returns", "type_comment"):
                    yield from self._part(item, scopes, own)

    def _part(self, item: object, scopes: Scopes, own: str) -> Iterator[Violation]:
        """One field of a statement: more statements, or expressions."""
        if isinstance(item, ast.stmt):
            yield from self._statement(item, scopes, own)
        elif isinstance(item, ast.expr):
            if not isinstance(getattr(item, "ctx", None), (ast.Store, ast.Del)):
                yield from self._expression(item, scopes)
        elif isinstance(item, (ast.withitem, ast.ExceptHandler, ast.match_case)):
            for value in (v for _, v in ast.iter_fields(item)):
                for part in value if isinstance(value, list) else [value]:
                    yield from self._part(part, scopes, own)
        elif isinstance(item, ast.pattern):
            for part in ast.walk(item):
                if isinstance(part, ast.expr):
                    yield from self._expression(part, scopes)

    def _target(self, node: ast.expr, scopes: Scopes, own: str) -> Iterator[Violation]:
        """What is assigned to or deleted: local names, and elements of what local names hold."""
        if isinstance(node, (ast.Tuple, ast.List)):
            for item in node.elts:
                yield from self._target(item, scopes, own)
        elif isinstance(node, ast.Starred):
            yield from self._target(node.value, scopes, own)
        elif isinstance(node, ast.Attribute):
            if not (own and isinstance(node.value, ast.Name) and node.value.id == own) or node.attr.startswith("__"):
                text = "no attribute is set but in `__init__`; nothing is kept, and no other module changed"
                yield Violation(node.lineno, f"{ast.unparse(node)[:60]} =", text)
        elif isinstance(node, ast.Subscript):
            root = root_of(node.value)
            if not isinstance(root, ast.Name) or is_global(root.id, scopes) or isinstance(node.value, ast.Attribute):
                text = "only what a call has made or was given may be written to; nothing is kept"
                yield Violation(node.lineno, f"{ast.unparse(node)[:60]} =", text)
            yield from self._expression(node.value, scopes)
            yield from self._expression(node.slice, scopes)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


__all__ = ["Violation", "violations"]
