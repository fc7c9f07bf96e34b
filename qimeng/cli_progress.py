"""What a user sees while an optimization runs: what is being tried, the best so far, the time left.

Deals in printing `Progress`. Knows nothing about what the steps mean.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

if TYPE_CHECKING:
    from qimeng.envs.steps.state import Progress

SHOWN_STEPS = 8
"""Finished steps that stay visible on a terminal."""


class ProgressDisplay:
    """Callback for `on_step`, and a context manager around the run.

    A terminal shows the last steps and one live line. Other outputs get one line for each finished step.

    Args:
        console: where to print.
        estimated: whether times come from the analytic model; every line then says so.
        quiet: show only the beginning and the end, because something else shows the steps.
        kept: what is said where Ctrl-C ends it before there is a result.
    """

    def __init__(
        self,
        console: Console,
        estimated: bool = False,
        quiet: bool = False,
        kept: str = "no result yet: nothing is written",
    ):
        self.console, self.unit, self._kept = console, "ms estimated" if estimated else "ms", kept
        self._lines: deque[str] = deque(maxlen=SHOWN_STEPS)
        self._spinner = Spinner("dots")
        self.quiet, live = quiet, console.is_terminal and not quiet
        self._live = Live(console=console, refresh_per_second=8, transient=True) if live else None

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if kind is KeyboardInterrupt:
            self.console.print(self._kept, markup=False)

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        status = self.status(progress)
        if self._live is None:
            if progress.phase != "try" and not (self.quiet and progress.phase == "done"):
                self.console.print(f"{progress.text}  [{status}]", markup=False, soft_wrap=True)
            return
        if progress.phase in ("done", "interrupted"):  # what Ctrl-C again does stays in sight
            self._lines.append(progress.text)
        doing = progress.text if progress.phase != "done" else "choosing the next step"
        self._spinner.update(text=Text(f"{doing}\n  {status}"))
        self._live.update(
            Group(*(Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in self._lines), self._spinner)
        )

    def status(self, progress: Progress) -> str:
        """Best so far, evaluations, time left."""
        parts = []
        if progress.best_ms is not None:
            best = f"best {progress.best_ms:.4g} {self.unit}"
            if progress.eager_ms and progress.best_ms:  # a program without kernels takes no time
                best += f", {progress.eager_ms / progress.best_ms:.2f} x eager"
            parts.append(best)
        parts.append(f"{progress.evaluations} evaluations")
        parts.append(f"{max(0.0, progress.seconds_left):.0f} s left")
        return "; ".join(parts)


__all__ = ["ProgressDisplay"]
