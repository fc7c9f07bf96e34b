"""What became of a model: its parts, their figures, the whole, in words and as plain data.

Deals in what a user reads. Knows nothing about how it came about.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from qimeng.integration.calls import Key, shapes_of
from qimeng.integration.dispatch import REASONS, Dispatch, detach
from qimeng.integration.package import write
from qimeng.integration.recording import Recording
from qimeng.integration.variant import Variant
from qimeng.integration.whole import Compared


@dataclass(frozen=True)
class PartReport:
    """One program of a model, or why there is none.

    Attributes:
        names: of the submodules that share it; empty name for the whole model.
        kind: class of those submodules.
        key: of the call that it was made for.
        share: of the model's time before, 0 to 1.
        headline: speedup and verification in words.
        speedup: over PyTorch eager on this part; None where there is no program or no time.
        estimated: whether that is an estimate.
        cached: whether the program came from the cache on disk.
        seconds: that it took to find.
        reason: why the part is left as it was; empty where it has a program.
        variant: the program as the first of the submodules runs it; None where there is none.
    """

    names: tuple[str, ...]
    kind: str
    key: Key
    share: float
    headline: str
    speedup: float | None
    estimated: bool
    cached: bool
    seconds: float
    reason: str = ""
    variant: Variant | None = None


@dataclass
class Record:
    """What `optimize` did; `model.qimeng` of the optimized model.

    Attributes:
        model: the optimized model.
        device: name of the device that it was optimized for.
        parts: its parts for each kind of call, those that take most first.
        compared: the whole model beside the original, for each of the example calls that could be made here.
        seconds: of the whole optimization.
        notes: what a user should know, in sentences.
    """

    model: nn.Module
    device: str
    parts: list[PartReport] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """The original's time over the optimized model's, on the first example call; None where not timed."""
        return self.compared[0].speedup if self.compared else None

    @property
    def recorded(self) -> bool:
        """Whether calls of the whole model are recorded as a CUDA graph and replayed."""
        dispatch = self.model.__dict__.get("forward")
        return isinstance(dispatch, Dispatch) and any(isinstance(v, Recording) for v in dispatch.variants.values())

    @property
    def calls(self) -> dict[str, Counter[str]]:
        """For each submodule with programs, how often one ran, and its own code by reason."""
        found = {}
        for name, module in self.model.named_modules():
            dispatch = module.__dict__.get("forward")
            if isinstance(dispatch, Dispatch):
                found[name] = dispatch.calls
        return found

    def restore(self) -> nn.Module:
        """Take all programs out of the model again."""
        for module in self.model.modules():
            detach(module)
        return self.model

    def report(self) -> str:
        """All of it in Markdown."""
        name = type(self.model).__name__
        lines = [f"# {name}", "", f"**{self._headline()}**, device {self.device}, {self.seconds:.0f} s.", ""]
        lines += ["| part | modules | shapes | share of the time | outcome |", "|---|---|---|---|---|"]
        for part in self.parts:
            label = f"{part.names[0] or 'the whole model'} ({part.kind})"
            outcome = part.reason or f"{part.headline}{' (estimated)' if part.estimated else ''}"
            outcome += ", found earlier" if part.cached else ""
            shapes = shapes_of(part.key)
            lines.append(f"| {label} | {len(part.names)} | {shapes} | {part.share:.0%} | {outcome} |")
        lines += ["", *(f"- {note}" for note in self.notes)]
        calls: Counter[str] = sum(self.calls.values(), Counter())
        for reason, count in calls.items():
            words = (
                "calls ran programs" if reason == "program" else f"calls ran the module's own code: {REASONS[reason]}"
            )
            lines.append(f"- {count} {words}")
        return "\n".join(lines) + "\n"

    def _headline(self) -> str:
        if self.speedup is not None:
            return f"{self.speedup:.2f} x PyTorch eager"
        return "not timed: there is no GPU here"

    def save(self, folder: str | Path) -> Path:
        """Write the programs as a package that needs torch and triton only (`qimeng.integration.package`).

        ``import NAME; model = NAME.apply(model)`` puts them into a model of the same class.

        Raises:
            QimengError: the model has no programs, or the folder's name is no name of a package.
        """
        programs = [(part.names, part.variant) for part in self.parts if part.variant is not None]
        path = write(Path(folder), type(self.model).__name__, self.device, programs)
        (path / "report.md").write_text(self.report())
        return path

    def __repr__(self) -> str:
        programs = sum(part.variant is not None for part in self.parts)
        return f"<Record: {self._headline()}, {programs} programs for {len(self.parts)} parts>"


__all__ = ["PartReport", "Record"]
