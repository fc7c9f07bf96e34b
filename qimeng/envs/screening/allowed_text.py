"""Checks that a kernel's text uses only allowed constructs; if not, gives the line and what to do instead.

A program could be wrong only after many calls, at some time of day, under another parent process or outside a sandbox.
No test run finds that. So untrusted text may only compute from its arguments. It may import, call and read only listed
names (`qimeng.envs.screening.allowed_names`), and keeps nothing between calls:

- a file holds imports, functions, small classes and constants, and constants are never changed;
- attributes are set only in the `__init__` of their own class; no `global`, no mutable defaults, no own decorators;
- no private attributes, addresses, clocks, random numbers, or names built at run time.

Buffers that are made once from parameters belong in `prepare`. Deals in syntax trees and scopes; runs nothing.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from qimeng.envs.screening.allowed_cuda import embedded_violations
from qimeng.envs.screening.allowed_names import (
    ASM_STATE,
    ATTRIBUTES_REFUSED,
    BUILT_INS,
    CHANGES,
    CUDA_FUNCTIONS,
    DUNDERS,
    READS,
    is_module,
    is_random,
    may_import,
    may_use,
)
from qimeng.envs.workers.plain_text import plain_text

HEADER = {"torch": "torch", "triton": "triton", "tl": "triton.language"}
"""What every implementation finds imported."""
CUDA_HEADER = {"torch": "torch"} | {name: name for name in CUDA_FUNCTIONS}
"""What one in CUDA C++ finds instead."""
_FUNCTIONS = (ast.FunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
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


@dataclass(frozen=True, order=True)
class Violation:
    """One thing that a kernel's text may not do.

    Attributes:
        line: where, from 1.
        what: what stands there.
        advice: why not, and what to do instead.
    """

    line: int
    what: str
    advice: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}: {self.advice}"


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


class _File:
    """One text: what it imports and defines, and what its functions do with that."""

    def __init__(self, tree: ast.Module, header: Mapping[str, str]):
        self.tree, self.header, self.imported = tree, header, dict(header)
        self.defined: set[str] = set()
        self.tables: set[str] = set()
        self.records: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported.update(_bindings(node))
        self.aliases: dict[str, str] = {}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        methods = {f.name for node in classes for f in node.body if isinstance(f, ast.FunctionDef)}
        own = {n.attr for c in classes for n in ast.walk(c) if isinstance(n, ast.Attribute) and _is_stored(n)}
        self.private = {name for name in methods | own if not name.startswith("__")}

    def look(self) -> Iterator[Violation]:
        """Every violation."""
        for statement in self.tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.defined.add(statement.name)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                for name in _stored(statement):
                    self.defined.add(name)
                    value = statement.value
                    dotted = self.dotted(value) if value is not None else None
                    if dotted is not None and not isinstance(value, ast.Name):
                        self.aliases[name] = dotted
                    elif _changeable(value):
                        self.tables.add(name)
        seen: set[str] = set()
        for statement in self.tree.body:
            yield from self._top(statement)
            for name in _stored(statement) if not isinstance(statement, (ast.Import, ast.ImportFrom)) else ():
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
            for item in _elements(node):
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
            for item in _elements(node):
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
        if _changeable(node):
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

    def _decorators(
        self, node: ast.FunctionDef | ast.ClassDef, scopes: tuple[frozenset[str], ...]
    ) -> Iterator[Violation]:
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

    def _function(
        self, node: ast.FunctionDef | ast.Lambda, scopes: tuple[frozenset[str], ...], owner: bool = False
    ) -> Iterator[Violation]:
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
            if not scopes and _changeable(default):
                yield Violation(default.lineno, "a changeable default", "it would be kept from one call to the next")
        if isinstance(node, ast.Lambda):
            yield from self._expression(node.body, (*scopes, names | _bound([node.body])))
            return
        if node.name.startswith("__") and not (owner and node.name in DUNDERS):
            yield Violation(node.lineno, node.name, "no kernel needs it")
        yield from self._decorators(node, scopes)
        inner = (*scopes, names | _bound(node.body))
        first = every[0].arg if owner and every and node.name in ("__init__", "__post_init__") else ""
        for name in sorted(inner[-1] & self.imported.keys()):
            yield Violation(node.lineno, name, "is the name of a module; give it another name")
        for statement in node.body:
            yield from self._statement(statement, inner, first)

    def _statement(self, node: ast.stmt, scopes: tuple[frozenset[str], ...], own: str) -> Iterator[Violation]:
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

    def _part(self, item: object, scopes: tuple[frozenset[str], ...], own: str) -> Iterator[Violation]:
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

    def _target(self, node: ast.expr, scopes: tuple[frozenset[str], ...], own: str) -> Iterator[Violation]:
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
            root = _root(node.value)
            if not isinstance(root, ast.Name) or _is_global(root.id, scopes) or isinstance(node.value, ast.Attribute):
                text = "only what a call has made or was given may be written to; nothing is kept"
                yield Violation(node.lineno, f"{ast.unparse(node)[:60]} =", text)
            yield from self._expression(node.value, scopes)
            yield from self._expression(node.slice, scopes)

    def _expression(self, node: ast.AST, scopes: tuple[frozenset[str], ...], bare: bool = False) -> Iterator[Violation]:
        """An expression, read.

        Args:
            node: the expression.
            scopes: names of the functions around it, innermost last.
            bare: whether a table of the file may stand here by itself.
        """
        if isinstance(node, (ast.Name, ast.Attribute)):
            dotted = self.dotted(node, scopes)
            if dotted is not None:
                yield from self._use(node, dotted)
                return
        if isinstance(node, ast.Name):
            yield from self._name(node, scopes, bare)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute_of(node, scopes)
        elif isinstance(node, ast.Lambda):
            yield from self._function(node, scopes)
        elif isinstance(node, _COMPREHENSIONS):
            yield from self._comprehension(node, scopes)
        elif isinstance(node, ast.Call):
            yield from self._call(node, scopes)
        elif isinstance(node, ast.Subscript):
            yield from self._expression(node.value, scopes, bare=True)
            yield from self._expression(node.slice, scopes)
        elif isinstance(node, ast.Compare):
            yield from self._expression(node.left, scopes)
            for op, right in zip(node.ops, node.comparators, strict=True):
                yield from self._expression(right, scopes, bare=isinstance(op, (ast.In, ast.NotIn)))
        elif isinstance(node, (ast.Await, ast.YieldFrom)):
            yield Violation(node.lineno, ast.unparse(node)[:60], "a kernel waits for nobody")
        else:
            for child in ast.iter_child_nodes(node):
                yield from self._expression(child, scopes)

    def _attribute_of(self, node: ast.Attribute, scopes: tuple[frozenset[str], ...]) -> Iterator[Violation]:
        yield from self._attribute(node.attr, node.lineno)
        read = node.attr in READS and isinstance(node.value, ast.Name)
        yield from self._expression(node.value, scopes, bare=read)
        if node.attr in CHANGES and not _is_local(node.value, scopes):
            text = "only what the call itself has made may be changed; nothing is kept from one call to the next"
            yield Violation(node.lineno, f"{ast.unparse(node)[:60]}()", text)

    def _comprehension(self, node: ast.AST, scopes: tuple[frozenset[str], ...]) -> Iterator[Violation]:
        assert isinstance(node, _COMPREHENSIONS)
        inner = (*scopes, _bound([g.target for g in node.generators]))
        for number, g in enumerate(node.generators):
            yield from self._expression(g.iter, scopes if number == 0 else inner, bare=True)
            for condition in g.ifs:
                yield from self._expression(condition, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            yield from self._expression(part, inner)

    def _call(self, node: ast.Call, scopes: tuple[frozenset[str], ...]) -> Iterator[Violation]:
        function = node.func
        if isinstance(function, ast.Name) and _is_global(function.id, scopes) and function.id not in self.defined:
            if function.id in ("getattr", "hasattr"):
                name = node.args[1] if len(node.args) > 1 else None
                if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                    yield Violation(node.lineno, f"{function.id} of a made name", "write the attribute as it is")
                    return
                as_attribute = ast.copy_location(ast.Attribute(node.args[0], name.value, ast.Load()), node)
                yield from self._expression(as_attribute, scopes)
                for argument in node.args[2:]:
                    yield from self._expression(argument, scopes)
                return
            if function.id == "type" and len(node.args) != 1:
                yield Violation(node.lineno, "type of three arguments", "write the class as it is")
            if function.id == "print" and node.keywords:
                yield Violation(node.lineno, "print to a file", "a kernel writes tensors only")
        dotted = self.dotted(function, scopes) or ""
        if dotted.endswith(".inline_asm_elementwise"):
            text = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "asm"), None)
            if not (isinstance(text, ast.Constant) and isinstance(text.value, str)) or ASM_STATE.search(text.value):
                yield Violation(node.lineno, "inline assembly", "it is a constant text that computes from its operands")
        yield from self._expression(function, scopes, bare=False)
        counts = isinstance(function, ast.Name) and function.id in (
            "len",
            "sorted",
            "enumerate",
            "tuple",
            "iter",
            "zip",
        )
        for argument in node.args:
            yield from self._expression(argument, scopes, bare=counts)
        for keyword in node.keywords:
            yield from self._expression(keyword.value, scopes, bare=keyword.arg in ("configs", "key"))

    def _use(self, node: ast.AST, dotted: str) -> Iterator[Violation]:
        line = getattr(node, "lineno", 1)
        if is_module(dotted):
            yield Violation(line, dotted, "a module is no value; write the function that is meant")
        elif not may_use(dotted):
            yield Violation(
                line, dotted, "is not on the list of what a kernel may use: operators on tensors and Triton's"
            )

    def _attribute(self, name: str, line: int) -> Iterator[Violation]:
        if name in ATTRIBUTES_REFUSED:
            yield Violation(
                line, f".{name}", f"{ATTRIBUTES_REFUSED[name]}; compute from the tensors' values and shapes"
            )
        elif is_random(name):
            yield Violation(line, f".{name}", "draws random numbers; the same inputs have the same result")
        elif name.startswith("_") and name not in self.private:
            yield Violation(line, f".{name}", "is private; a kernel has no use for it")

    def _name(self, node: ast.Name, scopes: tuple[frozenset[str], ...], bare: bool) -> Iterator[Violation]:
        name = node.id
        if not _is_global(name, scopes):
            return
        if name in self.defined:
            if name in self.tables and not bare:
                text = "a table of the file is only looked up (`[...]`, `.get`, `in`), so that nothing is kept in it"
                yield Violation(node.lineno, name, text)
            return
        if name not in BUILT_INS:
            known = hasattr(builtins, name)
            yield Violation(node.lineno, name, "no kernel has a use for it" if known else "is defined nowhere")

    def dotted(self, node: ast.AST | None, scopes: tuple[frozenset[str], ...] = ()) -> str | None:
        """The dotted name that an expression stands for, where it begins with a module that is imported."""
        if isinstance(node, ast.Name):
            if not _is_global(node.id, scopes):
                return None
            return self.aliases.get(node.id) if node.id in self.defined else self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            home = self.dotted(node.value, scopes)
            return None if home is None else f"{home}.{node.attr}"
        return None


def _bindings(node: ast.Import | ast.ImportFrom) -> Mapping[str, str]:
    found = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif alias.asname:
            found[alias.asname] = alias.name
        else:
            found[alias.name.partition(".")[0]] = alias.name.partition(".")[0]
    return found


def _stored(node: ast.stmt) -> list[str]:
    """Names that a statement of the file binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def _bound(nodes: list[ast.stmt] | list[ast.expr]) -> frozenset[str]:
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
        if isinstance(node, _COMPREHENSIONS):
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


def _is_global(name: str, scopes: tuple[frozenset[str], ...]) -> bool:
    return not any(name in scope for scope in scopes)


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def _is_local(node: ast.AST, scopes: tuple[frozenset[str], ...]) -> bool:
    """Whether an expression is a local name, or an element of what one holds; an attribute's value may be kept."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return not _is_global(node.id, scopes)
    return not isinstance(node, ast.Attribute)


def _changeable(node: ast.AST | None) -> bool:
    """Whether a list, a table or a set is made in an expression; those of a `triton.Config` are its own."""
    if isinstance(node, (ast.List, ast.Dict, ast.Set, *_COMPREHENSIONS)):
        return True
    if isinstance(node, ast.Lambda) or node is None:
        return False
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ("list", "dict", "set"):
            return True
        if name in ("Config", "tuple", "frozenset", "max", "min", "len"):
            return False
    return any(_changeable(child) for child in ast.iter_child_nodes(node))


def _elements(node: ast.expr) -> list[ast.expr]:
    """What a list, a table or a set is made of; of a comprehension also what it goes through."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    if isinstance(node, ast.Dict):
        return [*filter(None, node.keys), *node.values]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return made + [x for g in node.generators for x in _elements(g.iter)]
    return [node]


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


__all__ = ["Violation", "violations"]
