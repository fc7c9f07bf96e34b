"""The three roles (planner, coder, evaluator) and the typed results that pass between them.

Deals in plain data. Knows nothing about how a kernel is written, checked, timed or chosen.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qimeng.device import Device
    from qimeng.graph.region import Region
    from qimeng.program.program import Implementation, Program
    from qimeng.program.schedule import Schedule
    from qimeng.store import Store


class Gate(str, Enum):
    """The gates of an evaluation in the order they are passed."""

    WRITE = "write"
    COMPILE = "compile"
    RESOURCES = "resources"
    REGION = "region"
    PROGRAM = "program"
    TIMING = "timing"
    PASSED = "passed"


@dataclass(frozen=True, order=True)
class Action:
    """One macro optimization: an intent that neither mutates nor measures.

    Attributes:
        kind: name of a registered kind (``"fusion"``).
        regions: ids of the regions it touches; empty for ``stop``.
        param: the choice among the kind's options (``"taller"``), or an empty string.
    """

    kind: str
    regions: tuple[str, ...] = ()
    param: str = ""

    def __str__(self) -> str:
        return " ".join((self.kind, *([self.param] if self.param else []), *self.regions))


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


LASTING = frozenset(
    "illegal coder forbidden compile resources unsupported meta error wrong illegal-access too-fast tampered "
    "not-a-kernel sanitizer".split()
)
"""Classes of failure that say something about the program; all others may be an accident of a busy machine."""


@dataclass(frozen=True)
class Evaluation:
    """What the evaluator found out about one program.

    Attributes:
        gate: the last gate reached; `Gate.PASSED` when all were passed.
        error: why the gate refused it, in words that help repair; None when it passed.
        failure: class of the failure: one of `LASTING` (``"wrong"``, ``"compile"``, ``"resources"`` …), or
            ``"crash"``, ``"timeout"``, ``"memory"``, ``"judge"`` (the judge itself could not go on) …; None when it
            passed.
        timing: the candidate's times.
        eager: PyTorch's times on the same inputs, in the same mode.
        chosen: index of the alternative of the patch that was kept.
        accuracy: errors beside their budgets.
        resources: registers, spills, shared memory.
        region_ms: share of the work: region id to device milliseconds.
        generated_share: share of the device time spent in generated kernels, 0 to 1.
        peak_bytes: peak device memory of a call beyond inputs and parameters.
        eager_peak_bytes: the same for eager.
        prepare_ms: one-time preparation (packed weights) in milliseconds.
        configurations: number of configurations tried in this evaluation.
        seconds: wall seconds by part: ``compile``, ``check``, ``time``, ``start``.
        notes: what else is to be said, in words: how a program was checked without a GPU, or that it was not.
        sandbox: layers of the sandbox that the candidate ran in (`qimeng.envs.sandbox.LAYERS`).
        compiled: mode of torch.compile to its times, in turns with the candidate, where it was asked for
            (`Evaluator.compare_with`).
        unchecked: why nothing held the program's results, or those of some of its kernels, against the reference;
            empty where all were.
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
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    prepare_ms: float | None = None
    configurations: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sandbox: tuple[str, ...] = ()
    compiled: Mapping[str, Timing] = field(default_factory=dict)
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """True when the program is right and was timed."""
        return self.gate is Gate.PASSED

    @property
    def lasting(self) -> bool:
        """True where judging the program again would find the same (times aside); see `LASTING`."""
        return self.ok or self.failure in LASTING

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
        data["gate"] = self.gate.value
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """The object that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["gate"] = Gate(data["gate"])
        data["notes"], data["sandbox"] = tuple(data.get("notes", ())), tuple(data.get("sandbox", ()))
        for key, kind in (("timing", Timing), ("eager", Timing), ("resources", Resources)):
            if data[key] is not None:
                data[key] = kind(**data[key])
        data["compiled"] = {mode: Timing(**timing) for mode, timing in data.get("compiled", {}).items()}
        if data["accuracy"] is not None:
            data["accuracy"]["dropped"] = tuple(data["accuracy"]["dropped"])
            data["accuracy"] = Accuracy(**data["accuracy"])
        return cls(**data)


@dataclass(frozen=True)
class Patch:
    """The rewrite a coder returns.

    Attributes:
        regions: the program's new partition where the action changes it; None where it stays.
        target: id of the region (in the new partition) that gets a new implementation; None for a change of the
            graph alone.
        alternatives: the implementations to choose from (a sweep, at most 8); the evaluator keeps the fastest.
        note: one sentence about what was done, for people and for the report.
    """

    regions: tuple[Region, ...] | None = None
    target: str | None = None
    alternatives: tuple[Implementation, ...] = ()
    note: str = ""

    @property
    def is_sweep(self) -> bool:
        """Whether one template printed all alternatives; any others must not share a process."""
        from qimeng.program.origin import is_printed

        return all(is_printed(i) for i in self.alternatives)

    def apply(self, program: Program, chosen: int = 0) -> Program:
        """The program with this patch and alternative number `chosen`; asked again, the same object."""
        return _applied(self, program, chosen)

    def diff(self, program: Program, chosen: int = 0) -> str:
        """A unified diff of the program's source."""
        import difflib

        before, after = program.source.splitlines(True), self.apply(program, chosen).source.splitlines(True)
        return "".join(difflib.unified_diff(before, after, "before.py", "after.py"))

    def only(self, chosen: int) -> Patch:
        """The patch reduced to one alternative, as a recipe stores it."""
        return replace(self, alternatives=(self.alternatives[chosen],) if self.alternatives else ())

    def digest(self, chosen: int = 0) -> str:
        """Content hash of the new partition and implementation."""
        parts = [self.target or ""]
        if self.regions is not None:
            parts += [" ".join(r.nodes) for r in self.regions]
        if self.alternatives:
            parts.append(self.alternatives[chosen].source)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


@lru_cache(256)
def _applied(patch: Patch, program: Program, chosen: int) -> Program:
    """What `Patch.apply` returns: one step of a search asks several times, walks of a stored tree again and again."""
    new = program if patch.regions is None else program.with_regions(patch.regions)
    if patch.target is not None and patch.alternatives:
        new = new.with_implementation(patch.target, patch.alternatives[chosen])
    return new


@dataclass(frozen=True)
class Step:
    """One step of a trajectory: what was tried and what came of it."""

    action: Action
    evaluation: Evaluation | None
    accepted: bool
    patch_digest: str = ""


@dataclass(frozen=True)
class Request:
    """What a coder is asked for.

    Attributes:
        program: the program as it stands.
        action: what to do to it.
        device: for which device.
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``.
        failed: on repair, the patch that was refused.
        reason: on repair, the gate's message.
        refused: on repair, which of the refused patch's alternatives `reason` is about.
        history: the steps taken so far, refused ones included.
        evaluation: of the program as it stands; None where it was not judged.
        instruction: what the user wants done about it, in words; coders without a language model ignore it.
        seconds_left: wall-clock seconds that the run has left; who waits for others waits no longer.
    """

    program: Program
    action: Action
    device: Device
    mode: str = "default"
    failed: Patch | None = None
    reason: str | None = None
    refused: int = 0
    history: tuple[Step, ...] = ()
    evaluation: Evaluation | None = None
    instruction: str = ""
    seconds_left: float = math.inf


@dataclass(frozen=True)
class Observation:
    """What a planner sees.

    Attributes:
        program: the program as it stands (planners read its structure, never its kernels).
        actions: the legal actions, most promising region first, at most 256; `stop` is always among them.
        evaluation: of the present program; None before the first.
        best_ms: device milliseconds of the best program so far.
        eager_ms: device milliseconds of PyTorch eager.
        history: the steps so far.
        device: the device optimized for.
        mode: precision mode.
        steps_left: steps that the budget still allows.
    """

    program: Program
    actions: tuple[Action, ...]
    evaluation: Evaluation | None
    best_ms: float | None
    eager_ms: float | None
    history: tuple[Step, ...]
    device: Device
    mode: str = "default"
    steps_left: int = 0


@dataclass(frozen=True)
class Facts:
    """What legality and planning may know about a region's loop nest, without knowing its kernels.

    Attributes:
        family: ``"tile"`` (pointwise, reductions, normalizations) or ``"gemm"``.
        dtype: dtype of the arithmetic's operands.
        rows: kept positions (tile family).
        columns: positions reduced together, or the innermost axis where nothing is reduced (tile family).
        passes: passes over the columns before the outputs can be written (tile family); 0 is pointwise.
        full_outputs: outputs that change along the columns (tile family).
        contiguous: ``"r"`` where columns are contiguous in memory, ``"p"`` where rows are.
        m: rows of the product (gemm family).
        n: columns of the product.
        k: depth of the product.
        batch: number of products.
        packable: operands that are worth a packed copy, of ``""``, ``"a"``, ``"b"``, ``"ab"``: parameters, once, and
            those whose rows do not begin at multiples of 16 bytes, at every call.
        special: special functions (``"log"``, ``"tanh"`` …) of every element that approximate units may compute
            (tile family).
    """

    family: str
    dtype: str
    rows: int = 1
    columns: int = 1
    passes: int = 0
    full_outputs: int = 0
    contiguous: str = "r"
    m: int = 1
    n: int = 1
    k: int = 1
    batch: int = 1
    packable: str = ""
    special: tuple[str, ...] = ()


class Planner(ABC):
    """Chooses what to do next."""

    @abstractmethod
    def choose(self, observation: Observation) -> Action:
        """One of `observation.actions`."""


class Coder(ABC):
    """Turns an action into a small patch.

    Attributes:
        free_hand: whether it can work on a kernel that has no schedule, by changing its text.
    """

    free_hand: bool = False

    @abstractmethod
    def write(self, request: Request) -> Patch:
        """The patch that carries out `request.action`.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: the coder could not write it.
        """

    def can_implement(self, region: Region) -> str | None:
        """None where this coder can write kernels for `region`, else the reason in a few words."""
        return None

    def facts(self, region: Region) -> Facts | None:
        """The loop nest of `region` in numbers; None where this coder has no schedule for it."""
        return None

    def shared_bytes(self, region: Region, schedule: Schedule) -> int:
        """Shared memory in bytes that a block of `region` needs under `schedule`."""
        return 0

    def use_store(self, store: Store, spec: str) -> None:  # noqa: B027  (most coders remember nothing)
        """Keep in `store` what writing cost time or money, and answer from it; called once, before the first `write`.

        Args:
            store: the project's.
            spec: digest of the specification that is optimized.
        """

    def remarks(self) -> tuple[str, ...]:
        """What a result's notes should say about its work (what it cost); a sentence each."""
        return ()


class Evaluator(ABC):
    """Judges programs: are they right, and how fast."""

    @abstractmethod
    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge `program` with `patch` applied (the best of its alternatives), or `program` itself."""

    def final(self, program: Program) -> Evaluation:
        """Verify `program` again, as a whole and in a fresh process; by default the same as `evaluate`."""
        return self.evaluate(program)

    def compare_with(self, modes: Sequence[str], limit_s: float) -> None:  # noqa: B027  (estimates have no baselines)
        """Make torch.compile's programs ready in the background, so that the final verification times them as well.

        Args:
            modes: of torch.compile.
            limit_s: seconds that compiling in one mode may take.

        Raises:
            ValueError: torch.compile has no such mode.
        """

    def sanitize_with(self, tools: Sequence[str]) -> None:  # noqa: B027  (estimates run no kernel)
        """Have the final verification run tools of compute-sanitizer, where programs run on a GPU.

        Args:
            tools: such as ``"memcheck"``; see `qimeng.envs.sanitizer.TOOLS`.

        Raises:
            QimengError: there is no such tool.
        """

    def close(self) -> None:  # noqa: B027  (most evaluators hold nothing)
        """Give back processes and memory."""


__all__ = [
    "LASTING",
    "Accuracy",
    "Action",
    "Coder",
    "Evaluation",
    "Evaluator",
    "Facts",
    "Gate",
    "Observation",
    "Patch",
    "Planner",
    "Request",
    "Resources",
    "Sequence",
    "Step",
    "Timing",
]
