"""Writes a loop line by line.

Deals in names. Knows nothing about what is computed.
"""

from __future__ import annotations

from typing import Any

from qimeng.graph.loops.loop import At, Line, Loop, Name
from qimeng.graph.opgraph import Value


class LoopBuilder:
    """A loop that is being written.

    Args:
        count: number of steps.
    """

    def __init__(self, count: int):
        self.count = count
        self.values: list[Value] = []
        self._lines: list[Line] = []
        self._starts: list[str] = []
        self._following: list[str] = []
        self._stacked: list[tuple[str, bool]] = []

    def input(self, value: Value) -> Name:
        """A tensor of the graph, inside the loop."""
        if value not in self.values:
            self.values.append(value)
        return Name(f"x{self.values.index(value)}")

    def step(self, value: Value, reverse: bool = False) -> Name:
        """The part of a tensor that belongs to the step, along its first dimension."""
        place = At(-1, self.count - 1) if reverse else At(1, 0)
        return self.op("aten.select.int", self.input(value), 0, place)

    def state(self, start: Value) -> Name:
        """A state that begins with `start`."""
        self._starts.append(self.input(start).text)
        self._following.append("")
        return Name(f"s{len(self._starts) - 1}")

    def op(self, target: str, *args: Any, **kwargs: Any) -> Name:
        """An operator of the step, of `Name`, `At` and plain values."""
        name = f"v{len(self._lines)}"
        self._lines.append(Line(name, target, args, tuple(kwargs.items())))
        return Name(name)

    def follow(self, state: Name, value: Name) -> None:
        """Say what `state` is in the next step."""
        self._following[int(state.text[1:])] = value.text

    def keep(self, value: Name, reverse: bool = False) -> int:
        """Return `value` of every step, stacked; `reverse` puts the last step first. Gives the result's number."""
        self._stacked.append((value.text, reverse))
        return len(self._stacked) - 1

    def done(self) -> Loop:
        """The loop; its inputs are `values`."""
        return Loop(
            self.count,
            len(self.values),
            tuple(self._starts),
            tuple(self._lines),
            tuple(self._following),
            tuple(self._stacked),
        )


__all__ = ["LoopBuilder"]
