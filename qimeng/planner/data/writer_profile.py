"""What a trained writer of kernels carries out: drawn by the shares of its answers that a judge found right.

Deals in rows of `python -m benchmarks.writer judge` and in regions. Knows nothing about planners. Whether it writes a
kernel right hardly differs from try to try (`experiments/README.md`, "A pretrained writer"), so each implementation is
drawn once: right or wrong for good.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qimeng.errors import QimengError
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.library import LANGUAGE
from qimeng.program.implementation import Implementation

PRODUCTS = frozenset("linear mm bmm addmm matmul baddbmm convolution scaled_dot_product_attention".split())
ROWS = frozenset(
    "mean var sum amax amin _softmax _log_softmax native_layer_norm native_group_norm linalg_vector_norm logsumexp "
    "argmax argmin cumsum cumprod prod std var_mean max_pool2d avg_pool2d topk sort".split()
)
"""Operators of a region that needs a tile of products, and of one that walks along rows."""

STEPS = (2, 5, 9)
"""Most operators of a region that counts as short, as middling and as long; others are very long."""

WRITING = ("lowering", "fusion")
"""Kinds that write a kernel from nothing; others change one."""

Cell = tuple[str, int]


@dataclass(frozen=True)
class WriterProfile:
    """Whether the writer carries out what an action asks for.

    Attributes:
        shares: of its answers that were right, by what a region computes and how many operators it has.
        changes: the same of kinds that change a kernel.
        seed: of what is drawn.
        spread: by how much this writer's skill differs from what the answers say, in each cell and in changes: standard
            deviation of the log-odds, drawn by `seed`; 0 for not at all. A planner then has to find out what the writer
            of an episode can write.
    """

    shares: Mapping[Cell, float]
    changes: float
    seed: str = ""
    spread: float = 0.0

    @classmethod
    def read(cls, path: Path, coder: str = "trained", seed: str = "") -> WriterProfile:
        """Of the rows of one coder in a file; the first answer counts.

        Raises:
            QimengError: it has none there, or the file cannot be read.
        """
        found, changes = defaultdict[Cell, list[bool]](list), list[bool]()
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise QimengError(f"{path} holds no rows of `python -m benchmarks.writer judge`: {error}") from None
        for row in rows:
            if row.get("coder") == coder and row.get("tries"):
                right = row["tries"][0] == "passed"
                if row["kind"] in WRITING:
                    found[cell(row["chain"].split("+"))].append(right)
                else:
                    changes.append(right)
        if not found or not changes:
            raise QimengError(
                f"{path} has no judged answers of the coder {coder!r}: `python -m benchmarks.writer judge`"
            )
        return cls({c: sum(rights) / len(rights) for c, rights in found.items()}, sum(changes) / len(changes), seed)

    def __call__(self, region: Region, implementation: Implementation, kind: str) -> bool:
        """Drawn once for an implementation of regions that are equal; what a library computes is always right."""
        drawn = random.Random(f"{self.seed} {region.signature} {implementation.digest}").random()
        return drawn < self.chance(region, implementation, kind)

    def chance(self, region: Region, implementation: Implementation, kind: str) -> float:
        """How likely that was, from 0 to 1."""
        if implementation.language in ("torch", LANGUAGE):
            return 1.0
        names = [n.packet.removeprefix("aten.") for n in region.ops if category(n) != "view"]
        if kind in WRITING:
            return self._skill(cell(names), self.share(cell(names)))
        return self._skill("changes", self.changes)

    def _skill(self, what: Cell | str, share: float) -> float:
        """How likely this writer is right where the answers were in `share`."""
        if not self.spread or share in (0.0, 1.0):
            return share
        away = random.Random(f"{self.seed} {what}").gauss(0.0, self.spread)
        return 1 / (1 + math.exp(-math.log(share / (1 - share)) - away))

    def share(self, wanted: Cell) -> float:
        """Of answers that were right; of a cell without any, the mean of those of the same operators."""
        if wanted in self.shares:
            return self.shares[wanted]
        alike = [s for (what, _), s in self.shares.items() if what == wanted[0]] or list(self.shares.values())
        return sum(alike) / len(alike)


def cell(names: Sequence[str]) -> Cell:
    """What operators with these names compute, and in which step of lengths there are so many of them."""
    what = "products" if PRODUCTS & set(names) else "rows" if ROWS & set(names) else "pointwise"
    return what, sum(len(names) > most for most in STEPS)


__all__ = ["WriterProfile", "cell"]
