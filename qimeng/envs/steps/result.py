"""The result of an optimization: the module, and everything needed to judge and repeat it.

Deals in what is handed to a user: source, recipe, figures, a report, a folder on disk. Knows nothing about how the
program was found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.envs.cost.roofline import Roofline
from qimeng.envs.steps.state import Attempt
from qimeng.errors import QimengError
from qimeng.interfaces import Evaluation, Scope, Step
from qimeng.interfaces.records import action_from_data
from qimeng.program.load import load_source
from qimeng.program.program import Program
from qimeng.recipe import Recipe
from qimeng.spec.origin import MADE_FROM

if TYPE_CHECKING:
    import torch

NEEDS_GPU = (
    "this program's kernels run on a GPU and there is none here: call the module where there is one (save the result, "
    "its program.py needs torch and triton only), or set TRITON_INTERPRET=1 before Triton is imported to interpret them"
)

_FACTS = (
    "name",
    "device",
    "mode",
    "estimated",
    "evaluations",
    "cached",
    "seconds",
    "stopped",
    "on_pytorch",
    "declared",
)


@dataclass(frozen=True, eq=False)
class Result:
    """What `plan_and_code` returns.

    Attributes:
        name: what people call the computation.
        source: one standalone file (torch and triton only) with a class `Model`.
        recipe: the accepted steps; replaying them gives the same program without a coder.
        evaluation: the final verification of the program, in a fresh process.
        start: evaluation of the start program: the computation on PyTorch.
        steps: everything that was tried, in order, over all branches of the search.
        device: name of the device.
        mode: precision mode.
        estimated: True where times come from the analytic model rather than from a GPU.
        evaluations: programs sent to the judge, final verifications not counted.
        cached: evaluations and final verifications that the store knew already.
        seconds: wall-clock seconds of the whole optimization.
        stopped: why the search ended: ``"stop"`` (the planner), ``"steps"``, ``"evaluations"``, ``"seconds"``,
            ``"interrupted"``, ``"opaque"`` (it could not be captured, so there was nothing to search),
            ``"unjudged"`` (not even the start program passed the judge), ``"failed"`` (a planner raised).
        notes: what a user should know, in sentences.
        program: the program; None in a result read from disk.
        reference: makes the reference module; None in a result read from disk.
        on_pytorch: True where the computation was left on PyTorch, as its author wrote it.
        declared: what the spec declares of weights and activations (`KernelSpec.declaration`): for PyTorch's times too.
        roofline: what bounds the computation on the device; None in a result of an older version.
        labels: the operators of each region by its id, those of the start program and of the result.
        environment: versions of what the result was found with.
    """

    name: str
    source: str
    recipe: Recipe
    evaluation: Evaluation
    start: Evaluation
    steps: tuple[Attempt, ...]
    device: str
    mode: str
    estimated: bool
    evaluations: int
    cached: int
    seconds: float
    stopped: str
    notes: tuple[str, ...] = ()
    program: Program | None = None
    reference: Callable[[], torch.nn.Module] | None = None
    on_pytorch: bool = False
    declared: str = ""
    roofline: Roofline | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        word = " (estimated)" if self.estimated else ""
        steps = f"{len(self.recipe)} steps accepted of {len(self.steps)}"
        return f"<Result {self.name!r} on {self.device}, mode {self.mode}: {self.headline}{word}, {steps}>"

    @property
    def speedup(self) -> float | None:
        """PyTorch eager's device time over the program's (an estimate where `estimated`); None where not timed.

        1 by definition for what was left on PyTorch.
        """
        return 1.0 if self.on_pytorch else self.evaluation.speedup

    @property
    def unchecked(self) -> str:
        """Why the program, or some of its kernels, was not held against the reference; empty where all were."""
        if self.on_pytorch:  # it is the reference
            return ""
        return self.evaluation.unchecked or ("" if self.evaluation.ok else f"{self.evaluation.error}")

    @property
    def headline(self) -> str:
        """Speedup in words, and whether the program was checked."""
        speedup = f"{self.speedup:.2f} x PyTorch eager" if self.speedup else "not timed"
        if self.evaluation.over_compile:
            speedup += f", {self.evaluation.over_compile:.2f} x torch.compile"
        if self.declared:
            speedup += f", {self.declared} as declared"
        return f"{speedup}, UNCHECKED" if self.unchecked else speedup

    @property
    def verification(self) -> str:
        """What the final verification came to, in words."""
        if self.on_pytorch:
            return "none needed: it is left on PyTorch as it was written"
        if not self.evaluation.ok:
            return f"UNCHECKED: failed at gate {self.evaluation.gate.value}: {self.evaluation.error}"
        return f"UNCHECKED: {self.unchecked}" if self.unchecked else "right, in a fresh process"

    @cached_property
    def module(self) -> torch.nn.Module:
        """The program as a module, with the reference's parameters and buffers, on their device.

        It can be copied, pickled, and optimized again, which begins with the computation that it was made from.

        A result read from disk has no reference: its module holds zeros until `load_state_dict`. Where there is no GPU,
        calling a module with Triton kernels raises a QimengError, unless Triton's interpreter is on.
        """
        import torch

        if self.program is not None and self.program.fallback and self.reference is not None:
            return self.reference()
        module = load_source(self.source).Model()
        assert isinstance(module, torch.nn.Module)
        if self.reference is not None:
            reference = self.reference()
            tensors = [*reference.parameters(), *reference.buffers()]
            if tensors:
                module = module.to(tensors[0].device)
            state = reference.state_dict()
            module.load_state_dict({key: state[key] for key in module.state_dict()}, assign=True)
            module.train(reference.training)
            vars(module)[MADE_FROM] = reference
        if "@triton.jit" in self.source and not torch.cuda.is_available():
            if os.environ.get("TRITON_INTERPRET") == "1":
                from qimeng.envs.estimate.interpreter import mend

                mend()  # as the judge does: without it, some kernels do not run and bf16 is wrong
            else:
                module.register_forward_pre_hook(_needs_gpu)
        return module

    def report(self) -> str:
        """The result in Markdown: figures, what was tried, notes."""
        word = "estimated" if self.estimated else "measured"
        final, lines = self.evaluation, [f"# {self.name}", ""]
        kind = "not judged" if self.stopped == "unjudged" else word
        lines.append(f"**{self.headline}** ({kind}), device {self.device}, mode {self.mode}.")
        lines += ["", f"| figure | {word} |", "|---|---|"]
        lines += [f"| {label} | {text} |" for label, text in figures_of(final, self.start)]
        lines.append(f"| verification | {self.verification} |")
        lines.append(f"| evaluations | {self.evaluations} |")
        if self.cached:
            lines.append(f"| answers from the store, the final verification included | {self.cached} |")
        lines.append(f"| seconds | {self.seconds:.1f} |")
        lines.append(f"| ended by | {self.stopped} |")
        if self.notes or final.notes:
            lines += ["", *(f"- {note}" for note in (*self.notes, *final.notes))]
        if self.steps:
            lines += ["", f"| step | action | outcome | ms, {word} | gain |", "|---|---|---|---|---|"]
            lines += [
                f"| {i + 1} | {s.text} | {outcome_text(s, i in self.kept)} | {_ms(s)} | {_gain(s)} |"
                for i, s in enumerate(self.steps)
            ]
        return "\n".join(lines) + "\n"

    def rows(self) -> list[dict[str, Any]]:
        """Every step as plain data, for JSON lines.

        ``kept`` says whether the step is on the way to the result. An accepted step that is not was right, and led to
        programs that are not faster.
        """
        kept = self.kept
        return [
            {
                "action": asdict(s.action),
                "kept": i in kept,
                "text": s.text,
                "before_ms": s.before_ms,
                "gain": s.gain,
                "accepted": s.accepted,
                "patch": s.patch_digest,
                "parent": s.parent,
                "child": s.child,
                "evaluation": None if s.evaluation is None else json.loads(s.evaluation.to_json()),
            }
            for i, s in enumerate(self.steps)
        ]

    @cached_property
    def kept(self) -> frozenset[int]:
        """Numbers, in `steps`, of those on the way to the result."""
        found, wanted = set(), self.recipe.program
        digests = [(step.action, step.digest) for step in reversed(self.recipe.steps)]
        for action, digest in digests:
            number = next(
                (
                    i
                    for i, s in enumerate(self.steps)
                    if s.accepted and s.action == action and s.patch_digest == digest and s.child in (wanted, "")
                ),
                None,
            )
            if number is not None:
                found.add(number)
                wanted = self.steps[number].parent
        return frozenset(found)

    def to_json(self) -> str:
        """The figures as one line of JSON (source, recipe and steps are files of their own)."""
        data: dict[str, Any] = {key: getattr(self, key) for key in _FACTS}
        data |= {"speedup": self.speedup, "notes": list(self.notes)}
        data |= {"checked": not self.unchecked, "verification": self.verification}
        data["evaluation"] = json.loads(self.evaluation.to_json())
        data["start"] = json.loads(self.start.to_json())
        data |= {"labels": dict(self.labels), "environment": dict(self.environment)}
        data["roofline"] = None if self.roofline is None else asdict(self.roofline)
        return json.dumps(data, sort_keys=True)

    def save(self, folder: str | Path) -> Path:
        """Write ``program.py``, ``recipe.json``, ``result.json``, ``steps.jsonl`` and ``report.md`` to `folder`."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "program.py").write_text(self.source)
        (path / "recipe.json").write_text(self.recipe.to_json() + "\n")
        (path / "result.json").write_text(self.to_json() + "\n")
        (path / "steps.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in self.rows()))
        (path / "report.md").write_text(self.report())
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """The result that `save` wrote, without program and reference.

        Raises:
            QimengError: the folder holds no result.
        """
        path = Path(folder)
        if not path.is_dir():
            hint = f": name the folder that it is in, {path.parent}" if path.is_file() else ""
            raise QimengError(f"there is no folder {path}{hint}")
        if not (path / "result.json").exists():
            began = (path / "store.sqlite").exists()
            raise QimengError(
                f"{path} holds no result"
                + (": it is unfinished; run the same command again, which goes on where it ended" if began else "")
            )
        try:
            data = json.loads((path / "result.json").read_text())
            rows = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
            return cls(
                **{key: data[key] for key in _FACTS if key in data},
                source=(path / "program.py").read_text(),
                recipe=Recipe.from_json((path / "recipe.json").read_text()),
                evaluation=_evaluation(data["evaluation"]),
                start=_evaluation(data["start"]),
                steps=tuple(_step(row) for row in rows),
                notes=tuple(data["notes"]),
                roofline=Roofline(**data["roofline"]) if data.get("roofline") else None,
                labels=data.get("labels", {}),
                environment=data.get("environment", {}),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise QimengError(
                f"the result in {path} is damaged or unfinished ({type(error).__name__}: {error}); optimize again"
            ) from None


def outcome_text(step: Step, kept: bool = False) -> str:
    """What came of a step, in a few words; `kept` says whether it is on the way to the result."""
    if step.action.kind == "stop":
        return "the planner ended this branch"
    word = "kept" if kept else "right, not kept"
    if step.evaluation is None:
        return f"{word} (graph only)" if step.accepted else "not tried"
    if step.accepted:
        scope = " (time: sum of its regions)" if step.evaluation.scope is Scope.SUM else ""
        return f"{word}, UNCHECKED" if step.evaluation.unchecked else f"{word}{scope}"
    reason = (step.evaluation.error or "").partition("\n")[0]
    return f"refused ({step.evaluation.failure}): {reason[:80]}"


def _needs_gpu(module: torch.nn.Module, inputs: Any) -> None:
    raise QimengError(NEEDS_GPU)


def figures_of(final: Evaluation, start: Evaluation) -> list[tuple[str, str]]:
    """Label and text of each figure of a final verification beside that of the start program."""
    found: list[tuple[str, str]] = []
    if final.timing is not None:
        found.append(("device time", f"{final.timing.device_ms:.4g} ms, spread {final.timing.spread:.1%}"))
    if final.eager is not None:
        found.append(("PyTorch eager", f"{final.eager.device_ms:.4g} ms"))
    for mode, timing in final.compiled.items():
        less = ", outside a candidate's error budget" if mode in final.compiled_wrong else ""
        found.append((f"torch.compile, mode {mode}", f"{timing.device_ms:.4g} ms{less}"))
    if start.timing is not None:
        found.append(("start program", f"{start.timing.device_ms:.4g} ms"))
    if final.generated_share is not None:
        found.append(("GPU time in generated kernels", f"{final.generated_share:.0%}"))
    if final.library_share:
        found.append(("GPU time in a library's code", f"{final.library_share:.0%}"))
    if final.peak_bytes is not None and final.eager_peak_bytes:
        found.append(("peak memory", f"{final.peak_bytes / final.eager_peak_bytes:.2f} x eager's"))
    if final.accuracy is not None:
        a = final.accuracy
        found.append(("error, maximum", f"{a.max_error:.3g} of {a.max_budget:.3g} allowed"))
        found.append(("error, rms", f"{a.rms_error:.3g} of {a.rms_budget:.3g} allowed"))
        if a.kernelbench is not None:
            found.append(("KernelBench's rule", "passes" if a.kernelbench else "fails"))
    return found


def _ms(step: Step) -> str:
    return f"{step.evaluation.ms:.4g}" if step.evaluation and step.evaluation.ms is not None else ""


def _gain(step: Attempt) -> str:
    return f"{step.gain:.2f} x" if step.gain is not None else ""


def _evaluation(data: dict[str, Any]) -> Evaluation:
    return Evaluation.from_json(json.dumps(data))


def _step(row: dict[str, Any]) -> Attempt:
    evaluation = None if row["evaluation"] is None else _evaluation(row["evaluation"])
    action = action_from_data(row["action"])
    names = row.get("parent", ""), row.get("child", "")
    return Attempt(
        action, evaluation, row["accepted"], row["patch"], row["text"], row["before_ms"], row["gain"], *names
    )


__all__ = ["Result", "figures_of", "outcome_text"]
