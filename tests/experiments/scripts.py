"""Experiments as a user runs them, with Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import Ended, ended


def run(name: str, path: Path, *options: str) -> Ended:
    """`python -m experiments.name path …` in a process of its own."""
    return ended("-m", f"experiments.{name}", str(path), *options)
