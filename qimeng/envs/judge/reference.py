"""The reference: float64 results, eager's own error, and the budget that follows.

Deals in one specification: makes trials (inputs and parameters from secret seeds, with what the outputs should be).
It stays in the judge's process. A worker gets only the seeds of the current trial. Knows nothing about candidates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from qimeng.envs.cost.memory_plan import Plan, Sizes, device_bytes, free_host_bytes, memory_plan
from qimeng.envs.cost.roofline import product_flops
from qimeng.envs.errors import accuracy, discrete
from qimeng.envs.errors.accuracy import Error, Expected
from qimeng.envs.errors.degenerate import degenerate
from qimeng.envs.errors.extreme_inputs import ATTEMPTS, overflowing, says_nothing
from qimeng.envs.errors.float64 import NEARBY, NamedAsDouble, Near, aliases, nearby, tensors_in, to_double
from qimeng.envs.errors.nearby_inputs import most_nearby, second_look
from qimeng.envs.errors.selection import selected_values
from qimeng.envs.judge.accepted_values import refused_distributions, takes_other_buffers
from qimeng.envs.judge.random_operators import Draws, can_repeat, draws_of, random_operators, repeating
from qimeng.envs.judge.spec_notes import remarks_on
from qimeng.envs.judge.trials import Trial, TrialPool
from qimeng.envs.workers import tensor_bits
from qimeng.envs.workers.modes import precision
from qimeng.envs.workers.outputs import Facts, describe
from qimeng.envs.workers.stopwatch import FRESH_SHARE
from qimeng.envs.workers.worker_setup import Draw, Parameters
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import longest_reduction
from qimeng.graph.zeros import zeros_are_signed
from qimeng.spec import KernelSpec
from qimeng.spec.distributions import EXAMPLES, SECRET_SIZE, WILD, distributions_of
from qimeng.spec.patience import patience
from qimeng.spec.perturb import SHARES, seed_of
from qimeng.spec.seeding import seed_generators
from qimeng.spec.together import tied

NOT_FINITE_LIMIT = 0.01
"""Largest share of values that are not finite. A distribution above it is dropped; extreme ones have their own rule
(`qimeng.envs.errors.extreme_inputs`)."""


class References:
    """Trials of one specification.

    Args:
        spec: the specification.
        graph: its graph, for the longest reduction; None where it has none.
        device: where everything is computed.
        draw_seed: source of secret seeds.
        arithmetic: the context in which eager runs in a precision mode: PyTorch's flags, or what stands for them where
            eager runs on another machine than the one that is meant.

    Attributes:
        kind: ``"float64"``, or ``"eager-highest"`` where float64 does not run or its random operators cannot be
            given eager's draws.
        facts: structure of eager's output.
        dropped: distributions that are not used, since over 1 % of the values are not finite or the module raises.
        distributions: those that change some input, ``"given"`` first.
        eager_agrees: whether eager run twice passes KernelBench's own rule; None before the first trial.
        exact_agrees: whether the float64 result itself passes that rule against eager; None where it was not checked.
        input_bytes: of one set of inputs.
        input_sets: sets of inputs that a worker may hold at a time.
        degenerate: why the result can be guessed (see `qimeng.envs.errors.degenerate`), or an empty string.
        random: names of the operators that draw random numbers, where the result depends on them.
        mode_matters: whether the module computes something else in evaluation mode than in training mode.
        plan: how memory is used.
    """

    def __init__(
        self,
        spec: KernelSpec,
        graph: OpGraph | None,
        device: torch.device,
        draw_seed: Callable[[], int] = lambda: random.SystemRandom().getrandbits(62),
        arithmetic: Callable[[str], AbstractContextManager[None]] = precision,
        between: Callable[[], None] = lambda: None,
    ):
        self.spec, self.device, self.draw_seed, self.arithmetic = spec, device, draw_seed, arithmetic
        self._between = between
        self.kind = "float64"
        self.facts = Facts("", ())
        self.mutated: tuple[str, ...] = ()
        self.eager_agrees: bool | None = None
        self.exact_agrees: bool | None = None
        self.degenerate = ""
        self.random: tuple[str, ...] = ()
        self.input_bytes = 0
        self.mode_matters = False
        self.longest_reduction = longest_reduction(graph) if graph is not None and graph.nodes else 0
        self._terms = self.longest_reduction
        self.parameters = Parameters(spec, device)
        self.exact: torch.nn.Module | None = None
        self.input_sets = 1
        self._jumps: bool | None = None  # unknown
        self._keeps_signs, self._other_buffers = True, False  # until `_look` knows
        self._known_updates = {key for key, _ in graph.mutations} if graph is not None else set()
        self._signed = graph is not None and bool(graph.nodes) and zeros_are_signed(graph)
        if graph is not None and graph.nodes:
            self._jumps = discrete.may_jump(graph, graph.ops())
        self._moved: dict[str, list[Error]] = {}  # by distribution: over so many elements all draws have the same
        self._flop = sum(product_flops(graph, n) for n in graph.ops()) if graph is not None and graph.nodes else None
        has_parameters = next(self.parameters.module.parameters(), None) is not None
        self.distributions = distributions_of(spec.domains, has_parameters)
        self.dropped = refused_distributions(spec, self.distributions)
        self.plan = self._look()
        self._pool = TrialPool(self.plan.pool_bytes)

    @property
    def has_state(self) -> bool:
        """True where the module has parameters or buffers."""
        return bool(self.parameters.module.state_dict())

    @property
    def output_bytes(self) -> list[int]:
        """Bytes of each output tensor."""
        return [leaf.bytes for leaf in self.facts.leaves if leaf.is_tensor]

    @property
    def output_sets(self) -> int:
        """Outputs of calls that a worker may hold at a time."""
        return max(1, device_bytes(self.device) // FRESH_SHARE // max(sum(self.output_bytes), 1))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is to be said of the specification beside every result, in sentences."""
        found = remarks_on(self.spec, self.degenerate, self.random, self.kind == "float64", self.mode_matters)
        return found if self.plan.way == "device" else (*found, f"memory: {self.plan}")

    def trials(self, count: int) -> Iterable[Trial]:
        """Trials one after the other: the user's own values, as given with other parameters, then other inputs.

        The first change is of a single row of each parameter, the shares of the later ones take turns.
        """
        others = [1 + number % (len(SHARES) - 1) for number in range(max(count, len(self.distributions)))]
        kinds = [k for k in zip(self.distributions[1:], others, strict=False) if k[0] not in self.dropped]
        random.SystemRandom().shuffle(kinds)
        given: list[Draw] = []
        first: list[tuple[str, int | None]] = [(EXAMPLES, None), ("given", 0)]
        for distribution, share in [*first, *kinds, *(("given", other) for other in others)]:
            if len(given) == count:
                return
            trial = self._draw(distribution, share if self.has_state else None, given)
            if trial is not None:
                given.append(trial.draw)
                yield trial
            del trial  # its memory may be what the next one needs

    def fresh(self, count: int) -> Iterable[Trial]:
        """New trials on inputs as given, which no process has seen."""
        for _ in range(count):
            trial = self.make(self._new_draw("given", self.parameter_seed()))
            if trial is not None:
                yield trial
            del trial

    def every_distribution(self) -> Iterable[Trial]:
        """New trials: the user's own values; with other parameters each distribution, those of secret size twice."""
        again, tried = [d for d in self.distributions if d in SECRET_SIZE], set()
        for distribution, perturbed in [(EXAMPLES, False), *((d, True) for d in (*self.distributions, *again))]:
            if distribution in self.dropped:
                continue
            trial = self._made(distribution, perturbed)
            if trial is not None:
                tried.add(distribution)
                yield trial
            elif distribution not in tried:
                self.dropped.add(distribution)
            del trial

    def _made(self, distribution: str, perturbed: bool) -> Trial | None:
        """A new trial. For extreme inputs, the first one on which eager's result is meaningful."""
        trial = None
        for _ in range(ATTEMPTS if distribution in WILD else 1):
            trial = trial or self.make(self._new_draw(distribution, self.parameter_seed() if perturbed else None))
        return trial

    def make(self, draw: Draw) -> Trial | None:
        """The trial for `draw`; None where its distribution has to be dropped."""
        try:
            return self._make(draw)
        finally:
            self.tidy()

    def keep(self, trial: Trial) -> None:
        """Let a trial that was made for one candidate serve later ones."""
        self._pool.keep(trial)

    def accepts_selection(self, trial: Trial, number: int, actual: torch.Tensor) -> bool:
        """Whether differing integers select values within the float budget.

        Args:
            trial: the trial.
            number: which output.
            actual: the candidate's indices.
        """
        state = self.parameters.set(trial.draw.parameter_seed)
        inputs = self.inputs(trial.draw)
        exact_inputs = to_double(inputs, self._place)
        module = self._exact_module(state)
        with torch.no_grad():
            exact = selected_values(module, exact_inputs, number, actual.to(self._place))
            with self.arithmetic(self.spec.mode):
                eager = selected_values(self.parameters.module, inputs, number, actual)
        if exact is None or eager is None:
            return False
        error = accuracy.measure(eager.best.to(self._place), exact.best)
        floor = accuracy.floor(eager.best.dtype, accuracy.roundings(self.longest_reduction), Error())
        return accuracy.measure(exact.chosen, exact.best).max <= Expected(exact.best, error, floor).budget.max

    def look_again(self, trial: Trial, number: int, actual: torch.Tensor, error: Error) -> Expected | None:
        """The accepted value of a tensor that is out of bounds; None if it is wrong.

        Args:
            trial: the trial.
            number: which of `trial.expected`.
            actual: what the candidate handed over.
            error: its error.
        """
        expected = trial.expected[number]
        if accuracy.is_float(expected.value):
            wider = second_look(error, lambda: trial.expected[number], lambda: self._look_nearby(trial))
            if wider is not None:
                return wider
            if trial.draw.distribution == "infinite" and accuracy.same_but_for_few(
                actual, expected, any_kind=number >= len(trial.outputs)
            ):
                return expected.excused(Error())
        elif number < len(trial.outputs) and self.accepts_selection(trial, number, actual):
            return expected
        if number < len(trial.outputs) and self._has_jumped(trial, number, actual):
            return expected.excused(error)
        return None

    def may_look_nearby(self, done: int, elements: int) -> bool:
        """Whether one more trial nearby is to be made, after `done` with so many elements of inputs and outputs."""
        return self.kind == "float64" and self.plan.way == "device" and done < most_nearby(elements)

    def near(self, done: int) -> Near:
        """Where to look next, after `done` trials nearby."""
        return Near(self.draw_seed(), NEARBY[done % len(NEARBY)])

    def release(self) -> None:
        """Give the memory of the pool and of the float64 module back."""
        self._pool.clear()
        self.exact = None
        self.tidy()

    # -- parts

    def _look(self) -> Plan:
        """Run eager a few times: output structure, changed buffers, random operators; the plan of memory."""
        draw = self._new_draw(EXAMPLES, None)
        inputs = self.inputs(draw)
        self.input_bytes = sum(x.nbytes for x in tensors_in(inputs))
        self.input_sets = max(1, device_bytes(self.device) // FRESH_SHARE // max(self.input_bytes, 1))
        self._input_elements = sum(x.numel() for x in tensors_in(inputs))
        self.parameters.set(None)
        first, peak = self._watched(partial(self._eager, inputs, draw.seed))
        held = {f"input {i}": x for i, x in enumerate(tensors_in(inputs))}
        held |= {f"parameter {k}": v for k, v in self.parameters.module.state_dict().items()}
        self.facts, tensors = describe(first, held)
        self.mutated = self._updated(partial(self._eager, inputs, draw.seed))
        self.parameters.set(None)
        self._between()
        second = tensors_in(self._eager(inputs, draw.seed))
        self.eager_agrees = all(accuracy.kernelbench_close(a, b) for a, b in zip(second, tensors, strict=True))
        self.parameters.set(None)
        self._between()
        output, names = random_operators(partial(self._eager, inputs, draw.seed + 1))
        other = tensors_in(output)
        if not self.longest_reduction:
            self._terms = max((x.numel() for x in tensors_in(inputs)), default=1)
            self.longest_reduction = max(math.isqrt(self._terms), 1)
        if any(accuracy.is_float(a) and accuracy.measure(b, a).max > 1e-3 for a, b in zip(tensors, other, strict=True)):
            self.random = names or ("unknown",)
            self.kind = self.kind if can_repeat(self.random) else "eager-highest"
        del second, other, output
        self._between()
        if not self.random:
            self.mode_matters = self._in_other_mode_differs(inputs, draw.seed, tensors)
        self._keeps_signs = self.has_state and self._needs_signs(inputs)
        if next(self.parameters.module.buffers(), None) is not None:
            self._other_buffers = takes_other_buffers(self.spec)
        self._between()
        plan = self._planned(inputs, tensors, peak)
        has_inputs = bool(tensors_in(inputs))
        del inputs, held, first  # others are about to be made
        self.degenerate = degenerate(tensors, self._other_outputs if has_inputs else None)
        self.tidy()
        return plan

    def _updated(self, run: Callable[[], Any]) -> tuple[str, ...]:
        """Names of parameters and buffers that a call updates: those of the graph, and what is seen to change.

        One call is not enough: a mean that cancels to 0 leaves a running mean of 0 unchanged. So other parameters are
        tried too.
        """
        found = set(self._known_updates)
        if any(True for _ in self.parameters.module.buffers()):
            for seed in (None, self._parameter_seed(SHARES.index(1.0))):
                before = {k: v.clone() for k, v in self.parameters.set(seed).items()}
                run()
                after = self.parameters.module.state_dict()
                found |= {k for k, v in after.items() if not tensor_bits.same(v, before[k])}
        return tuple(k for k in self.parameters.module.state_dict() if k in found)

    def _watched(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """What `run` returns, and the bytes that it held at its peak; 0 on the CPU."""
        if self.device.type != "cuda":
            return run(), 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        return run(), int(torch.cuda.max_memory_allocated(self.device)) - before

    def _planned(self, inputs: Sequence[Any], tensors: Sequence[torch.Tensor], peak: int) -> Plan:
        """How to use memory for inputs and outputs like these, with `peak` bytes held by a call."""
        outputs = sum(x.nbytes for x in tensors)
        sizes = Sizes(
            inputs=sum(x.nbytes for x in tensors_in(inputs)),
            state=sum(x.nbytes for x in self.parameters.module.state_dict().values()),
            outputs=outputs,
            temporaries=max(peak - outputs, 0),
            itemsize=min(getattr(torch, self.spec.dtype).itemsize, 8),
            flop=self._flop,
        )
        host = free_host_bytes()
        plan = memory_plan(sizes, device_bytes(self.device) if self.device.type == "cuda" else max(host, 1 << 33), host)
        if plan.way == "none" and self.kind == "float64":
            self.kind = "eager-highest"
        return plan

    def _in_other_mode_differs(self, inputs: Sequence[Any], seed: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether eager computes something else in evaluation mode than in training mode."""
        module = self.parameters.module
        self.parameters.set(None)
        modes = [(part, part.training) for part in module.modules()]  # parts may be frozen
        module.train(not self.spec.training)
        try:
            other = tensors_in(self._eager(inputs, seed))
            pairs = zip(other, tensors, strict=True)
            return not all(accuracy.kernelbench_close(a, b) for a, b in pairs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # it does not run in that mode
            return True
        finally:
            for part, training in modes:
                part.training = training
            self.parameters.set(None)

    def _other_outputs(self) -> list[torch.Tensor]:
        """What eager makes of other inputs."""
        draw = self._new_draw("given", None)
        self.parameters.set(None)
        return tensors_in(self._eager(self.inputs(draw), draw.seed))

    def _draw(self, distribution: str, share: int | None, given: Sequence[Draw]) -> Trial | None:
        """A trial of this kind from the pool, or a new one; none of `given`, which this candidate gets already."""
        trial = self._pool.take((distribution, share), given)
        if trial is None:
            seed = None if share is None else self._parameter_seed(share)
            trial = self.make(self._new_draw(distribution, seed))
            if trial is not None:
                self.keep(trial)
        return trial

    def _new_draw(self, distribution: str, parameter_seed: int | None) -> Draw:
        seed = self.draw_seed()
        return Draw(seed, distribution, parameter_seed and tied(parameter_seed, distribution, seed))

    def parameter_seed(self) -> int | None:
        """A new seed of a change to the parameters; None where there are none."""
        return self._parameter_seed(self.draw_seed() % len(SHARES)) if self.has_state else None

    def _parameter_seed(self, share: int) -> int:
        """A new seed of a change to `SHARES[share]` of the rows; signs, masks and constants stay where those must."""
        draw = self.draw_seed()
        signs, fixed = not self._keeps_signs and draw % 2 > 0, self._other_buffers and draw // 2 % 2 > 0
        return seed_of(self.draw_seed() >> 8, share, signs, fixed)

    def _needs_signs(self, inputs: Sequence[Any]) -> bool:
        """Whether other signs of parameters (under a root, say) give values that are not finite."""
        shares = []
        for seed in (2, 3):
            self.parameters.set(seed)
            made = [x for x in tensors_in(self._eager(inputs, seed)) if accuracy.is_float(x)]
            shares.append(max((accuracy.not_finite_share(x, x) for x in made), default=0.0))
        self.parameters.set(None)
        return shares[1] > shares[0]

    def inputs(self, draw: Draw, near: Near | None = None) -> tuple[Any, ...]:
        """The specification's inputs for `draw`, or others near them."""
        made = self.spec.inputs(draw.seed, str(self.device), draw.distribution)
        return made if near is None else nearby(made, self.spec.domains, near)

    def _eager(self, inputs: Sequence[Any], seed: int, mode: str | None = None) -> Any:
        seed_generators(seed)
        with torch.no_grad(), self.arithmetic(mode or self.spec.mode), patience(f"{self.spec.name}: forward"):
            return self.parameters.module(*inputs)

    def _has_jumped(self, trial: Trial, number: int, actual: torch.Tensor) -> bool:
        """Whether what is out of bounds is a matter of rounding next to a threshold (`qimeng.envs.errors.discrete`)."""
        if self._jumps is False or self.kind != "float64" or self.random:
            return False
        dtype = getattr(torch, self.spec.dtype)

        def eager(mode: str) -> torch.Tensor:
            self.parameters.set(trial.draw.parameter_seed)
            return tensors_in(self._eager(self.inputs(trial.draw), trial.draw.seed, mode))[number]

        mode = discrete.rounding_mode(self.spec.mode, eager)

        def run() -> torch.Tensor:
            inputs = to_double(self.inputs(trial.draw), self._place)
            module = self._exact_module(self.parameters.set(trial.draw.parameter_seed))
            with torch.no_grad(), discrete.Rounding(dtype, mode, self.longest_reduction):
                return tensors_in(module(*inputs))[number]

        try:
            right = [eager(self.spec.mode)]
            with discrete.Dividing():
                right.append(eager(self.spec.mode))
            return discrete.explained(actual, trial.expected[number], right, run)
        except torch.OutOfMemoryError:
            return False
        finally:
            self.tidy()

    def _look_nearby(self, trial: Trial) -> bool:
        """Widen `trial` by one more on inputs nearby; False where no more are to be made."""
        elements = sum(e.value.numel() for e in trial.expected) + self._input_elements
        if not self.may_look_nearby(trial.nearby, elements):
            return False
        try:
            other = self._make(trial.draw, self.near(trial.nearby), trial)
        except torch.OutOfMemoryError:
            return False
        finally:
            self.tidy()
        if other is not None:
            trial.widen(other)
        return other is not None

    def _make(self, draw: Draw, near: Near | None = None, to: Trial | None = None) -> Trial | None:
        """The trial of `draw`, or of inputs near its own, held against the values of `to`."""
        exact, exact_buffers, moved = self._exact(draw, near)
        state = self.parameters.set(draw.parameter_seed)
        output, overflow = overflowing(draw.distribution, partial(self._eager, self.inputs(draw, near), draw.seed))
        tensors = tensors_in(output)
        outputs, buffers, shares = [], {}, [overflow]
        jumps = bool(self._jumps)
        for number, tensor in enumerate(tensors):
            at = to.outputs[number].value if to else None
            expected, share = self.expect(tensor, exact[number], moved[number], draw.distribution, jumps, at)
            exact[number] = torch.empty(0)  # as large as eager's output or twice that: gone as soon as it can be
            outputs.append(expected)
            shares.append(share)
        for key in self.mutated:
            at = to.buffers[key].value if to else None
            buffers[key], share = self.expect(
                state[key].clone(), exact_buffers[key], Error(), draw.distribution, jumps, at
            )
            shares.append(share)
        if draw.distribution in WILD:
            if says_nothing(draw.distribution, outputs, max(shares)):
                return None
        elif max(shares) > NOT_FINITE_LIMIT:
            self.dropped.add(draw.distribution)
            if draw.distribution not in (EXAMPLES, "given"):
                return None
        plain = draw.distribution == EXAMPLES and draw.parameter_seed is None and near is None
        if plain and self.kind == "float64":
            tolerance = self.spec.tolerances.kernelbench
            pairs = zip(outputs, tensors, strict=True)
            agree = all(accuracy.kernelbench_close(o.value, t, tolerance) for o, t in pairs)
            self.exact_agrees = agree and self.exact_agrees is not False
        return Trial(draw, outputs, buffers, tensors if plain else [])

    def expect(
        self,
        eager: torch.Tensor,
        exact: torch.Tensor,
        moved: Error,
        distribution: str,
        jumps: bool,
        at: torch.Tensor | None = None,
    ) -> tuple[Expected, float]:
        """What an output should be, and the share of its values that are not finite.

        Rounded inputs show errors for equal numbers and zeros. Eager is often exact on them, while another order of the
        same sums is not. So the floor is wide there.

        Args:
            eager: eager's output.
            exact: the float64 result.
            moved: change of that when the inputs move by one ulp.
            distribution: of the inputs.
            jumps: whether an element may jump (`qimeng.envs.errors.discrete`), which is no measure of the others.
            at: what the result is on the inputs that these are near to; eager's error is told relative to it. Where
                terms nearly cancel, errors are large beside what is left, and on inputs nearby more is left.
        """
        value = exact.to(eager.dtype)
        if not accuracy.is_float(eager):
            return Expected(value, eager=None if torch.equal(value, eager) else eager), 0.0
        tolerances = self.spec.tolerances
        independent = accuracy.roundings(self.longest_reduction)
        roundings = accuracy.roundings(self._terms, independent=False) if distribution == "rounded" else independent
        wider = moved * (roundings / independent)
        share = accuracy.not_finite_share(value, eager)
        floor = accuracy.floor(eager.dtype, roundings, wider, tolerances.floor_ulp)
        if share:
            error = accuracy.measure(eager, value, eager)
            return Expected(value, error, floor, eager, tolerances, self._signed), share
        error = discrete.error(eager, value, jumps)
        if at is not None and not eager.is_complex():
            there = discrete.error(at.double() + (eager.double() - value.double()), at.double(), jumps)
            error = there if math.isfinite(there.max) else error
        return Expected(value, error, floor, None, tolerances, self._signed), share

    def _exact(self, draw: Draw, near: Near | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Error]]:
        """Outputs and changed buffers in float64, and what one ulp of the inputs changes.

        Where memory is tight, the latter is found once for each distribution, which halves the time of a trial.
        """
        if self.kind == "float64":
            try:
                return self._in_double(draw, near)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                # float64 is refused by the spec or by PyTorch, or does not fit the memory
                self.kind = "eager-highest"
                self.exact = None
                self.tidy()
        self.parameters.set(draw.parameter_seed)
        output = tensors_in(self._eager(self.inputs(draw, near), draw.seed, "highest"))
        state = self.parameters.module.state_dict()
        return output, {k: state[k].clone() for k in self.mutated}, [Error()] * len(output)

    def _in_double(
        self, draw: Draw, near: Near | None
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Error]]:
        inputs = to_double(self.inputs(draw, near), self._place)
        draws: Draws | None = None
        if self.random:
            self.parameters.set(draw.parameter_seed)
            draws = draws_of(partial(self._eager, self.inputs(draw, near), draw.seed))
        module = self._exact_module(self.parameters.set(draw.parameter_seed))
        known = self._moved.get(draw.distribution) if self.plan.tidy else None
        with torch.no_grad():
            exact = [x.clone() if aliases(x, inputs) else x for x in _outputs(module, inputs, draws, self._jumps)]
            if any(x.is_floating_point() and x.dtype is not torch.float64 for x in exact):
                raise TypeError("the result is not float64")
            if self.plan.way != "device":  # rounded already: half an ulp more in what one ulp changes
                for number, leaf in enumerate(leaf for leaf in self.facts.leaves if leaf.is_tensor):
                    exact[number] = exact[number].to(getattr(torch, leaf.dtype))
            buffers = {k: module.state_dict()[k].clone().to(self.device) for k in self.mutated}
            if known is not None:
                return [x.to(self.device) for x in exact], buffers, known
            module = self._exact_module(self.parameters.set(draw.parameter_seed))
            with discrete.moved_by_an_ulp(inputs, getattr(torch, self.spec.dtype), bool(self._jumps)):
                other = _outputs(module, inputs, draws, self._jumps)
        moved = [discrete.error(b, a, bool(self._jumps)) for a, b in zip(exact, other, strict=True)]
        if draw.distribution not in WILD:
            self._moved[draw.distribution] = moved
        return [x.to(self.device) for x in exact], buffers, moved

    @property
    def _place(self) -> torch.device:
        """Where float64 results are made."""
        return torch.device("cpu") if self.plan.way == "host" else self.device

    def _exact_module(self, state: dict[str, torch.Tensor]) -> torch.nn.Module:
        if self.exact is None:
            self.exact = self.spec.module(str(self._place), torch.float64)
        self.exact.load_state_dict(state)
        return self.exact

    def tidy(self) -> None:
        """Give memory back that the worker may need."""
        if self.device.type == "cuda":
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if idle > 0.05 * device_bytes(self.device):
                torch.cuda.empty_cache()


def _outputs(
    module: torch.nn.Module, inputs: Sequence[Any], draws: Draws | None, jumps: bool | None
) -> list[torch.Tensor]:
    run = partial(module, *inputs)
    with NamedAsDouble() if jumps is False else nullcontext():
        return tensors_in(run() if draws is None else repeating(draws, run))


__all__ = ["NOT_FINITE_LIMIT", "References"]
