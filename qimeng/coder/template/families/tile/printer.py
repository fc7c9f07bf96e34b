"""The tile family as Triton source: pointwise, reductions, softmax-like programs and normalizations.

A program owns a block of rows ([PB, 1]) and walks their columns in steps ([1, RB]). Forms (see `TileSchedule.form`):
``resident`` keeps a whole row in registers; ``loop`` passes over it once a level of reductions and once more for the
outputs; ``split`` (see `split`) does the same with several programs a row and one launch a pass;
``wave`` and ``cooperative`` (see `shared`) share a row in one launch. Deals in kernel text.
Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.families.tile.pieces import Pieces
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.families.tile.shared import print_shared_row
from qimeng.coder.template.families.tile.single import print_pointwise, print_single
from qimeng.coder.template.families.tile.split import print_split_row
from qimeng.program.program import Implementation

PRODUCT = """
@triton.jit
def _product(a, b):
    return a * b
"""


def print_tile(plan: TilePlan, schedule: TileSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as rows and columns.
        schedule: form and block sizes.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: the schedule's form does not fit the plan.
    """
    source = _source(Pieces(plan, schedule, prefix), len(plan.region.inputs))
    return Implementation("triton", source, f"{prefix}_run", schedule=schedule)


def _source(p: Pieces, inputs: int) -> str:
    """The source: helpers, kernels, entry function."""
    form = p.schedule.form
    if form in ("resident", "loop"):
        print_single(p)
    elif p.plan.passes == 0:
        print_pointwise(p)
    elif form in ("wave", "cooperative"):
        print_shared_row(p)
    else:
        print_split_row(p)
    if any(e.param == "prod" for e in p.nest.reductions()):
        p.helpers.append(PRODUCT)
    return "".join(p.helpers) + "\n".join(p.kernels) + "\n" + _entry(p, inputs)


def _entry(p: Pieces, inputs: int) -> str:
    first = next((f"x{i}" for i, _ in enumerate(range(inputs))), None)
    lines = [f"def {p.prefix}_run({', '.join(f'x{i}' for i in range(inputs))}):"]
    lines += [f"    {line}" for line in p.loads.prelude]
    tensors = [p.loads.names[s.number] for s in p.nest.sources if not s.scalar]
    device = f"{tensors[0]}.device" if tensors else f"{first}.device"
    for i, (_, shape, stride, dtype) in enumerate(p.nest.outputs):
        lines.append(f"    y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device={device})")
    lines += [f"    {line.replace('DEVICE', device)}" for line in p.launches]
    return "\n".join([*lines, f"    return ({', '.join(f'y{i}' for i in range(len(p.nest.outputs)))},)"]) + "\n"


__all__ = ["print_tile"]
