"""Markdown tables of stored rows, written between markers so that no figure in a document is typed by hand.

Deals in text: ``<!-- bench:VIEW FILE … -->`` and ``<!-- /bench -->`` stand around a table, and what is between them is
replaced. Knows nothing about how figures are computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from qimeng.bench.comparison import compare
from qimeng.bench.ids import format_ids, natural
from qimeng.bench.markdown import markdown, number, percent
from qimeng.bench.row import Row, RowError, read_rows
from qimeng.bench.summary import Summary, geometric_mean, group_of, summarize

Kinds = Sequence[tuple[Mapping[str, Callable[[Sequence[Any]], str]], Callable[[Path], Sequence[Any]]]]
"""Views by name, and the function that reads the rows they are made of; a pair for each kind of row."""

_BLOCK = re.compile(r"(<!-- bench:(\w+) ([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def render(text: str, root: Path, kinds: Kinds | None = None) -> str:
    """`text` with every marked table made anew from the rows its marker names.

    Args:
        text: a Markdown document.
        root: folder that the markers' paths start from.
        kinds: the views that markers may name; those of benchmark rows (`VIEWS`) by default.

    Raises:
        RowError: an unknown view, or rows that cannot be read.
    """
    known = ((VIEWS, read_rows),) if kinds is None else kinds

    def fill(match: re.Match[str]) -> str:
        view, files = match[2], match[3].split()
        for views, read in known:
            if view in views:
                rows = [row for file in files for row in read(root / file)]
                return f"{match[1]}\n{views[view](rows)}\n{match[4]}"
        names = ", ".join(name for views, _ in known for name in views)
        raise RowError(f"no table called {view!r}; known: {names}")

    return _BLOCK.sub(fill, text)


def render_documents(
    documents: Sequence[Path], root: Path, renderer: Callable[[str, Path], str] = render
) -> list[tuple[Path, bool]]:
    """Make the tables of each document anew in place; whether its text changed.

    Args:
        documents: Markdown files.
        root: folder that the markers' paths start from.
        renderer: makes a text anew; by default with the views of benchmark rows alone.

    Raises:
        RowError: as `render`.
    """
    done = []
    for document in documents:
        text = document.read_text()
        new = renderer(text, root)
        if new != text:
            document.write_text(new)
        done.append((document, new != text))
    return done


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
        ("share of the roofline, median", lambda s: percent(s.roofline_fraction)),
        ("slowest against eager", lambda s: f"{s.slowest[1]:.2f} ({s.slowest[0]})" if s.slowest else "–"),
        ("peak memory over eager's, median", lambda s: number(s.median_memory_ratio)),
        ("seconds a problem without baselines, median", lambda s: number(s.median_seconds, 1)),
        ("their parts, medians", lambda s: ", ".join(f"{k} {number(v, 1)}" for k, v in s.seconds_split.items())),
        ("evaluations a problem, median", lambda s: number(s.median_evaluations, 0)),
    ]
    table = [["", *(s.settings for s in summaries)]]
    table += [[name, *(show(s) for s in summaries)] for name, show in lines]
    return markdown(table)


def speed(rows: Sequence[Row]) -> str:
    """Geometric means by group, one line a group and run; the best mode of torch.compile where several were timed."""
    summaries = summarize(rows)
    several = any(len(row.compiled_modes) > 1 for row in rows)
    head = ["run", "group", "problems", "over eager", "torch.compile over eager", "over torch.compile"]
    head += ["its best mode over eager", "over its best mode"] if several else []
    wrong = any(row.compiled_wrong for row in rows)
    head += ["over torch.compile, where it keeps to the error budget"] if wrong else []
    table = [[*head, "roofline over eager", "share of the roofline (median)", "half of the GPU time generated"]]
    for s in summaries:
        for g in s.groups:
            best = (g.compile_best_over_eager, g.over_compile_best) if several else ()
            right = (g.over_compile_right,) if wrong else ()
            means = (g.over_eager, g.compile_over_eager, g.over_compile, *best, *right, g.roofline_over_eager)
            shares = (g.roofline_fraction, g.half_generated)
            count = str(g.problems) if g.timed == g.problems else f"{g.timed} of {g.problems}"
            table.append([s.settings, g.group, count, *map(number, means), *map(percent, shares)])
    return markdown(table)


def parts(rows: Sequence[Row]) -> str:
    """Each part of a suite, whatever its problems compute and however long each had: one line a precision and card.

    What torch.compile compiles to a result less accurate than a candidate's has to be does not count as PyTorch's.
    """
    head = ["part of the suite", "mode, dtype", "GPU", "problems", "right", "over eager", "over the best of PyTorch"]
    table = [[*head, "slowest against eager", "half of the GPU time generated", "seconds a problem (median)"]]

    def line(row: Row) -> tuple[str, str, str]:
        return row.group or "–", f"{row.settings.mode}, {row.settings.dtype}", row.environment.device

    for names in sorted({line(row) for row in rows}):
        mine = [row for row in rows if line(row) == names]
        timed = [row for row in mine if row.right and row.speedup is not None]
        slowest = min((row.speedup or 0.0 for row in timed), default=None)
        means = geometric_mean(r.speedup for r in timed), geometric_mean(r.over_pytorch for r in timed), slowest
        generated = sum(row.right is True and (row.generated_share or 0.0) >= 0.5 for row in mine) / len(mine)
        seconds = median(row.optimize_seconds or 0.0 for row in mine)
        right = f"{sum(row.right is True for row in mine)}"
        table.append([*names, str(len(mine)), right, *map(number, means), percent(generated), number(seconds, 0)])
    return markdown(table)


def kinds(rows: Sequence[Row]) -> str:
    """What each kind of action did."""
    table = [["run", "kind", "steps", "right", "right and faster", "median gain", "best gain"]]
    for s in summarize(rows):
        for k in s.kinds:
            shares = [percent(k.accepted), percent(k.gained)]
            table.append([s.settings, k.kind, str(k.tried), *shares, number(k.median_gain), number(k.best_gain)])
    return markdown(table)


def comparison(rows: Sequence[Row]) -> str:
    """Runs side by side over the problems that all of them have, one line a group and run."""
    head = ["group", "run", "problems", "right", "over eager", "half of the GPU time generated"]
    table = [[*head, "evaluations (median)", "seconds (median)"]]
    for c in compare(rows):
        count = str(c.problems) if c.timed == c.problems else f"{c.problems}, {c.timed} timed in all"
        figures = [percent(c.right), number(c.over_eager), percent(c.half_generated)]
        table.append([c.group, c.run, count, *figures, number(c.median_evaluations, 0), number(c.median_seconds, 1)])
    return markdown(table)


def exceptions(rows: Sequence[Row]) -> str:
    """Problems that a reader should know of, by what is odd about them."""
    table = [["run", "what", "problems"]]
    for s in summarize(rows):
        table += [[s.settings, what, _listed(which)] for what, which in exceptions_of(s).items()]
    return markdown(table)


def exceptions_of(summary: Summary) -> dict[str, list[str]]:
    """What is odd to the problems it is odd about, each with a word on why; nothing that no problem is."""
    found = {
        "not right": [f"{name}: {why[:120]}" for name, why in summary.failed.items()],
        "right, but not by KernelBench's rule": list(summary.kernelbench_wrong),
        "eager run twice fails KernelBench's rule": list(summary.eager_unstable),
        "the float64 result fails KernelBench's rule": list(summary.exact_fails),
        "torch.compile is outside the error budget": list(summary.compiled_wrong),
        "degenerate": [f"{name}: {why}" for name, why in summary.degenerate.items()],
        "random operators": list(summary.random),
        "below 0.98 of eager": list(summary.too_slow),
        "above 1.1 x eager's memory": [f"{name} ({ratio:.2f} x)" for name, ratio in summary.memory_heavy.items()],
    }
    return {what: which for what, which in found.items() if which}


def problems(rows: Sequence[Row]) -> str:
    """Every problem of every run; the best mode of torch.compile as well where several were timed."""
    several = any(len(row.compiled_modes) > 1 for row in rows)
    head = ["problem", "group", "right", "eager ms", "torch.compile ms", *(["its best mode ms"] if several else [])]
    table = [[*head, "ours ms", "over eager", "generated", "share of the roofline", "note"]]
    for row in sorted(rows, key=lambda r: (r.settings.label, natural(r.id))):
        best = (row.compiled_best,) if several else ()
        times = (row.eager, row.compiled, *best, row.candidate)
        table.append(
            [
                f"{row.id} {row.name}".strip(),
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


FURTHEST = 10
"""Problems that `furthest` lists."""


def furthest(rows: Sequence[Row]) -> str:
    """The problems that reach the smallest share of the roofline, the smallest first."""
    table = [["problem", "group", "ours ms", "roofline ms", "share of the roofline", "over eager", "generated"]]
    known = [(share, row) for row in rows if row.right and (share := row.roofline_fraction)]
    for share, row in sorted(known, key=lambda pair: (pair[0], natural(pair[1].id)))[:FURTHEST]:
        ms = row.candidate.device_ms if row.candidate else None
        times = number(ms, 3), number(row.floor_ms, 4), percent(share, 2)
        table.append(
            [f"{row.id} {row.name}".strip(), group_of(row), *times, number(row.speedup), percent(row.generated_share)]
        )
    return markdown(table)


def selection(rows: Sequence[Row]) -> str:
    """Which problems were run, by the suite's groups and by what they compute."""
    table = [["part of the suite", "group", "problems", "ids"]]
    for part, group in sorted({(r.group, group_of(r)) for r in rows}):
        ids = {r.id for r in rows if (r.group, group_of(r)) == (part, group)}
        table.append([part or "–", group, str(len(ids)), format_ids(ids)])
    return markdown(table)


VIEWS: dict[str, Callable[[Sequence[Row]], str]] = {
    "figures": figures,
    "speed": speed,
    "kinds": kinds,
    "parts": parts,
    "comparison": comparison,
    "exceptions": exceptions,
    "furthest": furthest,
    "problems": problems,
    "selection": selection,
}
"""What a marker may ask for of a run's rows."""


def _listed(which: Sequence[str]) -> str:
    """Ids in short, where nothing else is said of them."""
    return "; ".join(which) if any(" " in text for text in which) else format_ids(which)


def _fast(table: dict[str, float]) -> str:
    shares = [percent(share) for name, share in table.items() if name != "fast_0"]
    return " / ".join(shares) or "–"


def _note(row: Row) -> str:
    notes = [
        (row.error is not None, (row.error or "")[:120]),
        (bool(row.collapsed), row.collapsed),
        (bool(row.degenerate), f"degenerate: {row.degenerate}"),
        (bool(row.eager_unstable), "eager run twice fails KernelBench's rule"),
        (bool(row.exact_fails), "the float64 result fails KernelBench's rule"),
        (row.kernelbench is False, "fails KernelBench's rule"),
        (bool(row.compiled_wrong), f"torch.compile is outside the error budget ({', '.join(row.compiled_wrong)})"),
        (not row.captured, "not captured"),
        (row.estimated, "estimated"),
        (bool(row.launch), f"launched as a {row.launch}"),
        (bool(row.library_share), f"{percent(row.library_share)} of the time in a library's code"),
    ]
    return "; ".join(text for holds, text in notes if holds)


__all__ = [
    "VIEWS",
    "Kinds",
    "comparison",
    "exceptions",
    "exceptions_of",
    "figures",
    "furthest",
    "kinds",
    "parts",
    "problems",
    "render",
    "render_documents",
    "selection",
    "speed",
]
