"""Bundles of stored trees as something to train on, and others that training never sees.

Deals in trees and tasks. Knows nothing about models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qimeng.envs.steps.setup import make_coder
from qimeng.errors import QimengError
from qimeng.interfaces import Coder
from qimeng.planner.data.bundles import SIZES, bundles, plannable
from qimeng.planner.data.parts import Captured, Parts, parts_of
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.writer_profile import WriterProfile
from qimeng.planner.lm.networks import NetworkTask, captured_networks, network_task
from qimeng.planner.lm.ranges import POSITIVE


@dataclass(frozen=True)
class Bundles:
    """Bundles that are planned in place of the trees' own computations (`qimeng.planner.data.bundles`).

    Attributes:
        count: bundles to train on; 0 for none.
        apart: bundles that decide which weights are kept. Their trees are those that are trained on and a third of the
            others, put together anew: of few trees, bundles would hold the same computations many times, and be easy.
        held_out: others for the report; 0 for none. Chance takes minutes on ten of them.
        least: computations of a bundle, at least.
        most: computations of a bundle, at most.
        writer: file with rows of a trained writer that was judged (`WriterProfile`), whose kernels are planned, drawn
            anew for each bundle; empty for those of the coder that wrote the trees.
        spread: by how much writers differ (`WriterProfile.spread`).
    """

    count: int = 0
    apart: int = field(default=16, metadata=POSITIVE)
    held_out: int = 4
    least: int = field(default=SIZES[0], metadata=POSITIVE)
    most: int = field(default=SIZES[1], metadata=POSITIVE)
    writer: str = ""
    spread: float = 0.0


@dataclass(frozen=True)
class Bundled:
    """Bundles made ready.

    Attributes:
        training: of trees that are trained on.
        validation: of the same trees and others.
        held_out: of trees that neither of the two has.
    """

    training: tuple[NetworkTask, ...]
    validation: tuple[NetworkTask, ...]
    held_out: tuple[NetworkTask, ...]


def bundled(kept: Sequence[Tree], held: Sequence[Tree], wanted: Bundles, coder: str, seed: int = 0) -> Bundled:
    """Bundles of `kept`, of these and a third of `held`, and of the rest.

    Trees of the precision mode that most have are used.

    Args:
        kept: trees to train on.
        held: others.
        wanted: how many, of how many computations.
        coder: name of the coder that says what is legal.
        seed: of what is drawn.

    Raises:
        QimengError: a bundle would have to have more computations than it may, or the writer's rows cannot be read.
    """
    if wanted.least > wanted.most:
        text = f"bundles.least = {wanted.least} is above bundles.most = {wanted.most}: set both"
        raise QimengError(text)
    mode = Counter(tree.mode for tree in (*kept, *held)).most_common(1)[0][0]
    stretches = [
        [t for t in trees if t.mode == mode] for trees in (kept, held[::3], [t for i, t in enumerate(held) if i % 3])
    ]
    captured = [captured_networks(trees) for trees in stretches]
    every = [one for some in captured for one in some]
    parts, written = parts_of(every), make_coder(coder)
    trained, apart, others = (list(plannable(some, parts, written)) for some in captured)
    pools = [trained, [*trained, *apart], others]
    writer = WriterProfile.read(Path(wanted.writer)) if wanted.writer else None
    counts = (wanted.count, wanted.apart, wanted.held_out)
    made = [
        tuple(_tasks(pool, parts, count, seed + number, wanted, written, writer))
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True))
    ]
    return Bundled(*made)


def _tasks(
    pool: Sequence[Captured],
    parts: Parts,
    count: int,
    seed: int,
    wanted: Bundles,
    coder: Coder,
    writer: WriterProfile | None,
) -> Iterator[NetworkTask]:
    for tree, start in bundles(pool, parts, coder, count, seed, (wanted.least, wanted.most)):
        # of one writer for all bundles, training would learn by heart which computations it writes right
        own = parts if writer is None else replace(parts, writes=replace(writer, seed=tree.name, spread=wanted.spread))
        task = network_task(tree, start, own, coder)
        if task is not None:
            yield task


__all__ = ["Bundled", "Bundles", "bundled"]
