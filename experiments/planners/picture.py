"""The anytime curves of replayed methods as a picture.

Deals in matplotlib, which the extra ``report`` brings. Knows nothing about how figures are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.planners.replay import ReplayRow
from experiments.planners.summary import summarize
from qimeng.errors import QimengError


def draw(rows: Sequence[ReplayRow], path: Path | str, only: Sequence[str] = ()) -> None:
    """Draw the mean share of the best-known log-gain over the evaluations, one line a method, its interval shaded.

    Args:
        rows: of one device, all estimated or all measured.
        path: file to write; its ending decides the format (``.svg``, ``.png``).
        only: labels of the methods to draw; all by default.

    Raises:
        QimengError: matplotlib is not installed, or the rows cannot stand in one picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise QimengError("pictures need matplotlib: pip install 'qimeng[report]'") from None
    found = [f for f in summarize(rows) if not only or f.method.label in only]
    if len({(f.device, f.estimated) for f in found}) != 1:
        raise QimengError("a picture takes the rows of one device, all estimated or all measured, of known methods")
    first = found[0]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for f in found:
        count = range(1, len(f.curve) + 1)
        line = axes.plot(count, [c.value for c in f.curve], label=f.method.label, drawstyle="steps-post")[0]
        bounds = ([c.low for c in f.curve], [c.high for c in f.curve])
        axes.fill_between(count, *bounds, color=line.get_color(), alpha=0.1, step="post", linewidth=0)
    axes.set_xlabel("evaluations (programs judged, the start program included)")
    axes.set_ylabel("share of the best-known log-gain")
    kind = "ESTIMATED times" if first.estimated else "measured times"
    axes.set_title(f"{first.specs} held-out specs, replayed on stored trees; {first.device}, {kind}")
    axes.set_xlim(1, len(first.curve))
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
