"""Plots as SVG text that takes its colours from the page: they fit light and dark pages.

Deals in numbers and matplotlib. Knows nothing about pages.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qimeng.errors import QimengError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from qimeng.envs.cost.roofline import Roofline
    from qimeng.report.story import Kernel

INK = "#010203"
"""Stands for the page's text colour in a plot; replaced by it."""
FAR = 20
"""Times below the bound from which on rates are drawn on a logarithmic scale: else all lie on the axis."""
GOOD, PLAIN, BAD = "#1a7f4b", "#3b6fd4", "#b4483c"
"""Kept, right, refused. Each is told apart by its mark too."""


def roofline_plot(bounds: Roofline, points: Sequence[tuple[str, float, str]]) -> str:
    """Every candidate on the device's roofline.

    Args:
        bounds: of the computation.
        points: name, milliseconds, and ``"kept"``, ``"right"`` or ``"base"`` of each program that was timed.
    """
    figure, axes = _figure(6.4, 3.6)
    work = bounds.flop or bounds.bytes
    unit = "TFLOP/s" if bounds.flop else "TB/s"
    across = bounds.flop / bounds.bytes if bounds.flop and bounds.bytes else 1.0
    peak = bounds.tflops or bounds.bandwidth_gbs / 1e3
    if bounds.flop:
        xs = [across / 30, min(bounds.tflops * 1e3 / bounds.bandwidth_gbs, across * 30), across * 30]
        axes.plot(xs, [min(bounds.tflops, x * bounds.bandwidth_gbs / 1e3) for x in xs], color=INK, lw=1.2)
        axes.set_xscale("log")
        axes.set_xlabel("FLOP for each byte that has to move")
        axes.set_yscale("log")
    else:
        axes.axhline(peak, color=INK, lw=1.2)
        axes.set_xlabel("programs in the order in which they were timed, PyTorch last")
        axes.set_xticks([])
        slowest = work / (max((ms for _, ms, _ in points), default=0.0) * 1e9 or 1.0)
        if points and slowest < peak / FAR:
            axes.set_yscale("log")
            axes.set_ylim(slowest / 2, 2 * peak)
        else:
            axes.set_ylim(0, 1.12 * peak)
    axes.text(0.01, 0.99, f"bound: {bounds.floor_ms:.4g} ms", transform=axes.transAxes, va="top", color=INK)
    marks = {"kept": ("D", GOOD, "kept"), "right": ("o", PLAIN, "right, not kept"), "base": ("s", INK, "PyTorch")}
    for kind, (mark, colour, label) in marks.items():
        rates = {i: work / (ms * 1e9) for i, (_, ms, state) in enumerate(points) if state == kind and ms > 0}
        if rates:
            xs = [across] * len(rates) if bounds.flop else list(rates)
            axes.plot(xs, list(rates.values()), mark, color=colour, ms=7, label=label, alpha=0.9, ls="")
    axes.set_ylabel(unit)
    axes.legend(frameon=False, loc="lower right", labelcolor=INK)
    return _svg(figure, f"Roofline: rate of each program in {unit}, and the bounds of the device")


def kernels_plot(before: Sequence[Kernel], after: Sequence[Kernel]) -> str:
    """Time by region before and after, one bar each, stacked."""
    figure, axes = _figure(6.4, 1.9)
    for row, (name, parts) in enumerate((("after", after), ("before", before))):
        left = 0.0
        for number, part in enumerate(parts):
            axes.barh(
                row, part.ms, left=left, color=PLAIN if name == "before" else GOOD, alpha=0.9 - 0.5 * (number % 2)
            )
            left += part.ms
        axes.text(left, row, f" {left:.4g} ms", va="center", color=INK)
    axes.set_yticks([0, 1], ["after", "before"])
    axes.set_xlabel("ms")
    axes.margins(x=0.15)
    return _svg(figure, "Time by kernel before and after")


def tree_plot(edges: Sequence[tuple[str, str, str]]) -> str:
    """The search tree: programs as dots, steps as lines.

    Args:
        edges: parent, child and state of each step; a refused one has a child of its own.
    """
    children: dict[str, list[tuple[str, str]]] = {}
    depth = {edges[0][0]: 0} if edges else {}
    for parent, child, state in edges:
        if child not in depth:
            depth[child] = depth.get(parent, 0) + 1
            children.setdefault(parent, []).append((child, state))
    place: dict[str, float] = {}
    row = 0.0

    def lay(node: str) -> float:
        nonlocal row
        below = [lay(child) for child, _ in children.get(node, ())]
        if not below:
            row += 1
        place[node] = sum(below) / len(below) if below else row
        return place[node]

    if edges:
        lay(edges[0][0])
    figure, axes = _figure(6.4, 0.8 + 0.16 * max(row, 4))
    looks = {"kept": (GOOD, "D", 6), "right": (PLAIN, "o", 4), "refused": (BAD, "x", 5)}
    for parent, below in children.items():
        for child, state in below:
            colour, mark, size = looks.get(state, (INK, ".", 3))
            axes.plot([depth[parent], depth[child]], [place[parent], place[child]], color=colour, lw=1)
            axes.plot([depth[child]], [place[child]], mark, color=colour, ms=size)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("steps from the start program")
    return _svg(figure, "Search tree: every program that was tried, by the number of steps that lead to it")


def curves_plot(curves: Mapping[str, Sequence[float]], label: str) -> str:
    """Shares of problems that are right and at least so much faster, by how much.

    Args:
        curves: name to the speedups of its right problems, with 0 for those that are not.
        label: of the horizontal axis.
    """
    figure, axes = _figure(6.4, 3.2)
    for (name, speedups), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        xs = [0.5 * 1.02**i for i in range(200)]
        axes.plot(
            xs, [sum(s >= x for s in speedups) / max(len(speedups), 1) for x in xs], style, color=PLAIN, label=name
        )
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share of problems")
    axes.legend(frameon=False, labelcolor=INK)
    return _svg(figure, "Share of problems that are right and at least so much faster (fast_p)")


def _figure(width: float, height: float) -> tuple[Any, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise QimengError("plots need matplotlib: pip install 'qimeng[report]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    """The figure as an element of a page, with a title for those who do not see it."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qimeng"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


__all__ = ["curves_plot", "kernels_plot", "roofline_plot", "tree_plot"]
