"""Variables for queries, keys, depth and columns, and the operands of the two products as tiles of them.

Deals in lines of kernel text. Knows nothing about the loop around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qimeng.coder.template.families.attention.boxes import described
from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import LEAST, AttentionSchedule
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.emitter import Emitter, Walk
from qimeng.coder.template.triton.walks import spread


@dataclass
class Tiles:
    """The variables of one kernel.

    Attributes:
        plan: the region.
        schedule: blocks and precision.
        prefix: beginning of the file's top-level names.
        head: lines before the loop that set what does not change in it.
    """

    plan: AttentionPlan
    schedule: AttentionSchedule
    prefix: str
    head: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        nest = self.plan.nest
        self.tables = [table for table, _ in nest.accesses()]
        _, self.rows, self.keys, self.depth, self.columns = self.plan.shape
        self.block_d = power_of_two(self.depth, LEAST)
        self.block_v = power_of_two(self.columns, LEAST)
        self.at_batch = self._walk(self.plan.batch, "z", "", "batch")
        self.at_rows = self._walk(self.plan.rows, "rm", "p", "row")
        self.at_columns = self._walk(self.plan.columns, "cn", "r", "column")
        self.overhangs = self.keys % self.schedule.block_n != 0
        self.steps = -(-self.keys // self.schedule.block_n)
        self.row_blocks = self.schedule.row_blocks(self.plan.shape[1])
        self.boxes = described(self.plan) if self.schedule.descriptors else {}

    def _walk(self, atoms: Dim, index: str, side: str, stem: str) -> list[Walk]:
        lines, walks = spread(self.plan.nest, atoms, self.tables, index, side, stem)
        self.head += lines
        return walks

    @property
    def specialized(self) -> bool:
        """Whether warps of their own copy the tiles, which takes keys and values that descriptors read."""
        return self.schedule.specialize and {"k", "v"} <= set(self.boxes)

    def descriptors(self) -> dict[str, str]:
        """Name of each descriptor to the host's text that makes it."""
        block = {"q": (self.schedule.block_m, self.block_d), "k": (self.schedule.block_n, self.block_d)}
        block["v"] = (self.schedule.block_n, self.block_v)
        names = self.plan.loads.names
        return {
            f"{name}_tile": box.made(f"{self.prefix}_aligned({names[box.source]})", *block[name])
            for name, box in self.boxes.items()
        }

    def emitter(self, *walks: Sequence[Walk], masks: dict[str, str], letter: str) -> Emitter:
        """An emitter over the program's batch element and `walks`."""
        return self.emitter_over([*self.at_batch, *(w for group in walks for w in group)], masks, letter)

    def emitter_over(self, walks: list[Walk], masks: dict[str, str], letter: str) -> Emitter:
        """An emitter over `walks`."""
        fast = self.plan.nest.finest if self.schedule.fast else ""
        return Emitter(self.plan.nest, walks, masks=masks, letter=letter, fast=fast)

    @property
    def row_mask(self) -> dict[str, str]:
        """The mask of queries, where their tiles overhang."""
        return {"p": "m_ok"} if self.rows % self.schedule.block_m else {}

    # -- operands
    def query(self) -> list[str]:
        """Lines that leave the queries in `q`, [BM, BD]."""
        assert self.plan.query is not None
        if "q" in self.boxes:
            return [f"q = {self.boxes['q'].load('q_tile', 'row0', 'BM', 'BD')}"]
        lines, walks = spread(self.plan.nest, self.plan.depth, self.tables, "qd", "r", "depth")
        masks = self.row_mask | ({"r": "qd_ok"} if self.depth != self.block_d else {})
        em = self.emitter(self.at_rows, walks, masks=masks, letter="q")
        value = self._operand(em, self.plan.query, "BM, BD", masks, "r")
        bounds = [f"qd_ok = qd < {self.depth}"] if "r" in masks else []
        lines = [*bounds, *lines, *zeros(em.lines, "BM", "BD"), *em.lines]
        return ["qd = tl.arange(0, BD)[None, :]", *lines, f"q = {value}"]

    def key(self, masked: bool) -> list[str]:
        """Lines that leave a step's keys in `k`, [BD, BN]; `rn` holds their positions."""
        assert self.plan.key is not None
        if "k" in self.boxes:
            return [f"k = {self.boxes['k'].load('k_tile', 'start', 'BN', 'BD')}.T"]
        lines, down = spread(self.plan.nest, self.plan.depth, self.tables, "kd", "p", "key_depth")
        more, across = self.key_walk("rn", "r")
        masks = {"p": "kd_ok"} if self.depth != self.block_d else {}
        masks |= {"r": "n_ok"} if masked and self.overhangs else {}
        em = self.emitter(down, across, masks=masks, letter="k")
        value = self._operand(em, self.plan.key, "BD, BN", masks, "p")
        bounds = [f"kd_ok = kd < {self.depth}"] if "p" in masks else []
        lines = [*bounds, *lines, *more, *zeros(em.lines, "BD", "BN"), *em.lines]
        return ["kd = tl.arange(0, BD)[:, None]", *lines, f"k = {value}"]

    def values(self, masked: bool) -> list[str]:
        """Lines that leave a step's values in `v`, [BN, BV]; `vn` holds their positions."""
        if "v" in self.boxes:
            return [f"v = {self.boxes['v'].load('v_tile', 'start', 'BN', 'BV')}"]
        lines, down = self.key_walk("vn", "p")
        masks = {"r": "c_ok"} if self.columns != self.block_v else {}
        masks |= {"p": "vn_ok"} if masked and self.overhangs else {}
        em = self.emitter(down, self.at_columns, masks=masks, letter="w")
        value = self._operand(em, self.plan.values, "BN, BV", masks, "p")
        bounds = [f"vn_ok = vn < {self.keys}"] if "p" in masks else []
        lines = [*bounds, *lines, *zeros(em.lines, "BN", "BV"), *em.lines]
        return ["vn = start + tl.arange(0, BN)[:, None]", *lines, f"v = {value}"]

    def key_walk(self, index: str, side: str) -> tuple[list[str], list[Walk]]:
        """Variables that walk the keys of a step."""
        return spread(self.plan.nest, self.plan.keys, self.tables, index, side, f"{index}_key")

    def row_walk(self) -> tuple[list[str], list[Walk]]:
        """Variables that walk the queries of a tile."""
        return spread(self.plan.nest, self.plan.rows, self.tables, "rm", "p", "row")

    def batch_walk(self, atoms: Dim) -> tuple[list[str], list[Walk]]:
        """Variables that walk some of the batch axes."""
        return spread(self.plan.nest, atoms, self.tables, "z", "", "batch")

    def _operand(self, em: Emitter, e: Expr, shape: str, masks: dict[str, str], zero: str) -> str:
        """The value of an operand in its own dtype, 0 beyond the edge of the side `zero`, which is summed over."""
        dtype = ops.TRITON_DTYPE[e.dtype]
        plain = e
        while plain.op == "identity":
            plain = plain.args[0]
        whole = em.side(e) == "pr"
        if plain.op == "load" and plain.access is None and whole and not self.plan.nest.sources[plain.param].scalar:
            mask = em.mask("pr")
            place = f"x{plain.param}_ptr + {em.offset(self.plan.nest.load_strides(plain))}"
            return self._rounded(f"tl.load({place}{f', mask={mask}, other=0.0' if mask else ''})")
        text = em.value(e)
        if not whole:
            text = f"tl.broadcast_to({text}, [{shape}])"
        if zero in masks:
            text = f"tl.where({masks[zero]}, {text}, 0.0)"
        return self._rounded(f"({text}).to({dtype})")

    # -- products
    def _rounded(self, text: str) -> str:
        """`text` as the tensor cores should take it: they cut fp32 off after TF32's significand."""
        rounds = not self.plan.half and self.schedule.precision == "tf32"
        return f"{self.prefix}_round({text})" if rounds else text

    def dot(self, a: str, b: str) -> str:
        """The product of two tiles."""
        precision = "" if self.plan.half else f', input_precision="{self.schedule.precision}"'
        return f"tl.dot({a}, {b}{precision})"

    def add_product(self, weights: str) -> list[str]:
        """Lines that add the step's product 2 to `acc`.

        Products of fp32 operands begin a new accumulator each step: tensor cores cut theirs off, which shows in long
        sums. For half operands a step must not begin before the product of the last one is done, since the assembler
        of CUDA before 13.3 may give the weights of both the same registers (github.com/triton-lang/triton/issues/9433):
        product 1 waits for it, and so does the rescaling of an online softmax. Without both, a choice that changes
        nothing does.
        """
        if not self.plan.half:
            return [f"acc += {self.dot(self._rounded(weights), 'v')}"]
        product = f"acc = tl.dot(({weights}).to({ops.TRITON_DTYPE[self.plan.dtype]}), v, acc)"
        waits = "acc = tl.where(start >= 0, acc, 0.0)  # until the product is done: the weights are in registers"
        alone = self.plan.scores is None and self.plan.weights.pair is None
        return [product, waits] if alone else [product]


def zeros(lines: Sequence[str], rows: str, columns: str) -> list[str]:
    """Vectors of 0 that give an access of `lines` a side that it does not walk."""
    text = "\n".join(lines)
    shapes = (("p_zero", f"[{rows}, 1]"), ("r_zero", f"[1, {columns}]"))
    return [f"{name} = tl.zeros({shape}, tl.int32)" for name, shape in shapes if name in text]


__all__ = ["Tiles", "zeros"]
