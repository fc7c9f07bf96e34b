"""Tables of products on inputs that vary within a row: errors before and after, and what the guard costs.

Deals in rows as plain data and in Markdown. Knows nothing about how rows are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.bench.markdown import markdown, number, percent

Rows = Sequence[dict[str, Any]]


def products(rows: Rows) -> str:
    """By mode and class of inputs: eager's error and, for each commit, the worst one of all forms and variants.

    Errors are shares of the product of the absolute values.
    """
    found = [r for r in rows if r["what"] == "product"]
    head = ["mode", "inputs", "eager's error"]
    table = [head]
    for mode, name in dict.fromkeys((r["mode"], r["class"]) for r in found):
        mine = [r for r in found if (r["mode"], r["class"]) == (mode, name)]
        line = [mode, name, _short(max(r["componentwise_eager"] for r in mine))]
        for commit in dict.fromkeys(r["environment"]["commit"] for r in mine):
            part = [r for r in mine if r["environment"]["commit"] == commit]
            line.append(f"{_short(max(r['componentwise'] for r in part))} ({commit[:7]})")
            line.append(f"{sum(not r['within'] for r in part)} of {len(part)}")
            line.append(str(sum(r["not_finite_wrong"] > 0 for r in part)))
        table.append(line)
    most = max(map(len, table))
    head += ["error (commit)", "outside the budget", "infinities or NaN wrong"] * ((most - len(head)) // 3)
    return f"{_device(found)}\n\n{markdown([[*line, *[''] * (most - len(line))] for line in table])}"


def product_times(rows: Rows) -> str:
    """By product and mode: milliseconds on normal inputs with and without the guard, and on the hardest ones."""
    found = [r for r in rows if r["what"] == "product times"]
    head = ["product (M x K x N)", "mode", "eager", "guarded", "without the guard", "the guard's share"]
    table = [[*head, "guarded, every tile exact", "plain kernel"]]
    for name, mode in dict.fromkeys((r["product"], r["mode"]) for r in found):
        mine = {r["inputs"].split()[0]: r["ms"] for r in found if (r["product"], r["mode"]) == (name, mode)}
        normal, hard = mine["normal"], mine["units"]
        best = min((k for k in normal if k.startswith("guarded")), key=lambda k: normal[k])
        without = normal[best.replace("guarded", "without")]
        share = percent(normal[best] / without - 1, 1)
        times = [normal["eager"], normal[best], without]
        line = [name, mode, *(number(t, 3) for t in times), share, number(hard[best], 3), number(hard["plain"], 3)]
        table.append(line)
    return f"{_device(found)}, milliseconds\n\n{markdown(table)}"


def _short(x: float) -> str:
    return f"{x:.2g}"


def _device(rows: Rows) -> str:
    places = dict.fromkeys(f"{r['environment']['device']}, commit {r['environment']['commit']}" for r in rows)
    return "; ".join(places)


PRODUCTS = {"products": products, "product_times": product_times}
"""What a marker may ask for of rows of `experiments.trust.run_products`."""

__all__ = ["PRODUCTS", "product_times", "products"]
