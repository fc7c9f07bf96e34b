"""Captures in several threads at a time, and captures after them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from qimeng.graph.capture import capture


def operators(width: int) -> list[str]:
    """Of a layer of this width."""
    layer = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Flatten())
    graph = capture(lambda: layer, lambda: (torch.ones(2, width),), values=True)
    return [node.target for node in graph.ops()]


def test_threads_capture_at_once_and_leave_nothing_behind() -> None:
    expected = operators(4)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(operators, range(2, 11))) == [expected] * 9
    assert operators(4) == expected
