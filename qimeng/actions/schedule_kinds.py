"""Kinds that rewrite a region's schedule: tiling, reordering, pipeline, precision, layout, split and their like.

Deals in numbers of `Schedule`, each rewrite a pure function. Which regions and devices they fit is checked in one
place, `qimeng.actions.base.check_schedule`. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.actions.base import MAX_ALTERNATIVES, Context, ScheduleKind, register
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action, Facts
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _variants(schedule: Schedule, candidates: list[Schedule]) -> tuple[Schedule, ...]:
    found = dict.fromkeys(c for c in candidates if c != schedule)
    return tuple(found)[:MAX_ALTERNATIVES]


class Tiling(ScheduleKind):
    """Cut the work into tiles of another shape.

    args: ``taller`` (more rows a tile), ``wider`` (more columns), ``deeper`` (longer steps of the reduced axis),
    ``smaller`` (less of both), ``larger`` (more of both).
    rewrite: ``tile 64 x 64`` -> ``tile 128 x 64``
    """

    name = "tiling"
    options = ("taller", "wider", "deeper", "smaller", "larger")

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """Steps of two in the direction of `param`, with warps to match."""
        s = schedule
        if s.family == "gemm":
            grow = {
                "taller": [s.but(block_m=s.block_m * 2)],
                "wider": [s.but(block_n=s.block_n * 2)],
                "deeper": [s.but(block_k=s.block_k * 2), s.but(block_k=s.block_k * 2, stages=max(2, s.stages - 1))],
                "smaller": [
                    s.but(block_m=s.block_m // 2),
                    s.but(block_n=s.block_n // 2),
                    s.but(block_k=s.block_k // 2),
                ],
                "larger": [s.but(block_m=s.block_m * 2, block_n=s.block_n * 2, warps=min(8, s.warps * 2))],
            }[param]
            grow += [c.but(warps=w) for c in list(grow) for w in (4, 8) if w != c.warps]
            fits = [c for c in grow if 16 <= c.block_m <= 256 and 16 <= c.block_n <= 256 and 16 <= c.block_k <= 256]
            return _variants(s, fits)
        if s.form == "resident":
            if param not in ("taller", "smaller"):
                return ()
            heights = [s.block_p * 2, s.block_p * 4] if param == "taller" else [s.block_p // 2, s.block_p // 4]
            found = [
                s.but(block_p=p, warps=w) for p in heights for w in (4, 8, 16) if 1 <= p <= max(_power(facts.rows), 1)
            ]
            return _variants(s, found)
        table: dict[str, list[tuple[float, float]]] = {
            "taller": [(2, 1), (4, 1), (2, 0.5)],
            "wider": [(1, 2), (1, 4), (0.5, 2)],
            "deeper": [],
            "smaller": [(0.5, 1), (1, 0.5), (0.5, 0.5)],
            "larger": [(2, 2), (1, 8)],
        }
        found = []
        for p, r in table[param]:
            height, width = int(s.block_p * p), int(s.block_r * r)
            if 1 <= height <= _power(facts.rows) and 1 <= width <= 32768 and width <= 2 * _power(facts.columns):
                found += [s.but(block_p=height, block_r=width, warps=w) for w in (4, 8, 16)]
        return _variants(s, found)


class Reordering(ScheduleKind):
    """Visit the output tiles in another order, so that neighbours share operands in the L2 cache.

    args: ``grouped`` (rows of tiles in groups) or ``plain`` (row by row).
    rewrite: ``for m: for n:`` -> ``for group of m: for n: for m in group:``
    """

    name = "reordering"
    options = ("grouped", "plain")
    family = "gemm"

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """Group heights 4, 8, 16 and 32, or 1."""
        sizes = (1,) if param == "plain" else (4, 8, 16, 32)
        return _variants(schedule, [schedule.but(group_m=g) for g in sizes])


class Pipeline(ScheduleKind):
    """Overlap loads with arithmetic.

    args: ``stages`` (depth of the software pipeline) or ``warps`` (threads that share a tile).
    rewrite: ``load; compute`` -> ``load next; compute this``
    """

    name = "pipeline"
    options = ("stages", "warps")

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """Neighbouring depths, or other warp counts."""
        s = schedule
        if param == "warps":
            return _variants(s, [s.but(warps=w) for w in (2, 4, 8, 16)])
        if s.family == "tile" and (s.form in ("resident", "wave", "cooperative") or facts.passes == 0):
            return ()
        return _variants(s, [s.but(stages=n) for n in (1, 2, 3, 4, 5) if s.family == "tile" or n > 1])


PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6", "fp16x3", "fp16")
"""How a product of fp32 operands is computed (see `Schedule.precision`)."""


class Precision(ScheduleKind):
    """Compute products of fp32 operands on the tensor cores, in parts that keep the precision the mode asks for.

    args: ``tf32`` and ``fp16`` (one product, an 11-bit significand; mode ``high`` only), ``tf32x3``, ``bf16x3``,
    ``bf16x6``, ``fp16x3`` (several products, about fp32's accuracy), ``ieee`` (plain fp32 arithmetic). Whether the
    result is within the error budget is for the evaluator to say.
    rewrite: ``dot(a, b)`` -> ``dot(lo(a), hi(b)) + dot(hi(a), lo(b)) + dot(hi(a), hi(b))``
    """

    name = "precision"
    options = PRECISIONS
    family = "gemm"

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Single-product forms only in mode ``high``; fp32 operands only."""
        _, schedule, facts = self._target(program, action, context)
        if facts.dtype != "float32":
            raise IllegalAction(f"precision is a choice for float32 operands, these are {facts.dtype}")
        if action.param in ("tf32", "fp16") and context.mode != "high":
            raise IllegalAction(
                f"{action.param} keeps 11 bits of 24; mode {context.mode!r} asks for fp32 (mode 'high' allows it)"
            )
        if context.device.tf32_tflops <= context.device.fp32_tflops and action.param != "ieee":
            raise IllegalAction(f"{context.device.name} has no faster rate for {action.param}")
        super().check(program, action, context)

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """The same tiles with another precision; the coder puts tiles that suit it first."""
        return () if schedule.precision == param else (schedule.but(precision=param),)


class Layout(ScheduleKind):
    """Change how operands lie in memory or how they are read.

    Operands are packed in the form that the main loop wants, parameters once, others at every call where their rows do
    not begin at multiples of 16 bytes; tensor descriptors are the GPU's tile copy engine.

    args: ``pack`` (parameters in `prepare`, unaligned operands before the product), ``unpack``, ``descriptors``,
    ``pointers``.
    rewrite: ``load(w + n * K + k)`` -> ``load(packed_w[tile])``
    """

    name = "layout"
    options = ("pack", "unpack", "descriptors", "pointers")
    family = "gemm"

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """Set or clear `packed` and `descriptors`."""
        new = {
            "pack": schedule.but(packed=facts.packable),
            "unpack": schedule.but(packed=""),
            "descriptors": schedule.but(descriptors=device.has("descriptors")),
            "pointers": schedule.but(descriptors=False),
        }[param]
        return _variants(schedule, [new])


class Split(ScheduleKind):
    """Share one reduction among several programs, or change how a row's passes are arranged.

    args: ``resident`` (a row in registers), ``loop`` (one program a row, several passes), ``split`` (several programs
    a row, one launch a pass), ``wave`` (the same in one launch, the second pass while the row is in L2),
    ``cooperative`` (one launch, a row in the registers of a group of programs); for products ``more`` and ``fewer``
    programs along K.
    rewrite: ``for k in K: acc += …`` -> ``for k in K / s: part[s] += …; acc = sum(part)``
    """

    name = "split"
    options = ("resident", "loop", "split", "wave", "cooperative", "more", "fewer")

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """A change of form with block sizes that suit it, or twice / half the splits."""
        s = schedule
        if s.family == "gemm":
            if param not in ("more", "fewer"):
                return ()
            counts = [s.splits * 2, s.splits * 4, s.splits * 8] if param == "more" else [s.splits // 2, s.splits // 4]
            return _variants(s, [s.but(splits=c) for c in counts if 1 <= c <= max(1, facts.k // s.block_k)])
        if facts.passes == 0:
            return ()
        column = facts.contiguous == "p"
        if param in ("more", "fewer"):
            if s.form != "split":
                return ()
            counts = [s.splits * 2, s.splits * 4] if param == "more" else [s.splits // 2, s.splits // 4]
            return _variants(s, [s.but(splits=c) for c in counts if 1 <= c <= 2048])
        if param == s.form:
            return ()
        return _variants(s, _FORMS[param](s, facts, device, column))


def _resident(s: Schedule, facts: Facts, device: Device, column: bool) -> list[Schedule]:
    width = _power(facts.columns)
    if width > 65536:
        return []
    heights = (128, 64, 32) if column else (1, 2, 4)
    found = []
    for height in heights:
        for warps in (8, 16, 4):
            per_thread = width * height // (warps * device.warp_size)
            if height <= _power(facts.rows) and 2 <= per_thread <= 64:
                found.append(s.but(form="resident", block_p=height, block_r=width, splits=1, warps=warps, stages=1))
    return found


def _loop(s: Schedule, facts: Facts, device: Device, column: bool) -> list[Schedule]:
    shapes = (
        [(128, 32, 8), (64, 32, 4), (256, 16, 8)]
        if column
        else [(1, 4096, 8), (1, 2048, 4), (1, 8192, 8), (1, 8192, 16)]
    )
    return [s.but(form="loop", block_p=p, block_r=r, warps=w, splits=1, stages=n) for n in (1, 3) for p, r, w in shapes]


def _split(s: Schedule, facts: Facts, device: Device, column: bool) -> list[Schedule]:
    """Measured on H200: columns in tiles of 32 x 128 with 4 shares; long rows in grid strides of 4096."""
    shapes = (
        [(128, 32, 8), (64, 32, 4), (256, 16, 8), (128, 16, 8)]
        if column
        else [(1, 4096, 8), (1, 2048, 4), (1, 8192, 8)]
    )
    found = []
    for p, r, w in shapes:
        programs = max(1, facts.rows // p)
        steps = max(1, facts.columns // r)
        for waves in (2, 8):
            shares = min(steps, max(4 if column else 1, -(-waves * device.sms // programs)))
            for stages in (1, 3) if not column else (1,):
                found.append(s.but(form="split", block_p=p, block_r=r, splits=shares, warps=w, stages=stages))
    return found


def _wave(s: Schedule, facts: Facts, device: Device, column: bool) -> list[Schedule]:
    """Measured on H200: tiles of 16384 with 8 warps, the first pass 150 tiles ahead. Three at once: a guess."""
    if facts.passes != 1 or not facts.full_outputs or column or facts.columns < 8192:
        return []
    if facts.columns * 4 > device.l2_bytes // 2:
        return []
    shapes = (
        (16384, 8, 150, 1), (16384, 8, 150, 3), (16384, 8, 75, 1), (8192, 8, 300, 1), (8192, 8, 150, 1),
        (4096, 8, 600, 1),
    )  # fmt: skip
    return [
        s.but(form="wave", block_p=1, block_r=r, warps=w, lag=lag, per_sm=n, splits=1, stages=1)
        for r, w, lag, n in shapes
    ]


def _cooperative(s: Schedule, facts: Facts, device: Device, column: bool) -> list[Schedule]:
    """Tiles of 16 to 32 elements a thread, with the next row's or not; a row must fit all multiprocessors."""
    if facts.passes != 1 or not facts.full_outputs or column or facts.columns < 8192:
        return []
    shapes = (
        (8192, 8, 2, 2), (16384, 16, 1, 2), (4096, 4, 4, 2), (4096, 8, 4, 2), (8192, 8, 3, 1), (4096, 4, 6, 1),
        (2048, 4, 8, 2), (16384, 8, 2, 1),
    )  # fmt: skip
    return [
        s.but(form="cooperative", block_p=1, block_r=r, warps=w, per_sm=n, splits=1, stages=stages)
        for r, w, n, stages in shapes
        if r < facts.columns <= r * device.sms * n
    ]


_FORMS = {"resident": _resident, "loop": _loop, "split": _split, "wave": _wave, "cooperative": _cooperative}


class Vectorization(ScheduleKind):
    """Give each thread more or fewer neighbouring elements, for wider memory accesses.

    args: ``more`` or ``fewer`` elements a thread.
    rewrite: ``x[i]`` -> ``x[4 * i : 4 * i + 4]``
    """

    name = "vectorization"
    options = ("more", "fewer")
    family = "tile"

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """Half or twice the warps for the same tile, or twice or half the tile for the same warps."""
        s = schedule
        if param == "more":
            found = [s.but(warps=max(1, s.warps // 2))]
            found += [s.but(block_r=s.block_r * 2)] if s.form != "resident" and s.block_r * 2 <= 32768 else []
        else:
            found = [s.but(warps=min(16, s.warps * 2))]
            found += [s.but(block_r=s.block_r // 2)] if s.form != "resident" and s.block_r >= 64 else []
        return _variants(s, found)


class Special(ScheduleKind):
    """Compute special functions (exp, log, tanh, sqrt …) by the GPU's approximate units, or by Triton's own code.

    The approximate forms keep about fp32's accuracy, also near the points where a unit has no bound; whether the
    result is within the error budget is for the evaluator to say.

    args: ``fast`` or ``accurate``.
    rewrite: ``log(x)`` -> ``ln2 * lg2.approx(x)``
    """

    name = "special"
    options = ("fast", "accurate")
    family = "tile"

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Only where every element takes such a function, on a GPU that has the units."""
        _, schedule, facts = self._target(program, action, context)
        if not facts.special:
            raise IllegalAction("no element of the region takes a special function (exp, log, tanh, sqrt …) in fp32")
        if not context.device.has("approximate"):
            raise IllegalAction(
                f"the approximate units are called by NVIDIA's instructions, not {context.device.name}'s"
            )
        if schedule.fast == (action.param == "fast"):
            raise IllegalAction(f"{', '.join(facts.special)} {action.param} is what the region has")
        super().check(program, action, context)

    def rewrite(self, schedule: Schedule, facts: Facts, device: Device, param: str) -> tuple[Schedule, ...]:
        """The same tiles with other code for the functions."""
        return _variants(schedule, [schedule.but(fast=param == "fast")])


for _kind in (Tiling(), Reordering(), Pipeline(), Precision(), Layout(), Split(), Vectorization(), Special()):
    register(_kind)
