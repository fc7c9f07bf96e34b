"""Attention and products under masks that are known before a call, on a GPU, beside PyTorch and libraries.

    python -m experiments.masks rows.jsonl --seconds 240 --only "attention window"
    TRITON_INTERPRET=1 python -m experiments.masks rows.jsonl --tiny

A row of JSON for each mask (kind, share that is wanted, sizes), written as soon as it is known: in turns, with a cold
L2, milliseconds of each configuration that lowering begins with, of the families `masked` and `sampled` and of those
that compute all blocks, of PyTorch in eager mode and of torch.compile. Beside attention, FlexAttention with a block
mask that is made before; beside a product, torch.sparse.sampled_addmm (cuSPARSE), which gives the wanted elements
alone, and the same of rows that are gathered (``edges``). Each result's distance from float64 is written down.
``--tiny`` tries the script on the CPU at small sizes, with Triton's interpreter; its times mean nothing. Deals in
running and writing down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.case_rows import Place, write_rows
from experiments.sparse import Calls, in_turns
from qimeng import KernelSpec
from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec

SHOWN = ("failed", "seen", "best_ms", "best_schedule", "over", "over_all_blocks", "not_timed")
"""Of a row, what is printed as well."""


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        what: ``"attention"``, ``"product"`` (of all rows and columns, times the mask) or ``"edges"`` (the products of
            single rows and columns, those that the mask has).
        kind: of its mask.
        number: of that kind.
        shape: batch, heads, positions and depth; of a product, rows and depth.
        dtype: of its operands.
    """

    what: str
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """What, kind, number, sizes."""
        return f"{self.what} {self.kind} {self.number} {'x'.join(map(str, self.shape))}"

    @property
    def length(self) -> int:
        """Rows of the mask."""
        return self.shape[-2]


def window(length: int, number: int) -> Tensor:
    """Each query sees `number` keys on either side."""
    at = torch.arange(length)
    return (at[:, None] - at).abs() <= number


def documents(length: int, number: int) -> Tensor:
    """`number` documents of lengths drawn at random, each causal in itself."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randperm(length - 1, generator=generator)[: number - 1].sort().values + 1
    own = torch.bucketize(torch.arange(length), ends, right=True)
    return (own[:, None] == own) & torch.ones(length, length, dtype=torch.bool).tril()


def bigbird(length: int, number: int) -> Tensor:
    """Blocks of 64 beside a query's own, the first one, and `number` drawn at random (Zaheer et al. 2020)."""
    blocks, generator = -(-length // 64), torch.Generator().manual_seed(0)
    at = torch.arange(blocks)
    seen = ((at[:, None] - at).abs() <= 1) | (at == 0) | (at[:, None] == 0)
    drawn = torch.rand(blocks, blocks, generator=generator).argsort(1)[:, :number]
    seen = seen.scatter(1, drawn, torch.ones_like(drawn, dtype=torch.bool))
    return seen.repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length].contiguous()


def blocks(length: int, number: int) -> Tensor:
    """`number` % of the blocks of 128 x 128, drawn at random, and those of the diagonal."""
    count, generator = -(-length // 128), torch.Generator().manual_seed(0)
    seen = (torch.rand(count, count, generator=generator) < number / 100) | torch.eye(count, dtype=torch.bool)
    return seen.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length].contiguous()


def elements(length: int, number: int) -> Tensor:
    """`number` % of the elements, drawn at random, and those of the diagonal."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(length, length, generator=generator) < number / 100) | torch.eye(length, dtype=torch.bool)


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    "window": window, "documents": documents, "bigbird": bigbird, "blocks": blocks, "elements": elements,
}  # fmt: skip
"""Kind to what makes the mask [positions, positions] of a number of positions and the kind's number."""


def cases(tiny: bool) -> list[Case]:
    """Every case; those that say most come first."""
    if tiny:
        return [
            Case("attention", "window", 9, (1, 2, 96, 32), "float32"),
            Case("product", "blocks", 20, (150, 40), "float32"),
            Case("edges", "elements", 2, (120, 40), "float32"),
        ]
    long, short, wide = (2, 16, 8192, 64), (8, 16, 1024, 64), (2, 16, 4096, 128)
    drawn = [("blocks", n, long) for n in (5, 10, 25, 50, 90)]
    drawn += [("window", 256, long), ("documents", 16, long), ("bigbird", 3, long)]
    drawn += [("window", 512, wide), ("documents", 8, wide), ("bigbird", 3, wide), ("blocks", 10, wide)]
    found = [Case("attention", *one) for one in [*drawn, ("window", 64, short), ("documents", 6, short)]]
    found.append(Case("attention", "blocks", 10, short, "float32"))
    sizes = (8192, 1024), (4096, 4096)
    found += [Case("product", "blocks", n, size) for size in sizes for n in (5, 20, 50, 90)]
    found += [Case("product", "window", 256, sizes[0]), Case("product", "blocks", 10, sizes[0], "float32")]
    return found + [Case("edges", "elements", n, (8192, 128), "float32") for n in (1, 5)]


class Attention(nn.Module):
    """Attention under a mask that a buffer holds."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads of q, k and v."""
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.get_buffer("mask"))


class Product(nn.Module):
    """A product of rows with rows under a mask that a buffer holds."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[rows, depth] and [rows, depth] to [rows, rows]."""
        return (x @ y.t()) * self.get_buffer("mask")


class Edges(nn.Module):
    """The products of those rows alone that edges in buffers join."""

    def __init__(self, mask: Tensor):
        super().__init__()
        source, target = mask.nonzero(as_tuple=True)
        self.register_buffer("source", source)
        self.register_buffer("target", target)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[rows, depth] and [rows, depth] to [edges]."""
        return (x[self.get_buffer("source")] * y[self.get_buffer("target")]).sum(-1)


MODULES: dict[str, tuple[Callable[[Tensor], nn.Module], int]] = {
    "attention": (Attention, 3), "product": (Product, 2), "edges": (Edges, 2),
}  # fmt: skip
"""What is computed to its module and the number of its inputs."""

OWN = {"attention": "masked", "product": "sampled", "edges": "tile"}
"""What is computed to the family that this is about."""


def sampled(mask: Tensor, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The wanted elements by torch.sparse, its pattern made ready before; half types are widened, as it has none."""
    pattern = mask.float().to_sparse_csr()
    x, y = x.float(), y.float().t()
    return lambda: torch.sparse.sampled_addmm(pattern, x, y, beta=0.0).values()


def flexible(mask: Tensor, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """FlexAttention under the mask, whose blocks are found before the first call."""
    length = mask.shape[0]

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[query, key]

    found = create_block_mask(seen, None, None, length, length, device=str(mask.device))
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return lambda: compiled(*inputs, block_mask=found)


def candidates(module: nn.Module, inputs: tuple[Tensor, ...], device: Device, place: str) -> Calls:
    """The configurations that lowering begins with, by their schedules."""
    spec = KernelSpec.from_module(module, inputs)
    start, context = Program.start(capture_spec(spec, verify=False, device=place)), Context(device, TemplateCoder())
    while (fusion := next((a for a in legal_actions(start, context) if a.kind == "fusion"), None)) is not None:
        start = context.coder.write(Request(start, fusion, device)).apply(start)
    patch = context.coder.write(Request(start, Action("lowering", (start.called[0].id,)), device))
    calls: Calls = {}
    for number, made in enumerate(patch.alternatives):
        ready = patch.apply(start, number).load().Model().to(place)
        ready.load_state_dict(module.state_dict())
        calls[str(made.schedule)] = partial(ready, *inputs)
    return calls


def measured(case: Case, device: Device, place: str) -> dict[str, Any]:
    """Times, distances from float64 and the shares of the best times."""
    torch.manual_seed(0)
    mask = MASKS[case.kind](case.length, case.number).to(place)
    made, count = MODULES[case.what]
    module, dtype = made(mask), getattr(torch, case.dtype)
    inputs = tuple(torch.randn(case.shape, device=place, dtype=dtype) for _ in range(count))
    own, compiled = candidates(module, inputs, device, place), torch.compile(module)
    others: Calls = {"eager": partial(module, *inputs), "torch.compile": partial(compiled, *inputs)}
    if case.what == "attention" and place == "cuda":
        others["FlexAttention"] = flexible(mask, inputs)
    elif case.what != "attention" and place == "cuda":
        others["torch.sparse.sampled_addmm"] = sampled(mask, *inputs)
    row = {"seen": float(mask.float().mean())} | in_turns(own | others, place)
    part = (slice(0, 1), slice(0, 2)) if case.what == "attention" else ()  # float64 takes much memory
    exact = module(*(x[part].double() for x in inputs))
    scale, times = exact.square().mean().sqrt(), row["turns_ms"]
    same = [name for name in times if name != "torch.sparse.sampled_addmm" or case.what == "edges"]
    row["largest_difference_over_rms"] = {
        name: float(((own | others)[name]()[part].double() - exact).abs().max() / scale) for name in same
    }
    mine = [name for name in own if name in times and name.startswith(OWN[case.what])]
    if best := min(mine, key=times.__getitem__, default=""):
        plain = min((times[n] for n in own if n in times and n not in mine), default=None)
        row |= {"best_ms": times[best], "best_schedule": best}
        row["over"] = {name: times[name] / times[best] for name in others if name in times}
        row["over_all_blocks"] = plain and plain / times[best]
    return row


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="After so many no further case is begun.")] = 240.0,
    only: Annotated[str, typer.Option(help="Words that a case's name begins with, such as 'product'.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small sizes on the CPU, to try the script.")] = False,
) -> None:
    """Measure the cases one after the other."""
    place = Place.of(tiny)
    chosen = [c for c in cases(tiny) if c.name.startswith(only)]
    heads = [{"case": c.name, **asdict(c)} for c in chosen]
    measures = [partial(measured, c, place.device, place.name) for c in chosen]
    write_rows(out, zip(heads, measures, strict=True), place, seconds, SHOWN)


if __name__ == "__main__":
    typer.run(main)
