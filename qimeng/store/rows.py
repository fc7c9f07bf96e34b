"""The rows of a store and the hashes that they are kept under.

Deals in plain data. Knows nothing about files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from qimeng.interfaces.steps import Action

if TYPE_CHECKING:
    from qimeng.interfaces.steps import Patch
    from qimeng.program.program import Program

ACCIDENT = "accident"
"""Purpose of failures that may not be the program's fault. They are recorded, but never used as answers."""


@dataclass(frozen=True)
class Conditions:
    """What an evaluation depends on besides the program; part of every key.

    Attributes:
        spec: digest of the specification.
        device: name of the device.
        mode: precision mode.
        estimated: True where times come from the analytic model, so that they never mix with measured ones.
        versions: (name, version) of the evaluator, torch, triton and the driver; the card's name, where one measured.
    """

    spec: str
    device: str
    mode: str = "default"
    estimated: bool = False
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Content hash."""
        return content_hash(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True)
class StoredStep:
    """One edge of the tree of trajectories.

    Attributes:
        parent: digest of the program that the action was applied to.
        action: what was tried.
        patch: digest of the patch; None where the coder wrote none.
        evaluation: digest of the evaluation; None where none was needed.
        accepted: whether the state advanced.
        child: digest of the resulting program; None where it was rolled back.
    """

    parent: str
    action: Action
    patch: str | None
    evaluation: str | None
    accepted: bool
    child: str | None


@dataclass(frozen=True)
class StoredAttempt:
    """What came of one answer of a language model.

    Attributes:
        parent: digest of the program that was to be changed.
        action: what the model was asked to do.
        reply: digest of the answer (`Store.reply`).
        patch: digest of the patch that was made of it, and of other answers to the same request; None where it could
            not be read. The steps with this patch say what the judge found.
        alternative: which of the patch's alternatives it is.
        failure: class of what was wrong with the answer; None where it could be read.
    """

    parent: str
    action: Action
    reply: str
    patch: str | None = None
    alternative: int = 0
    failure: str | None = None


def subject_of(program: Program, patch: Patch | None) -> str:
    """Digest of what is judged: the one program, or all that a patch lets the judge choose from."""
    if patch is None:
        return program.digest
    found = [patch.apply(program, i).digest for i in range(max(1, len(patch.alternatives)))]
    return found[0] if len(found) == 1 else content_hash(" ".join(found))


def evaluation_key(conditions: Conditions, subject: str, purpose: str = "step") -> str:
    """Digest of an evaluation: what was judged, for what purpose, under which conditions."""
    return content_hash("\n".join((conditions.digest, purpose, subject)))


def step_key(conditions: str, step: StoredStep) -> str:
    """Digest of an edge under the conditions of this digest."""
    return content_hash(json.dumps(step_row(conditions, step)))


def step_row(conditions: str, step: StoredStep) -> tuple[str | int | None, ...]:
    """The columns of an edge, but for its digest."""
    action = json.dumps(asdict(step.action), sort_keys=True)
    return (conditions, step.parent, action, step.patch, step.evaluation, int(step.accepted), step.child)


def attempt_key(row: tuple[str | int | None, ...]) -> str:
    """Digest of what came of an answer: of all columns but this one."""
    return content_hash(json.dumps(row))


def reply_key(question: str, body: str) -> str:
    """Digest of an answer of a language model."""
    return content_hash(f"{question}\n{body}")


def content_hash(text: str) -> str:
    """Hash of `text`, 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def conditions_from_json(body: str) -> Conditions:
    """The conditions that `Store.put_evaluation` wrote."""
    data = json.loads(body)
    return Conditions(**{**data, "versions": tuple((n, v) for n, v in data["versions"])})


__all__ = [
    "ACCIDENT",
    "Conditions",
    "StoredAttempt",
    "StoredStep",
    "attempt_key",
    "conditions_from_json",
    "content_hash",
    "evaluation_key",
    "reply_key",
    "step_key",
    "step_row",
    "subject_of",
]
