"""What a client sends to the evaluation service, and what it gets back.

Deals in plain data that travels as JSON. Knows nothing about HTTP, queues or how anything is judged. What the answers
have in common with KernelGYM's (arXiv 2602.05885): compiled, correct, speedup, share of generated kernels, hacks found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from qimeng.interfaces import Asked, Evaluation, Fault, Gate
from qimeng.program.content import digest_of

REFERENCE_FAILED = "reference"
"""Class of failure of a reference that does not load, does not end, or cannot be captured: no verdict on a program."""

HACKS = frozenset({"forbidden", "tampered", "mutated", "not-a-kernel", "too-fast", "clock", "protocol"})
"""Classes of failure that an honest kernel has no part in: forbidden constructs in the text, a judge that was
interfered with, work that others do, times that cannot be."""

_BEFORE_RUNNING = (Gate.WRITE, Gate.COMPILE)
_STRICT: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class Reference:
    """What is computed.

    Attributes:
        source: text of a KernelBench-style file: `Model`, `get_inputs`, `get_init_inputs`.
        dtype: floating dtype of inputs and parameters.
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``.
        training: whether the module is in training mode; None for the mode that it comes in.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    source: str
    dtype: str = "float32"
    mode: str = "default"
    training: bool | None = None


class Form(str, Enum):
    """How a candidate is written."""

    AUTO = "auto"
    """A `MODEL` where the text has a class `ModelNew`, else a `PROGRAM`."""
    PROGRAM = "program"
    """A function `entry` of the inputs and the parameters, which returns a tuple, and perhaps `prepare`."""
    MODEL = "model"
    """KernelBench's class `ModelNew`."""


@dataclass(frozen=True)
class Candidate:
    """The program that is judged.

    Attributes:
        source: its Python text.
        form: how it is written.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    source: str
    form: Form = Form.AUTO


@dataclass(frozen=True)
class Options:
    """What is to be found out.

    Attributes:
        asked: ``"check"`` (is it right?), ``"timing"`` (and how fast) or ``"final"`` (the same in a fresh process, on
            every distribution of inputs, with the test whether its kernels are needed).
        compile_modes: modes of torch.compile to compare with; timed where ``"final"`` is asked and a GPU measures.
        seconds: wall seconds that it may take once it is begun; None for what the server allows.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    asked: Asked = Asked.FINAL
    compile_modes: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Submission:
    """One question to the service."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    reference: Reference
    candidate: Candidate
    options: Options = field(default_factory=Options)

    @property
    def digest(self) -> str:
        """Content hash: submissions of equal digests ask the same. Limits of time are no part of it."""
        data = asdict(self)
        del data["options"]["seconds"]
        return digest_of("submission", json.dumps(data, sort_keys=True), size=32)  # strangers choose what is hashed

    @property
    def seconds(self) -> float | None:
        """As in the options."""
        return self.options.seconds

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal object back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Submission:
        """The object that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        options, candidate = data["options"], data["candidate"]
        return cls(
            Reference(**data["reference"]),
            Candidate(candidate["source"], Form(candidate["form"])),
            Options(Asked(options["asked"]), tuple(options["compile_modes"]), options["seconds"]),
        )


@dataclass(frozen=True)
class Batch:
    """Several questions in one request; each is taken or refused by itself."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    submissions: tuple[Submission, ...]


@dataclass(frozen=True)
class Failure:
    """Why a candidate did not pass, or was not judged.

    Attributes:
        kind: whose fault it is: ``"kernel"``, ``"measurement"``, ``"machine"``, ``"judge"``
            (`qimeng.interfaces.Fault`), ``"reference"``, or ``"unknown"``.
        gate: where it was refused (`qimeng.interfaces.Gate`).
        failure: class of the failure, such as ``"wrong"`` or ``"compile"`` (`Evaluation.failure`).
        message: why, in words that help repair.
    """

    kind: str
    gate: str
    failure: str
    message: str


@dataclass(frozen=True)
class Times:
    """Times of one call.

    Attributes:
        ms: median device milliseconds.
        spread: interquartile range over the median.
        calls: number of timed calls.
    """

    ms: float
    spread: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Answer:
    """What was found out.

    Attributes:
        compiled: whether the text is a program that compiles; None where that was not found out.
        correct: whether its results are right and its own, so false where a hack was found; None where that was not
            found out.
        speedup: eager's device time over the candidate's.
        over_compile: the same for the fastest mode of torch.compile that was asked for.
        times: the candidate's.
        eager: PyTorch's, on the same inputs in the same mode.
        torch_compile: mode to times.
        estimated: whether the times are a model's, because no GPU measured them.
        generated_share: share of the device time in the candidate's own kernels, from 0 to 1.
        fault: why it did not pass; None where it did.
        hacks: what an honest kernel does not do, in words; empty where nothing was found.
        kernelbench: whether it passes KernelBench's own comparison; None where that was not tried.
        unchecked: what was not compared with the reference, and why; empty where all was.
        card: name of the GPU that ran it; empty where none did.
        versions: of what judged it.
        notes: further remarks.
        evaluation: all that the judge said (`Evaluation.from_json` reads its JSON).
    """

    compiled: bool | None
    correct: bool | None
    speedup: float | None = None
    over_compile: float | None = None
    times: Times | None = None
    eager: Times | None = None
    torch_compile: dict[str, Times] = field(default_factory=dict)
    estimated: bool | None = None
    generated_share: float | None = None
    fault: Failure | None = None
    hacks: tuple[str, ...] = ()
    kernelbench: bool | None = None
    unchecked: str = ""
    card: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Evaluation, versions: dict[str, str] | None = None) -> Answer:
        """The answer that says what `found` does."""
        refused, early = found.fault is Fault.KERNEL, found.gate in _BEFORE_RUNNING
        past_check = found.ok or found.gate is Gate.TIMING
        compiled = True if past_check or refused else None
        correct: bool | None = (not found.unchecked or None) if past_check else None
        if refused:
            compiled, correct = not early, False
        message = found.error or ""
        failure = found.failure or "unknown"
        kind = found.fault.value if found.fault is not None else "unknown"
        if failure == REFERENCE_FAILED:
            kind = REFERENCE_FAILED
        return cls(
            compiled=compiled,
            correct=correct,
            speedup=found.speedup,
            over_compile=found.over_compile,
            times=_times(found.timing),
            eager=_times(found.eager),
            torch_compile={mode: times for mode, t in found.compiled.items() if (times := _times(t)) is not None},
            estimated=found.timing.estimated if found.timing is not None else None,
            generated_share=found.generated_share,
            fault=None if found.ok else Failure(kind, found.gate.value, failure, message),
            hacks=(f"{failure}: {message}",) if failure in HACKS else (),
            kernelbench=found.accuracy.kernelbench if found.accuracy is not None else None,
            unchecked=found.unchecked,
            card=str(found.card or ""),
            versions=dict(versions or {}),
            notes=found.notes,
            evaluation=json.loads(found.to_json()),
        )

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Answer:
        """The object whose JSON was read as `data`; fields of a later version are left out."""
        known = {f.name for f in fields(cls)}
        data = {name: value for name, value in data.items() if name in known}
        for name in ("times", "eager"):
            data[name] = Times(**data[name]) if data.get(name) else None
        data["torch_compile"] = {mode: Times(**t) for mode, t in data.get("torch_compile", {}).items()}
        data["fault"] = Failure(**data["fault"]) if data.get("fault") else None
        for name in ("hacks", "notes"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)


def _times(timing: Any) -> Times | None:
    return None if timing is None else Times(timing.device_ms, timing.spread, timing.calls)


__all__ = [
    "HACKS",
    "REFERENCE_FAILED",
    "Answer",
    "Batch",
    "Candidate",
    "Failure",
    "Form",
    "Options",
    "Reference",
    "Submission",
    "Times",
]
