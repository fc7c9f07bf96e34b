"""What an expression in a kernel's text may read and call.

Deals in one text's names and scopes. `qimeng.envs.screening.allowed_text` says what its statements may do.
"""

from __future__ import annotations

import ast
import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qimeng.envs.screening.allowed_names import (
    ASM_STATE,
    ATTRIBUTES_REFUSED,
    BUILT_INS,
    CHANGES,
    READS,
    is_module,
    is_random,
    may_use,
)
from qimeng.envs.screening.text_scopes import COMPREHENSIONS, Scopes, bindings, bound, is_global, is_local

EARLY, WAIT = "launch_pdl", "triton.language.extra.cuda.gdc_wait"
"""The option of a launch that begins before the kernel before it ends (programmatic dependent launch), and what the
kernel calls to wait for that one's results."""

ALIGNMENTS = (16, 32, 64, 128)
"""Bytes to whose multiple a text may ask whether memory begins at one."""


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


class Expressions(ABC):
    """The names of one text, and what its expressions do with them.

    Args:
        tree: the text.
        header: names that every text finds imported.
    """

    def __init__(self, tree: ast.Module, header: Mapping[str, str]):
        self.tree, self.header, self.imported = tree, header, dict(header)
        self.defined: set[str] = set()
        self.tables: set[str] = set()
        self.records: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported.update(bindings(node))
        self.aliases: dict[str, str] = {}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        methods = {f.name for node in classes for f in node.body if isinstance(f, ast.FunctionDef)}
        own = {n.attr for c in classes for n in ast.walk(c) if isinstance(n, ast.Attribute) and _is_stored(n)}
        self.private = {name for name in methods | own if not name.startswith("__")}

    @abstractmethod
    def _function(self, node: ast.FunctionDef | ast.Lambda, scopes: Scopes) -> Iterator[Violation]:
        """A function: its decorators and defaults outside, its body in a scope of its own."""

    def _expression(self, node: ast.AST, scopes: Scopes, bare: bool = False) -> Iterator[Violation]:
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
        elif isinstance(node, ast.Constant):
            if node.value == EARLY:
                yield Violation(node.lineno, EARLY, "write it as a keyword of the launch")
        elif isinstance(node, ast.Lambda):
            yield from self._function(node, scopes)
        elif isinstance(node, COMPREHENSIONS):
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
            for child in _read(node):
                yield from self._expression(child, scopes)

    def _attribute_of(self, node: ast.Attribute, scopes: Scopes) -> Iterator[Violation]:
        yield from self._attribute(node.attr, node.lineno)
        read = node.attr in READS and isinstance(node.value, ast.Name)
        yield from self._expression(node.value, scopes, bare=read)
        if node.attr in CHANGES and not is_local(node.value, scopes):
            text = "only what the call itself has made may be changed; nothing is kept from one call to the next"
            yield Violation(node.lineno, f"{ast.unparse(node)[:60]}()", text)

    def _comprehension(self, node: ast.AST, scopes: Scopes) -> Iterator[Violation]:
        assert isinstance(node, COMPREHENSIONS)
        inner = (*scopes, bound([g.target for g in node.generators]))
        for number, g in enumerate(node.generators):
            yield from self._expression(g.iter, scopes if number == 0 else inner, bare=True)
            for condition in g.ifs:
                yield from self._expression(condition, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            yield from self._expression(part, inner)

    def _call(self, node: ast.Call, scopes: Scopes) -> Iterator[Violation]:
        function = node.func
        if isinstance(function, ast.Name) and is_global(function.id, scopes) and function.id not in self.defined:
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
        if any(keyword.arg == EARLY for keyword in node.keywords) and not self._waits(function):
            yield Violation(node.lineno, EARLY, f"launch so only a kernel of the file that begins with `{WAIT}()`")
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

    def _waits(self, launched: ast.expr) -> bool:
        """Whether `launched` is ``kernel[grid]`` of a kernel that first waits for the kernel before it."""
        if not (isinstance(launched, ast.Subscript) and isinstance(launched.value, ast.Name)):
            return False
        named = [f for f in self.tree.body if isinstance(f, ast.FunctionDef) and f.name == launched.value.id]
        if len(named) != 1:
            return False
        lines = named[0].body[1:] if ast.get_docstring(named[0]) is not None else named[0].body
        first = lines[0].value if lines and isinstance(lines[0], ast.Expr) else None
        return isinstance(first, ast.Call) and self.dotted(first.func) == WAIT

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

    def _name(self, node: ast.Name, scopes: Scopes, bare: bool) -> Iterator[Violation]:
        name = node.id
        if not is_global(name, scopes):
            return
        if name in self.defined:
            if name in self.tables and not bare:
                text = "a table of the file is only looked up (`[...]`, `.get`, `in`), so that nothing is kept in it"
                yield Violation(node.lineno, name, text)
            return
        if name not in BUILT_INS:
            known = hasattr(builtins, name)
            yield Violation(node.lineno, name, "no kernel has a use for it" if known else "is defined nowhere")

    def dotted(self, node: ast.AST | None, scopes: Scopes = ()) -> str | None:
        """The dotted name that an expression stands for, where it begins with a module that is imported."""
        if isinstance(node, ast.Name):
            if not is_global(node.id, scopes):
                return None
            return self.aliases.get(node.id) if node.id in self.defined else self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            home = self.dotted(node.value, scopes)
            return None if home is None else f"{home}.{node.attr}"
        return None


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _read(node: ast.AST) -> Iterator[ast.AST]:
    """What an expression reads; of ``x.data_ptr() % 16`` the tensor, since that tells of no content."""
    match node:
        case ast.BinOp(ast.Call(ast.Attribute(tensor, "data_ptr"), [], []), ast.Mod(), ast.Constant(int(by))) if (
            by in ALIGNMENTS
        ):
            return iter([tensor])
    return ast.iter_child_nodes(node)


__all__ = ["Expressions", "Violation"]
