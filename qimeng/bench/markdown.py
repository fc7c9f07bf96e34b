"""Figures and tables as Markdown text.

Deals in strings. Knows nothing about what the figures are.
"""

from __future__ import annotations

from collections.abc import Sequence


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where it is not known."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share in per cent, or a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


__all__ = ["markdown", "number", "percent"]
