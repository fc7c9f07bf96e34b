"""Tables of the rows that the measurements of trust write.

Deals in rows as plain data and in Markdown. Knows nothing about how rows are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean, median, quantiles
from typing import Any

from qimeng.bench.markdown import markdown, number, percent

Rows = Sequence[dict[str, Any]]

INTERPRETED, PYTORCH = "Triton's interpreter on the CPU", "PyTorch on the CPU (the judge alone, no kernels)"
"""What ran where there was no GPU."""
APART = ("refused", "crash", "hang")
"""What the oracle says of a mutant without a result to compare: it does not compile, raises, crashes or hangs."""


def mutants(rows: Rows) -> str:
    """What the oracle finds wrong and the judge misses, by class of mutation."""
    head = [
        "class",
        "mutants",
        "do not run",
        "wrong by the oracle",
        "missed in a search",
        "missed in the end",
        "share missed",
    ]
    table = [[*head, "KernelBench's rule misses", "the same at 1e-2", "refused by the judge alone"]]
    found = [r for r in rows if r["what"] == "mutant"]
    kinds = sorted({r["kind"] for r in found})
    for kind in [*kinds, "all"]:
        mine = [r for r in found if kind in (r["kind"], "all")]
        wrong = [r for r in mine if is_wrong(r)]
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
    return f"{_where(rows, INTERPRETED)}\n\n{markdown(table)}"


def survivors(rows: Rows) -> str:
    """The mutants that the oracle finds wrong and the judge lets pass, with the errors that each measured."""
    table = [
        ["mutant", "class", "what was done", "the oracle's error", "over eager's", "the judge's error of its budget"]
    ]
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


def soak(rows: Rows) -> str:
    """The others with and without the harmful ones: verdicts, times; and what is left on the machine.

    Times are compared where both were taken in one run.
    """
    passes = {name: _candidates(rows, name) for name in ("without", "with")}
    both = sorted(set(passes["without"]) & set(passes["with"]))
    pairs = [(passes["without"][n], passes["with"][n]) for n in both]
    other = [f"{a['name']}: {_verdict(a)}, then {_verdict(b)}" for a, b in pairs if _verdict(a) != _verdict(b)]
    timed = [(a, b) for a, b in pairs if a["ms"] and b["ms"] and a["environment"] == b["environment"]]
    close = [abs(b["ms"] / a["ms"] - 1) <= a["spread"] + b["spread"] for a, b in timed]
    ratio = number(median(b["ms"] / a["ms"] for a, b in timed) if timed else None, 4)
    harmful = [r for r in rows if r["what"] == "candidate" and r["harm"]]
    samples = [r for r in rows if r["what"] == "sample"]
    growth = _growth([r for r in samples if r["run"] != "machine"])
    table = [
        ["", "figure"],
        ["candidates that do harm", f"{len(harmful)} ({', '.join(sorted({r['harm'] for r in harmful}))})"],
        ["others judged in both runs", str(len(pairs))],
        ["with another gate or verdict", f"{len(other)}" + "".join(f"; {text}" for text in other)],
        ["timed in both", str(len(timed))],
        ["times within the two spreads", percent(sum(close) / len(close) if close else None)],
        ["time with over time without, median", ratio],
        ["seconds an evaluation, median: others, harmful", f"{_middle(pairs)}, {_seconds(harmful)}"],
        ["judges that were looked at three times or more", str(len(growth))],
        ["memory of a judge at the last look less that halfway, MiB: median, largest", _two(growth)],
    ]
    figures = {"rss_mib": "judge's memory, MiB", "processes": "processes", "marked": "left by exploits"}
    figures |= {"files": "files", "gpu_mib": "GPU, MiB"}
    lines = [["run", "moment", "looks", *(f"{name}, most" for name in figures.values())]]
    for run, when in dict.fromkeys((r["run"], r["when"]) for r in samples):
        mine = [r for r in samples if (r["run"], r["when"]) == (run, when)]
        lines.append([run, when, str(len(mine)), *(f"{max(r[f] for r in mine):g}" for f in figures)])
    return f"{_where(rows, PYTORCH)}\n\n{markdown(table)}\n{markdown(lines)}"


def _growth(samples: Rows) -> list[float]:
    """By how many MiB each judge's memory grew in the latter half of its looks: in the former it loads libraries."""
    judges: dict[Any, list[float]] = {}
    for r in sorted(samples, key=lambda r: str(r["at"])):
        judges.setdefault(r["judge"], []).append(float(r["rss_mib"]))
    return [seen[-1] - seen[len(seen) // 2] for seen in judges.values() if len(seen) > 2]


def _two(values: Sequence[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else "–"


def cost(rows: Rows) -> str:
    """Seconds of an evaluation by part, and evaluations an hour."""
    found = [r for r in rows if r["what"] == "evaluation"]
    made = [r for r in rows if r["what"] == "spec" and "setup_s" in r]
    table = [["part", "seconds, mean", "median", "largest"]]
    for part in dict.fromkeys(p for r in found for p in r["parts"]):
        table.append([part, *_spread_of([r["parts"].get(part, 0.0) for r in found])])
    whole = [r["seconds"] for r in found]
    table.append(["an evaluation", *_spread_of(whole)])
    table.append(["an evaluator (references, baselines), once a spec", *_spread_of([r["setup_s"] for r in made])])
    lines = [["specs", "evaluations", "passed", "an hour, one after another", "jobs", "an hour, with them"]]
    for jobs in sorted({r["jobs"] for r in made}):
        mine = [r for r in made if r["jobs"] == jobs]
        count = sum(r["jobs"] == jobs for r in found)
        busy = sum(r["ended"] - r["began"] for r in mine)
        passed = sum(r["gate"] == "passed" for r in found if r["jobs"] == jobs)
        alone = 3600 * count / sum(r["seconds"] for r in found if r["jobs"] == jobs) if count else None
        together = 3600 * count / busy * jobs if busy else None
        lines.append([str(len(mine)), str(count), str(passed), number(alone, 0), str(jobs), number(together, 0)])
    return f"{_where(rows, PYTORCH)}\n\n{markdown(table)}\n{markdown(lines)}"


def exploits(rows: Rows) -> str:
    """What became of the exploits, by class, and of the honest candidates; then each that was not as it must be."""
    table = [["class", "judged", "refused", "passed, and gained nothing", "as they must be", "processes left"]]
    odd = [["candidate", "class", "what became of it"]]
    found = [r for r in rows if r["what"] == "case"]
    for kind in dict.fromkeys(r["class"] for r in found):
        mine = [r for r in found if r["class"] == kind]
        right = sum(r["as_expected"] for r in mine)
        passed = sum(r["passed"] for r in mine)
        left = sum(r["left_behind"] for r in mine)
        table.append([kind, *map(str, (len(mine), len(mine) - passed, passed, right, left))])
        for r in mine:
            if not r["as_expected"]:
                verdict = f"passed, {r['speedup'] or 0:.2f} x eager" if r["passed"] else _verdict(r)
                odd.append([r["case"], kind, verdict])
    text = f"{_where(rows, PYTORCH)}\n\n{markdown(table)}"
    return text if len(odd) == 1 else f"{text}\n{markdown(odd)}"


def stability(rows: Rows) -> str:
    """How far the medians of the same kernel lie apart."""
    table = [["kernel", "size", "evaluations", "passed", "median of medians, ms", "quartiles apart", "extremes apart"]]
    kernels = dict.fromkeys((r["kernel"], r["spec"]) for r in rows)
    for kernel, spec in kernels:
        mine = [r for r in rows if (r["kernel"], r["spec"]) == (kernel, spec)]
        times = [r["ms"] for r in mine if r["ms"]]
        apart: list[float | None] = [None, None]
        if len(times) > 1:
            low, middle, high = quantiles(times, n=4, method="inclusive")
            apart = [(high - low) / middle, (max(times) - min(times)) / middle]
        figures = [number(median(times) if times else None, 4), *(percent(x, 2) for x in apart)]
        table.append([kernel, spec.rpartition(" ")[2], str(len(mine)), str(len(times)), *figures])
    return f"{_where(rows, PYTORCH)}\n\n{markdown(table)}"


def recheck(rows: Rows) -> str:
    """Stored winners before a later judge, by dtype and mode; then the others, by why they did not pass."""
    table = [["dtype, mode", "winners", "passed", "their time then over now, geometric mean", "least"]]
    odd: dict[str, list[str]] = {}
    for kind in dict.fromkeys(r["key"].partition(" ")[2] for r in rows):
        mine = [r for r in rows if r["key"].partition(" ")[2] == kind]
        ratios = [r["row_ms"] / r["ms"] for r in mine if r.get("ms") and r.get("row_ms")]
        told = [number(geometric_mean(ratios) if ratios else None, 3), number(min(ratios, default=None), 3)]
        table.append([kind, str(len(mine)), str(sum(r["gate"] == "passed" for r in mine)), *told])
        for r in mine:
            if r["gate"] != "passed":
                odd.setdefault(_in_short(r["error"]), []).append(r["key"].partition(" ")[0])
    text = f"{_where(rows, PYTORCH)}\n\n{markdown(table)}"
    listed = [[why, str(len(keys)), ", ".join(keys)] for why, keys in odd.items()]
    return f"{text}\n{markdown([['not passed, because', 'winners', 'which'], *listed])}" if odd else text


def _in_short(error: str) -> str:
    """Why a winner was refused, without its numbers."""
    if "out of memory" in error:
        return "the device's memory ran out"
    if error.startswith("on inputs"):
        return f"wrong {error.partition(' and parameters')[0].partition(':')[0]}"
    return error


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether the oracle saw a mutant wrong."""
    return bool(row["witness"]["found"] == "wrong")


def is_missed(row: dict[str, Any]) -> bool:
    """Whether the judge let pass what the oracle saw wrong."""
    return is_wrong(row) and _passed(row)


def _passed(row: dict[str, Any]) -> bool:
    return row["final"] is not None and row["final"]["failure"] is None


def _where(rows: Rows, without_gpu: str) -> str:
    """Where rows were made, in a line; `without_gpu` says what ran where there was none."""
    places = dict.fromkeys((r["environment"]["device"], r.get("device", ""), r["environment"]["commit"]) for r in rows)
    told = [f"{without_gpu if kind == 'cpu' else device}, commit {commit[:12]}" for device, kind, commit in places]
    return "; ".join(dict.fromkeys(told))


def _candidates(rows: Rows, name: str) -> dict[int, dict[str, Any]]:
    return {r["number"]: r for r in rows if r["what"] == "candidate" and r["run"] == name and not r["harm"]}


def _verdict(row: dict[str, Any]) -> str:
    return f"{row['gate']} ({row['failure']})" if row["failure"] else str(row["gate"])


def _middle(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    return _seconds([row for pair in pairs for row in pair])


def _seconds(rows: Rows) -> str:
    return number(median(float(r["seconds"]) for r in rows) if rows else None)


def _spread_of(values: Sequence[float]) -> list[str]:
    if not values:
        return ["–"] * 3
    return [number(sum(values) / len(values)), number(median(values)), number(max(values))]


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


JOURNALS: dict[str, Callable[[Rows], str]] = {
    "exploits": exploits,
    "mutants": mutants,
    "survivors": survivors,
    "soak": soak,
    "cost": cost,
    "stability": stability,
    "recheck": recheck,
}
"""What a marker may ask for of rows of these measurements."""

__all__ = [
    "JOURNALS",
    "Rows",
    "cost",
    "exploits",
    "is_missed",
    "is_wrong",
    "mutants",
    "recheck",
    "soak",
    "stability",
    "survivors",
]
