"""Which schedules a GEMM starts from and which ones are worth trying, and how much shared memory each takes.

The lists come from sweeps on an H200 (11 shapes from 256 x 256 x 524288 to 32768 x 32768 x 64; Triton 3.6), best first
over all shapes. Deals in block sizes and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.gemm_plan import GemmPlan
from qimeng.coder.template.gemm_scheme import is_packed, scheme_of
from qimeng.device import Device
from qimeng.graph.opgraph import itemsize
from qimeng.program.schedule import Schedule

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
"""Schemes of several planes: blocks, and whether the products run end to end (`Schedule.cat`)."""

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

MOST = 8
"""Configurations that one step may try."""


def default_schedule(plan: GemmPlan, device: Device, mode: str, dtype: str) -> Schedule:
    """The plain, untuned schedule that lowering starts from.

    Args:
        plan: the plan.
        device: for which device.
        mode: precision mode; fp32 operands are multiplied in fp32 except in ``"high"``, where TF32 is allowed.
        dtype: dtype of the operands.
    """
    if dtype != "float32":
        base = Schedule("gemm", block_m=128, block_n=128, block_k=64, warps=8, stages=3, descriptors=has_tma(device))
    else:
        precision = "tf32" if mode == "high" else "ieee"
        base = Schedule("gemm", block_m=64, block_n=64, block_k=32, warps=4, stages=3, precision=precision)
    fitted = _fit(plan, device, base)
    while shared_bytes(plan, fitted) > device.shared_per_block and fitted.stages > 1:
        fitted = fitted.but(stages=fitted.stages - 1)
    return fitted


def schedule_for_precision(plan: GemmPlan, schedule: Schedule, precision: str, device: Device) -> tuple[Schedule, ...]:
    """At most eight configurations for `precision`, best guess first.

    Args:
        plan: the plan.
        schedule: the schedule as it stands.
        precision: a key of `SCHEMES`; half operands ignore it.
        device: for which device.

    Returns:
        Configurations that fit the device, each once; packed where the scheme packs.
    """
    scheme = scheme_of(plan, schedule.but(precision=precision))
    if scheme.dtype == "float32":
        sweep = [(blocks, False) for blocks in FULL_SWEEP]
    elif len(scheme.products) > 1:
        sweep = list(SPLIT_SWEEP)
    else:
        sweep = [(blocks, False) for blocks in PLAIN_SWEEP]
    held = "".join(side.name for side in plan.sides if side.held) if scheme.splits else schedule.packed
    found: dict[Schedule, None] = {}
    for (bm, bn, bk, warps, stages), cat in sweep:
        s = schedule.but(block_m=bm, block_n=bn, block_k=bk, warps=warps, stages=stages, precision=precision, cat=cat)
        s = s.but(packed=held, persistent=False, splits=1, descriptors=has_tma(device) and scheme.dtype != "float32")
        s = _fit(plan, device, s)
        s = s.but(promote=promotion(plan, s))
        while shared_bytes(plan, s) > device.shared_per_block and s.stages > 1:
            s = s.but(stages=s.stages - 1)
        if shared_bytes(plan, s) <= device.shared_per_block:
            found[s] = None
    ranked = sorted(found, key=lambda s: (_waste(plan, s, device), _unfit(plan, s)))
    return tuple(ranked[:MOST])


def promotion(plan: GemmPlan, schedule: Schedule) -> int:
    """Depth between promotions of the accumulator, so that its truncation stays within the error budget.

    Measured: the bias of a truncated accumulator is 2.7e-6 after 1024 elements of the depth (512 where the small
    products are interleaved). The budget is 1.9e-6 + 6e-8 * sqrt(K), so that short depths need half of that. TF32 and
    one plane of fp16 allow 1e-5, which they reach at a depth of 8192; half dtypes never do.
    """
    scheme, k = scheme_of(plan, schedule), plan.shape[3]
    if plan.half or scheme.dot == "ieee" or k <= 64:
        return 0
    several = len(scheme.products) > 1
    if not several and scheme.dot != "tf32x3":
        return 1024 if k >= 8192 and scheme.scaled else 0
    span = 1024 if schedule.cat else 512
    return span // 2 if k < 711 else span


def shared_bytes(plan: GemmPlan, schedule: Schedule) -> int:
    """Bytes of shared memory of a block of the main kernel, as Triton 3.6 allocates them for sm_90 (within 1 %).

    Each stage of the pipeline holds one block of every operand, of every plane where the products do not run end to
    end. An operand that the loop computes on first (rounding to TF32, a prologue, fp32 arithmetic) needs a stage less,
    and the right one a block (two for tf32x3) that the tensor cores read. An epilogue's reductions reuse the stages.
    """
    scheme = scheme_of(plan, schedule)
    total = 0
    for side, rows in zip(plan.sides, (schedule.block_m, schedule.block_n), strict=True):
        block = rows * schedule.block_k * itemsize(scheme.dtype)
        if is_packed(plan, schedule, side) or (plan.half and side.plain is not None):
            total += block * (1 if schedule.cat else scheme.planes) * max(schedule.stages, 1)
        else:
            loaded = sum(rows * schedule.block_k * itemsize(plan.nest.sources[e.param].dtype) for e in side.loads)
            total += loaded * max(schedule.stages - 1, 1)
            if side.name == "b" and scheme.dot != "ieee":
                total += block * (2 if scheme.dot == "tf32x3" else 1)
    return total


def has_tma(device: Device) -> bool:
    """True where the device copies tiles by tensor descriptors."""
    return device.backend == "cuda" and isinstance(device.arch, int) and device.arch >= 90


def _fit(plan: GemmPlan, device: Device, s: Schedule) -> Schedule:
    """`s` with blocks no larger than the problem needs and the depth split where tiles do not fill the device."""
    batch, m, n, k = plan.shape
    bm, bn = min(s.block_m, _power(m, 16)), min(s.block_n, _power(n, 16))
    bk = min(s.block_k, _power(k, 16))
    warps = s.warps
    while warps > 4 and bm * bn < 64 * 64 * warps // 4:
        warps //= 2
    tiles, steps = batch * -(-m // bm) * -(-n // bn), -(-k // bk)
    room = device.sms * max(1, 8 // warps)
    splits = max(1, min(room // tiles, steps // 8))
    return s.but(block_m=bm, block_n=bn, block_k=bk, warps=warps, splits=splits)


def _power(n: int, least: int) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def _waste(plan: GemmPlan, s: Schedule, device: Device) -> float:
    """Share of the device's work that falls outside the matrix or waits in the last wave, in quarters."""
    batch, m, n, _ = plan.shape
    gm, gn = -(-m // s.block_m), -(-n // s.block_n)
    programs = gm * gn * batch * s.splits
    waves = -(-programs // device.sms)
    done = (m * n * batch * s.splits) / (waves * device.sms * s.block_m * s.block_n)
    return -round(done * 4) / 4


def _unfit(plan: GemmPlan, s: Schedule) -> int:
    """1 where a configuration is of the kind that lost on the plan's kind of shape.

    A short depth wants small tiles, several of which store at once; a few rows want each block of the wide operand read
    once, for all products of a step.
    """
    _, m, n, k = plan.shape
    if k <= 256:
        return int(s.block_m * s.block_n > 128 * 128 or s.warps > 4)
    return int(min(m, n) <= 128 and s.cat)


__all__ = [
    "FULL_SWEEP", "MOST", "PLAIN_SWEEP", "SPLIT_SWEEP", "default_schedule", "has_tma", "promotion",
    "schedule_for_precision", "shared_bytes",
]  # fmt: skip
