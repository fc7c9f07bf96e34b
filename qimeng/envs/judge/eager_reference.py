"""Eager as a reference: how a module behaves that nobody has optimized.

Deals in runs of one specification on PyTorch: structure, changed buffers, random operators, memory. Knows nothing about
float64 results or trials.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from qimeng.envs.cost.memory_plan import Plan, Sizes, device_bytes, free_bytes, free_host_bytes, memory_plan
from qimeng.envs.cost.roofline import product_flops
from qimeng.envs.errors import accuracy, discrete
from qimeng.envs.errors.degenerate import degenerate
from qimeng.envs.errors.float64 import Near, move_nearby, nearby, tensors_in
from qimeng.envs.judge.input_validity import (
    has_norms_alone,
    refused_distributions,
    takes_any_values,
    takes_other_buffers,
)
from qimeng.envs.judge.random_operators import can_repeat, random_operators
from qimeng.envs.judge.spec_notes import remarks_on
from qimeng.envs.workers.outputs import Facts, describe
from qimeng.envs.workers.small_tensors import copied_state, differing
from qimeng.envs.workers.stopwatch import FRESH_SHARE
from qimeng.envs.workers.worker_setup import Draw, Parameters
from qimeng.graph.opgraph import OpGraph, places_of
from qimeng.graph.ops import longest_reduction
from qimeng.graph.state import settled_nodes
from qimeng.graph.zeros import zeros_are_signed
from qimeng.spec import KernelSpec
from qimeng.spec.declared import weight_form
from qimeng.spec.distributions import EXAMPLES, distributions_of
from qimeng.spec.modes import precision
from qimeng.spec.patience import patience
from qimeng.spec.perturb import SHARES, seed_of
from qimeng.spec.seeding import seed_generators
from qimeng.spec.together import tied

WEIGHING = re.compile("softmax|scaled_dot_product")
"""Operators whose masks give weights of exactly zero."""


class InputsRefused(Exception):
    """The module raises an error of its own on inputs that were drawn for it; the message is that error."""


class EagerReference:
    """PyTorch's own results for one specification, and what a first look at them shows.

    Args:
        spec: the specification.
        graph: its graph, for the longest reduction; None where it has none.
        device: where everything is computed.
        draw_seed: source of secret seeds.
        arithmetic: the context in which eager runs in a precision mode: PyTorch's flags, or what stands for them where
            eager runs on another machine than the one that is meant.
        between: called between two runs.

    Attributes:
        kind: ``"float64"``, or ``"eager-highest"`` where float64 does not run or its random operators cannot be
            given eager's draws.
        weighs: whether weights may be exact zeros: those of a softmax under a mask, or pruned ones.
        no_double: why float64 does not run; empty where it does, or where nobody tried.
        facts: structure of eager's output.
        mutated: parameters and buffers that a call updates.
        dropped: distributions that are not used, since over 1 % of the values are not finite or the module raises.
        distributions: those that change some input, ``"given"`` first.
        eager_agrees: whether eager run twice passes KernelBench's own rule; None before the first trial.
        input_bytes: of one set of inputs.
        input_sets: sets of inputs that a worker may hold at a time.
        degenerate: why the result can be guessed (see `qimeng.envs.errors.degenerate`), or an empty string.
        random: names of the operators that draw random numbers, where the result depends on them.
        mode_matters: whether the module computes something else in evaluation mode than in training mode.
        longest_reduction: numbers that are summed up at most.
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
        self.no_double = ""
        self.facts = Facts("", ())
        self.mutated: tuple[str, ...] = ()
        self.eager_agrees: bool | None = None
        self.degenerate = ""
        self.random: tuple[str, ...] = ()
        self.input_bytes = 0
        self.mode_matters = False
        self.longest_reduction = longest_reduction(graph) if graph is not None and graph.nodes else 0
        self._terms = self.longest_reduction
        prunes = bool(spec.weights) and weight_form(spec.weights).prunes
        self.weighs = prunes or graph is not None and any(WEIGHING.search(n.packet) for n in graph.ops())
        self._sums = self.longest_reduction > 1
        self.parameters = Parameters(spec, device)
        self.input_sets = 1
        self._jumps: bool | None = None  # unknown
        self._keeps_signs, self._other_buffers = True, False  # until `_look` knows
        around = graph.around if graph is not None else None
        self._updating = places_of(graph.outputs, around.updates) if graph is not None and around else frozenset()
        self._known_updates = {key for key, _ in graph.mutations} if graph is not None else set()
        self._signed = graph is not None and bool(graph.nodes) and zeros_are_signed(graph)
        if graph is not None and graph.nodes:
            settled = settled_nodes(graph)  # the same in every run: a declared form of weights jumps for no result
            self._jumps = discrete.may_jump(graph, [n for n in graph.ops() if n.name not in settled])
        self._flop = sum(product_flops(graph, n) for n in graph.ops()) if graph is not None and graph.nodes else None
        has_parameters = next(self.parameters.module.parameters(), None) is not None
        self.distributions = distributions_of(spec.domains, has_parameters)
        self._any_values = takes_any_values(graph)
        self.dropped = set() if self._any_values else refused_distributions(spec, self.distributions)
        self._has_norms_alone = graph is not None and self._any_values and has_norms_alone(graph)
        self._failed: Plan | None = None
        self.plan = self._look()

    @property
    def has_state(self) -> bool:
        """True where the module has parameters or buffers."""
        return bool(self.parameters.module.state_dict())

    @property
    def is_smooth(self) -> bool:
        """Whether two runs on the same inputs differ by roundings alone: nothing is drawn at random, nothing jumps."""
        return self._jumps is False and not self.random

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
        if self.no_double:
            found = (*found, f"held against PyTorch's own results: float64 failed ({self.no_double})")
        return found if self.plan.way == "device" else (*found, f"memory: {self.plan}")

    def inputs(self, draw: Draw, near: Near | None = None) -> tuple[Any, ...]:
        """The specification's inputs for `draw`, or others near them."""
        made = self.spec.inputs(draw.seed, str(self.device), draw.distribution)
        return made if near is None else nearby(made, self.spec.domains, near)

    def state(self, draw: Draw, near: Near | None = None) -> dict[str, torch.Tensor]:
        """Set parameters and buffers to those of `draw`, or near them; the module's own tensors."""
        state = self.parameters.set(draw.parameter_seed)
        if near is not None:
            move_nearby(self.parameters.module, near)
        return state

    def parameter_seed(self) -> int | None:
        """A new seed of a change to the parameters; None where there are none."""
        return self._parameter_seed(self.draw_seed() % len(SHARES)) if self.has_state else None

    def timed_parameter_seed(self) -> int | None:
        """The same for calls that are timed: masks, tables of integers and constants stay as they are.

        A kernel skips what a mask hides, so its time depends on the mask.
        """
        return self._parameter_seed(self.draw_seed() % len(SHARES), may_move=False) if self.has_state else None

    def timed_draw(self) -> Draw:
        """New inputs and parameters of the kind that timed calls have."""
        return self._new_draw("given", self.timed_parameter_seed())

    def fit(self) -> bool:
        """Take the quickest plan for which others leave enough of the device.

        False where none is left that makes float64 results there, but one would be if they left more.
        """
        free = free_bytes(self.device)
        if free is None or self.plan.way == "none":
            return True
        host = free_host_bytes()
        wanted = memory_plan(self._sizes, self._room, host, self._failed, free)
        alone = memory_plan(self._sizes, self._room, host, self._failed)
        if wanted.way in ("host", "none") and wanted.way != alone.way:
            return False
        if wanted.key != self.plan.key:
            self._take(wanted)
        return True

    def economize(self) -> bool:
        """Take the next plan, after the memory ran out; False where there is none."""
        if self.plan.way == "none":
            return False
        self._failed = self.plan
        self._take(memory_plan(self._sizes, self._room, free_host_bytes(), after=self.plan))
        return True

    @property
    def has_smaller_plan(self) -> bool:
        """Whether a plan of less memory is left that makes float64 results on the device."""
        plan = (
            memory_plan(self._sizes, self._room, free_host_bytes(), after=self.plan)
            if self.plan.way != "none"
            else None
        )
        return plan is not None and plan.way not in ("host", "none")

    def tidy(self) -> None:
        """Give memory back that the worker may need."""
        if self.device.type == "cuda":
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if idle > 0.05 * device_bytes(self.device):
                torch.cuda.empty_cache()

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
        del second  # outputs may be most of what fits
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
        del other, output
        self._between()
        if not self.random:
            self.mode_matters = self._in_other_mode_differs(inputs, draw.seed, tensors)
        self._keeps_signs = self.has_state and self._needs_signs(inputs)
        if next(self.parameters.module.buffers(), None) is not None:
            self._other_buffers = self._has_norms_alone or self._takes_other_buffers(inputs)
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
                before = copied_state(self.parameters.set(seed))
                if seed is None:
                    run()
                elif _unless_refused(run) is None:
                    continue
                after = self.parameters.module.state_dict()
                names = list(after)
                found |= {names[i] for i in differing([*after.values()], [before[k] for k in names])}
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
            rows=self._rows_of(inputs),
        )
        host = free_host_bytes()
        self._sizes, self._room = sizes, device_bytes(self.device) if self.device.type == "cuda" else max(host, 1 << 33)
        return self._with_plan(memory_plan(sizes, self._room, host))

    def _rows_of(self, inputs: Sequence[Any]) -> int:
        """Rows that the computation may keep apart: of its first input; 1 where it certainly mixes them."""
        first = next(iter(tensors_in(inputs)), None)
        mixed = self._jumps is not False or self.random or self.mutated
        return 1 if first is None or mixed or not first.dim() else first.shape[0]

    def _take(self, plan: Plan) -> None:
        """Go on with another plan."""
        self.plan = self._with_plan(plan)

    def _with_plan(self, plan: Plan) -> Plan:
        """`plan`, with the kind of reference that it leaves."""
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

    def _other_outputs(self) -> list[torch.Tensor] | None:
        """What eager makes of other inputs; None where it refuses those that are tried."""
        self.parameters.set(None)
        for _ in range(3):
            draw = self._new_draw("given", None)
            output = _unless_refused(partial(self._eager, self.inputs(draw), draw.seed))
            if output is not None:
                return tensors_in(output)
        return None

    def _new_draw(self, distribution: str, parameter_seed: int | None) -> Draw:
        seed = self.draw_seed()
        return Draw(seed, distribution, parameter_seed and tied(parameter_seed, distribution, seed))

    def _parameter_seed(self, share: int, may_move: bool = True) -> int:
        """A new seed of a change to `SHARES[share]` of the rows; signs, masks and constants stay where those must.

        Args:
            share: which of `SHARES`.
            may_move: whether masks, tables of integers and constants may change.
        """
        draw = self.draw_seed()
        signs, fixed = not self._keeps_signs and draw % 2 > 0, self._other_buffers and draw // 2 % 2 > 0
        fixed = fixed and may_move
        return seed_of(self.draw_seed() >> 8, share, signs, fixed)

    def _needs_signs(self, inputs: Sequence[Any]) -> bool:
        """Whether other signs of parameters (under a root, say) give values that are not finite."""
        shares = []
        for seed in (2, 3):
            self.parameters.set(seed)
            output = _unless_refused(partial(self._eager, inputs, seed))
            made = [x for x in tensors_in(output) if accuracy.is_float(x)]
            share = max((accuracy.not_finite_share(x, x) for x in made), default=0.0)
            shares.append(1.0 if output is None else share)
        self.parameters.set(None)
        return shares[1] > shares[0]

    def _takes_other_buffers(self, inputs: Sequence[Any]) -> bool:
        """Whether other constants, masks and integers among the buffers give as few values that are not finite.

        A long computation is tried here, at its own size, and not at all where an operator may look at values.
        """
        if not (self.spec.is_long and self.device.type == "cuda"):
            return takes_other_buffers(self.spec)
        if not self._any_values:
            return False
        counts = []
        for seed in (None, *(seed_of(number, share=1, fixed=True) for number in range(2))):
            self.parameters.set(seed)
            made = tensors_in(_unless_refused(partial(self._eager, inputs, 1)))
            counts.append(sum(int((~x.isfinite()).sum()) for x in made if accuracy.is_float(x)) if made else math.inf)
        self.parameters.set(None)
        return max(counts[1:]) <= counts[0] < math.inf

    def _eager(self, inputs: Sequence[Any], seed: int, mode: str | None = None) -> Any:
        seed_generators(seed)
        with torch.no_grad(), self.arithmetic(mode or self.spec.mode), patience(f"{self.spec.name}: forward"):
            return self.parameters.module(*inputs)


def _unless_refused(run: Callable[[], Any]) -> Any:
    """What the user's module returns; None where it raises an error of its own."""
    try:
        return run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:  # noqa: BLE001  the user's module may raise anything
        return None


__all__ = ["EagerReference", "InputsRefused"]
