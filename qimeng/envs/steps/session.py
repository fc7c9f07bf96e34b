"""One running optimization: write, verify, advance or roll back.

`Session.step` is the only place where a program changes; states, attempts and budgets are `qimeng.envs.steps.state`.
Knows nothing about the choice of actions, or how programs are written and judged.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

from qimeng.actions import check_action, kind_named, kinds, legal_actions
from qimeng.envs.judge.ranking import gain, preferred
from qimeng.envs.steps.state import STOP, Attempt, Budget, Ledger, Progress, State
from qimeng.envs.steps.step_record import outcome_of, put_attempt, text_of
from qimeng.envs.steps.stored_answers import subject_of
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS, carried, order_actions, within_limit
from qimeng.errors import CoderError, FamilyFault, IllegalAction, KindFault, PlannerFault, QimengError
from qimeng.interfaces import Action, Evaluation, Gate, Observation, Patch, Request, Step
from qimeng.program.program import Program
from qimeng.recipe import RecipeStep
from qimeng.store import Store


class Session:
    """An optimization under way.

    Args:
        task: what is optimized.
        budget: what may be used.
        store: where every attempt is recorded; None records nothing.
        on_step: told what is going on.
        clock: seconds, monotonic.
        began: the clock's time when the budget's seconds began; now by default.

    Attributes:
        state: where this branch stands.
        ledger: what all branches share.
        cut: legal actions that the last observation left out.
    """

    def __init__(
        self,
        task: Task,
        budget: Budget | None = None,
        store: Store | None = None,
        on_step: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ):
        self.task, self.store, self.on_step = task, store, on_step
        self.ledger = Ledger(budget or Budget(), clock, clock() if began is None else began)
        self.state = State(task.start)
        self.cut = 0

    def fork(self) -> Session:
        """A branch: a state of its own, budget and best program shared."""
        return copy.copy(self)

    def clone(self) -> Session:
        """An equal copy that shares nothing that changes."""
        twin = copy.copy(self)
        twin.ledger = self.ledger.clone()
        return twin

    def begin(self) -> Evaluation:
        """Judge the start program, once; steps are taken after that."""
        if self.ledger.start is None:
            self.tell("start", f"{self.task.name}: PyTorch, {len(self.task.start.regions)} regions")
            evaluation = self._judge(self.task.start, None)
            self.ledger.longest = 0.0  # the first evaluation also makes the reference and starts the judge
            self.ledger.start = evaluation
            self.state = replace(self.state, evaluation=evaluation, judged=True)
            self.ledger.best = self.state
        return self.ledger.start

    def exhausted(self) -> str | None:
        """Why no further step may be taken (``"stop"``, ``"steps"``, ``"evaluations"``, ``"seconds"``), or None."""
        ledger = self.ledger
        if self.state.done:
            return "stop"
        if len(self.state.history) >= ledger.budget.steps:
            return "steps"
        if ledger.evaluations >= ledger.budget.evaluations:
            return "evaluations"
        needed = ledger.writing + 2 * ledger.longest  # one step and the final verification
        if ledger.seconds_left < needed or ledger.seconds_left <= 0:
            return "seconds"
        return None

    def offered(self) -> tuple[tuple[Action, ...], int]:
        """The legal actions in order, `stop` first, at most 256 (see `within_limit`); and how many were cut."""
        program, legal = self.state.program, self.task.legal
        key = (program.digest, *(program.schedule(r) for r in program.regions), *kinds())
        if key not in legal:
            legal[key] = legal_actions(program, self.task.context, self.ledger.faults)
        found = [a for a in legal[key] if a not in self.state.masked and a.kind not in self.ledger.told]
        ordered = order_actions(found, program, self.state.evaluation, self.task.context.device)
        return within_limit(ordered), max(0, len(ordered) - MAX_ACTIONS)

    def observe(self, steps_left: int | None = None) -> Observation:
        """What a planner sees now.

        Args:
            steps_left: the steps left, if the budget does not define them.
        """
        start = self.ledger.start
        best = self.ledger.best
        actions, self.cut = self.offered()
        return Observation(
            program=self.state.program,
            actions=actions,
            evaluation=self.state.evaluation,
            best_ms=best.ms if best else None,
            eager_ms=start.eager.device_ms if start and start.eager else None,
            history=self.state.history,
            device=self.task.context.device,
            mode=self.task.context.mode,
            steps_left=self.ledger.budget.steps - len(self.state.history) if steps_left is None else steps_left,
        )

    def step(self, action: Action, instruction: str = "") -> Step:
        """Carry out `action`: write, verify, repair; then advance, or roll back and mask the action.

        An action that does not apply is refused like a failed one (gate ``write``); nothing is raised.

        Args:
            action: what to do.
            instruction: what the user tells the coder about it.
        """
        self.begin()
        if not isinstance(action, Action):
            raise PlannerFault(f"it chose {type(action).__name__}, which is not an action")
        if action == STOP:
            step = Step(action, None, True)
            self.state = replace(self.state, done=True, history=(*self.state.history, step))
            self.ledger.attempts.append(Attempt(action, None, True, text="stop", before_ms=self.state.ms))
            return step
        before = self.state
        text = text_of(action, before.program)
        step = self._attempt(action, instruction)
        gained = gain(step.evaluation, before.evaluation) if step.accepted else None
        attempt = Attempt(action, step.evaluation, step.accepted, step.patch_digest, text, before.ms, gained)
        self.ledger.attempts.append(attempt)
        self.tell("done", f"{text}: {outcome_of(step, before, self.state)}")
        return step

    def return_to(self, state: State) -> None:
        """Continue from an earlier state of this branch. The history stays, so nothing is tried twice unknowingly."""
        masked = self.ledger.refused.get(state.program.digest, frozenset())
        self.state = replace(state, history=self.state.history, masked=masked)

    def turn_down(self, trial: Session, best: State | None, reason: str) -> None:
        """Reject the last step of `trial`, a fork with one more step, and mask its action here.

        The step stays in the history as refused, and its program no longer counts as the best.

        Args:
            trial: the fork.
            best: the best state before that step.
            reason: why, in words.
        """
        ledger, step = self.ledger, trial.state.history[-1]
        ledger.best = best
        evaluation = replace(step.evaluation or Evaluation(Gate.PASSED), error=reason)
        ledger.attempts[-1] = replace(ledger.attempts[-1], accepted=False, gain=None, evaluation=evaluation)
        self._roll_back(replace(step, accepted=False, evaluation=evaluation))

    def tell(self, phase: str, text: str) -> None:
        """Report progress to `on_step`."""
        if self.on_step is None:
            return
        ledger = self.ledger
        eager = ledger.start.eager if ledger.start else None
        best = ledger.best.ms if ledger.best else None
        self.on_step(
            Progress(
                phase,
                text,
                best,
                eager.device_ms if eager else None,
                ledger.seconds_left,
                ledger.evaluations,
                len(ledger.attempts),
            )
        )

    # ---- one attempt and its repairs
    def _attempt(self, action: Action, instruction: str) -> Step:
        context, program = self.task.context, self.state.program
        request = Request(
            program,
            action,
            context.device,
            context.mode,
            history=self.state.history,
            evaluation=self.state.evaluation,
            instruction=instruction,
        )
        tried: set[str] = set()
        step, open_question = Step(action, None, False), False
        for _ in range(1 + self.ledger.budget.repairs):
            try:
                check_action(program, action, context)
                patch = self._written(request)
            except (IllegalAction, CoderError) as error:
                if isinstance(error, KindFault):
                    self.ledger.faults[error.kind] = str(error)
                    self.ledger.told.add(error.kind)
                elif isinstance(error, FamilyFault):
                    self.ledger.faults[error.family] = str(error)
                failure = "illegal" if isinstance(error, IllegalAction) else error.failure
                refused = Evaluation(Gate.WRITE, str(error), failure)
                open_question = open_question or not refused.lasting
                if request.failed is None:
                    step = Step(action, refused, False)
                    self._keep(program, step, None)
                break
            subject = subject_of(program, patch)
            if subject in tried:  # the coder has nothing new to offer
                break
            tried.add(subject)
            step = self._verify(action, patch)
            open_question = patch.computes_otherwise and not self.ledger.settled(subject)
            self._keep(program, step, patch)
            if step.accepted or self.exhausted():
                break
            assert step.evaluation is not None
            request = replace(request, failed=patch, reason=step.evaluation.error, refused=step.evaluation.chosen)
        if not step.accepted:
            self._roll_back(step, open_question)
        return step

    def _written(self, request: Request) -> Patch:
        """The coder's patch. Anything else that the coder does becomes a `CoderError`."""
        ledger, coder = self.ledger, self.task.context.coder
        began = ledger.clock()
        try:
            rewrite = kind_named(request.action.kind).apply(request.program, request.action, self.task.context)
            if rewrite.to_write is None:
                patch = rewrite.patch()
                if patch == Patch(note=patch.note):
                    raise IllegalAction(f"the kind of action {request.action.kind!r} changed nothing")
            else:
                patch = coder.write(replace(request, seconds_left=ledger.seconds_left))
            if not isinstance(patch, Patch):
                raise CoderError(f"the coder {type(coder).__name__} wrote {type(patch).__name__}, not a patch")
            subject_of(request.program, patch)  # it fits the program
            return patch
        except QimengError:
            raise
        except Exception as error:  # another package's coder may raise anything
            raise CoderError(f"the coder {type(coder).__name__} raised {type(error).__name__}: {error}") from error
        finally:
            ledger.writing = max(ledger.writing, ledger.clock() - began)

    def _verify(self, action: Action, patch: Patch) -> Step:
        """Judge `patch` (another partition alone needs no judge) and advance where it is right."""
        before = self.state
        if not patch.computes_otherwise:
            if patch.regions is None:
                return Step(action, Evaluation(Gate.WRITE, "the coder returned an empty patch", "coder"), False)
            program = patch.apply(before.program)
            step = Step(action, None, True, patch.digest())
            known = carried(before.program, program, before.evaluation, self.task.context.device)
            self._advance(program, known, step, RecipeStep.of(action, patch, ms=known.ms if known else None), False)
            return step
        note = f"{text_of(action, before.program)}: {patch.note}" if patch.note else text_of(action, before.program)
        self.tell("try", note)
        evaluation = self._judge(before.program, patch)
        if not evaluation.ok:
            return Step(action, evaluation, False, patch.digest())
        program = patch.apply(before.program, evaluation.chosen)
        step = Step(action, evaluation, True, patch.digest(evaluation.chosen))
        self._advance(program, evaluation, step, RecipeStep.of(action, patch, evaluation.chosen, evaluation.ms), True)
        return step

    def _advance(
        self, program: Program, evaluation: Evaluation | None, step: Step, record: RecipeStep, judged: bool
    ) -> None:
        masked = self.ledger.refused.get(program.digest, frozenset()) | self._taken(program, step.action)
        history = (*self.state.history, step)
        self.state = State(program, evaluation, self.state, record, history, masked, judged)
        best = self.ledger.best
        if judged and evaluation is not None and preferred(evaluation, best.evaluation if best else None):
            self.ledger.best = self.state

    def _taken(self, program: Program, last: Action) -> frozenset[Action]:
        """Actions that led on from `program` on the way to it, `last` the last step of that; most ways have none."""
        way = self.state.path()
        came = [*(state.record.action for state in way if state.record is not None), last]
        return frozenset(a for state, a in zip(way, came, strict=True) if state.program.digest == program.digest)

    def _roll_back(self, step: Step, open_question: bool = False) -> None:
        """Mask the action.

        Args:
            step: what was refused.
            open_question: the coder had no answer, or an accident stopped the judge. That says nothing about the
                action. It is masked in this state, and offered again when the search returns to this program.
        """
        digest, action = self.state.program.digest, frozenset({step.action})
        if not open_question:
            self.ledger.refused[digest] = self.ledger.refused.get(digest, frozenset()) | action
        self.state = replace(self.state, history=(*self.state.history, step), masked=self.state.masked | action)

    def _judge(self, program: Program, patch: Patch | None) -> Evaluation:
        ledger, subject = self.ledger, subject_of(program, patch)
        if ledger.settled(subject):
            return ledger.known[subject]
        began = ledger.clock()
        evaluation = self.task.judged(program, patch)
        ledger.longest = max(ledger.longest, ledger.clock() - began)
        ledger.evaluations += 1
        ledger.known[subject] = evaluation
        if not evaluation.lasting:
            ledger.accidents[subject] = ledger.accidents.get(subject, 0) + 1
        return evaluation

    def _keep(self, parent: Program, step: Step, patch: Patch | None) -> None:
        """Keep the attempt in the store, accepted or not."""
        if self.store is not None:
            child = self.state.program if step.accepted else None
            put_attempt(self.store, self.task.conditions, parent, step, patch, child)
