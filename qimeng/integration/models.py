"""Whole models: find the submodules that matter, optimize equal ones once, let them run the programs.

Deals in one model and its example calls. Knows nothing about how one part is optimized: that is `plan_and_code`.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qimeng.api import check_options, plan_and_code
from qimeng.arguments import check_budget, check_callable, check_keywords, names_of
from qimeng.device import Device
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.setup import make_coder, make_device
from qimeng.errors import QimengError, SpecError
from qimeng.graph.capture import CaptureError
from qimeng.integration.cache import ResultCache, cache_key
from qimeng.integration.calls import hollow, key_of, tensors_of
from qimeng.integration.copies import same_buffers, shared_copy
from qimeng.integration.dispatch import FallbackWarning, attach, own_code
from qimeng.integration.operator import Outputs
from qimeng.integration.parts import Part, choose
from qimeng.integration.profile import Visit, arguments, visits
from qimeng.integration.record import PartReport, Record
from qimeng.integration.settle import settle
from qimeng.integration.variant import Variant
from qimeng.planner import PLANNER, SEARCH, make_search
from qimeng.planner.lm.disk_cache import version
from qimeng.program.load import load_source
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.patience import together, within

LEAST_SECONDS = 10.0
"""Seconds below which no search is begun."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def optimize(
    module: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | list[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    seconds: float = 300.0,
    parts: Sequence[str] = (),
    inplace: bool = False,
    cache: bool | str | Path = True,
    device: str | Device | torch.device | None = None,
    mode: str | None = None,
    on_part: Callable[[PartReport], None] | None = None,
    **options: Any,
) -> nn.Module:
    """Make a whole model faster: a model of the same class that shares its parameters and runs generated programs.

    A small model is optimized as a whole. In a larger one, a call is watched, and the submodules that are repeated and
    take most of the time are optimized, equal ones once. A program runs for calls like the examples: same shapes,
    strides, dtypes, other arguments and mode, without gradients. Any other call runs the module's own code, and a
    `FallbackWarning` says why once. So training, `state_dict`, `load_state_dict`, `to`, `half`, hooks around the
    module, `torch.compile` and `torch.export` work as before.

    Args:
        module: the model, in the mode in which it will be called (``model.eval()`` for inference).
        example_inputs: of a call: a tuple of positional inputs, or a dict of named ones; a list of these for several
            kinds of calls, which get programs of their own.
        kwargs: example inputs given by keyword, beside a tuple.
        seconds: wall-clock budget of all parts; each gets as much as it takes of the model's time.
        parts: names of the submodules to optimize, with ``*`` (``["model.layers.*"]``); by default they are chosen.
        inplace: change `module` itself instead of a copy. The copy shares all parameters and buffers.
        cache: whether programs that were found before for equal parts, on this device and with these versions, are
            used again, and where they lie if a folder is given (``$QIMENG_CACHE/programs`` by default).
        device: name of a device; the GPU of this machine by default, else the H200, whose times are estimated.
        mode: precision mode (see `plan_and_code`).
        on_part: called with each part when it is done.
        options: further arguments of `plan_and_code`: planner, coder, search, evaluations.

    Returns:
        The optimized model. Its attribute ``qimeng`` is a `Record`: ``report()``, ``speedup``, ``calls``,
        ``save(folder)``, ``restore()``.

    Raises:
        SpecError: no example inputs, or the model fails on them; a model that cannot be copied; a wrong name in
            `parts`; an unknown precision mode.
        TypeError: an option that `plan_and_code` does not have.
        ValueError: an unknown planner, coder or search; a budget below 0.
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"optimize takes a torch.nn.Module, got {type(module).__name__}; for a function: plan_and_code")
    check_budget(seconds)
    check_keywords(kwargs)
    check_callable("on_part", on_part)
    if not isinstance(cache, bool | str | Path):
        raise ValueError(f"cache must be True, False or a folder, got {cache!r}")
    parts = names_of("parts", parts)
    check_names(options)
    check_options(mode=mode, **options)
    make_search(options.get("search", SEARCH), options.get("planner", PLANNER))  # a wrong name costs no capture
    make_coder(options.get("coder", "template"))
    began, row = time.monotonic(), make_device(device)
    calls = _calls(example_inputs, kwargs)
    model = module if inplace else shared_copy(module)
    record = Record(model, row.name)
    store = None if cache is False else ResultCache(None if cache is True else cache)
    work = _Work(model, record, row, mode, store, options, on_part)
    with same_buffers(model), within(seconds), together(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        planned = [_planned(model, args, named, parts) for args, named in calls]
        for number, plan in enumerate(planned):
            work.optimize(plan, began + seconds * (number + 1) / len(planned))
        for args, named in calls:
            settle(record, module, args, named)
    for counts in record.calls.values():
        counts.clear()
    mode_now, other = ("training", "evaluation") if model.training else ("evaluation", "training")
    record.notes.append(f"optimized in {mode_now} mode; in {other} mode the model runs its own code")
    record.seconds = time.monotonic() - began
    vars(model)["qimeng"] = record
    return model


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse names that are no further arguments of `plan_and_code`.

    Raises:
        TypeError: there are such names.
    """
    unknown = options.keys() - inspect.signature(check_options).parameters.keys()
    if unknown:
        raise TypeError(f"optimize() has no option {', '.join(sorted(unknown))}")


@dataclass(frozen=True)
class _Plan:
    """Parts for one kind of call of the model.

    Attributes:
        seen: its submodules by name.
        parts: what is to be optimized.
        given: arguments of each submodule of the parts.
    """

    seen: dict[str, Visit]
    parts: list[Part]
    given: dict[str, Arguments]


def _planned(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], patterns: Sequence[str]) -> _Plan:
    tensors = (*model.parameters(), *tensors_of((args, kwargs)))
    seen = visits(model, args, kwargs, next((t.device for t in tensors), torch.device("cpu")))
    parts = choose(seen, patterns)
    wanted = {name: part.key for part in parts for name in part.names}
    return _Plan(seen, parts, arguments(model, args, kwargs, wanted))


@dataclass(frozen=True)
class _Equal:
    """Submodules of a part that compute the same.

    Attributes:
        part: they.
        spec: of the first of them, held so that what was captured is not captured again; None where it has none.
        text: its start program; empty where it cannot be captured.
        refusal: why not.
    """

    part: Part
    spec: KernelSpec | None
    text: str
    refusal: str


@dataclass
class _Work:
    """One run of `optimize`."""

    model: nn.Module
    record: Record
    device: Device
    mode: str | None
    cache: ResultCache | None
    options: dict[str, Any]
    on_part: Callable[[PartReport], None] | None

    def optimize(self, plan: _Plan, deadline: float) -> None:
        """Optimize the parts of one kind of call until `deadline`, each as long as its share of what is left."""
        left = sum(part.share for part in plan.parts)
        for part in plan.parts:
            budget = (deadline - time.monotonic()) * part.share / max(left, part.share)
            left -= part.share
            end = time.monotonic() + budget
            for number, group in enumerate(groups := self._equal(part, plan)):
                share = len(group.part.names) / sum(len(g.part.names) for g in groups[number:])
                self._part(group, plan, (end - time.monotonic()) * share)

    def _equal(self, part: Part, plan: _Plan) -> list[_Equal]:
        """The part divided into submodules that compute the same."""
        groups: dict[tuple[str, str, str], tuple[KernelSpec | None, list[str]]] = {}
        for name in part.names:
            spec, text, refusal = self._captured(name, plan)
            groups.setdefault((text, refusal, "" if text else name), (spec, []))[1].append(name)
        share = part.share / len(part.names)
        return [
            _Equal(Part(tuple(names), part.key, share * len(names)), spec, text, refusal)
            for (text, refusal, _), (spec, names) in groups.items()
        ]

    def _captured(self, name: str, plan: _Plan) -> tuple[KernelSpec | None, str, str]:
        """Spec and start program of a submodule, which says all that it computes; or why it cannot be captured."""
        module, (args, kwargs) = plan.seen[name].module, plan.given[name]
        spec = None
        try:
            with own_code(self.model):
                named = name or type(module).__name__
                spec = KernelSpec.from_module(module, args, kwargs=kwargs, name=named, mode=self.mode)
                return spec, Program.start(capture_spec(spec, verify=False, kept=True)).source, ""
        except (CaptureError, SpecError) as error:
            return spec, "", str(error)

    def _part(self, group: _Equal, plan: _Plan, budget: float) -> None:
        """Optimize what stands for a part and let all of its submodules run the program."""
        part, text, refusal = group.part, group.text, group.refusal
        began, module = time.monotonic(), plan.seen[part.name].module
        args, kwargs = plan.given[part.name]
        key = cache_key(
            (text, part.key, self.device.name, self.mode, version(), sorted(map(str, self.options.items())))
        )
        result = self.cache.get(key) if self.cache is not None and text else None
        cached, reason = result is not None, ""
        if result is None and budget < LEAST_SECONDS:
            reason = (
                refusal
                or f"no time: its share of the budget is {max(budget, 0.0):.0f} s, a search takes {LEAST_SECONDS:.0f}"
            )
        elif result is None and group.spec is None:
            reason = refusal
        elif result is None:
            try:
                with own_code(self.model):
                    result = plan_and_code(group.spec, seconds=budget, device=self.device, **self.options)
            except QimengError as error:
                reason = str(error)
            if result is not None and self.cache is not None and text and result.stopped != "interrupted":
                self.cache.put(key, result)
        variant = None
        if result is not None:
            reason = _why_not(result) or _why_no_program(module, args, kwargs)
            variant = None if reason else self._attach(part, plan, result)
            if variant is None and not reason:
                reason = "its parameters do not fit the program"
        report = PartReport(
            part.names, type(module).__name__, part.key, part.share,
            result.headline if result is not None else "",
            result.speedup if result is not None else None,
            result.estimated if result is not None else False,
            cached, time.monotonic() - began, reason, variant,
        )  # fmt: skip
        self.record.parts.append(report)
        if self.on_part is not None:
            self.on_part(report)

    def _attach(self, part: Part, plan: _Plan, result: Result) -> Variant | None:
        """Let every submodule of the part run the program; the first one's is returned."""
        first: Variant | None = None
        loaded = load_source(result.source)  # kernels are compiled once for all
        for name in part.names:
            module, (args, kwargs) = plan.seen[name].module, plan.given[name]
            with torch.no_grad():
                returned = module(*args, **kwargs)
            outputs = Outputs.of(returned, [*tensors_of((args, kwargs)), *module.parameters(), *module.buffers()])
            variant = Variant(part.key, loaded.Model(), result.source, hollow((args, kwargs)), outputs)
            if attach(module, variant):
                first = first or variant
        return first


def _why_not(result: Result) -> str:
    """Why a result is not used; empty where it is."""
    if result.on_pytorch:
        return next(iter(result.notes), "") or "nothing faster was found"
    if result.unchecked:
        return result.verification
    return ""


def _why_no_program(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no program can stand in for a module, whatever it computes; empty where one can."""
    state = module.state_dict()
    before = {name: b._version for name, b in module.named_buffers() if name not in state}
    with torch.no_grad():
        module(*args, **kwargs)
    changed = [name for name, b in module.named_buffers() if name in before and b._version != before[name]]
    return f"its forward updates {', '.join(changed)}, which is not in the state_dict" if changed else ""


def _calls(example_inputs: Any, kwargs: Mapping[str, Any] | None) -> list[Arguments]:
    """The example calls."""
    given = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if isinstance(example_inputs, list) and kwargs:
        raise SpecError("kwargs go with one call: give a list of dicts for several calls with keywords")
    calls: list[Arguments] = []
    for one in given:
        if isinstance(one, Mapping):
            calls.append(((), {**one, **(kwargs or {})}))
        elif isinstance(one, tuple):
            calls.append((one, dict(kwargs or {})))
        else:
            raise SpecError(
                f"example inputs must be a tuple, a dict, or a list of those; got {type(one).__name__}; write (x,)"
            )
    for args, named in calls:
        if not args and not named:
            raise SpecError("example inputs are needed: optimize(model, (x,))")
        if key_of(args, named) is None:
            raise SpecError("example inputs must be tensors and plain data (numbers, text, None, and lists of them)")
    return calls


__all__ = ["check_names", "optimize"]
