"""The schedule that lowering gives a loop over steps, and others worth measuring beside it.

Deals in shapes and capacities. A step takes the time of its multiply-adds, of the weights that are read again, and of
waiting for the other programs; the figures for these are guesses, and lowering measures the best few. Knows nothing
about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.recurrent.plan import RecurrentPlan
from qimeng.coder.template.families.recurrent.schedule import LEAST, MOST_PRODUCTS, RecurrentSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.graph.ops import precision_of

TILE = 32
"""Values of a product's tile that a thread holds."""

FEW = 16
"""Sequences that a program has at most, where fewer programs need not have more."""

GUESSES = 5
"""Schedules that lowering measures beside the plain one."""

FALLBACKS = 2
"""How many of these are multiply-adds, where tensor cores have their own."""

CYCLES_A_MS = 1.7e6
"""Cycles of a multiprocessor in a millisecond."""

AHEAD = 4
"""Depth of the pipeline of a loop whose programs do not wait."""

WAIT_CYCLES, WAIT_EACH, AGAIN_BYTES = 2500, 8, 32
"""Cycles of one exchange, more for each program that takes part, and bytes of weights that an SM reads in a cycle."""

LANES_CYCLES, READ_CYCLES = 600, 2
"""Cycles of a product whose terms the lanes of a warp share, for shuffles and for what all of them compute; and those
of a warp that reads a term for each of its results."""

DOT_CYCLES, DOT_RATE = 500, 187
"""Cycles of a step on tensor cores besides products and exchange, and multiply-adds in a cycle, far below the peak:
what tensor cores read comes from shared memory in each step."""


COLUMNS = 32
"""Columns of weights that tensor cores take in the time that fewer take."""


def default_schedule(plan: RecurrentPlan, device: Device) -> RecurrentSchedule:
    """The one with the shortest steps by the figures above."""
    return candidates(plan, device)[0]


def guesses(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """The next best ones."""
    return candidates(plan, device)[1 : GUESSES + 1]


def candidates(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """Every cut whose programs run at the same time, the best guess first."""
    if not plan.exchanged:
        return apart(plan)
    fast, plain = dots(plan, device), exact(plan, device)
    first = GUESSES - FALLBACKS + 1
    return [*fast[:first], *plain[:FALLBACKS], *fast[first:], *plain[FALLBACKS:]]


def keeps_states(plan: RecurrentPlan) -> bool:
    """Whether the states of every step are kept, in a dtype with a NaN to spare, so that programs can wait for them."""
    return plan.itemsize < 8 and set(plan.returned) == set(plan.exchanged)


def takes_tf32(plan: RecurrentPlan, mode: str) -> bool:
    """Whether PyTorch may round products to TF32."""
    return plan.itemsize == 4 and precision_of([plan.node.packet], mode) == "high"


def dots(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """Cuts with products on tensor cores, the best guess first."""
    found = list[RecurrentSchedule]()
    k, kept = max(power_of_two(plan.column_count), LEAST), keeps_states(plan)
    for p in (LEAST, 2 * LEAST, 4 * LEAST):
        for shift in range(power_of_two(plan.column_count).bit_length()):
            r = power_of_two(plan.column_count) >> shift
            for warps in (4, 8):
                s = RecurrentSchedule(block_p=p, block_r=r, block_k=k, warps=warps, dot=True, by_value=kept)
                fits = shared_bytes(plan, s) <= device.shared_per_block
                if fits and not no_tensor_cores(plan, s) and _at_once(plan, s, device):
                    found.append(s)
        if p >= plan.row_count:
            break
    return sorted(found, key=lambda s: (cycles(plan, s, device.sms), s.warps))


def no_tensor_cores(plan: RecurrentPlan, s: RecurrentSchedule) -> str:
    """Why tensor cores cannot compute the products under `s`; empty where they can."""
    if plan.itemsize > 4 or not 1 <= len(plan.products) <= MOST_PRODUCTS:
        return f"tensor cores take 1 to {MOST_PRODUCTS} products, not {len(plan.products)} of {plan.stored}"
    few = min(s.block_p, s.block_k, s.block_r * power_of_two(len(plan.products)))
    if few < LEAST or s.block_k < plan.column_count:
        return f"tensor cores need larger blocks than {s.block_p} sequences, {s.block_r} units and {s.block_k} terms"
    return ""


def exact(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """Cuts with products as multiply-adds in fp32, the best guess first."""
    found, kept = list[RecurrentSchedule](), keeps_states(plan)
    for p in (1 << i for i in range(power_of_two(plan.row_count).bit_length())):
        if p > FEW and found:
            break
        for shift in range(power_of_two(plan.column_count).bit_length()):
            r = power_of_two(plan.column_count) >> shift
            for warps in (4, 8):
                k = depth_block(plan, p, r, warps)
                s = RecurrentSchedule(block_p=p, block_r=r, block_k=k, warps=warps, by_value=kept)
                if _at_once(plan, s, device):
                    found += [s, s.but(by_result=True)]
    ranked = sorted(found, key=lambda s: cycles(plan, s, device.sms))
    by_result, shared = ([s for s in ranked if s.by_result is form] for form in (True, False))
    if not by_result[0].holds(plan.tiles, plan.column_count):
        return shared  # weights are read in each step, which takes each lane far longer
    return [s for pair in zip(by_result, shared, strict=True) for s in pair]  # by turns, as the figures are guesses


def _at_once(plan: RecurrentPlan, s: RecurrentSchedule, device: Device) -> bool:
    return waiting(plan, s) == 1 or programs_of(plan, s) <= device.sms


def programs_of(plan: RecurrentPlan, s: RecurrentSchedule) -> int:
    """Number of programs of a launch."""
    return plan.group_count * -(-plan.column_count // s.block_r) * -(-plan.row_count // s.block_p)


def waiting(plan: RecurrentPlan, s: RecurrentSchedule) -> int:
    """Number of programs that wait for each other after a step."""
    shares = -(-plan.column_count // s.block_r)
    return shares * (plan.group_count if plan.coupled else 1) if plan.exchanged else 1


def shared_bytes(plan: RecurrentPlan, s: RecurrentSchedule) -> int:
    """Shared memory of a program with products on tensor cores: its weights, and the states that it reads."""
    held, planes = s.block_r * power_of_two(len(plan.products)), 1.5 if plan.itemsize == 4 else 1
    return int((held + planes * s.block_p) * len(plan.terms) * s.block_k * plan.itemsize)


def apart(plan: RecurrentPlan) -> list[RecurrentSchedule]:
    """Cuts of a loop whose elements do not meet: few elements a program, what they read loaded ahead."""
    found = []
    for elements, warps in ((128, 4), (64, 2), (256, 4), (32, 1), (512, 4)):
        r = min(power_of_two(plan.column_count), elements)
        p = min(power_of_two(plan.row_count), elements // r)
        found.append(RecurrentSchedule(block_p=p, block_r=r, block_k=1, warps=warps, stages=AHEAD))
    return list(dict.fromkeys(found))


def depth_block(plan: RecurrentPlan, block_p: int, block_r: int, warps: int) -> int:
    """The longest part of a row of states that a product takes at once."""
    most = max(TILE * 32 * warps // (block_p * block_r), 1)
    return min(power_of_two(plan.column_count), 1 << (most.bit_length() - 1))


def cycles(plan: RecurrentPlan, s: RecurrentSchedule, sms: int = 132) -> float:
    """A guess at the cycles of a step on a GPU of `sms` multiprocessors."""
    together = waiting(plan, s)
    waves = max(1.0, programs_of(plan, s) / sms) if plan.exchanged else 1.0
    weights = plan.tiles * s.block_r * plan.column_count
    wait = WAIT_CYCLES + WAIT_EACH * together if together > 1 else WAIT_CYCLES / 4
    if s.dot:
        columns = max(plan.tiles * s.block_r, COLUMNS)
        return waves * (DOT_CYCLES + columns * plan.column_count * s.block_p / DOT_RATE) + wait
    rate = 32 * min(s.warps, 4)
    again = 0.0 if s.holds(plan.tiles, plan.column_count) else weights * plan.itemsize / AGAIN_BYTES
    reads = len(plan.terms) * s.block_p * s.block_r * plan.column_count / 32
    adding = READ_CYCLES * reads if s.by_result else LANES_CYCLES * len(plan.products)
    return waves * (weights * s.block_p / rate + again + adding) + wait


__all__ = [
    "CYCLES_A_MS",
    "GUESSES",
    "apart",
    "candidates",
    "cycles",
    "default_schedule",
    "depth_block",
    "dots",
    "exact",
    "guesses",
    "keeps_states",
    "no_tensor_cores",
    "programs_of",
    "shared_bytes",
    "takes_tf32",
    "waiting",
]
