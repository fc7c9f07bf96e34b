"""A family as another package brings it: the product of a banded matrix with a vector.

``y[i] = sum of bands[i, d] * x[i + d]`` in PyTorch is an unfold, a product and a sum. Nothing of `qimeng` names this
file. Run by itself it lowers such a product, retiles it, and runs both kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qimeng.actions import GraphRewrite, Kind
from qimeng.actions.base import Context, find_region
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import (
    Cost,
    Family,
    Move,
    Needs,
    NotConcerned,
    Schedule,
    Unsupported,
    family_field,
    power_of_two,
)
from qimeng.graph.region import Region, merge
from qimeng.interfaces import Action
from qimeng.program.program import Implementation, Program

KERNEL = """
@triton.jit
def {prefix}_band(x_ptr, bands_ptr, y_ptr, B: tl.constexpr):
    row = tl.program_id(0) * B + tl.arange(0, B)
    acc = tl.zeros([B], tl.float32)
    for d in range({width}):
        bands = tl.load(bands_ptr + row * {width} + d, mask=row < {rows}, other=0)
        acc += bands * tl.load(x_ptr + row + d, mask=row < {rows}, other=0)
    tl.store(y_ptr + row, acc, mask=row < {rows})


def {prefix}_run(x, bands):
    y = torch.empty({rows}, dtype=torch.float32, device=x.device)
    {prefix}_band[(triton.cdiv({rows}, {block}),)](x, bands, y, B={block}, num_warps={warps})
    return (y,)
"""


@dataclass(frozen=True)
class BandSchedule(Schedule):
    """Rows of a program and its warps."""

    family: str = family_field("banded")
    block: int = power_of_two(128)
    warps: int = power_of_two(4)


@dataclass(frozen=True)
class BandPlan:
    """The matrix's sizes."""

    region: Region
    rows: int
    width: int


class Retile(Move[BandPlan, BandSchedule]):
    """Twice or half the rows a program."""

    def schedules(self, plan: BandPlan, schedule: BandSchedule, param: str, device: Device) -> Sequence[BandSchedule]:
        """Nothing for options that mean nothing here."""
        blocks = {"larger": 2 * schedule.block, "smaller": schedule.block // 2}
        return (schedule.but(block=blocks[param]),) if param in blocks and blocks[param] >= 1 else ()


class Banded(Family[BandPlan, BandSchedule]):
    """Products of a banded matrix with a vector."""

    name = "banded"
    about = "products of a banded matrix with a vector"
    schedule = BandSchedule

    def __init__(self) -> None:
        self.moves = {"tiling": Retile()}

    def plan(self, region: Region) -> BandPlan:
        """An unfold by steps of one, a product with the bands, a sum over them."""
        if [n.packet for n in region.ops] != ["aten.unfold", "aten.mul", "aten.sum"]:
            raise NotConcerned("no banded product")
        if len(region.inputs) != 2 or len(region.outputs) != 1:
            raise Unsupported("something else is read or written")
        rows, width = region.graph.meta(region.inputs[1]).shape
        return BandPlan(region, rows, width)

    def default(self, plan: BandPlan, device: Device, mode: str) -> BandSchedule:
        """128 rows a program."""
        return BandSchedule()

    def needs(self, plan: BandPlan, schedule: BandSchedule) -> Needs:
        """Three vectors of the rows."""
        return Needs(warps=schedule.warps, values=3 * schedule.block)

    def print(self, plan: BandPlan, schedule: BandSchedule, prefix: str) -> Implementation:
        """One kernel."""
        block, warps = schedule.block, schedule.warps
        text = KERNEL.format(prefix=prefix, rows=plan.rows, width=plan.width, block=block, warps=warps)
        return Implementation("triton", text, f"{prefix}_run", schedule=schedule)

    def cost(self, plan: BandPlan, schedule: BandSchedule) -> Cost:
        """A block asks for a band of its rows at a time."""
        return Cost(block_bytes=8 * schedule.block)


class Bundle(Kind):
    """Make two regions that read the same input one region.

    args: the two regions.
    rewrite: ``a = f(x); b = g(x)`` -> ``a, b = fg(x)``
    """

    name = "bundle"

    def proposals(self, program: Program, context: Context) -> Sequence[Action]:  # type: ignore[override]
        """Every pair of regions with an input in common."""
        pairs = [(a, b) for i, a in enumerate(program.regions) for b in program.regions[i + 1 :]]
        return [Action(self.name, (a.id, b.id)) for a, b in pairs if set(a.inputs) & set(b.inputs)]

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where neither reads what the other writes."""
        first, second = find_region(program, action), find_region(program, action, 1)
        if set(first.outputs) & set(second.inputs):
            raise IllegalAction("one of them reads what the other writes")

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition with both as one region."""
        return GraphRewrite(merge(program.regions, action.regions), note="bundled")


def banded(x: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
    """The product in PyTorch."""
    return (x.unfold(0, bands.shape[1], 1) * bands).sum(1)


class Module(torch.nn.Module):
    """The product as a module."""

    def forward(self, x: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
        """`banded`."""
        return banded(x, bands)


def inputs(rows: int = 300, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """A vector and the bands."""
    torch.manual_seed(0)
    return torch.randn(rows + width - 1), torch.randn(rows, width)


def whole() -> Program:
    """The product as one region on PyTorch."""
    from qimeng.graph.capture import capture

    program = Program.start(capture(Module, inputs))
    return program.with_regions(merge(program.regions, [r.id for r in program.regions]))


def main() -> None:
    """Prints one line of JSON: the schedules, and the errors of the kernels in the interpreter."""
    from qimeng.actions import Context, legal_actions
    from qimeng.coder.template.coder import TemplateCoder
    from qimeng.device import DEVICES
    from qimeng.family import register_family
    from qimeng.interfaces import Request
    from qimeng.program.program import load_source

    register_family(Banded())
    context, program = Context(DEVICES["h200"], TemplateCoder()), whole()
    rows = []
    for text in ("lowering", "tiling larger"):
        action = next(a for a in legal_actions(program, context) if str(a).startswith(text))
        program = context.coder.write(Request(program, action, context.device)).apply(program)
        made = program.implementation(program.regions[0])
        run = getattr(
            load_source(f"import torch\nimport triton\nimport triton.language as tl\n{made.source}"), made.entry
        )
        rows.append([str(made.schedule), float((run(*inputs())[0] - banded(*inputs())).abs().max())])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
