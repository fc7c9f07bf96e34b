"""The problems of a benchmark at other sizes: ``python -m experiments.resized KERNELBENCH OUT``.

Does a gain hold at sizes that nobody chose? Each file is written again in ways that its module still accepts:

- ``odd``: each size becomes a prime near three quarters of it; where the module does not accept that, an odd number of
  eights; where it does not accept that either, it stays.
- ``one``: what gives the first input its first dimension becomes one.

``qimeng bench run folder:OUT`` then measures them like any suite, ``--dtype bfloat16`` in another number format. The
table sets these rows beside those of the same problems as they were.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import torch
import typer

from qimeng.bench.ids import natural
from qimeng.bench.markdown import markdown, number
from qimeng.bench.row import Row
from qimeng.spec.fake import fake_tensors
from qimeng.spec.origin import SourceOrigin
from qimeng.spec.reduce import elements
from qimeng.spec.sizes import rewritten

LEAST = 24
"""Sizes below this are structure (a kernel's width, a number of groups) and stay."""


def odd(text: str) -> str:
    """`text` with as many sizes changed as its module accepts, the largest first; `text` itself where it takes none."""
    text, sizes = rewritten(text, {})
    table: dict[int, int] = {}
    for size in sorted({s for s in sizes if s >= LEAST}, reverse=True):
        for other in _others(size):
            if other not in table.values() and _runs(rewritten(text, table | {size: other})[0]):
                table[size] = other
                break
    return rewritten(text, table)[0]


def one(text: str) -> str:
    """`text` with a first dimension of one in its first input; `text` itself where no size gives that alone."""
    text, sizes = rewritten(text, {})
    first, *rest = _shape(text)
    if first in sizes and first > 1:
        changed = rewritten(text, {first: 1})[0]
        if _shape(changed) == [1, *rest] and _runs(changed):
            return changed
    return text


WAYS: dict[str, Callable[[str], str]] = {"odd": odd, "one": one}
"""What a way does to the text of a file."""


def _others(size: int) -> Iterator[int]:
    about = size * 3 // 4
    yield next(n for n in range(about, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    eights = about // 8 - (about // 8 + 1) % 2
    if eights > 0:
        yield 8 * eights


def _runs(text: str) -> bool:
    return elements(SourceOrigin(text=text, name="resized"), training=False) > 0


def _shape(text: str) -> list[int]:
    """Shape of the first tensor among a file's inputs; ``[0]`` where there is none."""
    with fake_tensors():
        inputs = SourceOrigin(text=text, name="resized").examples(0, "cpu")
    return next((list(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dim()), [0])


def main(
    root: Annotated[Path, typer.Argument(help="Folder of problem files, such as a checkout's KernelBench.")],
    out: Annotated[Path, typer.Argument(help="Where the changed files go, below a folder for each way.")],
    way: Annotated[str, typer.Option(help=f"Ways, with commas: {', '.join(WAYS)}.")] = "odd,one",
    only: Annotated[str, typer.Option(help="Patterns of paths, with commas, such as level1/19_*.")] = "*",
) -> None:
    """Write the files of a folder again with other sizes; those that accept no other size are left out."""
    patterns = only.split(",")
    for path in sorted(root.rglob("*.py"), key=lambda p: natural(p.as_posix())):
        id = path.relative_to(root).with_suffix("").as_posix()
        if not any(fnmatchcase(id, pattern) for pattern in patterns):
            continue
        text = path.read_text()
        for name in way.split(","):
            changed = WAYS[name](text)
            print(f"{name}: {id}: {_said(text, changed)}")
            if changed != rewritten(text, {})[0]:
                written = out / name / f"{id}.py"
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(changed)


def _said(text: str, changed: str) -> str:
    pairs = dict(zip(rewritten(text, {})[1], rewritten(changed, {})[1], strict=True))
    return ", ".join(f"{a} to {b}" for a, b in pairs.items() if a != b) or "takes no other size"


# ---- the table


def resized(rows: Sequence[Row]) -> str:
    """A line a way and number format: how many problems are right, and their gain beside that of the same problems.

    Rows of the suite ``kernelbench`` are the problems as they were. *Kept* is the geometric mean of the gain over
    eager, less one, over that of the problems as they were, less one.
    """
    before = {row.id: row for row in rows if row.suite == "kernelbench"}
    parts = defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        if row.suite != "kernelbench":
            parts[row.suite, row.settings.dtype].append(row)
    lines = []
    for (suite, dtype), found in sorted(parts.items()):
        both = [(row, old) for row in found if (old := before.get(_number(row.id))) and row.speedup and old.speedup]
        new, then = (
            (_mean([r.speedup or 1.0 for r in part]) for part in zip(*both, strict=True)) if both else (0.0, 0.0)
        )
        right = sum(row.right is True for row in found)
        kept = (new - 1) / (then - 1) if then > 1 else None
        slowest = min((row.speedup for row in found if row.speedup), default=None)
        lines.append(
            [suite, dtype, f"{right} of {len(found)}", str(len(both)), *map(number, (then, new, kept, slowest))]
        )
    head = ["sizes", "dtype", "right", "beside", "gain as they were", "gain", "kept", "slowest against eager"]
    return markdown([head, *lines])


def _number(id: str) -> str:
    """``"level1/19"`` of ``"level1/19_ReLU"``."""
    level, _, name = id.rpartition("/")
    return f"{level}/{name.partition('_')[0]}"


def _mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


RESIZED: dict[str, Callable[[Sequence[Row]], str]] = {"resized": resized}

__all__ = ["RESIZED", "WAYS", "odd", "one", "resized"]

if __name__ == "__main__":
    typer.run(main)
