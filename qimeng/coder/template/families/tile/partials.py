"""Partial results of a row that several programs share: the workspaces they pass through memory in.

Deals in places of memory. Knows nothing about forms.
"""

from __future__ import annotations

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.accumulate import Accumulator
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.row_pieces import Pieces, extent_of


def workspaces(p: Pieces, splits: int, space: str = "w") -> list[str]:
    """Allocate workspaces in the entry function; returns their parameter names."""
    names = []
    for level in range(1, p.plan.passes + 1):
        accs = p.accumulators(level)
        kinds = [k for k, _ in _components(p, accs)]
        for kind, dtype in (("f", _float_dtype(p, accs)), ("i", "int64")):
            if kind in kinds:
                size = kinds.count(kind) * p.plan.row_count * splits
                p.launches.append(f"{space}{level}{kind}_ptr = torch.empty({size}, dtype=torch.{dtype}, device=DEVICE)")
                names.append(f"{space}{level}{kind}_ptr")
    return names


def partial_stores(
    p: Pieces, accs: list[tuple[Expr, Accumulator]], level: int, splits: int, split: str = "split", space: str = "w"
) -> list[str]:
    """Store each partial result at [component, row, split] of a workspace."""
    lines = [f"row = {p.row_number()}"]
    total = p.plan.row_count
    mask = ", mask=p_mask" if extent_of(p.row_inner) % p.PB else ""
    for kind, name in _components(p, accs):
        place = f"{space}{level}{kind}_ptr + ({_slot(p, accs, name)} * {total} + row) * {splits} + {split}"
        lines.append(f"tl.store({place}, {name}{mask})")
    return lines


def partial_loads(p: Pieces, em: Emitter, level: int, splits: int, space: str = "w") -> list[str]:
    """Combine the partial results of `level` and make them known."""
    accs = p.accumulators(level)
    wide = power_of_two(splits)
    total = p.plan.row_count
    lines = [f"row = {p.row_number()}", f"slots = tl.arange(0, {wide})[None, :]"]
    mask = f"(slots < {splits})" if wide != splits else "(slots >= 0)"
    guard = f"{mask} & p_mask" if extent_of(p.row_inner) % p.PB else mask
    for e, acc in accs:
        names = []
        for kind, name in _components(p, [(e, acc)]):
            slot = _slot(p, accs, name)
            names.append(f"{name}_parts")
            place = f"{space}{level}{kind}_ptr + ({slot} * {total} + row) * {splits} + slots"
            lines.append(f"{name}_parts = tl.load({place}, mask={guard}, other=0)")
        lines += acc.merge(names, mask)
        p.define(em, e, acc)
    return lines


def _components(p: Pieces, accs: list[tuple[Expr, Accumulator]]) -> list[tuple[str, str]]:
    """(workspace, variable) of every partial result: float ones in ``f``, integer ones in ``i``."""
    found = []
    for _, acc in accs:
        for part in acc.parts:
            integer = not acc.floating or part.endswith("_at")
            found.append(("i" if integer else "f", part))
    return found


def _slot(p: Pieces, accs: list[tuple[Expr, Accumulator]], name: str) -> int:
    kinds = _components(p, accs)
    kind = next(k for k, n in kinds if n == name)
    return [n for k, n in kinds if k == kind].index(name)


def _float_dtype(p: Pieces, accs: list[tuple[Expr, Accumulator]]) -> str:
    return "float64" if any(a.dtype == "tl.float64" for _, a in accs) else "float32"


__all__ = ["partial_loads", "partial_stores", "workspaces"]
