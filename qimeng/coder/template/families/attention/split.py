"""Several programs that share the keys of a tile of queries: what each leaves behind, and how that becomes one result.

For few queries and many keys there are too few tiles for a GPU (flash-decoding, Dao et al. 2023). Each program stores
its running values as they are at the end of its keys; a second kernel rescales them to a common maximum and adds them
up. Deals in kernel text. Knows nothing about the loop over the keys.
"""

from __future__ import annotations

from qimeng.coder.template.families.attention.tiles import Tiles


def statistics(tiles: Tiles) -> list[str]:
    """The running values of a row beside the product."""
    weights = tiles.plan.weights
    return [*(["m", "l"] if weights.pair is not None else []), *(f"sum{i}" for i, _ in enumerate(weights.sums))]


def share(tiles: Tiles, bounded: bool) -> list[str]:
    """Lines that cut `low` and `high` to the keys of this program's `part`.

    Args:
        tiles: the kernel's tiles.
        bounded: `low` and `high` say already which keys are seen at all.
    """
    keys = -(-tiles.steps // tiles.schedule.splits) * tiles.schedule.block_n
    if bounded:
        return [f"low = tl.maximum(low, part * {keys})", f"high = tl.minimum(high, part * {keys} + {keys})"]
    return [f"low = part * {keys}", f"high = tl.minimum(low + {keys}, {tiles.keys})"]


def store_part(tiles: Tiles) -> list[str]:
    """Lines that store the running values of this program's `part`."""
    rows, columns = ("m_ok" if tiles.row_mask else "", "c_ok" if tiles.columns != tiles.block_v else "")
    whole = " & ".join(filter(None, (rows, columns)))
    lines = [_place(tiles), f"tl.store(parts_ptr + place * {tiles.columns} + cn, acc{_masked(whole)})"]
    for i, name in enumerate(statistics(tiles)):
        lines.append(f"tl.store(stats_ptr + {i * count(tiles)} + place, {name}{_masked(rows)})")
    return lines


def merge_parts(tiles: Tiles) -> list[str]:
    """Lines that leave in the running values what all parts amount to."""
    rows, columns = ("m_ok" if tiles.row_mask else "", "c_ok" if tiles.columns != tiles.block_v else "")
    whole, names = " & ".join(filter(None, (rows, columns))), statistics(tiles)
    body = [_place(tiles), f"acc_part = tl.load(parts_ptr + place * {tiles.columns} + cn{_masked(whole, '0.0')})"]
    for i, name in enumerate(names):
        body.append(f"{name}_part = tl.load(stats_ptr + {i * count(tiles)} + place{_masked(rows, '0.0')})")
    if "m" in names:
        body += [
            "m_new = tl.maximum(m, m_part)",
            'top = tl.where(m_new == float("-inf"), 0.0, m_new)',
            "scale, scale_part = tl.exp(m - top), tl.exp(m_part - top)",
            "l = l * scale + l_part * scale_part",
            "acc = acc * scale + acc_part * scale_part",
            "m = m_new",
        ]
    else:
        body.append("acc += acc_part")
    body += [f"{name} += {name}_part" for name in names if name.startswith("sum")]
    return [f"for part in range({tiles.schedule.splits}):", *(f"    {line}" for line in body)]


def count(tiles: Tiles) -> int:
    """Rows of all parts."""
    return tiles.schedule.splits * tiles.plan.shape[0] * tiles.rows


def _place(tiles: Tiles) -> str:
    return f"place = tl.cast(part * {tiles.plan.shape[0]} + z, tl.int64) * {tiles.rows} + rm"


def _masked(mask: str, other: str = "") -> str:
    if not mask:
        return ""
    return f", mask={mask}" + (f", other={other}" if other else "")


__all__ = ["count", "merge_parts", "share", "statistics", "store_part"]
