"""Operands that are copied as tiles through tensor descriptors (TMA), which fill what overhangs with zeros.

Deals in strides and in the text of a descriptor and of its loads. Knows nothing about the loop around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.ir import coalesce, is_wide
from qimeng.coder.template.triton.emitter import Walk
from qimeng.coder.template.triton.walks import spread
from qimeng.device import Device
from qimeng.graph.opgraph import itemsize

MOST_DIMENSIONS = 5
"""Dimensions of a tensor map (CUDA driver API, `cuTensorMapEncodeTiled`)."""

ALIGNMENT = 16
"""Bytes that every stride of a tensor map but the last is a multiple of (the same)."""


@dataclass(frozen=True)
class Box:
    """An operand of two sides, one tile of which a descriptor loads.

    Attributes:
        source: number of the tensor among what the nest loads.
        shape: extents: those of the batch that the tensor has, rows, elements of a row.
        strides: of each, in elements.
        batch: the variables of the first ones.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    batch: tuple[str, ...]

    def made(self, tensor: str, rows: int, width: int) -> str:
        """The host's text that makes the descriptor of `tensor` for tiles of `rows` by `width`."""
        block = [*(1 for _ in self.batch), rows, width]
        return f"TensorDescriptor({tensor}, {list(self.shape)}, {list(self.strides)}, {block})"

    def load(self, name: str, row: str, rows: str, width: str) -> str:
        """The text that loads the tile [`rows`, `width`] from `row` on through the descriptor `name`."""
        text = f"{name}.load([{', '.join([*self.batch, row, '0'])}])"
        return f"{text}.reshape({rows}, {width})" if self.batch else text


def _box(plan: AttentionPlan, operand: Expr | None, rows: Dim, width: Dim, batch: Sequence[Walk]) -> Box | None:
    """How a descriptor says where `operand` lies; None where none can, as for a single row, which no axis walks.

    Args:
        plan: the region.
        operand: queries, keys or values.
        rows: axes of its rows, which are queries or keys.
        width: axes of the elements of a row.
        batch: the variables of the batch.
    """
    nest = plan.nest
    if not rows or not width:
        return None
    while operand is not None and operand.op == "identity":
        operand = operand.args[0]
    if operand is None or not plan.half or operand.op != "load" or operand.access is not None:
        return None
    source, strides = nest.sources[operand.param], nest.load_strides(operand)
    if source.scalar or any(len(coalesce(nest, atoms, [strides], frozenset())) > 1 for atoms in (rows, width)):
        return None
    walked = [w for w in batch if strides.get(w.atoms[-1], 0)]
    shape = (*(w.extent for w in walked), plan.extent(rows), plan.extent(width))
    steps = (*(strides[w.atoms[-1]] for w in walked), strides.get(rows[-1], 0), strides.get(width[-1], 0))
    fits = all(s > 0 and s * itemsize(source.dtype) % ALIGNMENT == 0 for s in steps[:-1])
    if steps[-1] != 1 or not fits or len(shape) > MOST_DIMENSIONS:
        return None
    far = is_wide(nest, [table for table, _ in nest.accesses()])  # the variables have 64 bits then
    return Box(operand.param, shape, steps, tuple(f"{w.name}.to(tl.int32)" if far else w.name for w in walked))


def described(plan: AttentionPlan) -> dict[str, Box]:
    """Operands that descriptors can read: ``"q"``, ``"k"`` and ``"v"``, each with its box."""
    tables = [table for table, _ in plan.nest.accesses()]
    batch = spread(plan.nest, plan.batch, tables, "z", "", "batch")[1]
    sides = {
        "q": (plan.query, plan.rows, plan.depth),
        "k": (plan.key, plan.keys, plan.depth),
        "v": (plan.values, plan.keys, plan.columns),
    }
    found = {name: _box(plan, *side, batch) for name, side in sides.items()}
    return {name: box for name, box in found.items() if box is not None}


def can_specialize(plan: AttentionPlan, device: Device) -> bool:
    """Whether warps of their own may copy keys and values: Triton does this on Hopper (`nvgpu-warp-specialization`)."""
    hopper = device.kind == "cuda" and device.has("descriptors") and int(device.arch) // 10 == 9
    return hopper and {"k", "v"} <= set(described(plan))


__all__ = ["Box", "can_specialize", "described"]
