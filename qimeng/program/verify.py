"""Checks that a captured graph computes the same as its module.

It runs both, at reduced size if that gives the same graph, and compares everything that a call returns or changes.
Knows nothing about kernels or timing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree

from qimeng.graph import refusals
from qimeng.graph.block_shares import with_block_shares
from qimeng.graph.capture import CaptureError, ValuesNeeded, capture
from qimeng.graph.checks import Check, checks_of
from qimeng.graph.device_strides import seen_on, with_strides
from qimeng.graph.layout import laid_out, order_of
from qimeng.graph.leaves import Call, recorded
from qimeng.graph.mode import mode_matters
from qimeng.graph.on_device import for_device
from qimeng.graph.opgraph import OpGraph, Value, same_operators
from qimeng.graph.state import is_state, updated_tables
from qimeng.graph.structure import structure_of
from qimeng.program.in_double import InDouble
from qimeng.program.program import Program, load_source
from qimeng.spec import EXAMPLES, KernelSpec, perturb_parameters
from qimeng.spec.attributes import held_in
from qimeng.spec.check import missing_on_cpu
from qimeng.spec.kept import make_state
from qimeng.spec.modes import precision
from qimeng.spec.patience import TooLong, left_s, patience
from qimeng.spec.reduce import MUCH, RUNNABLE
from qimeng.spec.returned import opened
from qimeng.spec.seeding import seed_generators

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Differences between two orders of the same arithmetic; a graph that computes something else is far outside."""


SEED = 0
"""Of random generators before each call that is compared."""

MANY = 200
"""Operators from which on a second capture, at reduced size, takes longer than a run at full size on a GPU."""

SHARE = 0.5
"""Part of the seconds for a user's code (`qimeng.spec.patience.left_s`) that one capture may compute."""


LOOPS = (
    "a Python loop over positions or steps makes operators for each of them. To have it optimized, give more seconds "
    "or shorter inputs, or write the loop as an operator (torch.cumsum, torch.nn.LSTM)"
)
"""Why a capture takes long, and what to do."""

_CAPTURED: WeakKeyDictionary[KernelSpec, OpGraph] = WeakKeyDictionary()
"""Graphs that nobody has compared with their module, for whoever asks next: a verification, or, at reduced size, who
checks programs."""


def capture_spec(
    spec: KernelSpec, verify: bool = True, device: str = "cpu", kept: bool = False, known: OpGraph | None = None
) -> OpGraph:
    """The graph of `spec`, compared with the module before use, unless `verify` is False.

    What is verified also has what `with_call` adds. Where verifying fails with Python numbers left free, they are
    specialised.

    Args:
        spec: makes the module.
        verify: whether to compare.
        device: where it will run: on a GPU, some results lie otherwise in memory (`qimeng.graph.device_strides`).
        kept: whether the next call for this spec shall not capture it again, where it is not compared now.
        known: what `exported` gave for `spec`, here or on another machine.

    Raises:
        CaptureError: the computation does not export, or not in time, or the graph differs from the module; the
            message says how.
    """
    if not verify:
        known = _CAPTURED.get(spec, known)
        graph = _capture(spec) if known is None else known
        if kept:
            _CAPTURED[spec] = graph
        return _as_asked(spec, for_device(spec, device, graph))
    most = left_s()
    try:
        with patience("capture", most):
            return _right(spec, device, known)
    except TooLong:
        raise CaptureError(f"the graph could not be compared with the module within {most:.3g} s; {LOOPS}") from None


def exported(spec: KernelSpec) -> OpGraph:
    """The graph of `spec` as torch.export gives it: nothing was compared, and no device was asked.

    Raises:
        CaptureError: see `capture_spec`.
    """
    with patience("capture", left_s()):
        return _capture(spec)


def _right(spec: KernelSpec, device: str, known: OpGraph | None) -> OpGraph:
    """The graph, compared with the module."""
    known = _CAPTURED.pop(spec, known)  # once: the module may change meanwhile, and is then captured anew
    graph = _capture(spec) if known is None else known
    try:
        graph = _verified(spec, graph, device)
    except CaptureError:
        if not _free(graph):
            raise
        graph = _verified(spec, _capture(spec, specialise=True), device)
    return _as_asked(spec, with_call(spec, for_device(spec, device, graph), device))


def _as_asked(spec: KernelSpec, graph: OpGraph) -> OpGraph:
    """`graph`, in which what the spec declares of weights is computed once, and whose results it may want repeated.

    What its masks hide is counted, for estimates of time.
    """
    made = replace(graph, settles=bool(spec.weights) or graph.settles, deterministic=spec.deterministic)
    return with_block_shares(made, spec.module) if spec.is_small else made


def with_call(spec: KernelSpec, graph: OpGraph, device: str = "cpu") -> OpGraph:
    """`graph` with the way its module is called, and the mode where training and evaluation compute different things.

    Both belong to the identity of a program (`OpGraph.call`, `OpGraph.training`).
    """
    positions = len(graph.in_spec.parts[0].parts)
    return replace(graph, training=spec.training if mode_matters(spec, device) else None, call=spec.call(positions))


class _OtherValues(CaptureError):
    """Numbers differ by more than two orders of the same arithmetic do, as a rule."""


class _OtherLayout(CaptureError):
    """An output of the module fills its memory in another order of dimensions than the graph's."""

    def __init__(self, message: str, number: int, order: tuple[int, ...]):
        super().__init__(message)
        self.number, self.order = number, order


def _verified(spec: KernelSpec, graph: OpGraph, device: str) -> OpGraph:
    """`graph` once it is right, its outputs laid out in memory as the module's."""
    orders: dict[int, tuple[int, ...]] = {}
    while True:
        try:
            verify_graph(spec, graph, orders, device)
            return laid_out(graph, orders)
        except _OtherLayout as other:
            if other.number in orders:
                raise
            orders[other.number] = other.order


def _capture(spec: KernelSpec, specialise: bool = False) -> OpGraph:
    """The graph, around what torch.export refuses where that can be.

    Checks of values that only raise errors become a piece of code at the end. A submodule that torch.export refuses
    stays as it is.
    """
    hidden: dict[str, list[Call]] = {}
    checks: dict[Any, Check] | None = None
    while True:
        try:
            return _in_memory_if_needed(spec, specialise, hidden, checks or {})
        except CaptureError as error:
            if checks is None and error.by_values:
                checks = checks_of(spec)
                if checks:
                    continue
            name = error.where
            while name and not (found := _hidden_too(spec, hidden, name)):
                name = name.rpartition(".")[0]
            if not name:
                raise
            hidden = found


def _hidden_too(spec: KernelSpec, hidden: Mapping[str, Any], name: str) -> dict[str, list[Call]]:
    """`hidden` with the submodule called `name`; empty where that cannot be."""
    kept = [other for other in hidden if not other.startswith(f"{name}.")]
    if name in hidden or not spec.is_small:
        return {}
    try:
        return recorded(spec, [*kept, name])
    except Exception:  # noqa: BLE001  it also runs and rebuilds the user's own classes, which may raise anything
        return {}


def _in_memory_if_needed(
    spec: KernelSpec, specialise: bool, hidden: Mapping[str, Sequence[Call]], checks: Mapping[Any, Check]
) -> OpGraph:
    """The graph; module and inputs are made in memory only if tensors outside the state_dict need it."""

    def inputs() -> tuple[Any, ...]:
        return spec.inputs(0, "cpu", EXAMPLES)

    def captured(values: bool) -> OpGraph:
        left = left_s()
        try:
            with patience("capture", left, busy=SHARE * left):
                return capture(spec.module, inputs, specialise, values, hidden, checks, spec.stateful)
        except TooLong:
            raise CaptureError(
                f"capturing its operators did not end within {SHARE * left:.3g} s of the processor, half of the time "
                f"left, or not within all of it ({left:.3g} s); {LOOPS}"
            ) from None

    try:
        return captured(values=False)
    except ValuesNeeded:
        if not spec.is_small:
            raise
        return captured(values=True)


def _free(graph: OpGraph) -> set[int]:
    """Positions of the numbers that the graph holds for any value."""
    return {int(n.target) for n in graph.nodes.values() if n.kind == "scalar"}


def verify_graph(
    spec: KernelSpec, graph: OpGraph, orders: Mapping[int, tuple[int, ...]] | None = None, device: str = "cpu"
) -> None:
    """Compare the program of `graph`, all on PyTorch, with the module it was captured from.

    It uses the user's own inputs, twice so that state shows, and two seeds, the last one with other parameters. Then
    Python numbers are changed: free numbers must take effect, others must be refused. Compared are structure, type,
    shape, stride, dtype, values, buffers, and shared memory of outputs. It runs at reduced size if that has the same
    operators in the same order; else at full size. If the program will run on the GPU, what is large runs there, and
    a graph of `MANY` operators at full size. What is too large for the CPU runs on the GPU in any case.

    Args:
        spec: makes the module.
        graph: what was captured.
        orders: outputs that get another layout than the graph's (`qimeng.graph.layout`).
        device: where the program will run.

    Raises:
        CaptureError: a difference, or no size at which the two can be compared; the message names it.
    """
    small = spec if device == "cuda" and _whole_is_quicker(graph) else spec.reduced()
    reduced = graph
    if small is not spec:
        reduced = _capture(small, specialise=not _free(graph))
        if not any(isinstance(x, float) for x in graph.scalars.values()):  # which `capture_spec` would leave free first
            _CAPTURED[small] = reduced
    if not same_operators(reduced, graph):
        small, reduced = spec, graph
    elements = _elements(reduced)
    if small is spec and elements > RUNNABLE:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and _elements(reduced) - _made_of_state(reduced) > RUNNABLE:
            raise CaptureError(
                f"it has {elements} elements and no smaller size does the same, so that the graph cannot be checked "
                "against the module without a GPU"
            )
    elif elements <= MUCH:
        device = "cpu"
    try:
        _hold_against(small, reduced, orders or {}, device)
    except CaptureError as error:
        missing = error.__cause__ is not None and missing_on_cpu(error.__cause__)
        if device == "cuda" or not missing or not torch.cuda.is_available():
            raise
        _hold_against(small, reduced, orders or {}, "cuda")


def _hold_against(spec: KernelSpec, graph: OpGraph, orders: Mapping[int, tuple[int, ...]], device: str) -> None:
    """Compare on `device`; see `verify_graph`."""
    if device == "cuda":
        graph = with_strides(graph, seen_on(device))
    graph = laid_out(graph, orders)
    module = spec.module(device)
    make_state(module, updated_tables(graph))  # a file's may be drawn at random, on this device as nowhere else
    with tempfile.TemporaryDirectory(prefix="qimeng_verify_") as folder:
        model = load_source(Program.start(graph).source, "qimeng_verify", folder).Model().to(device)
    updated = {key for key, _ in graph.mutations}
    for seed, distribution in ((0, EXAMPLES), (1, "given"), (2, "given")):
        if seed == 2:
            perturb_parameters(module, seed)
        _load(model, module)
        inputs = spec.inputs(seed, device, distribution)
        for _ in range(2 if distribution == EXAMPLES else 1):
            _compare(module, model, inputs, updated)
    inputs = spec.inputs(3, device)
    for changed in _other_numbers(inputs, graph):
        _compare(module, model, changed, updated, may_fail=True)
    for position, changed in _refused(inputs, graph):
        try:
            _run(model, changed)
        except ValueError:
            continue
        raise CaptureError(f"the graph was made for one value of input {position} but takes another")


def _whole_is_quicker(graph: OpGraph) -> bool:
    """Whether to run `graph` at full size on this machine's GPU: it has many operators, and memory is left for it."""
    if len(graph.nodes) <= MANY or not torch.cuda.is_available():
        return False
    free, _ = torch.cuda.mem_get_info()
    return 4 * _elements(graph) <= free / 2  # as if nothing was freed, in float32; module and graph take turns


def _elements(graph: OpGraph) -> int:
    return sum(m.numel for n in graph.nodes.values() for m in n.metas if m is not None)


def _made_of_state(graph: OpGraph) -> int:
    """Elements that operators make of parameters alone, such as the codes of a declared weight: one pass over each."""
    values = (Value(n.name, port) for n in graph.ops() for port in range(len(n.metas)))
    return sum(graph.meta(v).numel for v in values if is_state(graph, v))


def _load(model: torch.nn.Module, module: torch.nn.Module) -> None:
    try:
        make_state(model, module.state_dict())
        model.load_state_dict(module.state_dict())
    except RuntimeError as error:
        added = [key for key in module.state_dict() if key not in model.state_dict()]
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        if added and all(key in tensors for key in added):
            raise CaptureError(
                f"forward adds {', '.join(added)} to the module's state: call the module once before it is given"
            ) from error
        if added:
            raise CaptureError(
                f"its state_dict holds more than parameters and buffers ({', '.join(added)}): keep that out of the "
                "state_dict (get_extra_state, hooks), or optimize the part without it"
            ) from error
        raise CaptureError(f"the graph does not take the module's state_dict: {error}") from error


def _run(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What a call returns; in fp32's own precision, beside which the roundings of TF32 would hide differences."""
    with torch.no_grad(), precision("highest"):
        seed_generators(SEED)
        return opened(module(*inputs))


def _compare(
    module: torch.nn.Module, model: torch.nn.Module, inputs: tuple[Any, ...], updated: Set[str], may_fail: bool = False
) -> None:
    """One call of both; where the module itself may fail on `inputs`, that settles nothing.

    Args:
        module: the module.
        model: the graph's.
        inputs: of the call.
        updated: names of the buffers that the graph updates.
        may_fail: whether the module may.
    """
    held = held_in(module)
    before = {name: list(map(_mark, leaves)) for name, leaves in held.items()}
    exact = InDouble(module, inputs, {name: b.clone() for name, b in module.named_buffers() if name in updated}, _run)
    try:
        expected = _run(module, inputs)
    except Exception as error:  # the user's module may raise anything
        if may_fail:
            return
        raise CaptureError(f"the module fails on its own inputs: {type(error).__name__}: {error}") from error
    seeds = torch.initial_seed() != SEED
    try:
        found = _run(model, inputs)
    except Exception as error:  # a graph that does not run may fail in any operator
        raise CaptureError(f"the graph does not run: {type(error).__name__}: {error}") from error
    wanted, tree = _pytree.tree_flatten(expected)
    got, other = _pytree.tree_flatten(found)
    if tree != other and structure_of(tree) != structure_of(other):  # a local class is made again by name and fields
        raise CaptureError(f"the module returns {tree}, the graph {other}")
    buffers = dict(model.named_buffers())
    state = {n: b for n, b in module.named_buffers() if n in buffers}
    pairs: list[tuple[int | str, tuple[Any, Any]]] = [
        *enumerate(zip(wanted, got, strict=True)),
        *((name, (b, buffers[name])) for name, b in state.items()),
    ]
    for which, (a, b) in pairs:
        try:
            _same(f"output {which}" if isinstance(which, int) else f"buffer {which}", a, b)
        except CaptureError as other:
            if not isinstance(other, _OtherValues) or not exact.is_rounding(which, a, b):
                raise type(other)(f"{other}{_reason(before, held_in(module), seeds)}") from None
        if isinstance(which, int):
            _same_strides(which, a, b)
    here = [*_pytree.tree_leaves(inputs), *state.values()]
    there = [*_pytree.tree_leaves(inputs), *(buffers[n] for n in state)]
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if _shared(b, [*there, *got[:i]]) - _shared(a, [*here, *wanted[:i]]):
            raise CaptureError(f"output {i} shares memory with an input, buffer or other output, the module's does not")


def _mark(leaf: Any) -> Any:
    """What tells whether a tensor was replaced or changed; a number or text itself."""
    return (id(leaf), leaf._version) if isinstance(leaf, torch.Tensor) else leaf


def _reason(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]], seeds: bool) -> str:
    """Why a module may yield other results than its graph, and what to do; empty where nobody knows.

    Args:
        before: marks of what its attributes held before a call.
        after: what they hold after it.
        seeds: whether a call seeds generators.
    """
    changed = [name for name, leaves in after.items() if before.get(name, []) != list(map(_mark, leaves))]
    tensors = [name for name in changed if any(isinstance(x, torch.Tensor) for x in after[name])]
    numbers = [name for name in changed if name in before and name not in tensors]
    if numbers:
        return f": forward changes {', '.join(numbers)}, and a graph keeps tensors only; keep it in a buffer"
    if tensors:
        return f": forward keeps state in {', '.join(tensors)}. {refusals.STATE_INSTEAD}"
    return ": forward seeds random generators, which a graph cannot; do that before the call" if seeds else ""


def _same(what: str, a: Any, b: Any) -> None:
    """Refuse where `b`, from the graph, is not `a`, from the module."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a != b:
            raise CaptureError(f"{what} is {b!r} from the graph, {a!r} from the module")
        return
    for fact in ("shape", "dtype", "device"):
        if getattr(a, fact) != getattr(b, fact):
            raise CaptureError(
                f"{what} has {fact} {getattr(b, fact)} from the graph, {getattr(a, fact)} from the module"
            )
    if a.is_complex():  # PyTorch does not compare those of half type
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if torch.equal(a, b):
        return
    if not a.is_floating_point():
        raise CaptureError(f"{what} differs in {int((a != b).sum())} of {a.numel()} elements")
    limit = TOLERANCE.get(a.dtype, 0.1)
    x, y = a.double(), b.double()
    finite = x[x.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if not torch.allclose(x, y, rtol=limit, atol=limit * scale, equal_nan=True):
        worst = float((x - y).abs().nan_to_num(torch.inf).max())
        raise _OtherValues(f"{what} differs by up to {worst:.3g} where values reach {scale:.3g}")


def _same_strides(number: int, a: Any, b: Any) -> None:
    """Refuse where the elements of `b`, from the graph, lie otherwise in memory than those of `a`, from the module."""
    if not isinstance(a, torch.Tensor) or all(
        n <= 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    ):
        return
    message = f"output {number} has strides {b.stride()} from the graph, {a.stride()} from the module"
    order = order_of(tuple(a.shape), a.stride())
    raise CaptureError(message) if order is None else _OtherLayout(message, number, order)


def _shared(x: Any, others: list[Any]) -> set[int]:
    """Positions in `others` of the tensors that share memory with `x`."""

    def place(t: Any) -> int:
        return t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else 0

    return {i for i, t in enumerate(others) if place(x) and place(t) == place(x)}


def _other_numbers(inputs: tuple[Any, ...], graph: OpGraph) -> Iterator[tuple[Any, ...]]:
    """The inputs with other values of the numbers that the graph holds for any value."""
    leaves, tree = _pytree.tree_flatten(inputs)
    free = _free(graph)
    if not free:
        return
    for change in (lambda x: x * 1.5 + 0.25, lambda x: -x, lambda x: 2):
        yield tuple(_pytree.tree_unflatten([change(x) if i in free else x for i, x in enumerate(leaves)], tree))


def _refused(inputs: tuple[Any, ...], graph: OpGraph) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Position and inputs, for each Python value that the graph was specialised on and another in its place."""
    leaves, tree = _pytree.tree_flatten(inputs)
    for i, x in graph.scalars.items():
        other = not x if isinstance(x, bool) else x + 1 if isinstance(x, (int, float)) else 0
        if other != x or type(other) is not type(x):
            yield i, tuple(_pytree.tree_unflatten([other if j == i else y for j, y in enumerate(leaves)], tree))


__all__ = ["TOLERANCE", "capture_spec", "exported", "verify_graph", "with_call"]
