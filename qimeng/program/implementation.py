"""Implementations: source code that computes a region.

Deals in text and its calling convention. Knows nothing about programs, or about checking and timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qimeng.graph.region import Region
from qimeng.program.content import digest_of, plain
from qimeng.program.schedule import Schedule


@dataclass(frozen=True)
class Implementation:
    """Source code that computes a region.

    Attributes:
        language: ``"torch"`` (PyTorch calls), ``"library"`` (one vendor-library call), or that of a backend
            (`qimeng.backend`): ``"triton"``, ``"cuda"`` …
        source: Python text that defines `entry`; every top-level name in it must be unique to this text.
        entry: name of the function; it takes the region's inputs in order, then the prepared buffers, and returns a
            tuple of the region's outputs.
        prepare: name of a function of the inputs numbered `prepare_inputs`, which returns a tuple of buffers; run
            again when one of those changes. Empty where nothing is prepared.
        prepare_inputs: positions of the region's inputs (all of them parameters or buffers) that `prepare` takes.
        schedule: what the template printed the source from; None where another coder wrote it. Whether a template did
            is another question (`qimeng.program.origin`).
    """

    language: str
    source: str
    entry: str
    prepare: str = ""
    prepare_inputs: tuple[int, ...] = ()
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        """Keep plain text alone.

        Raises:
            TypeError: a field that holds text holds something else.
        """
        for name in ("language", "source", "entry", "prepare"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise TypeError(f"the {name} of an implementation is text, got {type(text).__name__}")
            if type(text) is not str:  # a class of its own may compare equal to what it is not
                object.__setattr__(self, name, str.__str__(text))

    def __repr__(self) -> str:
        lines = len(self.source.splitlines())
        return f"<Implementation {self.entry}: {self.language}, {lines} lines, {self.schedule or 'no schedule'}>"

    @cached_property
    def digest(self) -> str:
        """Hash of all fields, whatever region they are for; `qimeng.program.identity` has its part in a program's."""
        i = self
        return digest_of(
            "implementation", i.language, i.source, i.entry, i.prepare, i.prepare_inputs, schedule_content(i.schedule)
        )

    @property
    def text_alone(self) -> Implementation:
        """The same with its digest and without its schedule, whose class a worker may not have."""
        if self.schedule is None:
            return self
        found = replace(self, schedule=None)
        found.__dict__["digest"] = self.digest
        return found

    @property
    def generated(self) -> bool:
        """True for kernels that were generated rather than called from a library."""
        return self.language not in ("torch", "library")


def schedule_content(schedule: Schedule | None) -> Any:
    """What stands for a schedule in a hash: its family and what is not usual in it, whatever its class is called."""
    if schedule is None:
        return None
    (unusual,) = plain(schedule).values()
    return [schedule.family, sorted(unusual)]


def torch_implementation(region: Region) -> Implementation:
    """The region on PyTorch: the implementation every program starts from; the same object for equal regions."""
    known: dict[str, Implementation] = region.graph.memo.setdefault("on PyTorch", {})
    if region.signature not in known:
        entry = f"torch_{region.signature}"
        known[region.signature] = Implementation("torch", region.function(entry), entry)
    return known[region.signature]


__all__ = ["Implementation", "schedule_content", "torch_implementation"]
