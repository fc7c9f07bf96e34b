"""The stored result of one problem's run: one typed row, one line of JSON.

Deals in raw measurements and how they were made. Knows nothing about how rows are produced or summed up; ratios are
computed from what is stored, never stored themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.errors import QimengError
from qimeng.interfaces import Timing

if TYPE_CHECKING:
    from qimeng.bench.suite import Problem


class RowError(QimengError):
    """A file of rows that cannot be read."""

    code = "rows"


@dataclass(frozen=True)
class Settings:
    """What a run was asked for; rows with equal settings belong together.

    Attributes:
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``; ``"own"`` for that of each spec.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: what inputs and parameters are cast to; ``"own"`` for
            that of each spec.
        planner: name of the planner.
        coder: name of the coder.
        search: name of the search.
        seconds: wall-clock budget of a problem: capture, search and final verification; baselines not counted.
        evaluations: most evaluations of a problem; 0 for the default.
        compile_modes: modes of torch.compile that are measured as well; the first of them is "torch.compile" in tables.
        compile_seconds: most seconds that torch.compile may take in one mode; it works while the search does.
    """

    mode: str = "default"
    dtype: str = "float32"
    planner: str = "heuristic"
    coder: str = "template"
    search: str = "greedy"
    seconds: float = 35.0
    evaluations: int = 0
    compile_modes: tuple[str, ...] = ("default",)
    compile_seconds: float = 60.0

    @property
    def label(self) -> str:
        """The settings that a reader compares by, in a few words."""
        most = f", {self.evaluations} evaluations" if self.evaluations else ""
        return f"{self.planner}, {self.coder}, {self.search}; mode {self.mode}, {self.dtype}; {self.seconds:g} s{most}"


@dataclass(frozen=True)
class Environment:
    """Where a row was measured.

    Attributes:
        device: the GPU's name, or the device that times were estimated for.
        driver: driver version; empty without a GPU.
        torch: version of torch.
        triton: version of triton.
        python: version of Python.
        commit: commit of the library's checkout (`QIMENG_COMMIT` where there is no git), or its version.
    """

    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    python: str = ""
    commit: str = ""


@dataclass(frozen=True)
class StepRow:
    """One step of the trajectory.

    Attributes:
        kind: the action's kind.
        param: the action's option.
        accepted: whether the program that it gave was right, so that the state advanced.
        gate: the gate that the evaluation reached; empty for a step that needed none.
        gain: time before over time after, in the same unit; None where either was not timed.
        configurations: number of configurations that the step tried.
        refused: why some of them were refused, a line each; of a refused step its own reason.
    """

    kind: str
    param: str = ""
    accepted: bool = False
    gate: str = ""
    gain: float | None = None
    configurations: int = 0
    refused: tuple[str, ...] = ()

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StepRow:
        """The row of a step from its decoded JSON."""
        return cls(**{**data, "refused": tuple(data.get("refused", ()))})


@dataclass(frozen=True)
class Row:
    """One problem's run.

    Attributes:
        id: the problem's id in its suite, ``"level1/23"``.
        name: its label.
        digest: content hash of the problem.
        settings: what was asked for.
        environment: where it ran.
        family: see `qimeng.bench.families`; empty where the problem failed before it was captured.
        collapsed: why a matrix product is smaller than it looks, or empty.
        random: whether an operator draws random numbers.
        captured: False where the computation stays one PyTorch region.
        degenerate: why zeros or a constant pass as the result, or empty.
        eager_unstable: whether eager run twice fails KernelBench's own rule; None where not checked.
        exact_fails: whether the float64 result itself fails that rule against eager; None where not checked.
        right: whether the result passed our rule in the final verification; None where it never got there.
        kernelbench: whether it passed KernelBench's rule (allclose against eager).
        reference: what it was checked against: ``"float64"`` or ``"eager-highest"``.
        error: why there is no result, in words; None when there is one.
        candidate: times of the final program.
        eager: times of PyTorch eager in the same mode, measured in turns with the candidate.
        compiled: times of torch.compile in the first mode asked for.
        compiled_modes: mode of torch.compile to its times, for those that could be timed; notes say why others not.
        compiled_wrong: those whose results are further from eager's than a candidate's may be, and by how much.
        compiled_best: times of the fastest of them.
        compiled_best_mode: its name.
        generated_share: share of the device time in generated kernels, 0 to 1.
        library_share: share of the device time in implementations by a library, such as TorchInductor's, 0 to 1.
        launch: ``"cuda-graph"``, or ``"streams"`` with branches side by side, where the whole call is a recorded CUDA
            graph; empty where kernels are launched one by one.
        flops: floating-point operations of the matrix products.
        floor_ms: the roofline's bound in milliseconds (`qimeng.envs.cost.roofline.floor_ms`).
        peak_bytes: peak device memory of a call of the candidate beyond inputs and parameters.
        eager_peak_bytes: the same of eager.
        prepare_ms: one-time preparation (packed weights) in milliseconds.
        evaluations: programs sent to the judge.
        configurations: configurations tried in them.
        steps: the trajectory.
        seconds: wall seconds by part: ``"capture"``, ``"reference"`` (what results are held against), ``"wait"`` (for
            the GPU or its memory), ``"compile"``, ``"library"`` (waiting for TorchInductor's code of a candidate),
            ``"start"`` (of workers), ``"check"``, ``"time"``, ``"baselines"`` (waiting for torch.compile, and timing
            it), ``"judge"`` (what else the judge did, such as ending workers), ``"rest"`` (planner, coder and all
            else). ``"optimize"`` is the wall time from the file to the verified result without ``"baselines"``;
            ``"total"`` is all of it.
        recipe: the accepted steps as one line of JSON.
        source_digest: content hash of the final program's source.
        notes: what a reader should know, in sentences.
        started: UTC time at which the run began, ISO 8601.
        suite: name of the suite that the problem is of.
        group: the part of the suite that it belongs to (see `qimeng.bench.suite.Suite.group`).
    """

    id: str
    name: str
    digest: str
    settings: Settings
    environment: Environment = field(default_factory=Environment)
    family: str = ""
    collapsed: str = ""
    random: bool = False
    captured: bool = True
    degenerate: str = ""
    eager_unstable: bool | None = None
    exact_fails: bool | None = None
    right: bool | None = None
    kernelbench: bool | None = None
    reference: str = ""
    error: str | None = None
    candidate: Timing | None = None
    eager: Timing | None = None
    compiled: Timing | None = None
    compiled_modes: Mapping[str, Timing] = field(default_factory=dict)
    compiled_wrong: Mapping[str, str] = field(default_factory=dict)
    compiled_best: Timing | None = None
    compiled_best_mode: str = ""
    generated_share: float | None = None
    library_share: float | None = None
    launch: str = ""
    flops: int | None = None
    floor_ms: float | None = None
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    prepare_ms: float | None = None
    evaluations: int = 0
    configurations: int = 0
    steps: tuple[StepRow, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    source_digest: str = ""
    notes: tuple[str, ...] = ()
    started: str = ""
    suite: str = ""
    group: str = ""

    @property
    def problem(self) -> tuple[str, str]:
        """What was computed: id and content."""
        return self.id, self.digest

    @property
    def optimize_seconds(self) -> float | None:
        """Wall seconds without baselines; None where nothing is known of them."""
        if "optimize" in self.seconds or "total" not in self.seconds:
            return self.seconds.get("optimize")
        return self.seconds["total"] - self.seconds.get("baselines", 0.0)  # rows of November 2026

    @property
    def key(self) -> str:
        """Problem and settings: a later row with the same key replaces an earlier one."""
        return row_key(self.id, self.digest, self.settings)

    @property
    def estimated(self) -> bool:
        """True where the times are an analytic model's."""
        return bool(self.candidate and self.candidate.estimated)

    @property
    def speedup(self) -> float | None:
        """Eager's device time over the candidate's."""
        return _ratio(self.eager, self.candidate)

    @property
    def compile_speedup(self) -> float | None:
        """torch.compile's speedup over eager: what the candidate is held against."""
        return _ratio(self.eager, self.compiled)

    @property
    def compile_best_speedup(self) -> float | None:
        """The speedup over eager of torch.compile's fastest mode."""
        return _ratio(self.eager, self.compiled_best)

    def over_eager_in(self, mode: str) -> float | None:
        """The speedup over eager of torch.compile in `mode`; None where it was not timed."""
        return _ratio(self.eager, self.compiled_modes.get(mode))

    @property
    def over_compile(self) -> float | None:
        """torch.compile's device time over the candidate's."""
        return _ratio(self.compiled, self.candidate)

    @property
    def over_compile_best(self) -> float | None:
        """The device time of torch.compile's fastest mode over the candidate's."""
        return _ratio(self.compiled_best, self.candidate)

    @property
    def over_pytorch(self) -> float | None:
        """The device time of PyTorch's fastest over the candidate's.

        That is eager's, or of a mode of torch.compile whose result is as accurate as a candidate's has to be.
        """
        timed: Mapping[str, Timing | None] = self.compiled_modes or {"default": self.compiled}  # as older rows have it
        modes = [timing for mode, timing in timed.items() if mode not in self.compiled_wrong]
        found = [ratio for t in (self.eager, *modes) if (ratio := _ratio(t, self.candidate)) is not None]
        return min(found, default=None)

    @property
    def roofline_fraction(self) -> float | None:
        """The bound over the candidate's device time, 1 at the roofline."""
        if self.floor_ms is None or self.candidate is None or self.candidate.device_ms <= 0:
            return None
        return self.floor_ms / self.candidate.device_ms

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of the candidate over eager's; None where either is unknown or eager needs none."""
        if self.peak_bytes is None or not self.eager_peak_bytes:
            return None
        return self.peak_bytes / self.eager_peak_bytes

    def to_json(self) -> str:
        """One line; `from_json` gives an equal row back."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Row:
        """The row that `to_json` wrote.

        Raises:
            RowError: the text is no row.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if "id" not in data:  # rows of November 2026: KernelBench's level and number
                level, number = data.pop("level"), data.pop("number")
                data |= {"id": f"level{level}/{number}", "suite": "kernelbench", "group": f"level{level}"}
            settings = data["settings"]
            data["settings"] = Settings(**{**settings, "compile_modes": tuple(settings["compile_modes"])})
            data["environment"] = Environment(**data["environment"])
            data["notes"] = tuple(data["notes"])
            data["steps"] = tuple(StepRow.from_data(step) for step in data["steps"])
            for name in ("candidate", "eager", "compiled", "compiled_best"):
                if data[name] is not None:
                    data[name] = Timing(**data[name])
            modes = data.get("compiled_modes", {})  # rows of November 2026 have the first and the best only
            data["compiled_modes"] = {mode: Timing(**timing) for mode, timing in modes.items()}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RowError(f"not a row: {text[:80]!r} ({type(error).__name__}: {error})") from error


def row_key(id: str, digest: str, settings: Settings) -> str:
    """What makes two runs the same one."""
    return json.dumps([id, digest, asdict(settings)])


def blank_row(problem: Problem, settings: Settings, **known: Any) -> Row:
    """A row of `problem` with what is known of it so far; how failures are recorded."""
    about = {"suite": problem.suite, "group": problem.group}
    return Row(problem.id, problem.name, problem.digest, settings, **{**about, **known})


def read_rows(path: Path | str) -> tuple[Row, ...]:
    """The rows of a file; where two have the same key, the later one.

    A last line without its end, as a killed run leaves it, is left out.

    Raises:
        RowError: no such file, or a line in it is no row.
    """
    rows = [Row.from_json(line) for line in whole_lines(path)]
    return tuple({row.key: row for row in rows}.values())


def append_row(path: Path | str, row: Row) -> None:
    """Add `row` at the end of the file and flush it to disk; a half-written last line is cut off first."""
    append_line(path, row.to_json())


def whole_lines(path: Path | str) -> list[str]:
    """The lines of a file that are not empty; a last line without its end is left out.

    Raises:
        RowError: no such file.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise RowError(f"cannot read {path}: {error.strerror}") from error
    whole, _, _ = text.rpartition("\n")
    return [line for line in whole.splitlines() if line.strip()]


def append_line(path: Path | str, line: str) -> None:
    """Add a line at the end of the file and flush it to disk; a half-written last line is cut off first."""
    import os

    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+b") as out:
        out.seek(0)
        text = out.read()
        if text and not text.endswith(b"\n"):
            out.truncate(text.rfind(b"\n") + 1)
        out.write(line.encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _ratio(numerator: Timing | None, denominator: Timing | None) -> float | None:
    if numerator is None or denominator is None or denominator.device_ms <= 0:
        return None
    if numerator.estimated != denominator.estimated:
        return None
    return numerator.device_ms / denominator.device_ms


__all__ = [
    "Environment",
    "Row",
    "RowError",
    "Settings",
    "StepRow",
    "append_line",
    "append_row",
    "blank_row",
    "read_rows",
    "row_key",
    "whole_lines",
]
