"""One running optimization: write, verify, advance or roll back.

`Session.step` is the only place where a program changes; states, attempts and budgets are `qimeng.envs.steps.state`.
Knows nothing about the choice of actions, or how programs are written and judged.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from qimeng.actions import check_action, each_lowered, kind_named, kinds, legal_actions
from qimeng.envs.judge.gates.first_call import warms_up
from qimeng.envs.judge.ranking import gain, preferred
from qimeng.envs.steps.milestones import (
    CULPRITS,
    bisected,
    is_due,
    is_on_region,
    note_measured,
    shared_out,
    summed,
    unsettled,
)
from qimeng.envs.steps.next_kernels import prepare_next
from qimeng.envs.steps.parts import verify_parts
from qimeng.envs.steps.state import FINAL, STOP, Attempt, Budget, Ledger, Progress, State, Unchosen
from qimeng.envs.steps.step_record import outcome_of, put_attempt, text_of
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS, carried, order_actions, within_limit
from qimeng.envs.steps.time_up import TimeUp
from qimeng.errors import CoderError, FamilyFault, IllegalAction, KindFault, PlannerFault, QimengError, ReplayError
from qimeng.interfaces import Action, Asked, Evaluation, Gate, Observation, Patch, Request, Scope, Step
from qimeng.program.program import Program
from qimeng.recipe import RecipeStep
from qimeng.store import Store, subject_of

COMPILE_S = 3.0
"""Seconds that a step is expected to wait for compilers at most, where kernels of later steps are compiled ahead."""

ROLLED_BACK = "the program before this step was refused as a whole, and its last steps were taken back"


class Session:
    """An optimization under way.

    Args:
        task: what is optimized.
        budget: what may be used.
        store: where every attempt is recorded; None records nothing.
        on_step: called with what is going on.
        clock: seconds, monotonic.
        began: the clock's time when the budget's seconds began; now by default.
        waited: tells how many of the clock's seconds the judge has waited for a device that others use; they do not
            count against the budget's seconds.

    Attributes:
        state: where this branch stands.
        ledger: what all branches share.
        likely: the choice of a planner that may be asked ahead, for kernels to be compiled; None where there is none.
        seen: the last observation of this branch.
        cut: legal actions that it left out.
    """

    def __init__(
        self,
        task: Task,
        budget: Budget | None = None,
        store: Store | None = None,
        on_step: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
        waited: Callable[[], float] = lambda: 0.0,
    ):
        self.task, self.store, self.on_step = task, store, on_step
        self.ledger = Ledger(budget or Budget(), clock, clock() if began is None else began, waited)
        self.state = State(task.start)
        self.cut = 0
        self.likely: Callable[[Observation], Action] | None = None
        self.seen: Observation | None = None
        self._library_least_s, self._library_share = 0.0, 0.5

    def fork(self, library_least_s: float = 0.0, library_share: float = 0.5) -> Session:
        """A branch: a state of its own, budget and best program shared.

        Args:
            library_least_s: seconds that a library may take to compile a patch of the branch, even where the budget
                leaves less.
            library_share: share of what is left beside a step and the final verification that it may take.
        """
        branch = copy.copy(self)
        branch._library_least_s, branch._library_share = library_least_s, library_share
        return branch

    def clone(self) -> Session:
        """An equal copy that shares nothing that changes."""
        twin = copy.copy(self)
        twin.ledger = self.ledger.clone()
        return twin

    def begin(self) -> Evaluation:
        """Judge the start program, once, or again where it is found wrong; steps are taken after that."""
        if self.ledger.start is None:
            self.tell("start", f"{self.task.name}: PyTorch, {len(self.task.start.regions)} regions")
            evaluation = self._judge(self.task.start)
            if evaluation.failure == "wrong":  # of PyTorch's own operators: other inputs may not make rounding grow
                self.ledger.known.clear()
                evaluation = self._judge(self.task.start)
            spent = {part: evaluation.seconds.get(part, 0.0) for part in FINAL}
            if self.task.by_region:  # steps are judged by region: only this one shows what the whole takes
                self.ledger.took.clear()
            if not self.task.estimated:
                self.ledger.milestone = spent["check"] + spent["time"]  # what results are held against is there then
                self.ledger.final = sum(times * spent[part] for part, times in FINAL.items())
            self.ledger.start = evaluation
            self._measured(evaluation)
            self.ledger.best = self.ledger.leader = self.state
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
        if ledger.seconds_left < self.needed_s() or ledger.seconds_left <= 0:
            return "seconds"
        return None

    def library_s(self) -> float | None:
        """Seconds that a library may take to compile the patch of a step; None for a budget without end.

        Half of what is left beside that step and the final verification: the search goes on with the other half. A
        branch may be given more (`fork`), as far as the wall limit allows.
        """
        ledger, needed = self.ledger, self.needed_s()
        spare = ledger.seconds_left - needed
        if math.isinf(spare):
            return None
        least = min(self._library_least_s, ledger.wall_left - 2 * ledger.waiting - needed)
        return max(spare * self._library_share, least, 0.0)

    def needed_s(self) -> float:
        """Seconds that all takes which still has its place, in this order: one more step is begun only if it fits.

        That step, those that are left for after the search, the final verification.
        """
        ledger = self.ledger
        return ledger.writing + (1 + ledger.later) * ledger.longest + self.final_s()

    def final_s(self) -> float:
        """Seconds that a final verification takes; none where a search only explores."""
        if self.ledger.explores:
            return 0.0
        return max(self.ledger.longest, self.ledger.final) + self._anew_s()

    def fits(self, evaluations: int = 0) -> bool:
        """Whether a final verification is expected to end before the wall limit, so many evaluations before it."""
        ledger = self.ledger
        return ledger.wall_left >= evaluations * (ledger.longest + ledger.waiting) + self.final_s() + ledger.waiting

    def check_time(self, evaluations: int = 0) -> None:
        """Called before a final verification; arguments as for `fits`.

        Raises:
            TimeUp: it does not fit.
        """
        if not self.fits(evaluations):
            raise TimeUp

    def _anew_s(self) -> float:
        """Seconds that a library takes in the final verification of the best program to compile it again."""
        best = self.ledger.best
        if best is None or best.evaluation is None or not warms_up(best.program):
            return 0.0
        return best.evaluation.seconds.get("compile", 0.0)

    def legal(self) -> list[Action]:
        """What applies to the present program and was not refused there."""
        program, legal = self.state.program, self.task.legal
        key = (program.digest, *(program.schedule(r) for r in program.regions), *kinds())
        if key not in legal:
            legal[key] = legal_actions(program, self.task.context, self.ledger.faults)
        return [a for a in legal[key] if a not in self.state.masked and a.kind not in self.ledger.reported]

    def offered(self) -> tuple[tuple[Action, ...], int]:
        """The actions to choose from, `stop` first, at most 256 (see `within_limit`); and how many were cut."""
        program, task = self.state.program, self.task
        found = [a for a in self.legal() if task.offers is None or task.offers(program, a)]
        if task.estimated:
            found = [a for a in found if a.param not in kind_named(a.kind).measured]
        ordered = order_actions(found, program, self.state.evaluation, task.context.device)
        return within_limit(ordered), max(0, len(ordered) - MAX_ACTIONS)

    def observe(self, steps_left: int | None = None) -> Observation:
        """What a planner sees now.

        Args:
            steps_left: the steps left, if the budget does not define them.
        """
        start = self.ledger.start
        best = self.ledger.best
        actions, self.cut = self.offered()
        self.seen = Observation(
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
        return self.seen

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
            self.settle()
            step = Step(action, None, True)
            self.state = replace(self.state, done=True, history=(*self.state.history, step))
            digest = self.state.program.digest
            stop = Attempt(action, None, True, text="stop", before_ms=self.state.ms, parent=digest, child=digest)
            self.ledger.attempts.append(stop)
            return step
        before = self.state
        text = text_of(action, before.program)
        step = self._attempt(action, instruction)
        gained = gain(step.evaluation, before.evaluation) if step.accepted else None
        names = before.program.digest, self.state.program.digest if step.accepted else ""
        attempt = Attempt(action, step.evaluation, step.accepted, step.patch_digest, text, before.ms, gained, *names)
        self.ledger.attempts.append(attempt)
        self.tell("done", f"{text}: {outcome_of(step, before, self.state)}")
        if is_due(self.state):
            self.settle()
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
        ledger.best = ledger.leader = best
        evaluation = replace(step.evaluation or Evaluation(Gate.PASSED), error=reason)
        ledger.attempts[-1] = replace(ledger.attempts[-1], accepted=False, gain=None, evaluation=evaluation)
        self._roll_back(replace(step, accepted=False, evaluation=evaluation))

    def settle(self) -> None:
        """Judge the present program as a whole where only its regions were judged; see `qimeng.envs.steps.milestones`.

        Steps that make it wrong are left out, and those after them taken again; all of them are left out where the wall
        limit leaves no time to look for those at fault.
        """
        for attempt in range(1 + CULPRITS):
            way = unsettled(self.state)
            if not way:
                return
            self.tell("try", f"milestone: the whole program after {len(self.state.path()) - 1} steps")
            found = self._judge(self.state.program)
            outcome = f"right, {self.state.ms or 0.0:.4g} -> {found.timing}" if found.ok else f"refused: {found.error}"
            self.tell("done", f"milestone: {outcome}")
            if found.ok:
                self._measured(found)
                return
            looks = attempt < CULPRITS and self.fits(len(way).bit_length() + 1)
            bad, found = bisected(way, found, self._judge) if looks else (0, found)
            self._refuse(way[bad], found)
            for state in way[bad + 1 :] if looks else ():
                if state.record is not None:
                    with suppress(IllegalAction, ReplayError, KeyError):  # it builds on what was left out
                        self._take_again(state.record)

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
        request = self.request(action, instruction)
        tried: set[str] = set()
        step, open_question = Step(action, None, False), False
        for _ in range(1 + self.ledger.budget.repairs):
            try:
                check_action(program, action, context)
                patch = self._patch(request)
            except (IllegalAction, CoderError) as error:
                if isinstance(error, KindFault):
                    self.ledger.faults[error.kind] = str(error)
                    self.ledger.reported.add(error.kind)
                elif isinstance(error, FamilyFault):
                    self.ledger.faults[error.family] = str(error)
                failure = "illegal" if isinstance(error, IllegalAction) else error.failure
                refused = Evaluation(Gate.WRITE, str(error), failure)
                open_question = open_question or not refused.lasting
                if request.failed is None:
                    step = Step(action, refused, False)
                    self.keep(program, step, None)
                break
            subject = subject_of(program, patch)
            if subject in tried:  # the coder has nothing new to offer
                break
            tried.add(subject)
            if patch.others:
                exactly = partial(self._patch, replace(request, mode="highest"))
                step = verify_parts(self, action, patch, exactly)
            else:
                step = self.verify(action, patch)
                self.keep(program, step, patch)
            open_question = patch.computes_otherwise and not self.is_known(program, patch)
            if step.accepted or self.exhausted() or self.state.program is not program:
                break
            assert step.evaluation is not None
            request = replace(request, failed=patch, reason=step.evaluation.error, refused=step.evaluation.chosen)
        if not step.accepted:
            self._roll_back(step, open_question)
        return step

    def _patch(self, request: Request) -> Patch:
        """The coder's patch, which may have been written ahead; that is taken once."""
        key = request.program.digest, request.action, request.mode
        ahead = self.ledger.written.pop(key, None) if request.failed is None else None
        return ahead or self.written(request)

    def request(self, action: Action, instruction: str = "") -> Request:
        """What the coder is asked for `action`, with what the user tells it."""
        context, state = self.task.context, self.state
        return Request(
            state.program,
            action,
            context.device,
            context.mode,
            history=state.history,
            evaluation=state.evaluation,
            instruction=instruction,
        )

    def written(self, request: Request) -> Patch:
        """The coder's patch. Anything else that the coder does becomes a `CoderError`."""
        ledger, coder = self.ledger, self.task.context.coder
        began = ledger.clock()
        try:
            rewrite = kind_named(request.action.kind).apply(request.program, request.action, self.task.context)
            if rewrite.each:
                patch = each_lowered(replace(request, seconds_left=ledger.seconds_left), rewrite, coder)
            elif rewrite.to_write is None:
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

    def verify(self, action: Action, patch: Patch) -> Step:
        """Judge `patch` (another partition alone needs no judge) and advance where it is right."""
        before = self.state
        if not patch.computes_otherwise:
            if patch.regions is None:
                return Step(action, Evaluation(Gate.WRITE, "the coder returned an empty patch", "coder"), False)
            program = patch.apply(before.program)
            step = Step(action, None, True, patch.digest())
            known = carried(before.program, program, self._shared_out(before), self.task.context.device)
            self._advance(program, known, step, RecipeStep.of(action, patch, ms=known.ms if known else None), False)
            return step
        note = f"{text_of(action, before.program)}: {patch.note}" if patch.note else text_of(action, before.program)
        self.tell("try", note)
        on_region = self.task.by_region and is_on_region(before.program, patch)
        if not on_region:
            self.settle()  # what is judged as a whole should fail for its own faults
            if self.state.program is not before.program:
                return Step(action, Evaluation(Gate.PROGRAM, ROLLED_BACK, "rolled-back"), False, patch.digest())
        prepare_next(self, action, patch)
        evaluation = self._judge(before.program, patch, Asked.REGION if on_region else Asked.TIMING)
        if not evaluation.ok:
            return Step(action, evaluation, False, patch.digest())
        program, judged = patch.apply(before.program, evaluation.chosen), evaluation.scope is Scope.PROGRAM
        if judged and self.task.by_region:
            note_measured(self.ledger.torch_ms, program, evaluation, self.task.context.device)
        elif not judged:
            target, device = program.region(patch.target or ""), self.task.context.device
            evaluation = summed(evaluation, before, program, target, self.ledger.torch_ms, device)
        if (left := Unchosen.of(before, action, patch, evaluation.chosen)) is not None:
            self.ledger.unchosen[program.digest] = left
        step, ms = Step(action, evaluation, True, patch.digest(evaluation.chosen)), evaluation.ms if judged else None
        self._advance(program, evaluation, step, RecipeStep.of(action, patch, evaluation.chosen, ms), judged)
        return step

    def assume(self, action: Action, patch: Patch) -> None:
        """Go on as if `patch` were right, its first alternative chosen: for a fork that looks ahead."""
        before, program = self.state, patch.apply(self.state.program)
        known = carried(before.program, program, self._shared_out(before), self.task.context.device)
        masked = self.ledger.refused.get(program.digest, frozenset()) | self._taken(program, action)
        history = (*before.history, Step(action, None, True, patch.digest()))
        self.state = State(program, known, before, RecipeStep.of(action, patch), history, masked)

    def _advance(
        self, program: Program, evaluation: Evaluation | None, step: Step, record: RecipeStep, judged: bool
    ) -> None:
        masked = self.ledger.still_refused(self.state.program, program) | self._taken(program, step.action)
        history = (*self.state.history, step)
        self.state = State(program, evaluation, self.state, record, history, masked, judged)
        self._rank(judged)

    def _rank(self, judged: bool) -> None:
        """Note where the present state is the one to prefer: among those judged as a whole, and among all."""
        ledger, evaluation = self.ledger, self.state.evaluation
        if evaluation is None or not (judged or self.state.is_sum):
            return
        if judged and preferred(evaluation, ledger.best.evaluation if ledger.best else None):
            ledger.best = self.state
        if preferred(evaluation, ledger.leader.evaluation if ledger.leader else None):
            ledger.leader = self.state

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

    # ---- judging, and milestones
    def _judge(self, program: Program, patch: Patch | None = None, asked: Asked = Asked.TIMING) -> Evaluation:
        """What the judge says of a program, or of a patch on it; what is known is not asked again."""
        ledger = self.ledger
        alone, subject = self._names(program, patch)
        alone = alone if asked is Asked.REGION else subject
        for known in (alone, subject):
            if ledger.settled(known):
                return ledger.known[known]
        began, waited = ledger.clock(), ledger.waited()
        library_s = None if patch is None else self.library_s()  # without a patch, it is there or was compiled before
        evaluation = self.task.judged(program, patch, asked, ledger.submitted, library_s)
        waited = ledger.waited() - waited
        took = ledger.clock() - began - waited
        ledger.waiting = ledger.waited() / (ledger.evaluations + 1)
        if patch is not None and (patch.others or warms_up(patch.apply(program, evaluation.chosen))):
            spent = evaluation.seconds  # later programs have most of these kernels
            took -= min(took, spent.get("compile", 0.0) + spent.get("library", 0.0))
        elif self.task.evaluator.prepares:  # most of the next ones are compiled ahead
            took -= max(0.0, evaluation.seconds.get("compile", 0.0) - COMPILE_S)
        ledger.took.append(took)
        ledger.evaluations += 1
        key = subject if evaluation.scope is Scope.PROGRAM else alone
        ledger.known[key] = evaluation
        if not evaluation.lasting:
            ledger.accidents[key] = ledger.accidents.get(key, 0) + 1
        if key != subject and evaluation.ok and patch is not None:
            chosen, _ = self._names(program, patch.only(evaluation.chosen))
            ledger.known.setdefault(chosen, replace(evaluation, chosen=0))
        return evaluation

    def is_known(self, program: Program, patch: Patch) -> bool:
        """Whether the judge's answer about a patch is known already."""
        return any(map(self.ledger.settled, self._names(program, patch)))

    def _names(self, program: Program, patch: Patch | None) -> tuple[str, str]:
        """What findings about a patch are kept under: for its region alone, and for the whole program."""
        subject = subject_of(program, patch)
        if patch is None or not (self.task.by_region and is_on_region(program, patch)):
            return subject, subject
        return self.task.request(program, patch, Asked.REGION).region_subject, subject

    def _shared_out(self, state: State) -> Evaluation | None:
        """The evaluation of `state`; in a network the times of its regions add up to the program's."""
        if state.evaluation is None or not self.task.by_region:
            return state.evaluation
        times = shared_out(state.program, state.evaluation, self.task.context.device)
        return replace(state.evaluation, region_ms=times)

    def _measured(self, evaluation: Evaluation) -> None:
        """The present program was judged as a whole."""
        record = self.state.record
        if evaluation.ok:
            if self.task.by_region:
                note_measured(self.ledger.torch_ms, self.state.program, evaluation, self.task.context.device)
            record = None if record is None else replace(record, ms=evaluation.ms)
        if self.ledger.leader is self.state:  # its sum was a guess
            self.ledger.leader = self.ledger.best
        self.state = replace(self.state, evaluation=evaluation, record=record, judged=True)
        if evaluation.ok:
            self._rank(True)

    def _refuse(self, culprit: State, evaluation: Evaluation) -> None:
        """Go back to before `culprit`, the result of a step that passed alone and is refused as part of the whole.

        Args:
            culprit: on the path of the present state.
            evaluation: of the whole program with it.
        """
        ledger, record, parent = self.ledger, culprit.record, culprit.parent
        assert record is not None and parent is not None
        self.tell("done", f"{text_of(record.action, parent.program)}: refused as part of the whole: {evaluation.error}")
        error = f"right alone, refused in the whole program: {evaluation.error}"
        failed = replace(evaluation, error=error)
        patch = record.patch.patch(parent.program.graph)
        ledger.known[self._names(parent.program, patch)[0]] = failed
        digest = parent.program.digest
        ledger.refused[digest] = ledger.refused.get(digest, frozenset()) | {record.action}

        def is_it(step: Step) -> bool:
            return step.accepted and step.action == record.action and step.patch_digest == record.digest

        ledger.attempts[:] = [
            replace(a, accepted=False, gain=None, evaluation=failed) if is_it(a) else a for a in ledger.attempts
        ]
        history = tuple(replace(s, accepted=False, evaluation=failed) if is_it(s) else s for s in self.state.history)
        known = ledger.known.get(digest)
        self.state = replace(parent, history=history, masked=ledger.refused[digest])
        if known is not None and known.ok and not parent.judged:
            self._measured(known)
        ledger.leader = ledger.best

    def _take_again(self, record: RecipeStep) -> None:
        """Take a step of a recipe on the present program; nothing is written, and what was judged is not judged again.

        Raises:
            IllegalAction: it does not apply.
            ReplayError: likewise.
        """
        history = self.state.history
        self.verify(record.action, record.patch.patch(self.state.program.graph))
        self.state = replace(self.state, history=history)

    def keep(self, parent: Program, step: Step, patch: Patch | None) -> None:
        """Keep the attempt in the store, accepted or not."""
        if self.store is not None:
            child = self.state.program if step.accepted else None
            alone = None
            if step.evaluation is not None and step.evaluation.scope is not Scope.PROGRAM and patch is not None:
                alone = self.ledger.known[self._names(parent, patch)[0]]
            put_attempt(self.store, self.task.conditions, parent, step, patch, child, alone)


__all__ = ["Session"]
