"""The ``split`` form: several programs a row, one launch for the totals of their shares and one for the scans.

The totals are combined in the order of the shares, so that a result is the same in every run. Deals in kernel text.
Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.families.scan.running import Running
from qimeng.coder.template.families.scan.steps import Steps
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.row_passes import hoist, loop, store_rows
from qimeng.coder.template.triton.row_pieces import Pieces, extent_of


def print_shares(steps: Steps) -> None:
    """Print both kernels and their launches; all shares of a row store what does not change along it."""
    p = steps.pieces
    splits = max(1, min(p.schedule.splits, p.steps))
    share = -(-p.steps // splits)
    splits = -(-p.steps // share)
    low, high = f"split * {share}", f"tl.minimum(split * {share} + {share}, {p.steps})"
    spaces = _workspaces(steps, splits)
    grid = str(p.programs * splits)
    rows, row_walks = p.rows(f"pid // {splits}")
    head = ["pid = tl.program_id(0)", f"split = pid % {splits}", *rows]

    columns, col_walks = p.columns(_named(steps.step("low", "high")))
    em = p.emitter(row_walks + col_walks)
    for r in steps.running:
        for a in r.scan.operands():
            hoist(p, em, a)
    body = [*head, f"low = {low}", f"high = {high}", *p.flush(em)]
    body += [line for r in steps.running for line in (r.lanes() if r.unordered else r.start())]
    inside = []
    for r in steps.running:
        inside += steps.operands(em, r)
        inside += r.gather() if r.unordered else [*r.run(), *r.resume(), *r.carry()]
    body += loop(p, columns, inside, "low", "high")
    body += [line for r in steps.running if r.unordered for line in r.total("l")]
    body.append(f"row = {p.row_number()}")
    for r in steps.running:
        for space, value in zip(_spaces(r), r.variables("c"), strict=True):
            body.append(f"tl.store({space} + row * {splits} + split, {value}{_mask(p)})")
    p.kernel("totals", body, spaces, grid)

    em = p.emitter(row_walks + col_walks)
    body = [*head, f"low = {low}", f"high = {high}", *_before(steps, splits)]
    body += [*store_rows(p, em), *steps.output_pass(em, "low", "high")]
    p.kernel("scans", body, spaces, grid)


def _named(step: str) -> str:
    return f"({step})" if " " in step else step


def _before(steps: Steps, splits: int) -> list[str]:
    """Combine the totals of the shares before this one."""
    p, wide = steps.pieces, power_of_two(splits)
    earlier = f"(slots > split) & (slots < {splits})" if steps.reverse else "slots < split"
    guard = f"({earlier}) & p_mask" if extent_of(p.row_inner) % p.PB else earlier
    lines = [f"row = {p.row_number()}", f"slots = tl.arange(0, {wide})[None, :]"]
    for r in steps.running:
        for space, value, none in zip(_spaces(r), r.variables("b"), r.neutrals(), strict=True):
            lines.append(f"{value} = tl.load({space} + row * {splits} + slots, mask={guard}, other={none})")
        lines += r.total("b", "0" if steps.reverse else str(wide - 1))
    return lines


def _workspaces(steps: Steps, splits: int) -> list[str]:
    """Allocate a value for each share of each row in the entry function; returns the parameter names."""
    p, names = steps.pieces, []
    size = p.plan.row_count * splits
    for r in steps.running:
        for name, dtype in zip(_spaces(r), r.dtypes(), strict=True):
            p.launches.append(f"{name} = torch.empty({size}, dtype=torch.{dtype}, device=DEVICE)")
            names.append(name)
    return names


def _spaces(r: Running) -> list[str]:
    return [f"w{name}_ptr" for name in r.variables("t")]


def _mask(p: Pieces) -> str:
    return ", mask=p_mask" if extent_of(p.row_inner) % p.PB else ""


__all__ = ["print_shares"]
