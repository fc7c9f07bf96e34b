"""Expressions as lines of Triton over a two-dimensional tile.

A tile has a `p` side ([PB, 1] vectors) and an `r` side ([1, RB] vectors); every value is a scalar, one of those, or the
whole [PB, RB] tile, and Triton broadcasts. Deals in which variable walks which axes, in offsets, masks, loads and
arithmetic. Knows nothing about loops, launches or schedules: the templates decide those.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qimeng.coder.template.nest.axes import strides_of
from qimeng.coder.template.nest.contracted import beside_extreme
from qimeng.coder.template.nest.dtypes import CONVERTED, compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, constant, guard, positions
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.combined import combined
from qimeng.coder.template.triton.exponentials import one_beside

MOST_FP8 = 464
"""Magnitude up to which a number rounds to one of fp8 (e4m3): half a step above 448, the largest."""


@dataclass
class Walk:
    """One variable of the kernel and the axes it walks.

    Attributes:
        name: the variable; a scalar, a [PB, 1] or a [1, RB] vector.
        atoms: coalesced axes, outermost first; one stride (the innermost axis') serves every access.
        extent: number of positions.
        side: ``""`` for a scalar, ``"p"`` or ``"r"`` for vectors.
        column: it walks columns, so that it has no value between the passes over them.
        base: where the vector starts, as a scalar; with 64-bit offsets it is added to the pointer apart from `lane`.
        lane: positions from `base`, as a 32-bit vector.
    """

    name: str
    atoms: tuple[int, ...]
    extent: int
    side: str = ""
    column: bool = False
    base: str = ""
    lane: str = ""


@dataclass
class Emitter:
    """Prints expressions of a nest.

    Attributes:
        nest: the loop nest.
        walks: the variables that cover every axis in use.
        wide: use 64-bit offsets.
        masks: side to the name of its mask, where that side can overhang.
        lines: what was printed, without indentation.
        letter: how temporaries begin; two branches of an `if` must not share names.
        fast: how special functions are computed; see `ops.write`.
        aligned: elements that an access along a row's columns is a multiple of; 0 where nothing is known.
        starts: number of a source to where in its tensor it begins, as text; 0 where it is not there.
        limited: whether reads beyond a dimension's elements (`Nest.limits`) are masked, as stores are.
    """

    nest: Nest
    walks: list[Walk]
    wide: bool = False
    masks: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    load_hint: str = ""
    letter: str = "v"
    fast: str = ""
    aligned: int = 0
    starts: Mapping[int, str] = field(default_factory=dict)
    limited: bool = False
    _count: int = 0

    def side(self, e: Expr) -> str:
        """``""``, ``"p"``, ``"r"`` or ``"pr"``: along which sides of the tile the value changes."""
        return self.side_of(e.depends)

    def side_of(self, atoms: Iterable[int]) -> str:
        """The sides that walk any of `atoms`."""
        wanted = set(atoms)
        sides = {w.side for w in self.walks if w.side and wanted & set(w.atoms)}
        return ("p" if "p" in sides else "") + ("r" if "r" in sides else "")

    def fresh(self) -> str:
        """A new temporary's name."""
        self._count += 1
        return f"{self.letter}{self._count}"

    def offset(self, strides: dict[int, int], pad: str = "") -> str:
        """The offset of an access as text; `pad` names sides that it must have even without a stride."""
        scalars, lanes = [], []
        sides: set[str] = set()
        for w in self.walks:
            step = strides.get(w.atoms[-1], 0) if w.atoms else 0
            if step:
                times = "" if step == 1 else f" * {step}"
                sides.add(w.side)
                if (self.wide or self.aligned) and w.base:
                    scalars.append(f"{w.base}{times}")
                    lanes.append(f"{w.lane}{times}")
                else:
                    (lanes if w.side else scalars).append(f"{w.name}{times}")
        lanes += [f"{side}_zero" for side in pad if side not in sides]
        if self.aligned and len({w.column for w in self.walks if w.atoms and strides.get(w.atoms[-1], 0)}) == 2:
            scalars = [f"tl.multiple_of({' + '.join(scalars)}, {self.aligned})"]
        return " + ".join(scalars + lanes) or "0"

    def mask(self, sides: str, extra: Iterable[str] = ()) -> str:
        """The mask of an access that has `sides`, as an argument text (empty where nothing overhangs)."""
        parts = [self.masks[s] for s in sides if s in self.masks] + list(extra)
        return " & ".join(parts)

    def define(self, e: Expr, name: str) -> None:
        """Say that `e` is held in the variable `name`."""
        self.names[id(e)] = name

    def value(self, e: Expr) -> str:
        """The name (or literal) of `e`, printing what is needed to compute it."""
        if id(e) in self.names:
            return self.names[id(e)]
        printed = combined(e, self.fast)
        for a in printed.operands():  # iterative depth is bounded by the region's length
            self.value(a)
        text = self._print(printed)
        self.names[id(e)] = text
        return text

    def _print(self, e: Expr) -> str:
        if e.op == "const":
            return literal(e.param, e.dtype)
        if e.op == "load":
            return self._load(e)
        if e.op == "index":
            return self._index(e)
        if e.op == "identity":
            return self.value(e.args[0])
        if e.op == "cast":
            return self._cast(e)
        if e.op == "round":
            target = self.fresh()
            self.lines.append(f"{target} = ({self.value(e.args[0])}).to({ops.TRITON_DTYPE[e.dtype]}).to(tl.float32)")
            return target
        if e.op in ("reduce", "part", "dot", "scan"):
            raise AssertionError(f"{e.op} must be defined by the template before it is used")
        args = [self.value(a) if isinstance(a, Expr) else literal(a, self._partner(e)) for a in e.args]
        numbers = [not isinstance(a, Expr) or constant(a) is not None for a in e.args]
        if all(numbers) or e.op in ops.BITWISE:  # functions take tensors, not numbers
            dtype = ops.TRITON_DTYPE[compute_dtype(self._partner(e))]
            args = [
                f"tl.full([1, 1], {a}, {dtype})" if number and "tl." not in a else a
                for a, number in zip(args, numbers, strict=True)
            ]
        elif self._partner(e) == "float64" and e.op in ops.ROUNDS_NUMBERS:
            args = [
                f"tl.full([1, 1], {t}, tl.float64)" if number and "tl." not in t else t
                for t, number in zip(args, numbers, strict=True)
            ]
        if (found := beside_extreme(e)) is not None:
            number, top = found
            one = self.fresh()
            self.lines.append(f"{one} = {one_beside(self.value(top))}")
            args[number] = f"{args[number]} * {one}"
        target = self.fresh()
        self.lines += ops.write(e.op, target, args, e.dtype, self.fast, self._partner(e))
        if e.dtype in ("int8", "uint8", "int16"):  # numbers beside them may have made int32 of them
            self.lines.append(f"{target} = {target}.to({ops.TRITON_DTYPE[e.dtype]})")
        return target

    def _partner(self, e: Expr) -> str:
        """The dtype that a plain number beside the operands of `e` is meant in."""
        for a in e.operands():
            if a.dtype != "bool":
                return a.dtype
        return e.dtype

    def _load(self, e: Expr) -> str:
        source = self.nest.sources[e.param]
        if source.scalar:
            return f"x{source.number}"
        strides = self.nest.load_strides(e)
        exists = guard(e)
        sides = self.side(e) if e.access else self.side_of(strides)
        within = self._within(set(e.depends)) if self.limited else []
        mask = self.mask(sides, [*([] if exists is None else [self.value(exists)]), *within])
        place = self.offset(strides, sides if e.access else "")
        for position, step in positions(e):
            place += f" + {self._position(position)}" + ("" if step == 1 else f" * {step}")
        place += f" + {self.starts[source.number]}" if source.number in self.starts else ""
        target = self.fresh()
        arguments = f", mask={mask}, other={'0.0' if e.dtype in CONVERTED else '0'}" if mask else ""
        hint = self.load_hint if "r" in sides and "p" in sides else ""
        cast = f".to({ops.TRITON_DTYPE[compute_dtype(e.dtype)]})" if compute_dtype(e.dtype) != e.dtype else ""
        self.lines.append(f"{target} = tl.load(x{source.number}_ptr + {place}{arguments}{hint}){cast}")
        return target

    def _position(self, e: Expr) -> str:
        text = self.value(e)
        return f"tl.cast({text}, tl.int64)" if self.wide and e.dtype != "int64" else text

    def _index(self, e: Expr) -> str:
        strides, step = {}, 1
        for atom in reversed(e.reduced):
            strides[atom] = step
            step *= self.nest.axes.size(atom)
        target = self.fresh()
        self.lines.append(f"{target} = {self.offset(strides)}")
        return target

    def _cast(self, e: Expr) -> str:
        inner = self.value(e.args[0])
        have, want = compute_dtype(e.args[0].dtype), compute_dtype(e.dtype)
        if have == want:
            return inner
        if constant(e.args[0]) is not None and "tl." not in inner:  # a number has no dtype that it could change
            inner = f"tl.full([1, 1], {inner}, {ops.TRITON_DTYPE[have]})"
        if want in CONVERTED:  # as in PyTorch: a GPU's own conversion gives its largest number for what is above
            inner = f"tl.where(tl.abs({inner}) > {MOST_FP8}, float('nan'), {inner})"
        if want == "uint8" and is_float(have):  # a negative number wraps, as in PyTorch; the GPU's conversion gives 0
            inner = f"({inner}).to(tl.int64)"
        target = self.fresh()
        text = f"({inner} != 0)" if want == "bool" else f"({inner}).to({ops.TRITON_DTYPE[want]})"
        self.lines.append(f"{target} = {text}")
        return target

    def _within(self, held: set[int]) -> list[str]:
        """Masks of what lies within the dimensions of a tensor with the axes `held`."""
        found = [(strides_of(self.nest.axes, [d], [1]), n) for d, n in self.nest.limits if set(d) & held]
        return [f"({self.offset(walked)} < {n})" for walked, n in found]

    def store(self, number: int, value: str | None = None, sides: str = "pr", hint: str = "") -> None:
        """Store output `number`; positions along axes that it does not have write once."""
        expr, _, _, dtype = self.nest.outputs[number]
        strides = self.nest.output_strides(number)
        held = {a for d in expr.dims for a in d}
        once = [
            f"({w.name} == 0)"
            for w in self.walks
            if w.atoms and not (set(w.atoms) & held) and ("r" in sides or not w.column)
        ]
        mask = self.mask(sides, [*once, *self._within(held)])
        text = value if value is not None else self.value(expr)
        held_in = ops.TRITON_DTYPE[compute_dtype(dtype)]
        if constant(expr) is not None and "tl." not in text:
            text = f"tl.full([1, 1], {text}, {held_in})"
        elif self.side(expr) == "" and dtype != "bool":
            text = f"({text} + tl.zeros([1, 1], {held_in}))"
        arguments = f", mask={mask}" if mask else ""
        place = f"y{number}_ptr + {self.offset(strides, sides)}"
        self.lines.append(f"tl.store({place}, ({text}).to({_store_dtype(dtype)}){arguments}{hint})")


def without_unused(lines: list[str]) -> list[str]:
    """The lines of a kernel without assignments that nothing reads.

    >>> without_unused(["a = 1", "b = a", "c = 2", "tl.store(p, c)"])
    ['c = 2', 'tl.store(p, c)']
    """
    while True:
        words = Counter(word for line in lines for word in set(re.findall(r"[A-Za-z_]\w*", line)))
        kept = [x for x in lines if not (m := _ASSIGNED.match(x)) or words[m[1]] > 1 or "atomic" in x]
        if len(kept) == len(lines):
            return kept
        lines = kept


_ASSIGNED = re.compile(r"\s*(\w+) = ")


def _store_dtype(dtype: str) -> str:
    return ops.TRITON_DTYPE[dtype]


def literal(value: object, dtype: str) -> str:
    """A Python number as Triton text in the spirit of `dtype`.

    >>> literal(2, "float32"), literal(float("inf"), "float32"), literal(True, "bool")
    ('2.0', 'float("inf")', 'True')

    Triton makes +0 of a -0 in the text, so that it is computed.

    >>> literal(-0.0, "float32")
    '(tl.full([1, 1], 0.0, tl.float32) * -1.0)'
    """
    if isinstance(value, bool) or dtype == "bool":
        return str(bool(value))
    if is_float(dtype) or isinstance(value, float):
        number = float(value)  # type: ignore[arg-type]
        if number != number or number in (float("inf"), float("-inf")):
            return f'float("{number}")'
        if number == 0 and math.copysign(1.0, number) < 0:
            return f"(tl.full([1, 1], 0.0, tl.{'float64' if dtype == 'float64' else 'float32'}) * -1.0)"
        return repr(number)
    return repr(value)


__all__ = ["Emitter", "Walk", "literal", "without_unused"]
