"""Which schedules a product starts from and which ones are worth trying, and how much shared memory each takes.

The lists come from sweeps on an H200 (11 shapes from 256 x 256 x 524288 to 32768 x 32768 x 64; Triton 3.6), best first
over all shapes. Deals in block sizes and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.positions import columns_read
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import SCHEMES, SHORT, is_packed, is_turned, scheme_of
from qimeng.coder.template.families.gemm.staging import few_channels, holds_planes, shiftable, stageable, under
from qimeng.coder.template.families.gemm.traffic import (
    SMALL_SHARE,
    inline_sides,
    memory_binds,
    never_copied,
    operand_bytes,
    packed_sides,
)
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES
from qimeng.graph.opgraph import itemsize

Blocks = tuple[int, int, int, int, int]
"""block_m, block_n, block_k, warps, stages."""

SPLIT_SWEEP: tuple[tuple[Blocks, bool], ...] = (
    ((128, 256, 64, 8, 4), True),
    ((128, 256, 64, 8, 3), True),
    ((256, 128, 64, 8, 4), True),
    ((128, 256, 32, 8, 4), False),
    ((128, 128, 32, 4, 3), False),
    ((128, 128, 64, 8, 3), False),
    ((128, 128, 64, 4, 3), True),
    ((64, 128, 64, 4, 3), True),
)
"""Schemes of several planes: blocks, and whether the products run end to end (`GemmSchedule.cat`)."""

PLAIN_SWEEP: tuple[Blocks, ...] = (
    (128, 256, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 2),
    (128, 128, 64, 4, 2),
    (64, 64, 64, 4, 3),
)
"""One product of 16-bit operands."""

FULL_SWEEP: tuple[Blocks, ...] = (
    (128, 128, 32, 8, 3),
    (128, 64, 32, 4, 3),
    (64, 64, 32, 4, 3),
    (128, 256, 32, 8, 3),
    (64, 128, 32, 4, 3),
    (128, 128, 32, 4, 3),
    (64, 64, 64, 4, 2),
)
"""fp32 operands as they are (TF32 or plain fp32)."""

INLINE_SWEEP: tuple[Blocks, ...] = (
    (128, 128, 32, 8, 4),
    (128, 256, 32, 8, 4),
    (256, 128, 32, 8, 4),
    (64, 128, 32, 4, 4),
    (64, 64, 32, 4, 4),
)
"""Operands that the main loop splits or rounds where memory binds the product. Not from a sweep: by compiler counts
(Triton 3.6, sm_90): 106 registers at 128 x 128 in TF32, so that one block of an SM computes on what it read while
another multiplies; planes, their scales and a second accumulator take more."""

STAGED_SWEEP: tuple[Blocks, ...] = (
    (128, 128, 32, 4, 3),
    (128, 128, 64, 8, 2),
    (64, 128, 32, 4, 4),
    (256, 64, 32, 8, 3),
    (64, 64, 64, 4, 3),
)
"""Several planes of a convolution's input, read from a copy. Not from a sweep. Three planes at 128 columns take 144 to
192 KiB of shared memory, so that an SM of an H200 has one block; at 64, two of the first or of the third fit. Splitting
into three planes in the loop was faster on an H200: by 6 % at 8 channels in two dimensions, and by 25 to 30 % (without
a copy, against two planes of a copy) at 3 channels in three."""

STAGED_PLAIN_SWEEP: tuple[Blocks, ...] = (
    (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (256, 128, 64, 8, 3),
    (64, 128, 64, 4, 4),
)
"""One plane of it. Not from a sweep."""

INLINE_FIRST = 2
"""So many of those come before packed planes, the others after them."""

VERY_LONG, VERY_LONG_SHARE = 65536, 0.225
"""Depth from which the budget of sums allows more bias (`promotion`), and the share of it that this may take."""

BIAS_OF_512 = 1.9e-6
"""Relative error of a sum of positive numbers whose accumulator is promoted every 512 elements (H100)."""

OFTEN, SHORT_WINDOWS = 32, 128
"""Elements of the depth between two promotions, in one more schedule for windows of at most that depth. A mean over an
image shows the bias of a convolution of few channels, which PyTorch computes in plain fp32. Estimated by a model on the
CPU that cuts each step of 16 off to fp32 as tensor cores do: 16,000 results of depth 72 are off by 5.0e-8 in the mean
when never promoted, by 1.9e-8 every 32, and by 0.14e-8 in plain fp32. Not measured on a GPU."""

GUESSES = 2
"""Schedules of each precision that lowering tries; twice as many of the likeliest."""


def default_schedule(plan: GemmPlan, device: Device, mode: str) -> GemmSchedule:
    """The plain, untuned schedule that lowering starts from.

    Args:
        plan: the plan.
        device: for which device.
        mode: precision mode; fp32 operands are multiplied in fp32 except in ``"high"``, where TF32 is allowed.
    """
    if plan.dtype != "float32":
        base = GemmSchedule(block_m=128, block_n=128, block_k=64, warps=8, stages=3, descriptors=has_tma(device))
    else:
        precision = "tf32" if mode == "high" else "ieee"
        base = GemmSchedule(block_m=64, block_n=64, block_k=32, warps=4, stages=3, precision=precision)
    fitted = _fit(plan, device, base.but(dependent=device.has("dependent")))
    while shared_bytes(plan, fitted) > device.shared_per_block and fitted.stages > 1:
        fitted = fitted.but(stages=fitted.stages - 1)
    return fitted


def schedule_for_precision(
    plan: GemmPlan, schedule: GemmSchedule, precision: str, device: Device
) -> tuple[GemmSchedule, ...]:
    """At most eight configurations for `precision`, best guess first.

    Args:
        plan: the plan.
        schedule: the schedule as it stands.
        precision: a key of `SCHEMES`; half operands ignore it.
        device: for which device.

    Returns:
        Configurations that fit the device, each once; packed where the scheme packs. Windows are read from a copy or
        where they lie, by turns.
    """
    scheme = scheme_of(plan, schedule.but(precision=precision))
    tma = has_tma(device) and (scheme.dtype != "float32" or scheme.rounds)
    base = schedule.but(precision=precision, persistent=False, splits=1, cat=False, descriptors=tma)
    read = never_copied(plan) if scheme.splits else ""
    base = base.but(packed=packed_sides(plan, schedule.packed, precision), inline=read)
    if scheme.dtype == "float32":
        sweep = [(blocks, False) for blocks in FULL_SWEEP]
    elif len(scheme.products) > 1:
        sweep = list(SPLIT_SWEEP)
    else:
        sweep = [(blocks, False) for blocks in PLAIN_SWEEP]
    reading = inline_sides(plan, device, precision)
    plain = _ranked(plan, base, sweep, device)
    if (plan.half or scheme.rounds) and stageable(plan) is None:
        packed = "".join(s.name for s in plan.sides if s.held or s.name in base.packed)
        copied = _ranked(plan, base.but(staged=True, packed=packed), sweep, device)
        where_it_lies = plain if plan.half else _ranked(plan, base, [(b, False) for b in INLINE_SWEEP], device)
        moved = [s.but(shifted=True) for s in copied if tma and shiftable(plan, s) is None]
        return _in_turn(moved, _in_turn(copied, where_it_lies))[:MAX_ALTERNATIVES]
    if not reading:
        return plain[:MAX_ALTERNATIVES]
    packed = "".join(side for side in base.packed if side not in reading)
    inline = base.but(packed=packed, inline=reading if scheme.splits else "")
    first = _ranked(plan, inline, [(blocks, False) for blocks in INLINE_SWEEP], device)
    if "a" in reading and stageable(plan) is None:
        once = "".join(s.name for s in plan.sides if s.held or s.name in packed)
        sweep = [(blocks, False) for blocks in (STAGED_SWEEP if scheme.planes > 1 else STAGED_PLAIN_SWEEP)]
        held = _ranked(plan, base.but(staged=True, packed=once, inline=""), sweep, device)
        planes = [s for s in held if holds_planes(plan, s)]
        moved = [s.but(shifted=True) for s in planes if tma and shiftable(plan, s) is None]
        copied = _ranked(plan, inline.but(staged=True), [(blocks, False) for blocks in INLINE_SWEEP], device)
        once_split, in_loop = _in_turn(moved, planes)[: 2 * GUESSES], _in_turn(copied, first)
        likelier, others = (in_loop, once_split) if scheme.planes > 2 else (once_split, in_loop)
        return (*likelier[: 2 * GUESSES], *others, *likelier[2 * GUESSES :])[:MAX_ALTERNATIVES]
    if scheme.rounds:
        return first[:MAX_ALTERNATIVES]
    return (*first[:INLINE_FIRST], *plain, *first[INLINE_FIRST:])[:MAX_ALTERNATIVES]


def _in_turn(first: Sequence[GemmSchedule], second: Sequence[GemmSchedule]) -> tuple[GemmSchedule, ...]:
    """One of each by turns, the first of `first` before all."""
    pairs = zip_longest(first, second)
    return tuple(s for pair in pairs for s in pair if s is not None)


def guesses(plan: GemmPlan, schedule: GemmSchedule, device: Device, mode: str) -> list[GemmSchedule]:
    """What lowering measures beside the plain schedule.

    For fp32 operands the tensor cores at the precisions that the mode admits; for half operands larger tiles, of packed
    operands where rows of memory are not aligned.
    """
    if plan.half:
        return list(schedule_for_precision(plan, schedule, schedule.precision, device)[: 2 * GUESSES])
    if device.tf32_tflops <= device.fp32_tflops:
        return []
    first, *others = precisions(plan, device, mode)
    several = [schedule_for_precision(plan, schedule, first, device)[: 2 * GUESSES]]
    several += [schedule_for_precision(plan, schedule, p, device)[:GUESSES] for p in others]
    found = [s for schedules in several for s in schedules]
    return [*found, *_promoted_often(plan, found)]


def _promoted_often(plan: GemmPlan, found: Sequence[GemmSchedule]) -> list[GemmSchedule]:
    """The first of `found` that multiplies planes, promoted every `OFTEN`: there for a final verification."""
    planes = next((s for s in found if len(scheme_of(plan, s).products) > 1), None)
    if planes is None or not never_copied(plan) or not OFTEN < plan.shape[3] <= SHORT_WINDOWS:
        return []
    return [planes.but(promote=OFTEN)]


def precisions(plan: GemmPlan, device: Device, mode: str) -> tuple[str, ...]:
    """Precisions at which lowering tries a product of fp32 operands on the tensor cores, the likeliest first.

    Scaled fp16 planes at the mode's precision; where memory binds the product also what reads operands but once: TF32
    in mode ``"high"``, else bf16 planes, where the budget of errors of so deep a product admits them. Windows are read
    from a copy that holds planes, or in TF32 where that is admitted: without a copy, planes of them would have to be
    scaled window by window. cuDNN computes convolutions of few channels in fp32 even then, and its error is the budget:
    there fp32's precision comes first. It comes last for others, since cuDNN takes fp32 for some of them as well (large
    transposed ones, groups); where memory binds a convolution, that costs little.
    """
    if plan.mode(mode) == "high":
        if never_copied(plan):
            if few_channels(plan):
                return (*_copied(plan, "fp16x3"), "bf16x6", "tf32")
            exact = ("bf16x6",) if memory_binds(plan, device, "bf16x6") else _copied(plan, "fp16x3")
            return (*_copied(plan, "fp16"), "tf32", *exact)
        others = ("tf32",) if inline_sides(plan, device, "tf32") else ()
        return ("fp16", *others, "fp16x3") if mode != "high" else ("fp16", *others)
    if never_copied(plan) and stageable(plan) is None:
        return (*_copied(plan, "fp16x3"), "bf16x6")
    once = inline_sides(plan, device, "bf16x3") and SCHEMES["bf16x3"].error <= budget(plan)
    return ("fp16x3", "bf16x3") if once else ("fp16x3",)


def _copied(plan: GemmPlan, precision: str) -> tuple[str, ...]:
    """`precision`, where a copy of windows may hold its planes."""
    schedule = GemmSchedule(staged=True, precision=precision)
    return (precision,) if stageable(plan) is None and holds_planes(plan, schedule) else ()


def budget(plan: GemmPlan) -> float:
    """The judge's floor for the error of a product of fp32 operands: 16 ulp and what the sum's length adds."""
    return 1.9e-6 + 6e-8 * math.sqrt(plan.shape[3])


def _ranked(
    plan: GemmPlan, base: GemmSchedule, sweep: Sequence[tuple[Blocks, bool]], device: Device
) -> tuple[GemmSchedule, ...]:
    """`base` with the blocks of `sweep`, those that fit the device, each once, the best guess first."""
    found: dict[GemmSchedule, None] = {}
    for (bm, bn, bk, warps, stages), cat in sweep:
        s = base.but(block_m=bm, block_n=bn, block_k=bk, warps=warps, stages=stages, cat=cat)
        s = _fit(plan, device, s)
        s = s.but(promote=promotion(plan, s))
        while shared_bytes(plan, s) > device.shared_per_block and s.stages > 1:
            s = s.but(stages=s.stages - 1)
        if s.inline:
            s = _deepened(plan, s, device)
        if shared_bytes(plan, s) <= device.shared_per_block:
            found[s] = None
    return tuple(sorted(found, key=lambda s: (_waste(plan, s, device), _unfit(plan, s))))


def _deepened(plan: GemmPlan, s: GemmSchedule, device: Device) -> GemmSchedule:
    """`s` with so many parts of the depth that none needs a second accumulator, as long as they move little.

    A second accumulator takes the registers that a second block of an SM would have.
    """
    batch, m, n, k = plan.shape
    needed = math.ceil(k / s.promote) if s.promote else 1
    moved = 2 * itemsize("float32") * batch * m * n
    most = math.ceil(SMALL_SHARE * sum(operand_bytes(plan, side) for side in plan.sides) / moved)
    even = s.splits * math.ceil(needed / s.splits)  # as many waves, each several times
    if even > most >= needed:
        return s.but(splits=needed)
    return s.but(splits=s.splits * max(1, min(even, most) // s.splits))


def promotion(plan: GemmPlan, schedule: GemmSchedule) -> int:
    """Depth between promotions of the accumulator, so that its truncation stays within the error budget.

    Measured on an H100: a sum of 4096 positive numbers is off by 1.9e-6 of itself when promoted every 512 elements of
    the depth, by 0.7e-6 every 256, and by 1.0e-6 in PyTorch. The judge allows four times PyTorch's error, and some of
    its inputs cancel, so 512 is too many. Sums shorter than `SHORT` need half of 256. Every 256 instead of every 512
    takes 3.7 % longer at a depth of 32768. The sums of `VERY_LONG` depths have a budget that allows more; the bias of
    positive numbers takes `VERY_LONG_SHARE` of it, since it is larger where parts of the depth differ in size. TF32
    and one plane of fp16 allow 1e-5, which they reach at a depth of 8192; half dtypes never do. Plain fp32 has no bias,
    but one result in 30,000 of a depth of 32768 is off by more than the floor.
    """
    scheme, k = scheme_of(plan, schedule), plan.shape[3]
    if plan.half or k <= 64:
        return 0
    if scheme.dot == "ieee":
        return 1024 if k >= 8192 else 0
    wider = 1 << int(math.log2(max(budget(plan) / 5.4e-6, 1)))
    if len(scheme.products) == 1 and scheme.dot != "tf32x3":
        return 1024 * wider if k >= 8192 and scheme.scaled else 0
    if k >= VERY_LONG:
        deepest = 1 << int(math.log2(512 * VERY_LONG_SHARE * budget(plan) / BIAS_OF_512))
        return 2 * deepest if schedule.cat else deepest
    return 128 if k < SHORT else 256


def shared_bytes(plan: GemmPlan, schedule: GemmSchedule) -> int:
    """Bytes of shared memory of a block of the main kernel, as Triton 3.6 allocates them for sm_90 (within 1 %).

    Each stage of the pipeline holds one block of every operand, of every plane where the products do not run end to
    end. An operand that the loop computes on first (rounding to TF32, a prologue, fp32 arithmetic) needs a stage less,
    and the right one a block of every plane (two for tf32x3) that the tensor cores read. An epilogue's reductions reuse
    the stages, unless a persistent program may fetch the next tile's first blocks meanwhile.
    """
    plan = under(plan, schedule)
    scheme = scheme_of(plan, schedule)
    right = "a" if is_turned(plan, schedule) else "b"
    total = 0
    for side, rows in zip(plan.sides, (schedule.block_m, schedule.block_n), strict=True):
        block = rows * schedule.block_k * itemsize(scheme.dtype)
        ready = side.split or ((plan.half or side.rounded) and side.plain is not None)
        if ready or is_packed(plan, schedule, side):
            total += block * (1 if schedule.cat else scheme.planes) * max(schedule.stages, 1)
        else:
            loaded = sum(rows * schedule.block_k * itemsize(plan.nest.sources[e.param].dtype) for e in side.loads)
            total += loaded * max(schedule.stages - 1, 1)
            if side.name == right and scheme.dot != "ieee":
                total += block * (2 if scheme.dot == "tf32x3" else scheme.planes)
    tile = schedule.block_m * schedule.block_n
    if schedule.stores and schedule.persistent:
        total += tile * itemsize(plan.dtype) // schedule.pieces
    elif schedule.flat:
        total += tile
    return total


def has_tma(device: Device) -> bool:
    """True where the device copies tiles by tensor descriptors."""
    return device.has("descriptors")


def _fit(plan: GemmPlan, device: Device, s: GemmSchedule) -> GemmSchedule:
    """`s` with blocks no larger than the problem needs and the depth split where tiles do not fill the device."""
    (batch, m, _, k), (first, end) = plan.shape, columns_read(plan)
    n = end - first
    bm, bn = min(s.block_m, power_of_two(m, 16)), min(s.block_n, power_of_two(n, 16))
    bk = min(s.block_k, power_of_two(k, 16))
    warps = s.warps
    while warps > 4 and bm * bn < 64 * 64 * warps // 4:
        warps //= 2
    tiles, steps = batch * -(-m // bm) * -(-n // bn), -(-k // bk)
    room = device.sms * max(1, 8 // warps)
    if (s.inline or scheme_of(plan, s).rounds) and bm * bn <= 64 * 32 * warps:
        room = device.sms * max(2, 8 // warps)  # one block multiplies while another computes on what it read
    splits = max(1, min(room // tiles, steps // 8))
    return s.but(block_m=bm, block_n=bn, block_k=bk, warps=warps, splits=splits)


def _waste(plan: GemmPlan, s: GemmSchedule, device: Device) -> float:
    """Share of the device's work that falls outside the matrix or waits in the last wave, in quarters."""
    batch, m, n, _ = plan.shape
    gm, gn = -(-m // s.block_m), -(-n // s.block_n)
    programs = gm * gn * batch * s.splits
    waves = -(-programs // device.sms)
    done = (m * n * batch * s.splits) / (waves * device.sms * s.block_m * s.block_n)
    return -round(done * 4) / 4


def _unfit(plan: GemmPlan, s: GemmSchedule) -> int:
    """1 where a configuration is of the kind that lost on the plan's kind of shape.

    A short depth wants small tiles, several of which store at once, unless fp32 operands go through the loop: their
    bytes are twice those of planes, and small tiles read them more often. A few rows want each block of the wide one
    read once, for all products of a step.
    """
    _, m, n, k = plan.shape
    if k <= 256 and not s.inline and not scheme_of(plan, s).rounds:
        return int(s.block_m * s.block_n > 128 * 128 or s.warps > 4)
    return int(min(m, n) <= 128 and s.cat)


__all__ = [
    "FULL_SWEEP", "GUESSES", "INLINE_SWEEP", "PLAIN_SWEEP", "SPLIT_SWEEP", "budget", "default_schedule", "guesses",
    "has_tma",
    "precisions", "promotion", "schedule_for_precision", "shared_bytes",
]  # fmt: skip
