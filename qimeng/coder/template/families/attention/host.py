"""The source of an attention: its kernels and the entry function that launches them.

Deals in text: parameters, launches, outputs. Knows nothing about what the kernels compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qimeng.coder.template.families.attention import split
from qimeng.coder.template.families.attention.guard import flags_of, guard_body, seen_batch, seen_body
from qimeng.coder.template.families.attention.kernel import Kernel
from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import AttentionSchedule
from qimeng.coder.template.families.attention.tiles import Tiles
from qimeng.coder.template.triton.aligned import ALIGNED
from qimeng.coder.template.triton.emitter import without_unused
from qimeng.coder.template.triton.rounding import ROUND
from qimeng.program.program import Implementation

GUARD_WARPS = 4
"""Warps of the kernels before the attention: they look at 128 keys of up to 256 columns, or at one block of a mask."""


def print_attention(
    plan: AttentionPlan, schedule: AttentionSchedule, prefix: str, kind: type[Kernel] = Kernel
) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as two products.
        schedule: blocks and precision.
        prefix: beginning of every top-level name.
        kind: the kernel; what it is `given` the entry function takes after the inputs.
    """
    tiles = Tiles(plan, schedule, prefix)
    batch, sizes = plan.shape[0], sizes_of(tiles)
    options = f"num_warps={schedule.warps}, num_stages={schedule.stages}"
    kernels, launches = [], []
    if plan.bounds:
        count = batch * flags_of(plan).chunks
        text, launch = kernel_text(plan, f"{prefix}_wild", guard_body(tiles), sizes, count, f"num_warps={GUARD_WARPS}")
        kernels.append(text)
        launches += [f"flags = torch.empty(({count},), dtype=torch.int32, device=DEVICE)", launch]
    if plan.bounds.conditions:
        count = plan.extent(seen_batch(plan)) * tiles.row_blocks * tiles.steps
        text, launch = kernel_text(plan, f"{prefix}_seen", seen_body(tiles), sizes, count, f"num_warps={GUARD_WARPS}")
        kernels.append(text)
        launches += [f"seen = torch.empty(({count},), dtype=torch.int32, device=DEVICE)", launch]
    made = tiles.descriptors()
    launches += [f"{name} = {text}" for name, text in made.items()]
    body = kind(Tiles(plan, schedule, prefix)).lines()
    count = batch * schedule.row_blocks(plan.shape[1])
    text, launch = kernel_text(plan, f"{prefix}_attention", body, sizes, count * schedule.splits, options, kind.given)
    kernels.append(text)
    if schedule.splits > 1:
        rows = split.count(tiles)
        for name, width in (("parts", tiles.columns), ("stats", len(split.statistics(tiles)))):
            launches.append(f"{name} = torch.empty(({rows * width},), dtype=torch.float32, device=DEVICE)")
        launches.append(launch)
        merge = kind(Tiles(plan, schedule, prefix)).merge()
        text, launch = kernel_text(plan, f"{prefix}_merge", merge, sizes, count, options)
        kernels.append(text)
    source = "\n\n".join([*kernels, _entry(plan, prefix, [*launches, launch], kind.given)])
    if made:
        head = ["from triton.tools.tensor_descriptor import TensorDescriptor", ALIGNED.format(prefix=prefix).strip()]
        source = "\n\n\n".join([*head, source])
    if f"{prefix}_round(" in source:
        source = f"{ROUND.format(prefix=prefix).strip()}\n\n\n{source}"
    return Implementation("triton", source, f"{prefix}_run", schedule=schedule)


def sizes_of(tiles: Tiles) -> dict[str, int]:
    """The constants that kernels are compiled for."""
    s = tiles.schedule
    return {"BM": s.block_m, "BN": s.block_n, "BD": tiles.block_d, "BV": tiles.block_v}


def kernel_text(
    plan: AttentionPlan,
    name: str,
    body: Sequence[str],
    sizes: dict[str, int],
    programs: int,
    options: str,
    given: Sequence[str] = (),
) -> tuple[str, str]:
    """A kernel with the parameters that it uses, and the line that launches it; `given` are further tensors."""
    lines = without_unused(list(body))
    words = set(re.findall(r"\w+", "\n".join(lines)))
    passed = {
        (f"x{s.number}" if s.scalar else f"x{s.number}_ptr"): (
            f"float({plan.loads.names[s.number]})" if s.scalar else plan.loads.names[s.number]
        )
        for s in plan.nest.sources
    }
    passed |= {f"y{i}_ptr": f"y{i}" for i in range(len(plan.nest.outputs))}
    passed |= {f"{operand}_tile": f"{operand}_tile" for operand in "qkv"}
    passed |= {f"{made}_ptr": made for made in ("flags", "seen", "parts", "stats", *given)}
    used = {p: argument for p, argument in passed.items() if p in words}
    constants = {k: n for k, n in sizes.items() if k in words}
    head = ", ".join([*used, *(f"{k}: tl.constexpr" for k in constants)])
    text = f"@triton.jit\ndef {name}({head}):\n" + "".join(f"    {line}\n" for line in lines)
    arguments = ", ".join([*used.values(), *(f"{k}={n}" for k, n in constants.items()), options])
    return text, f"{name}[({programs},)]({arguments})"


def _entry(plan: AttentionPlan, prefix: str, launches: Sequence[str], given: Sequence[str]) -> str:
    tensor = next(plan.loads.names[s.number] for s in plan.nest.sources if not s.scalar)
    device = f"{tensor}.device"
    inputs, outputs = range(len(plan.region.inputs)), range(len(plan.nest.outputs))
    lines = list(plan.loads.prelude)
    for i, (_, shape, stride, dtype) in enumerate(plan.nest.outputs):
        lines.append(f"y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device={device})")
    lines += [line.replace("DEVICE", device) for line in launches]
    lines.append(f"return ({', '.join(f'y{i}' for i in outputs)},)")
    head = f"def {prefix}_run({', '.join([*(f'x{i}' for i in inputs), *given])}):\n"
    return head + "".join(f"    {line}\n" for line in lines)


__all__ = ["GUARD_WARPS", "kernel_text", "print_attention", "sizes_of"]
