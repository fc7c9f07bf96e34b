"""Runs the body of a test in a process of its own, where nothing of PyTorch's has been used before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def in_own_process(body: Callable[[], None]) -> None:
    """Call `body`, a function of a module, in a new process; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(body).result()


__all__ = ["in_own_process"]
