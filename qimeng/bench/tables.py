"""Markdown tables of stored rows, written between markers so that no figure in a document is typed by hand.

Deals in text: ``<!-- bench:VIEW FILE … -->`` and ``<!-- /bench -->`` stand around a table, and what is between them is
replaced. Knows nothing about how figures are computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from qimeng.bench.row import Row, RowError, read_rows
from qimeng.bench.suite import format_selection
from qimeng.bench.summary import Summary, group_of, summarize

_BLOCK = re.compile(r"(<!-- bench:(\w+) ([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def render(text: str, root: Path) -> str:
    """`text` with every marked table made anew from the rows its marker names, paths relative to `root`.

    Raises:
        RowError: an unknown view, or rows that cannot be read.
    """

    def fill(match: re.Match[str]) -> str:
        view, files = match[2], match[3].split()
        if view not in VIEWS:
            raise RowError(f"no table called {view!r}; known: {', '.join(VIEWS)}")
        rows = [row for file in files for row in read_rows(root / file)]
        return f"{match[1]}\n{VIEWS[view](rows)}\n{match[4]}"

    return _BLOCK.sub(fill, text)


def figures(rows: Sequence[Row]) -> str:
    """The key figures, one column a run."""
    summaries = summarize(rows)
    lines: list[tuple[str, Callable[[Summary], str]]] = [
        ("problems", lambda s: str(s.problems)),
        ("times", lambda s: "estimated" if s.estimated else "measured"),
        ("right (fast_0)", lambda s: percent(s.fast.get("fast_0"))),
        ("right by KernelBench's rule", lambda s: percent(s.kernelbench_right)),
        ("fast_1 / fast_1.2 / fast_2", lambda s: _fast(s.fast)),
        ("the same against torch.compile", lambda s: _fast(s.fast_compile)),
        ("at least half of the GPU time generated", lambda s: percent(s.half_generated)),
        ("slowest against eager", lambda s: f"{s.slowest[1]:.2f} ({s.slowest[0]})" if s.slowest else "–"),
        ("peak memory over eager's, median", lambda s: number(s.median_memory_ratio)),
        ("seconds a problem, median", lambda s: number(s.median_seconds, 1)),
        ("evaluations a problem, median", lambda s: number(s.median_evaluations, 0)),
    ]
    table = [["", *(s.settings for s in summaries)]]
    table += [[name, *(show(s) for s in summaries)] for name, show in lines]
    return markdown(table)


def speed(rows: Sequence[Row]) -> str:
    """Geometric means by group, one line a group and run."""
    head = ["run", "group", "problems", "over eager", "torch.compile over eager", "over torch.compile"]
    table = [[*head, "over its best mode", "roofline over eager", "share of the roofline (median)"]]
    for s in summarize(rows):
        for g in s.groups:
            means = (g.over_eager, g.compile_over_eager, g.over_compile, g.over_compile_best, g.roofline_over_eager)
            count = str(g.problems) if g.timed == g.problems else f"{g.timed} of {g.problems}"
            table.append([s.settings, g.group, count, *map(number, means), percent(g.roofline_fraction)])
    return markdown(table)


def kinds(rows: Sequence[Row]) -> str:
    """What each kind of action did."""
    table = [["run", "kind", "steps", "right", "right and faster", "median gain", "best gain"]]
    for s in summarize(rows):
        for k in s.kinds:
            shares = [percent(k.accepted), percent(k.gained)]
            table.append([s.settings, k.kind, str(k.tried), *shares, number(k.median_gain), number(k.best_gain)])
    return markdown(table)


def problems(rows: Sequence[Row]) -> str:
    """Every problem of every run."""
    head = ["problem", "group", "right", "eager ms", "torch.compile ms", "ours ms", "over eager", "generated"]
    table = [[*head, "share of the roofline", "note"]]
    for row in sorted(rows, key=lambda r: (r.settings.label, r.level, r.number)):
        times = (row.eager, row.compiled, row.candidate)
        table.append(
            [
                f"{row.id} {row.name}",
                group_of(row),
                {True: "yes", False: "**no**", None: "–"}[row.right],
                *(number(t.device_ms if t else None, 3) for t in times),
                number(row.speedup),
                percent(row.generated_share),
                percent(row.roofline_fraction),
                _note(row),
            ]
        )
    return markdown(table)


def selection(rows: Sequence[Row]) -> str:
    """Which problems were run, by group, as numbers that ``--problems`` takes."""
    table = [["level", "group", "problems", "numbers"]]
    keys = sorted({(r.level, group_of(r)) for r in rows})
    for level, group in keys:
        numbers = sorted({r.number for r in rows if r.level == level and group_of(r) == group})
        table.append([str(level), group, str(len(numbers)), format_selection(numbers)])
    return markdown(table)


VIEWS: dict[str, Callable[[Sequence[Row]], str]] = {
    "figures": figures,
    "speed": speed,
    "kinds": kinds,
    "problems": problems,
    "selection": selection,
}
"""What a marker may ask for."""


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where it is not known."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in per cent, or a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.0f} %"


def _fast(table: dict[str, float]) -> str:
    shares = [percent(share) for name, share in table.items() if name != "fast_0"]
    return " / ".join(shares) or "–"


def _note(row: Row) -> str:
    notes = [
        (row.error is not None, (row.error or "")[:120]),
        (bool(row.collapsed), row.collapsed),
        (bool(row.degenerate), f"degenerate: {row.degenerate}"),
        (bool(row.eager_unstable), "eager run twice fails KernelBench's rule"),
        (row.kernelbench is False, "fails KernelBench's rule"),
        (not row.captured, "not captured"),
        (row.estimated, "estimated"),
    ]
    return "; ".join(text for holds, text in notes if holds)
