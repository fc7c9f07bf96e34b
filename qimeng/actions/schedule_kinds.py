"""Kinds that tune a region's kernel: tiling, reordering, pipeline, precision, layout, split and their like.

Deals in the words of the vocabulary: names, options, what each means. Which schedules an option leads to is a family's
own (`qimeng.family.Family.moves`). Knows nothing about any family.
"""

from __future__ import annotations

from qimeng.actions.base import Context, ScheduleKind, find_region
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action
from qimeng.program.program import Program


class Tiling(ScheduleKind):
    """Cut the work into tiles of another shape.

    args: ``taller`` (more rows a tile), ``wider`` (more columns), ``deeper`` (longer steps of the reduced axis),
    ``smaller`` (less of both), ``larger`` (more of both).
    rewrite: ``tile 64 x 64`` -> ``tile 128 x 64``
    """

    name = "tiling"
    options = ("taller", "wider", "deeper", "smaller", "larger")


class Reordering(ScheduleKind):
    """Visit the output tiles in another order, so that neighbours share operands in the L2 cache.

    args: ``grouped`` (rows of tiles in groups) or ``plain`` (row by row).
    rewrite: ``for m: for n:`` -> ``for group of m: for n: for m in group:``
    """

    name = "reordering"
    options = ("grouped", "plain")


class Pipeline(ScheduleKind):
    """Overlap loads with arithmetic.

    args: ``stages`` (depth of the software pipeline) or ``warps`` (threads that share a tile).
    rewrite: ``load; compute`` -> ``load next; compute this``
    """

    name = "pipeline"
    options = ("stages", "warps")


class Precision(ScheduleKind):
    """Compute products of fp32 operands on the tensor cores, in parts that keep the precision the mode asks for.

    args: ``tf32`` and ``fp16`` (one product, an 11-bit significand; where eager takes TF32), ``tf32x3``, ``bf16x3``,
    ``bf16x6``, ``fp16x3`` (several products, about fp32's accuracy), ``ieee`` (plain fp32 arithmetic). Whether the
    result is within the error budget is for the evaluator to say.
    rewrite: ``dot(a, b)`` -> ``dot(lo(a), hi(b)) + dot(hi(a), lo(b)) + dot(hi(a), hi(b))``
    """

    name = "precision"
    options = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6", "fp16x3", "fp16")


class Layout(ScheduleKind):
    """Change how operands lie in memory or how they are read.

    Operands are packed in the form that the main loop wants, parameters once, others at every call where their rows do
    not begin at multiples of 16 bytes; a convolution's input is copied channels last, with its padding. Tensor
    descriptors are the GPU's tile copy engine.

    args: ``pack`` (parameters in `prepare`, unaligned operands before the product), ``unpack``, ``descriptors``,
    ``pointers``.
    rewrite: ``load(w + n * K + k)`` -> ``load(packed_w[tile])``
    """

    name = "layout"
    options = ("pack", "unpack", "descriptors", "pointers")


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


class Vectorization(ScheduleKind):
    """Give each thread more or fewer neighbouring elements, for wider memory accesses.

    args: ``more`` or ``fewer`` elements a thread.
    rewrite: ``x[i]`` -> ``x[4 * i : 4 * i + 4]``
    """

    name = "vectorization"
    options = ("more", "fewer")


class Special(ScheduleKind):
    """Compute special functions (exp, log, tanh, sqrt …) by the GPU's approximate units, or by Triton's own code.

    The approximate forms keep about fp32's accuracy, also near the points where a unit has no bound; whether the
    result is within the error budget is for the evaluator to say.

    args: ``fast`` or ``accurate``.
    rewrite: ``log(x)`` -> ``ln2 * lg2.approx(x)``
    """

    name = "special"
    options = ("fast", "accurate")


class Language(ScheduleKind):
    """Write the kernel in another language, for the same loops.

    Offered where the coder writes more than one (`Coder.languages`).

    args: ``triton``, or ``cuda`` (CUDA C++, compiled by NVRTC).
    rewrite: ``@triton.jit def kernel(x)`` -> ``__global__ void kernel(const float* x)``
    """

    name = "language"
    options = ("triton", "cuda")
    local = True

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the coder writes that language, the device runs it, and the region is in another one."""
        region = find_region(program, action)
        written = context.coder.languages
        if action.param not in written:
            raise IllegalAction(f"{action}: the coder writes {' and '.join(written)}")
        if program.implementation(region).language == action.param:
            raise IllegalAction(f"{action}: the region is in that language")
        super().check(program, action, context)


for _kind in (
    Tiling(),
    Reordering(),
    Pipeline(),
    Precision(),
    Layout(),
    Split(),
    Vectorization(),
    Special(),
    Language(),
):
    register(_kind)


__all__ = ["Language", "Layout", "Pipeline", "Precision", "Reordering", "Special", "Split", "Tiling", "Vectorization"]
