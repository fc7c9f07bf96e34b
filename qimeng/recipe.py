"""Recipes: how a program was made, as data that makes it again.

Deals in accepted steps, each with its action and its whole patch. Knows nothing about coders, evaluators or clocks:
replaying applies stored patches, so it gives the same program anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from qimeng.errors import IllegalAction, ReplayError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces.records import PatchRecord, action_from_data
from qimeng.interfaces.steps import Action, Patch
from qimeng.program.identity import IDENTITY
from qimeng.program.program import Program


@dataclass(frozen=True)
class RecipeStep:
    """One accepted step.

    Attributes:
        action: what was done.
        digest: content hash of the patch (`Patch.digest`).
        patch: the patch, reduced to the implementation that was kept.
        ms: device milliseconds after the step; no part of the recipe's identity.
    """

    action: Action
    digest: str
    patch: PatchRecord
    ms: float | None = field(default=None, compare=False)

    @classmethod
    def of(cls, action: Action, patch: Patch, chosen: int = 0, ms: float | None = None) -> RecipeStep:
        """The step that applied alternative number `chosen` of `patch`."""
        return cls(action, patch.digest(chosen), PatchRecord.of(patch.only(chosen)), ms)


@dataclass(frozen=True)
class Recipe:
    """The accepted steps from the start program to a program; equality ignores times.

    Attributes:
        steps: in the order they were taken.
        program: digest of the program they lead to; empty where it is not known.
        identity: the rule that the digests were made by (`qimeng.program.identity.IDENTITY`).
    """

    steps: tuple[RecipeStep, ...] = ()
    program: str = ""
    identity: int = IDENTITY

    def __len__(self) -> int:
        return len(self.steps)

    def replay(self, graph: OpGraph) -> Program:
        """The program that the steps make of `graph`, whole on PyTorch at first; no coder is called.

        Raises:
            ReplayError: a step does not fit the graph, the program comes out another one, or a newer version of the
                library wrote the recipe. The program of an older one's has another digest today, and is not compared.
        """
        if self.identity not in _PATCH_DIGESTS:
            raise ReplayError(f"the recipe has digests of rule {self.identity}, this version knows {[*_PATCH_DIGESTS]}")
        program = Program.start(graph)
        for number, step in enumerate(self.steps):
            program = self._apply(program, step, number)
        if self.identity == IDENTITY and self.program and program.digest != self.program:
            raise ReplayError(
                f"the recipe leads to program {program.digest} and was written for {self.program}: replay it on the "
                "computation that was optimized, with the same names of parameters, shapes and dtypes"
            )
        return program

    def _apply(self, program: Program, step: RecipeStep, number: int) -> Program:
        patch = step.patch.patch(program.graph)
        found = _PATCH_DIGESTS[self.identity](patch)
        if found != step.digest:
            raise ReplayError(f"step {number} ({step.action}): the stored patch has hash {found}, not {step.digest}")
        try:
            return patch.apply(program)
        except (KeyError, IllegalAction) as error:
            raise ReplayError(f"step {number} ({step.action}): {error.args[0]}") from None

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal recipe back."""
        steps = [{**asdict(s), "patch": s.patch.to_data()} for s in self.steps]
        return json.dumps({**asdict(self), "steps": steps}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote.

        Raises:
            ReplayError: `text` is no recipe.
        """
        try:
            data = json.loads(text)
            steps = tuple(
                RecipeStep(action_from_data(s["action"]), s["digest"], PatchRecord.from_data(s["patch"]), s["ms"])
                for s in data["steps"]
            )
            return cls(steps, data["program"], data.get("identity", 1))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ReplayError(f"not a recipe: {type(error).__name__}: {error}") from None


def _digest_of_text(patch: Patch) -> str:
    """What `Patch.digest` was under rule 1."""
    parts = [patch.target or ""]
    if patch.regions is not None:
        parts += [" ".join(r.nodes) for r in patch.regions]
    if patch.alternatives:
        parts.append(patch.alternatives[0].source)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


_PATCH_DIGESTS: dict[int, Callable[[Patch], str]] = {1: _digest_of_text, IDENTITY: lambda patch: patch.digest()}


__all__ = ["Recipe", "RecipeStep"]
