"""The main entry point of the library.

Deals in defaults. Knows nothing about how any part works.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.arguments import check_budget, check_callable, check_keywords, check_object, names_of
from qimeng.envs.steps.loop import Search, optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget, Progress
from qimeng.planner import PLANNER, SEARCH, make_search
from qimeng.spec import check_mode
from qimeng.spec.patience import within
from qimeng.store import Store

if TYPE_CHECKING:
    import torch

    from qimeng.device import Device
    from qimeng.envs.steps.task import Task
    from qimeng.interfaces import Coder, Evaluator, Planner


def plan_and_code(
    spec: Any,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    evaluations: int = 40,
    planner: str | Planner = PLANNER,
    coder: str | Coder = "template",
    search: str | Search = SEARCH,
    device: str | Device | torch.device | None = None,
    mode: str | None = None,
    compile_modes: Sequence[str] = ("default",),
    sanitize: Sequence[str] = (),
    store: Store | str | Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    evaluator: Evaluator | None = None,
) -> Result:
    """Optimize a PyTorch computation for a GPU and return a drop-in module that is right and not slower.

    Starts from the computation on PyTorch and improves it step by step: the planner picks an optimization, the coder
    writes it, the judge verifies and times it. The best program is verified once more in a fresh process. A computation
    that cannot be captured as a graph is returned as it is, with the reason in `Result.notes`.

    A generated kernel is kept where it is as fast as PyTorch within 1.5 %: it can be read, changed and carried on from.

    Without a GPU the kernels are cross-compiled, checked in Triton's interpreter and timed by an analytic model; the
    result then says `estimated`. Ctrl-C keeps the best program so far.

    Args:
        spec: a `KernelSpec`, an `nn.Module`, a function, or the path of a KernelBench-style file.
        inputs: example inputs, where `spec` is a module or a function: a tuple of the positional ones.
        kwargs: example inputs that are given by keyword: ``plan_and_code(layer, (x,), kwargs={"mask": mask})``.
        seconds: wall-clock budget, capture and final verification included. A step is begun only if it and the final
            verification are expected to fit; what TorchInductor does not compile in time is left aside, and a note says
            so. ``docs/limits.md`` lists what may take longer.
        evaluations: most programs sent to the judge before the final verification.
        planner: ``"lm"`` (the trained language model that comes with the package; with the search ``"best-of-n"`` it
            goes on after its first trajectory), ``"lm:FOLDER"`` (another one), ``"heuristic"`` (rules; it starts some
            seconds sooner), ``"random"``, or a `Planner`.
        coder: ``"template"``, ``"openai:MODEL"``, ``"transformers:FOLDER"``, ``"hybrid:openai:MODEL"``, or a `Coder`
            (`qimeng.coder.named.coder_named` makes one with a base URL and a budget; see ``docs/coders.md``).
        search: ``"best-of-n"`` (what the planner would do alone, then trajectories drawn from its policy),
            ``"greedy"`` (the planner alone), ``"climb"`` (greedy, slower schedules taken back), ``"beam"``, ``"mcts"``
            (tree search with the policy as prior), ``"archive"`` (evolution: islands and MAP-Elites); the last three
            begin with what the planner would do alone as well. Or an object with `run(session)`, which brings its own
            planner. Numbers may follow a name: ``"beam:8"``, ``"mcts:c=2"``, ``"archive:islands=4,seed=1"``; a wrong
            one is refused with those there are.
        device: name of a device (see `qimeng devices`), or ``"cuda"`` for the GPU of this machine; by default that GPU,
            else the H200.
        mode: precision mode, for the result and the PyTorch it is compared with: ``"default"`` (as PyTorch ships),
            ``"highest"`` (no TF32) or ``"high"`` (TF32 or better); the spec's own by default.
        compile_modes: modes of torch.compile to time beside the result, on a GPU; none for an empty sequence. They are
            compiled in the background, in at most half of `seconds` each and `seconds` together; the report says what
            could not be. Where one is faster than the result, torch.compile's code is verified and returned, beyond the
            budget.
        sanitize: tools of NVIDIA's compute-sanitizer that the final verification runs on the winner, on a GPU:
            ``"memcheck"``, ``"racecheck"``, ``"initcheck"``, ``"synccheck"``; none by default, since each takes up to
            minutes. What it finds in a generated kernel refuses the program; all else stands in the notes.
        store: a `Store` or the path of one; what was judged before is not judged again, and an interrupted call
            repeated with the same arguments goes on where it ended.
        on_step: called with a `Progress` before and after every evaluation.
        evaluator: another judge than the one this machine calls for.

    Returns:
        The result: `module`, `source`, `recipe`, figures, `report()`, `save(folder)`.

    Raises:
        SpecError: the computation cannot be optimized as given (the message says what to change), or an unknown mode.
        DeviceError: an unknown device.
        ValueError: an unknown planner, coder, search (or option of one) or mode of torch.compile; a budget below 0; an
            object that is none of its role.
    """
    began = time.monotonic()
    check_budget(seconds, evaluations)
    check_keywords(kwargs)
    check_options(
        planner=planner, coder=coder, search=search, mode=mode, compile_modes=compile_modes, sanitize=sanitize,
        store=store, on_step=on_step, evaluator=evaluator,
    )  # fmt: skip
    modes, tools = names_of("compile_modes", compile_modes), names_of("sanitize", sanitize)
    chosen = make_search(search, planner)
    opened = Store(store) if isinstance(store, str | Path) else store
    with contextlib.ExitStack() as held:
        if opened is not store and opened is not None:
            opened.goes_on = True  # a full disk costs what is stored, not the search
            held.callback(opened.close)
        held.enter_context(within(seconds))
        compiled = (modes, seconds / max(2, len(modes)))  # one after the other: not beyond the budget together
        task = make_task(
            spec, inputs, kwargs=kwargs, coder=coder, evaluator=evaluator, device=device, mode=mode, store=opened,
            compiled=compiled,
        )  # fmt: skip
        if evaluator is None:
            held.callback(task.evaluator.close)
        return run_task(
            task, chosen, Budget(seconds, evaluations), began, compiled, sanitize=tools, store=opened, on_step=on_step
        )


def check_options(
    *,
    evaluations: int = 0,
    planner: str | Planner = PLANNER,
    coder: str | Coder = "template",
    search: str | Search = SEARCH,
    mode: str | None = None,
    compile_modes: Sequence[str] = (),
    sanitize: Sequence[str] = (),
    store: Store | str | Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    evaluator: Evaluator | None = None,
) -> None:
    """Refuse options of `plan_and_code` that cannot be used, before any work starts.

    Raises:
        SpecError: an unknown precision mode.
        ValueError: as `plan_and_code` says.
    """
    check_budget(0, evaluations)
    check_mode(mode)
    check_callable("on_step", on_step)
    check_object("search", search, ("run",))
    check_object("planner", planner, ("choose",))
    check_object("coder", coder, ("write",))
    if evaluator is not None:
        check_object("evaluator", evaluator, ("submit", "gather"), names=False)
    if store is not None and not isinstance(store, Path):
        check_object("store", store, ("put_spec",))
    names_of("compile_modes", compile_modes), names_of("sanitize", sanitize)


def run_task(
    task: Task,
    search: Search,
    budget: Budget,
    began: float,
    compiled: tuple[Sequence[str], float] = ((), 0.0),
    *,
    sanitize: Sequence[str] = (),
    store: Store | None = None,
    on_step: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    waited: Callable[[], float] = lambda: 0.0,
) -> Result:
    """Optimize a task beside its baselines; `plan_and_code` and the benchmarks (`qimeng.bench.measure`) both end here.

    Args:
        task: what is optimized, its judge included, which the caller closes.
        search: decides which steps are taken.
        budget: what may be used.
        began: the clock's time when the budget's seconds began.
        compiled: modes of torch.compile to time beside the result, and the most seconds that each may take to compile.
        sanitize: tools that the final verification runs (see `plan_and_code`).
        store: where every attempt is recorded.
        on_step: called with what is going on.
        clock: seconds, monotonic.
        waited: tells how many of them the judge has waited for a device that others use; they do not count against
            `Budget.seconds`.

    Raises:
        ValueError: torch.compile has no such mode.
        QimengError: compute-sanitizer has no such tool.
    """
    from qimeng.envs.judge.torch_compile import check_modes
    from qimeng.envs.screening.sanitizer import check_tools
    from qimeng.interfaces import FinalOptions

    modes, compile_seconds = compiled
    check_modes(modes)
    task = replace(task, options=FinalOptions(tuple(modes), compile_seconds, check_tools(sanitize)))
    return optimize(task, search, budget, store, on_step, clock, began, waited)


__all__ = ["check_options", "plan_and_code", "run_task"]
