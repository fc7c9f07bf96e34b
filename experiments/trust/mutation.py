"""Mutants of a Triton text: one small mistake each, as people and models make them.

Deals in Python text and its syntax tree: which places of a kernel can be changed, how, and what class of mistake that
is. Knows nothing about what a kernel computes or whether a mutant is wrong: many are not.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.trust.kinds import Kinds, is_jit, jit_functions

CLASSES = ("arithmetic", "index", "boundary", "precision")
"""A wrong formula; a wrong place in memory; a wrong edge of a block, loop or reduction; fewer bits than there were."""

_SWAPS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
}
_FLIPS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: (">", "<="),
    ast.Gt: ("<", ">="),
    ast.LtE: (">=", "<"),
    ast.GtE: ("<=", ">"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
}
_FUNCTIONS = {
    "exp": "exp2",
    "exp2": "exp",
    "log": "log2",
    "log2": "log",
    "sqrt": "rsqrt",
    "rsqrt": "sqrt",
    "sin": "cos",
    "cos": "sin",
    "max": "min",
    "min": "max",
    "sum": "max",
    "maximum": "minimum",
    "minimum": "maximum",
}
_DROPPED = frozenset("exp exp2 log log2 sqrt rsqrt abs erf sigmoid sin cos floor ceil".split())
_HALVES = ("bfloat16", "float16")
EPSILON = 1e-3
"""A constant smaller than this that is added to something counts as an epsilon."""


@dataclass(frozen=True)
class Mutation:
    """One mistake at one place.

    Attributes:
        kind: one of `CLASSES`.
        operator: what was done, in words.
        line: of the text, from 1.
        start: first byte that is replaced.
        end: first byte that stays.
        after: what comes instead.
    """

    kind: str
    operator: str
    line: int
    start: int
    end: int
    after: str

    def apply(self, text: str) -> str:
        """`text` with the mistake in it."""
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def diff(self, text: str) -> str:
        """The lines that differ, the old one first."""
        old, new = text.splitlines(), self.apply(text).splitlines()
        last = self.line + text.encode()[self.start : self.end].count(b"\n")
        more = len(new) - len(old)
        lines = [f"- {x.strip()}" for x in old[self.line - 1 : last]]
        return "\n".join(lines + [f"+ {x.strip()}" for x in new[self.line - 1 : last + more]])


def mutations(text: str) -> list[Mutation]:
    """Every mutation of the kernels in `text`, in the order of their places; no two give the same text."""
    tree = ast.parse(text)
    finder = _Finder(text, tree)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            finder.function(statement)
    found, seen = [], {text}
    for mutation in sorted(finder.found, key=lambda m: (m.start, m.end, m.operator, m.after)):
        changed = mutation.apply(text)
        if changed not in seen and _parses(changed):
            seen.add(changed)
            found.append(mutation)
    return found


def choose(found: Sequence[Mutation], count: int, seed: int | str) -> list[Mutation]:
    """`count` of the mutations (all where there are fewer): the classes in turns, and within each its operators.

    Args:
        found: what there is.
        count: how many are wanted.
        seed: of the choice.
    """
    rng = random.Random(seed)
    stock: dict[str, dict[str, list[Mutation]]] = {}
    for mutation in found:
        stock.setdefault(mutation.kind, {}).setdefault(mutation.operator, []).append(mutation)
    used: dict[str, int] = {}
    chosen: list[Mutation] = []
    while len(chosen) < min(count, len(found)):
        for kind in [k for k in CLASSES if stock.get(k)]:
            table = stock[kind]
            least = min(used.get(o, 0) for o in table)
            operator = rng.choice([o for o in table if used.get(o, 0) == least])
            used[operator] = least + 1
            places = table[operator]
            chosen.append(places.pop(rng.randrange(len(places))))
            if not places:
                del table[operator]
            if len(chosen) == count:
                break
    return chosen


class _Finder:
    """Walks the functions of a text and notes what can be changed."""

    def __init__(self, text: str, tree: ast.Module):
        self.data = text.encode()
        self.lines = [0]
        for line in self.data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.kinds = Kinds(jit_functions(tree))
        self.found: list[Mutation] = []

    def function(self, function: ast.FunctionDef) -> None:
        """Note what can be changed in `function`: everything in a kernel, the grid in what launches one."""
        if not is_jit(function):
            for node in ast.walk(function):
                self._grid(node)
            return
        for statement, in_loop in _statements(function.body):
            self.kinds.enter(function, statement)
            self._statement(statement, in_loop)
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    self._expression(child, None)

    # -- statements

    def _statement(self, statement: ast.stmt, in_loop: bool) -> None:
        if isinstance(statement, ast.For):
            self._loop(statement)
        elif isinstance(statement, ast.Assign | ast.AugAssign):
            self._assignment(statement, in_loop)

    def _loop(self, loop: ast.For) -> None:
        call = loop.iter
        if not (isinstance(call, ast.Call) and call.args):
            return
        stop = call.args[1] if len(call.args) > 1 else call.args[0]
        self._add("boundary", "last step of a loop left out", stop, f"({self._text(stop)}) - 1")
        if len(call.args) > 1:
            self._add("boundary", "first step of a loop left out", call.args[0], f"({self._text(call.args[0])}) + 1")
        if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Mult):
            left = stop.left
            if isinstance(left, ast.Constant) and type(left.value) is int and left.value > 1:
                self._add("precision", "a product of planes dropped", left, str(left.value - 1))

    def _assignment(self, statement: ast.Assign | ast.AugAssign, in_loop: bool) -> None:
        value = statement.value
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if not isinstance(target, ast.Name):
            return
        kind = self.kinds.of(value)
        if kind == "index" and _mentions(value, "arange"):
            self._add("index", "an index off by one", value, f"{self._text(value)} + 1")
        if kind != "value" or isinstance(value, ast.Constant | ast.Name):
            return
        carried = isinstance(statement, ast.AugAssign) or target.id in {
            n.id for n in ast.walk(value) if isinstance(n, ast.Name)
        }
        for half in _HALVES:
            operator = f"accumulated in {half}" if carried and in_loop else f"a value rounded to {half}"
            self._add("precision", operator, value, f"({self._text(value)}).to(tl.{half}).to(tl.float32)")

    def _grid(self, node: ast.AST) -> None:
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            return
        for size in node.slice.elts:
            if isinstance(size, ast.Constant) and type(size.value) is int and size.value > 1:
                self._add("boundary", "last block not launched", size, str(size.value - 1))

    # -- expressions

    def _expression(self, node: ast.expr, parent: ast.AST | None) -> None:
        if isinstance(node, ast.BinOp):
            self._binary(node, parent)
        elif isinstance(node, ast.Compare):
            self._comparison(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Constant) and not isinstance(parent, ast.Call | ast.keyword):
            self._constant(node, parent)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_number(node.operand):
            self._add("arithmetic", "a sign dropped", node, f"({self._text(node.operand)})")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, node)
            elif isinstance(child, ast.keyword):
                self._expression(child.value, child)

    def _binary(self, node: ast.BinOp, parent: ast.AST | None) -> None:
        kind, left, right = self.kinds.of(node), self._operand(node.left), self._operand(node.right)
        if isinstance(node.op, ast.BitAnd) and kind == "mask":
            self._add("boundary", "a condition of a mask dropped", node, left)
            self._add("boundary", "a condition of a mask dropped", node, right)
            return
        above = self.kinds.of(parent) if isinstance(parent, ast.BinOp) else ""
        if kind == "pointer" and above != "pointer":
            self._add("index", "an address off by one", node, f"{self._text(node)} + 1")
        if kind == "index":
            self._index(node)
        swap = _SWAPS.get(type(node.op))
        if kind != "value" or swap is None:
            return
        self._add("arithmetic", f"{swap[0]} became {swap[1]}", node, f"({left} {swap[1]} {right})")
        self._add("arithmetic", f"what follows {swap[0]} dropped", node, f"({left})")
        if isinstance(node.op, ast.Add | ast.Mult):
            self._add("arithmetic", f"what precedes {swap[0]} dropped", node, f"({right})")
        for side in (node.left, node.right):
            other = self.kinds.other_value(side.id) if isinstance(side, ast.Name) else None
            if other is not None and self.kinds.of(side) == "value":
                self._add("arithmetic", "another variable read", side, other)

    def _index(self, node: ast.BinOp) -> None:
        for side in (node.left, node.right):
            if isinstance(node.op, ast.Mult) and isinstance(side, ast.Constant) and type(side.value) is int:
                for other in (side.value + 1, max(side.value - 1, 0)):
                    self._add("index", "a wrong stride", side, str(other))
        swap = _SWAPS.get(type(node.op))
        if swap is not None and not isinstance(node.op, ast.Mult | ast.Div):
            text = f"({self._operand(node.left)} {swap[1]} {self._operand(node.right)})"
            self._add("index", f"{swap[0]} became {swap[1]} in an index", node, text)

    def _comparison(self, node: ast.Compare) -> None:
        if len(node.ops) != 1:
            return
        left, right = self._operand(node.left), self._operand(node.comparators[0])
        if self.kinds.of(node) == "mask" and isinstance(node.ops[0], ast.Lt):
            self._add("boundary", "a mask one wider", node, f"{left} <= {right}")
            self._add("boundary", "a mask one narrower", node, f"{left} < {right} - 1")
            return
        for sign in _FLIPS.get(type(node.ops[0]), ()):
            self._add("arithmetic", "a comparison changed", node, f"{left} {sign} {right}")

    def _constant(self, node: ast.Constant, parent: ast.AST | None) -> None:
        if type(node.value) is not float or node.value == 0.0:
            return
        added = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub)
        if added and abs(node.value) < EPSILON:
            self._add("arithmetic", "epsilon ten times as large", node, repr(10 * node.value))
            self._add("arithmetic", "epsilon dropped", node, "0.0")
            return
        self._add("arithmetic", "a constant off by a thousandth", node, repr(1.001 * node.value))
        self._add("arithmetic", "a constant off by one", node, repr(node.value + 1.0))

    def _call(self, node: ast.Call) -> None:
        name, arguments = _name(node), node.args
        if name in ("load", "store"):
            self._access(node)
        elif name == "where" and len(arguments) == 3:
            self._where(node)
        elif name == "dot":
            self._dot(node)
        elif name in _FUNCTIONS and arguments and self.kinds.of(arguments[0]) == "value":
            assert isinstance(node.func, ast.Attribute)
            start = self._offset(node.func.end_lineno, node.func.end_col_offset) - len(name)
            self._put("arithmetic", f"{name} became {_FUNCTIONS[name]}", node, start, len(name), _FUNCTIONS[name])
        if name in _DROPPED and arguments:
            self._add("arithmetic", f"{name} dropped", node, f"({self._text(arguments[0])})")

    def _access(self, node: ast.Call) -> None:
        kept = [self._text(a) for a in node.args]
        by_name = {k.arg: k for k in node.keywords}
        if "mask" in by_name:
            rest = [self._text(k) for k in node.keywords if k.arg not in ("mask", "other")]
            self._add("boundary", "a mask dropped", node, f"{self._text(node.func)}({', '.join(kept + rest)})")
        if "other" in by_name:
            self._add("boundary", "masked elements filled with another value", by_name["other"].value, "1")

    def _where(self, node: ast.Call) -> None:
        condition, kept, fill = node.args
        if self.kinds.of(condition) == "mask":
            self._add("boundary", "the mask of a reduction dropped", node, f"({self._text(kept)})")
            for other in ("0.0", "1.0"):
                self._add("boundary", "the identity of a reduction changed", fill, other)
        else:
            swapped = f"{self._text(fill)}, {self._text(kept)}"
            first, last = self._offset(kept.lineno, kept.col_offset), self._offset(fill.end_lineno, fill.end_col_offset)
            self._put("arithmetic", "the branches of a choice swapped", node, first, last - first, swapped)

    def _dot(self, node: ast.Call) -> None:
        if len(node.args) > 2:
            rest = [*map(self._text, node.args[:2]), *map(self._text, node.keywords)]
            self._add("arithmetic", "the accumulator dropped", node, f"{self._text(node.func)}({', '.join(rest)})")
        for keyword in node.keywords:
            exact = isinstance(keyword.value, ast.Constant) and keyword.value.value in ("ieee", "tf32x3")
            if keyword.arg == "input_precision" and exact:
                self._add("precision", "a product in tf32", keyword.value, '"tf32"')
                for half in _HALVES:
                    a, b = (f"({self._text(x)}).to(tl.{half})" for x in node.args[:2])
                    text = ", ".join([a, b, *map(self._text, node.args[2:])])
                    self._add("precision", f"a product in {half}", node, f"{self._text(node.func)}({text})")

    # -- text

    def _operand(self, node: ast.expr) -> str:
        """The text of an operand, in the parentheses that it may have had."""
        text = self._text(node)
        return f"({text})" if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare) else text

    def _text(self, node: ast.expr | ast.keyword) -> str:
        return self.data[slice(*self._span(node))].decode()

    def _span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return self.lines[line - 1] + column

    def _add(self, kind: str, operator: str, node: ast.expr, after: str) -> None:
        start, end = self._span(node)
        self._put(kind, operator, node, start, end - start, after)

    def _put(self, kind: str, operator: str, node: ast.expr, start: int, length: int, after: str) -> None:
        line = self.data[:start].count(b"\n") + 1
        self.found.append(Mutation(kind, operator, line, start, start + length, after))


def _statements(body: Sequence[ast.stmt], in_loop: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement in the order of the text, and whether it is in a loop."""
    for statement in body:
        yield statement, in_loop
        inside = in_loop or isinstance(statement, ast.For | ast.While)
        for part in ("body", "orelse"):
            yield from _statements(getattr(statement, part, []), inside)


def _name(node: ast.Call) -> str:
    """Name of the function of ``tl`` (or of a method) that is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Call) and _name(n) == name for n in ast.walk(node))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


__all__ = ["CLASSES", "Mutation", "choose", "mutations"]
