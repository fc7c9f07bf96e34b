"""Expressions of a nest as C++ statements of one thread.

A thread stands at one row and walks elements of its columns, `vector` neighbours at a time. What does not change along
the columns is computed once a row, all else once an element. Deals in positions, offsets, loads and arithmetic. Knows
nothing about loops, launches or reductions: the printer decides those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qimeng.coder.template.cuda.ops import C_TYPE, compute_dtype, compute_type, is_float, known, literal, written
from qimeng.coder.template.nest.contracted import beside_extreme
from qimeng.coder.template.nest.expr import Expr, constant
from qimeng.coder.template.nest.ir import Nest
from qimeng.family import Unsupported

Group = tuple[tuple[int, ...], int]
"""Coalesced axes, outermost first, and their extent."""


@dataclass(frozen=True)
class Position:
    """A variable that holds the position along coalesced axes."""

    name: str
    atoms: tuple[int, ...]
    extent: int


def check_printable(nest: Nest) -> None:
    """Raise `Unsupported` where CUDA C++ cannot say what `nest` computes; the message names the operator."""
    for e in nest.exprs:
        dtypes = {e.dtype, *(a.dtype for a in e.operands())}
        if dtypes - C_TYPE.keys():
            raise Unsupported(f"CUDA C++ is not printed for {', '.join(sorted(dtypes - C_TYPE.keys()))}")
        if e.access:
            raise Unsupported("CUDA C++ is not printed for values read at computed positions")
        if e.op in ("idiv", "imod") and is_float(e.dtype):
            raise Unsupported(f"CUDA C++ is not printed for {e.op} of floating numbers")
        structural = ("load", "const", "index", "identity", "cast", "round", "reduce", "part")
        if e.op not in structural and not known(e.op):
            raise Unsupported(f"CUDA C++ is not printed for {e.op}")


@dataclass
class Emitter:
    """Prints the expressions of a nest.

    Attributes:
        nest: the loop nest.
        rows: positions of the thread's row.
        columns: positions of the first of the elements at hand, innermost last.
        vector: neighbouring elements that are read and written together.
        wide: offsets need 64 bits.
        row_lines: statements that are printed once a row.
        loads: statements that read the elements at hand, `vector` at a time.
        lines: statements of one element, whose number among them is ``v``.
        held: number of a load to the variable that holds its elements, where a row stays in registers.
    """

    nest: Nest
    rows: Sequence[Position]
    columns: Sequence[Position]
    vector: int
    wide: bool
    row_lines: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    held: Mapping[int, str] = field(default_factory=dict)
    _row_names: dict[int, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _count: int = 0

    # -- what the printer asks

    def begin_pass(self) -> None:
        """Forget the values of elements: another loop computes its own."""
        self._names = {}
        self.loads, self.lines, self.row_lines = [], [], []

    def define(self, e: Expr, text: str) -> None:
        """Say that the row's value `e` is `text`."""
        self._row_names[id(e)] = text

    def moves(self, e: Expr) -> bool:
        """Whether `e` changes along the columns."""
        return bool(e.depends & {a for p in self.columns for a in p.atoms})

    def value(self, e: Expr) -> str:
        """The name or literal of `e`, printing what is needed to compute it."""
        constant_value = constant(e)
        if constant_value is not None:
            return literal(constant_value.param, constant_value.dtype)
        names = self._names if self.moves(e) else self._row_names
        if id(e) not in names:
            names[id(e)] = self._print(e)
        return names[id(e)]

    def offset(self, strides: Mapping[int, int], columns: bool = True) -> str:
        """The offset of the first of the elements at hand, as text."""
        parts = []
        for p in (*self.rows, *(self.columns if columns else ())):
            step = strides.get(p.atoms[-1], 0) if p.atoms else 0
            if step:
                parts.append(p.name if step == 1 else f"{p.name} * {step}{'LL' if self.wide else ''}")
        return " + ".join(parts) or "0"

    def step(self, strides: Mapping[int, int]) -> int:
        """Elements of memory from one of the elements at hand to the next."""
        return strides.get(self.columns[-1].atoms[-1], 0) if self.columns and self.columns[-1].atoms else 0

    def element(self, strides: Mapping[int, int]) -> str:
        """The offset of element ``v`` of those at hand."""
        step = self.step(strides)
        at = self.offset(strides)
        if self.vector == 1 or not step:
            return at
        return f"{at} + v" if step == 1 else f"{at} + v * {step}"

    # -- parts

    def _print(self, e: Expr) -> str:
        lines = self.lines if self.moves(e) else self.row_lines
        if e.op == "load":
            return self._load(e, lines)
        if e.op in ("reduce", "part"):
            raise AssertionError(f"{e.op} must be defined by the printer before it is used")
        if e.op == "identity":
            return self.value(e.args[0])
        target = self._fresh()
        if e.op == "index":
            text = self._index(e)
        elif e.op == "cast":
            inner = self.value(e.args[0])
            have, want = compute_dtype(e.args[0].dtype), compute_dtype(e.dtype)
            if have == want:
                return inner
            if want == "uint8" and is_float(have):  # a negative number wraps, as in PyTorch
                inner = f"static_cast<long long>({inner})"
            text = f"{inner} != 0" if want == "bool" else f"static_cast<{C_TYPE[want]}>({inner})"
        elif e.op == "round":
            text = f"static_cast<float>(static_cast<{C_TYPE[e.dtype]}>({self.value(e.args[0])}))"
        else:
            partner = self._partner(e)
            args = [self.value(a) if isinstance(a, Expr) else literal(a, partner) for a in e.args]
            text = written(e.op, args, compute_dtype(partner))
            if beside_extreme(e) is not None:
                text = f"difference({', '.join(args)})"
        lines.append(f"const {compute_type(e.dtype)} {target} = {text};")
        return target

    def _partner(self, e: Expr) -> str:
        """The dtype that a plain number beside the operands of `e` is meant in, and that they are computed in."""
        found = [a.dtype for a in e.operands() if a.dtype != "bool"]
        return next((d for d in found if is_float(d)), found[0] if found else e.dtype)

    def _load(self, e: Expr, lines: list[str]) -> str:
        source = self.nest.sources[e.param]
        if source.scalar:
            return f"x{source.number}"
        strides, kind = self.nest.load_strides(e), C_TYPE[e.dtype]
        if self.moves(e) and self.vector > 1 and self.step(strides) == 1:
            packed = self.held.get(id(e))
            if packed is None:
                packed = self._fresh("l")
                self.loads.append(f"const auto {packed} = {self.vector_load(e)};")
            text = f"{packed}.v[v]"
        elif id(e) in self.held:
            text = f"{self.held[id(e)]}.v[v]"
        else:
            text = f"x{source.number}[{self.element(strides) if self.moves(e) else self.offset(strides, False)}]"
        target = self._fresh()
        lines.append(f"const {compute_type(e.dtype)} {target} = {_widened(text, kind)};")
        return target

    def vector_load(self, e: Expr) -> str:
        """The elements at hand of a load, read in one access."""
        place = f"x{self.nest.sources[e.param].number} + {self.offset(self.nest.load_strides(e))}"
        kind = f"Pack<{C_TYPE[e.dtype]}, {self.vector}>"
        return f"*reinterpret_cast<const {kind}*>({place})"

    def _index(self, e: Expr) -> str:
        strides, step = {}, 1
        for atom in reversed(e.reduced):
            strides[atom] = step
            step *= self.nest.axes.size(atom)
        return self.element(strides)

    def index(self, e: Expr) -> str:
        """Position along the reduced axes, as argmax and argmin count it."""
        return self._index(e)

    def _fresh(self, letter: str = "t") -> str:
        self._count += 1
        return f"{letter}{self._count}"


def positions(groups: Iterable[Group], letter: str) -> list[Position]:
    """A variable for each of `groups`."""
    return [Position(f"{letter}{i}", atoms, extent) for i, (atoms, extent) in enumerate(groups)]


def decomposed(found: Sequence[Position], number: str, index: str) -> list[str]:
    """Statements that take the positions `found` from their flat number."""
    lines, below = [], 1
    for i in range(len(found) - 1, -1, -1):
        text = number if below == 1 else f"{number} / {below}"
        lines.append(f"const {index} {found[i].name} = {f'({text}) % {found[i].extent}' if i else text};")
        below *= found[i].extent
    return lines


def _widened(text: str, kind: str) -> str:
    return f"static_cast<float>({text})" if kind in ("__half", "__nv_bfloat16") else text


__all__ = ["Emitter", "Group", "Position", "check_printable", "decomposed", "positions"]
