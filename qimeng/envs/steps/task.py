"""A task: the computation, the device, the coder and the judge.

Deals in the parts that a step loop needs, put together once. Knows nothing about steps.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qimeng.actions import Context
from qimeng.envs.workers.answering import failure_of
from qimeng.errors import BackendError, QimengError
from qimeng.interfaces import (
    Action,
    Asked,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    FinalOptions,
    Gate,
    Patch,
    Ticket,
)
from qimeng.program.program import Program
from qimeng.store import Conditions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Task:
    """One computation to optimize under fixed conditions.

    Attributes:
        start: the program that every search begins with: whole on PyTorch.
        context: device, coder and precision mode.
        evaluator: the judge, for this computation and these conditions.
        conditions: what the judge's findings depend on; keys of the store.
        name: what people call the computation.
        reason: why it could not be captured as a graph; empty where it was.
        reference: makes the reference module, whose parameters a result takes over; None where there is none.
        whole: the computation as one PyTorch region, as its author wrote it: what is returned where even the start
            program, which runs operator by operator, is slower than that. None where there is none.
        options: of the final verification.
        declared: what the spec declares, such as ``"weights int8"`` (`KernelSpec.declaration`); empty where nothing.
        by_region: whether a step on one region is judged on that region (`qimeng.envs.steps.milestones`).
        offers: says which legal actions are offered, where not all are (the answers to some are not known, say).
        legal: legal actions by program, shared by sessions, because replays of one task reach the same programs.
    """

    start: Program
    context: Context
    evaluator: Evaluator
    conditions: Conditions
    name: str = "program"
    reason: str = ""
    reference: Callable[[], torch.nn.Module] | None = None
    whole: Program | None = None
    options: FinalOptions = field(default_factory=FinalOptions)
    declared: str = ""
    by_region: bool = False
    offers: Callable[[Program, Action], bool] | None = None
    legal: dict[tuple[object, ...], tuple[Action, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def estimated(self) -> bool:
        """True where times come from the analytic model."""
        return self.conditions.estimated

    def request(
        self,
        program: Program,
        patch: Patch | None = None,
        asked: Asked = Asked.TIMING,
        library_s: float | None = None,
    ) -> EvaluationRequest:
        """What the judge is asked about a program, or a patch on it; arguments as for `judged`."""
        return EvaluationRequest(
            program,
            patch,
            asked,
            self.conditions.spec,
            self.context.device.name,
            self.context.mode,
            self.options,
            library_seconds=library_s,
        )

    def submit(self, request: EvaluationRequest) -> Ticket | None:
        """The ticket of a request whose answer `judged` gathers later; None where the engine takes none now.

        Whatever an engine raises is left to `judged`, which asks again and says it.
        """
        try:
            return self.evaluator.submit(request)
        except Exception:  # noqa: BLE001  (another package's engine may raise anything)
            return None

    def prepare(self, request: EvaluationRequest) -> None:
        """Tell the engine what it may be asked next; whatever it raises says nothing about a program."""
        with suppress(Exception):  # another package's engine may raise anything
            self.evaluator.prepare(request)

    def judged(
        self,
        program: Program,
        patch: Patch | None = None,
        asked: Asked = Asked.TIMING,
        submitted: MutableMapping[str, Ticket] | None = None,
        library_s: float | None = None,
    ) -> Evaluation:
        """The judge's answer about a program, or a patch on it.

        Args:
            program: the program.
            patch: on it.
            asked: what is asked.
            submitted: tickets by the digest of their request; one for this request is taken out and gathered. An engine
                that answers one request at a time was only told ahead what will be asked: it is asked anew, with the
                seconds that there are now.
            library_s: seconds that a library may take to compile what is new in it; None for the judge's own limit.

        Raises:
            QimengError: the judge refuses the request. Whatever else an engine raises becomes an answer that names it,
                which is no verdict on the program; so does a backend's fault.
        """
        try:
            request = self.request(program, patch, asked, library_s)
            ticket = submitted.pop(request.digest, None) if submitted else None
            return self.evaluator.ask(request, ticket if self.evaluator.at_once > 1 else None)
        except BackendError as fault:  # of a language that the program's kernels are written in
            return Evaluation(Gate.WRITE, str(fault), "coder")
        except QimengError:
            raise
        except Exception as error:  # noqa: BLE001  (another package's engine may raise anything)
            what = (str(error).splitlines() or [""])[0]
            text = f"the evaluator {self.evaluator.name} raised {type(error).__name__}: {what} ({_place(error)})"
            return Evaluation(Gate.PROGRAM, text, failure_of(error))


def _place(error: Exception) -> str:
    """Where an error was raised: file and line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


__all__ = ["Task"]
