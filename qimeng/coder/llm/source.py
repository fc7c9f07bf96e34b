"""From a model's Python text to an implementation: what is kept of it, what is added, and under which names.

- The entry is the function `region`; where there is none, the only function that is no kernel, that no other one calls,
  and that takes as many arguments as the region has inputs.
- Only what the entry reaches is kept. A name that is defined again means its last definition. Statements that would
  run when the file is loaded (tests, prints, settings) go.
- Usual imports are added where they are missing; packages beyond `ROOTS` are refused, since a program's file needs
  PyTorch and Triton only.
- A text that makes kernels by `cuda_kernel` is CUDA C++, any other is Triton.
- `prepare` makes buffers out of parameters: its arguments are called like the entry's, which takes the buffers after
  its inputs.
- Every top-level name gets the region's prefix, so that no two regions of a program share one.

Deals in text and syntax trees. Knows nothing about fences, models or whether the code is right.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping

from qimeng.coder.llm.chat import ChatError
from qimeng.coder.llm.names import bound, renamed, used
from qimeng.coder.llm.shown import ENTRY, PREPARE
from qimeng.graph.region import Region
from qimeng.program.program import Implementation

ROOTS = frozenset(
    "torch triton math typing functools itertools operator collections dataclasses enum numbers __future__".split()
)
"""Packages that may be imported."""

HEADER = {"torch": "torch", "triton": "triton", "tl": "triton.language"}
"""What every program file imports: name to module."""

USUAL = HEADER | {
    "math": "math",
    "F": "torch.nn.functional",
    "nn": "torch.nn",
    "libdevice": "triton.language.extra.libdevice",
}
"""Names that are imported where they are used and not defined; they mean the same in every region."""

CUDA_NAMES = frozenset({"cuda_kernel", "cuda_aligned"})
"""What an implementation in CUDA C++ finds defined; `triton` it has to import."""

_PREFIX = re.compile(r"^[a-z][0-9a-f]{8,16}_+(?=[A-Za-z])")
_WHOLE = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)


def implementation_of(text: str, region: Region, present: Implementation | None = None) -> Implementation:
    """The implementation of `region` that `text` holds.

    Args:
        text: Python, with plain line ends.
        region: what it should compute.
        present: what it is an edited version of, if so; says which inputs `prepare` takes where its names do not.

    Raises:
        ChatError: (``"format"``) it holds none; the message says what to do.
        SyntaxError: it is no Python.
    """
    module, count = _Module(text), len(region.inputs)
    entry = _entry(module, count)
    roots, prepare_inputs = [entry.name], tuple[int, ...]()
    if _arity(entry)[0] > count:
        prepare_inputs = _prepare_inputs(module, entry, region, present)
        roots.append(PREPARE)
    kept = module.reached(roots)
    language = _language(module, kept)
    body, own = module.text(kept, HEADER if language == "triton" else {"torch": "torch"})
    prefix = f"m{region.signature[:8]}_"
    new = {entry.name: prefix + ENTRY}
    for name in sorted(own - {entry.name}):
        short = _PREFIX.sub("", name).lstrip("_") or name
        new[name] = prefix + (name if short in own or prefix + short in new.values() else short)
    prepare = new[PREPARE] if prepare_inputs else ""
    return Implementation(language, renamed(body, new), new[entry.name], prepare, prepare_inputs)


def _language(module: _Module, kept: list[int]) -> str:
    """What the kernels among the statements `kept` are written in.

    Raises:
        ChatError: (``"format"``) in both languages.
    """
    cuda = any("cuda_kernel" in module.uses[number] for number in kept)
    if cuda and any(_is_jit(module.statements[number]) for number in kept):
        raise _format("the kernels are in Triton and in CUDA C++; write all of them in one")
    return "cuda" if cuda else "triton"


def _is_jit(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in statement.decorator_list)


def _format(message: str) -> ChatError:
    return ChatError(message, "format")


class _Module:
    """The top-level statements of a text, by the names that they bind."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.statements = [s for s in ast.parse(text).body if not _is_script(s)]
        self.binds = [bound(s) for s in self.statements]
        self.names = set[str]().union(*self.binds)
        self.uses = [used(s) for s in self.statements]

    def functions(self) -> dict[str, ast.FunctionDef]:
        """The host's functions by name, the last of each; no kernels."""
        found = {s.name: s for s in self.statements if isinstance(s, ast.FunctionDef)}
        return {n: f for n, f in found.items() if not _is_jit(f)}

    def reached(self, roots: list[str]) -> list[int]:
        """Numbers of the statements that the names `roots` need, in order.

        Raises:
            ChatError: (``"format"``) something that they need is defined nowhere, or they keep state.
        """
        kept: set[int] = set()
        waiting, seen = list(roots), set(roots)
        while waiting:
            name = waiting.pop()
            for number in self._definers(name):
                statement = self.statements[number]
                kept.add(number)
                if any(isinstance(node, ast.Global) for node in ast.walk(statement)):
                    raise _format(f"`{name}` uses `global`; nothing may be kept from one call to the next")
                more = set() if isinstance(statement, ast.Import | ast.ImportFrom) else self.uses[number] - seen
                waiting += sorted(more)
                seen |= more
        missing = sorted(n for n in seen - self.names - set(USUAL) - CUDA_NAMES if not hasattr(builtins, n))
        if missing:
            raise _format(f"the answer uses `{missing[0]}`, which it does not define; answer with all that is needed")
        return sorted(kept)

    def text(self, kept: list[int], header: Mapping[str, str]) -> tuple[str, set[str]]:
        """The text of those statements, imports first; and the names in it that are its own.

        Args:
            kept: numbers of the statements.
            header: what the text finds imported, name to module.

        Raises:
            ChatError: (``"format"``) an import that is not allowed.
        """
        imports: list[str] = []
        parts: list[str] = []
        own: set[str] = set()
        needed = set[str]().union(*(self.uses[k] for k in kept))
        for number in kept:
            statement = self.statements[number]
            for node in ast.walk(statement):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    _check_import(node)
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                parts.append(self._segment(number))
                own |= self.binds[number]
                continue
            for single, name, meaning in _singles(statement):
                if name in needed and header.get(name) != meaning:
                    imports.append(ast.unparse(single))
                    own |= {name} if meaning and USUAL.get(name) != meaning else set()
        for name in sorted(needed - self.names - set(header)):
            if name in USUAL:
                imports.insert(0, f"import {USUAL[name]}" + (f" as {name}" if name != USUAL[name] else ""))
        head = "\n".join(dict.fromkeys(imports))
        return "\n\n\n".join([*([head] if head else []), *parts]) + "\n", own - ROOTS

    def _definers(self, name: str) -> Iterator[int]:
        """The statements that give `name` its value: the last whole definition, and what changes it after that."""
        for number in range(len(self.statements) - 1, -1, -1):
            if name in self.binds[number]:
                yield number
                if isinstance(self.statements[number], _WHOLE):
                    return

    def _segment(self, number: int) -> str:
        """The text of one statement, with the comments right above it."""
        statement = self.statements[number]
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]) - 1
        last = statement.end_lineno or first + 1
        others = (s for i, s in enumerate(self.statements) if i != number)
        if any(s.lineno <= last and (s.end_lineno or s.lineno) > first for s in others):  # they share a line
            return ast.unparse(statement)
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(self.lines[first:last])


def _entry(module: _Module, count: int) -> ast.FunctionDef:
    """The function that computes the region."""
    found = module.functions()
    if ENTRY in found:
        least, most = _arity(found[ENTRY])
        if most < count or (least > count and PREPARE not in found):
            raise _format(f"`{ENTRY}` takes {least} arguments; the region has {count} inputs, in the order shown")
        return found[ENTRY]
    called = {n for f in found.values() for n in used(f) - {f.name}}
    fitting = [f for f in found.values() if f.name not in called and _arity(f)[0] <= count <= _arity(f)[1]]
    if len(fitting) == 1:
        return fitting[0]
    have = f"only {', '.join(sorted(found))}" if found else "no function of the host"
    raise _format(f"the answer has no function `{ENTRY}` ({have}); define `{ENTRY}` with {count} arguments")


def _arity(function: ast.FunctionDef) -> tuple[int, float]:
    """Fewest and most positional arguments."""
    a = function.args
    count = len(a.posonlyargs) + len(a.args)
    return count - len(a.defaults), float("inf") if a.vararg else count


def _prepare_inputs(
    module: _Module, entry: ast.FunctionDef, region: Region, present: Implementation | None
) -> tuple[int, ...]:
    """Positions of the region's inputs that `prepare` takes."""
    names = [a.arg for a in (*entry.args.posonlyargs, *entry.args.args)][: len(region.inputs)]
    taken = [a.arg for a in module.functions()[PREPARE].args.args]
    if taken and set(taken) <= set(names):
        positions = tuple(names.index(t) for t in taken)
    elif present is not None and present.prepare and len(present.prepare_inputs) == len(taken):
        positions = present.prepare_inputs
    else:
        raise _format(f"`{PREPARE}` must take inputs of `{ENTRY}` under the same names ({', '.join(names)})")
    for i in positions:
        if region.graph.nodes[region.inputs[i].node].kind not in ("parameter", "buffer"):
            raise _format(f"`{PREPARE}` takes `{names[i]}`, which is no parameter: it changes from call to call")
    return positions


def _is_script(statement: ast.stmt) -> bool:
    """Whether it runs only where the file is started as a program."""
    return isinstance(statement, ast.If) and "__name__" in used(statement.test)


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in modules:
        if module.partition(".")[0] not in ROOTS or (isinstance(node, ast.ImportFrom) and node.level):
            raise _format(f"`{ast.unparse(node)}` is not allowed: the kernel's file has PyTorch and Triton only")
    if any(alias.name == "*" for alias in node.names):
        raise _format(f"`{ast.unparse(node)}`: say which names are imported")


def _singles(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each name that an import binds: a statement of its own, the name, and what it means.

    ``import a.b`` binds ``a``, which means nothing new.
    """
    for alias in node.names:
        if isinstance(node, ast.Import):
            meaning = "" if "." in alias.name and alias.asname is None else alias.name
            yield ast.Import([alias]), alias.asname or alias.name.partition(".")[0], meaning
        elif node.module != "__future__":
            yield ast.ImportFrom(node.module, [alias], 0), alias.asname or alias.name, f"{node.module}.{alias.name}"


__all__ = ["HEADER", "ROOTS", "USUAL", "implementation_of"]
