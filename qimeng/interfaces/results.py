"""What an evaluation of a program found: the gate reached, the error, times, accuracy and resources.

Deals in plain data. Knows nothing about programs or about how they are checked and timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from qimeng.device import Card
from qimeng.interfaces.faults import FAULTS, LASTING, Fault


class Gate(str, Enum):
    """The gates of an evaluation in the order they are passed."""

    WRITE = "write"
    COMPILE = "compile"
    RESOURCES = "resources"
    REGION = "region"
    PROGRAM = "program"
    TIMING = "timing"
    PASSED = "passed"


class Scope(str, Enum):
    """What an evaluation's times are of."""

    PROGRAM = "program"
    """The whole program was run."""
    REGION = "region"
    """The patch's region was run, alone; its times, errors and memory are those of the region."""
    SUM = "sum"
    """The whole program's, summed from times of regions that were run alone; the next milestone measures them."""


@dataclass(frozen=True)
class Timing:
    """Times of one call in milliseconds.

    Attributes:
        device_ms: median device time (CUDA events, L2 flushed), or the model's estimate.
        spread: interquartile range over the median.
        wall_ms: median wall-clock latency of a call with synchronization; None where not measured.
        calls: number of timed calls.
        estimated: True for an analytic model's figure; never compared with measured ones.
    """

    device_ms: float
    spread: float = 0.0
    wall_ms: float | None = None
    calls: int = 0
    estimated: bool = False

    @property
    def uncertainty(self) -> float:
        """Standard error of the median over the median, for normal samples: 1.253 s / sqrt(calls), s = spread / 1.349.

        The spread itself where the number of calls is not known.
        """
        return self.spread if self.calls < 4 else 0.929 * self.spread / math.sqrt(self.calls)

    def __str__(self) -> str:
        return f"{self.device_ms:.4g} ms{' estimated' if self.estimated else ''}"


@dataclass(frozen=True)
class Accuracy:
    """Worst errors over the trials, |y - r| / (|r| + rms of r over its last dimension), beside what was allowed.

    Attributes:
        max_error: maximum error of the candidate.
        rms_error: root-mean-square error of the candidate.
        max_budget: the maximum allowed for it.
        rms_budget: the root mean square allowed for it.
        kernelbench: whether KernelBench's own rule passes (allclose against eager); None where not checked.
        reference: ``"float64"``, or ``"eager-highest"`` where float64 does not run.
        trials: number of trials checked.
        dropped: names of distributions dropped, because over 1 % of the reference is not finite or the module refuses
            them.
    """

    max_error: float
    rms_error: float
    max_budget: float
    rms_budget: float
    kernelbench: bool | None = None
    reference: str = "float64"
    trials: int = 0
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """Static resources of the largest kernel of a program.

    Attributes:
        registers: registers a thread; None where no driver or cuobjdump tells.
        spills: bytes of spilled registers a thread (local memory).
        shared_bytes: bytes of shared memory a block.
        kernels: number of kernels compiled.
    """

    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    kernels: int = 0


@dataclass(frozen=True)
class Evaluation:
    """What the evaluator found out about one program.

    Attributes:
        gate: the last gate reached; `Gate.PASSED` when all were passed.
        error: why the gate refused it, in words that help repair; None when it passed.
        failure: class of the failure: one of `LASTING` (``"wrong"``, ``"compile"``, ``"resources"`` …), or
            ``"crash"``, ``"timeout"``, ``"memory"``, ``"machine"``, ``"judge"`` … (`qimeng.interfaces.faults`); None
            when it passed.
        timing: the candidate's times.
        eager: PyTorch's times on the same inputs, in the same mode.
        chosen: index of the alternative of the patch that was kept.
        accuracy: errors beside their budgets.
        resources: registers, spills, shared memory.
        region_ms: share of the work: region id to device milliseconds.
        generated_share: share of the device time spent in generated kernels, 0 to 1.
        library_share: share of the device time spent in implementations by a library (`qimeng.library`), PyTorch's own
            calls not counted.
        peak_bytes: peak device memory of a call beyond inputs and parameters.
        eager_peak_bytes: the same for eager.
        prepare_ms: one-time preparation (packed weights) in milliseconds.
        configurations: number of configurations tried in this evaluation.
        seconds: wall seconds by part: ``compile``, ``check``, ``time``, ``start``.
        notes: further remarks, such as how a program was checked without a GPU, or that it was not.
        sandbox: layers of the sandbox that the candidate ran in (`qimeng.envs.sandbox.LAYERS`).
        compiled: mode of torch.compile to its times, in turns with the candidate, where it was asked for
            (`FinalOptions.compile_modes`).
        compiled_wrong: those of them whose results are further from eager's than a candidate's may be, and by how much.
        unchecked: why the program's results, or those of some kernels, were not compared with the reference; empty if
            all were.
        scope: what the times are of.
        refused: why other alternatives of the patch were refused, a line each.
        card: the GPU that ran the program; None where none did.
    """

    gate: Gate
    error: str | None = None
    failure: str | None = None
    timing: Timing | None = None
    eager: Timing | None = None
    chosen: int = 0
    accuracy: Accuracy | None = None
    resources: Resources | None = None
    region_ms: Mapping[str, float] = field(default_factory=dict)
    generated_share: float | None = None
    library_share: float | None = None
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    prepare_ms: float | None = None
    configurations: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sandbox: tuple[str, ...] = ()
    compiled: Mapping[str, Timing] = field(default_factory=dict)
    compiled_wrong: Mapping[str, str] = field(default_factory=dict)
    unchecked: str = ""
    scope: Scope = Scope.PROGRAM
    refused: tuple[str, ...] = ()
    card: Card | None = None

    @property
    def ok(self) -> bool:
        """True when the program is right and was timed."""
        return self.gate is Gate.PASSED

    @property
    def lasting(self) -> bool:
        """True where judging the program again would find the same (times aside); see `LASTING`."""
        return self.ok or self.failure in LASTING

    @property
    def fault(self) -> Fault | None:
        """Whose fault the failure is; None when it passed, or where the failure is nobody's (`FAULTS`)."""
        return None if self.failure is None else FAULTS.get(self.failure)

    @property
    def ms(self) -> float | None:
        """Device milliseconds, or None when it was not timed."""
        return self.timing.device_ms if self.timing else None

    @property
    def speedup(self) -> float | None:
        """Eager's device time over the candidate's; None when either is missing, or no kernel runs (views alone)."""
        if self.timing is None or self.eager is None or not self.timing.device_ms:
            return None
        return self.eager.device_ms / self.timing.device_ms

    @property
    def over_compile(self) -> float | None:
        """Device time of torch.compile's fastest mode over the candidate's; None when either is missing."""
        if self.timing is None or not self.compiled or not self.timing.device_ms:
            return None
        return min(t.device_ms for t in self.compiled.values()) / self.timing.device_ms

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal object back."""
        data = asdict(self)
        data["gate"], data["scope"] = self.gate.value, self.scope.value
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """The object that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["gate"], data["scope"] = Gate(data["gate"]), Scope(data.get("scope", Scope.PROGRAM))
        for key in ("notes", "sandbox", "refused"):
            data[key] = tuple(data.get(key, ()))
        for key, kind in (("timing", Timing), ("eager", Timing), ("resources", Resources), ("card", Card)):
            if data.get(key) is not None:
                data[key] = kind(**data[key])
        data["compiled"] = {mode: Timing(**timing) for mode, timing in data.get("compiled", {}).items()}
        if data["accuracy"] is not None:
            data["accuracy"]["dropped"] = tuple(data["accuracy"]["dropped"])
            data["accuracy"] = Accuracy(**data["accuracy"])
        return cls(**data)


__all__ = ["Accuracy", "Evaluation", "Gate", "Resources", "Scope", "Timing"]
