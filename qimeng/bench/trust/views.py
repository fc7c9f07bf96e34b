"""Tables of the rows that the measurements of trust write.

Deals in rows as plain data and in Markdown. Knows nothing about how rows are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qimeng.bench.markdown import markdown, percent

Rows = Sequence[dict[str, Any]]

APART = ("refused", "crash", "hang")
"""What a witness says of a mutant that nobody needs to compare: it does not compile, raises, crashes or hangs."""


def mutants(rows: Rows) -> str:
    """What was witnessed wrong and missed, by class of mutation."""
    head = [
        "class",
        "mutants",
        "do not run",
        "witnessed wrong",
        "missed in a search",
        "missed in the end",
        "share missed",
    ]
    table = [[*head, "KernelBench's rule misses", "the same at 1e-2", "refused, not witnessed"]]
    found = [r for r in rows if r["what"] == "mutant"]
    kinds = sorted({r["kind"] for r in found})
    for kind in [*kinds, "all"]:
        mine = [r for r in found if kind in (r["kind"], "all")]
        wrong = [r for r in mine if is_witnessed(r)]
        stock, loose = ([r for r in wrong if r["witness"][rule]] for rule in ("stock", "loose"))
        missed = [r for r in wrong if is_missed(r)]
        counts = [
            len(mine),
            sum(r["witness"]["found"] in APART for r in mine),
            len(wrong),
            sum(r["search"]["failure"] is None for r in wrong),
            len(missed),
        ]
        shares = [percent(len(part) / len(wrong) if wrong else None, 1) for part in (missed, stock, loose)]
        strict = sum(r["witness"]["found"] == "right" and not _passed(r) for r in mine)
        table.append([kind, *map(str, counts), *shares, str(strict)])
    return f"{_where(rows)}\n\n{markdown(table)}"


def survivors(rows: Rows) -> str:
    """The mutants that were witnessed wrong and that the judge let pass, with what it saw of them."""
    table = [["mutant", "class", "what was done", "witnessed error", "over eager's", "the judge's error of its budget"]]
    for r in rows:
        if r["what"] == "mutant" and is_missed(r):
            w, j = r["witness"], r["final"]
            diff = " ".join(f"`{line}`" for line in r["diff"].splitlines())
            told = f"{_short(j['max_error'])} of {_short(j['max_budget'])}; rms {_short(j['rms_error'])} of "
            told += _short(j["rms_budget"])
            name = f"{r['key']} ({r['family']}, {r['dtype']})"
            seen = f"{_short(w['error'])} ({w['words']})"
            table.append([name, r["kind"], f"{r['operator']}: {diff}", seen, _short(w["times"]), told])
    return markdown(table)


def is_witnessed(row: dict[str, Any]) -> bool:
    """Whether the oracle saw a mutant wrong."""
    return bool(row["witness"]["found"] == "wrong")


def is_missed(row: dict[str, Any]) -> bool:
    """Whether the judge let pass what the oracle saw wrong."""
    return is_witnessed(row) and _passed(row)


def _passed(row: dict[str, Any]) -> bool:
    return row["final"] is not None and row["final"]["failure"] is None


def _where(rows: Rows) -> str:
    """Where rows were made, in a line; for the interpreter it says so."""
    places = dict.fromkeys((r["environment"]["device"], r.get("device", ""), r["environment"]["commit"]) for r in rows)
    words = {"cpu": "Triton's interpreter on the CPU", "cuda": ""}
    told = [f"{words.get(kind) or device}, commit {commit[:12]}" for device, kind, commit in places]
    return "; ".join(dict.fromkeys(told))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


JOURNALS: dict[str, Callable[[Rows], str]] = {"mutants": mutants, "survivors": survivors}
"""What a marker may ask for of rows of these measurements."""

__all__ = ["JOURNALS", "Rows", "is_missed", "is_witnessed", "mutants", "survivors"]
