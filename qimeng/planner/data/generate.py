"""Generates any number of specs from a seed. Each is a readable PyTorch file.

Deals in families, sizes and dtypes. Knows nothing about any benchmark; `qimeng.planner.data.overlap` finds generated
specs that equal a benchmark's problem.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qimeng.errors import QimengError
from qimeng.planner.data.convolutional import convolutional, decoder, dense
from qimeng.planner.data.draft import Draft, Tensor
from qimeng.planner.data.losses import loss
from qimeng.planner.data.pointwise import pointwise
from qimeng.planner.data.products import attention, block, gated, product, wide
from qimeng.planner.data.rows import normalization, reduction, softmax
from qimeng.planner.data.sizes import choose_sizes
from qimeng.planner.data.transformer import mixer, towers, transformer

if TYPE_CHECKING:
    from qimeng.spec import KernelSpec

FAMILIES: Mapping[str, Callable[[Draft], tuple[Tensor, ...]]] = {
    "pointwise": pointwise,
    "reduction": reduction,
    "normalization": normalization,
    "softmax": softmax,
    "loss": loss,
    "product": product,
    "gated": gated,
    "attention": attention,
    "block": block,
    "wide": wide,
}
"""What is drawn, by name; each is as likely as any other, products twice."""

NETWORKS: Mapping[str, Callable[[Draft], tuple[Tensor, ...]]] = {
    "convolutional": convolutional,
    "dense": dense,
    "decoder": decoder,
    "transformer": transformer,
    "mixer": mixer,
    "towers": towers,
}
"""Networks of about 50 to 300 operators, drawn where they are asked for by name."""

DTYPES = ("float32", "float32", "float32", "bfloat16", "float16")
MODES = ("default", "default", "default", "high")
"""Precision modes of float32 specs with products; all others have ``"default"``."""

SMALL = (1 << 12, 1 << 15)
"""Bytes of inputs for the CPU."""


class GenerateError(QimengError):
    """Sizes or families that nothing can be drawn for."""

    code = "generate"


@dataclass(frozen=True)
class Bytes:
    """How large inputs and parameters are together: drawn between the two, evenly in the logarithm.

    Attributes:
        least: bytes, at least 4096.
        most: bytes.
    """

    least: int = 1 << 20
    most: int = 1 << 30

    def __post_init__(self) -> None:
        if not 4096 <= self.least <= self.most:
            raise GenerateError(f"inputs of {self.least} to {self.most} bytes: say at least 4096, the smaller first")


@dataclass(frozen=True)
class Drawn:
    """A spec and where it comes from; the same four make the same spec.

    Attributes:
        spec: the spec, called ``SEED-INDEX-FAMILY``.
        family: one of `FAMILIES` or `NETWORKS`.
        seed: of the whole sequence.
        index: its number there.
    """

    spec: KernelSpec
    family: str
    seed: int
    index: int


def draw(seed: int, index: int, sizes: Bytes | None = None, families: Sequence[str] = ()) -> Drawn:
    """Spec number `index` of the sequence `seed`.

    The operators do not depend on `sizes`: the same number at another size is the same computation.

    Args:
        seed: of the sequence.
        index: number in it, from 0.
        sizes: how large its inputs are; 1 MiB to 1 GiB by default.
        families: draw from these only; all of `FAMILIES` by default.

    Raises:
        GenerateError: an unknown family.
    """
    from qimeng.spec import KernelSpec

    drawn = {**FAMILIES, **NETWORKS}
    unknown = [f for f in families if f not in drawn]
    if unknown:
        raise GenerateError(f"unknown family {unknown[0]!r}; known: {', '.join(drawn)}")
    rng = random.Random(f"{seed}/{index}")
    known = list(families or [*FAMILIES, "product"])
    family = rng.choice(known)
    dtype, mode = rng.choice(DTYPES), rng.choice(MODES)
    if family in NETWORKS:
        dtype, mode = "bfloat16" if dtype == "float16" else dtype, "default"
    draft = Draft(rng)
    results = drawn[family](draft)
    if dtype == "float16" and any("torch.sum(" in line for line in draft.lines):
        dtype = "bfloat16"  # a sum of many elements leaves float16's range
    sizes = sizes or Bytes()
    other = random.Random(f"{seed}/{index}/sizes")
    wanted = round(math.exp(other.uniform(math.log(sizes.least), math.log(sizes.most))))
    chosen = choose_sizes(draft, other, wanted, itemsize=4 if dtype == "float32" else 2)
    text = draft.text(chosen, *results)
    high = mode if draft.products and dtype == "float32" else "default"
    spec = KernelSpec.from_source(text, f"{seed}-{index}-{family}", dtype=dtype, mode=high)
    return Drawn(spec, family, seed, index)


def draw_many(
    seed: int, count: int, first: int = 0, sizes: Bytes | None = None, families: Sequence[str] = ()
) -> Iterator[Drawn]:
    """`count` different specs of the sequence `seed`, from number `first` on; a repeated text is passed over."""
    seen: set[str] = set()
    index = first
    while len(seen) < count:
        drawn = draw(seed, index, sizes, families)
        index += 1
        if drawn.spec.digest not in seen:
            seen.add(drawn.spec.digest)
            yield drawn


__all__ = ["DTYPES", "FAMILIES", "NETWORKS", "Bytes", "Drawn", "GenerateError", "draw", "draw_many"]
