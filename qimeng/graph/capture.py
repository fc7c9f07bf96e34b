"""From a module and fake inputs to an `OpGraph`, by torch.export.

Deals in export, decomposition and naming. Allocates nothing for inputs or weights. Knows nothing about the use of the
graph. `qimeng.program.verify` checks that it is right.
"""

from __future__ import annotations

import contextlib
import io
import keyword
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution
from torch.fx import config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from qimeng.graph import refusals
from qimeng.graph.checks import Check, hold
from qimeng.graph.constant_masks import with_named_masks
from qimeng.graph.convert import CaptureError, ValuesNeeded, converted
from qimeng.graph.counters import counted_together
from qimeng.graph.decompose import decomposed
from qimeng.graph.experts.assumed import Assumed
from qimeng.graph.experts.capture import LoopStays, all_rows, stacked
from qimeng.graph.experts.visits import Visits
from qimeng.graph.leaves import Call, hide, innermost
from qimeng.graph.loops.roll import rolled
from qimeng.graph.loops.writes import concatenated
from qimeng.graph.masked import choose_by_masks
from qimeng.graph.one_each import choose_in_rows
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.padding import as_without_gradients
from qimeng.graph.picked import gather_picked
from qimeng.graph.replaced import written_into
from qimeng.graph.stand_ins import OtherFunctions
from qimeng.graph.structure import Structure, UnknownStructure, structure_of
from qimeng.spec.attributes import held_in
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.returned import opened

_ONE_AT_A_TIME = threading.RLock()
"""torch.export changes PyTorch's operators for the whole process, and two at a time leave them changed."""


def capture(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], tuple[Any, ...]],
    specialise: bool = False,
    values: bool = False,
    hidden: Mapping[str, Sequence[Call]] | None = None,
    checks: Mapping[Any, Check] | None = None,
    attributes: Collection[str] = (),
) -> OpGraph:
    """The graph of `make_module()(*make_inputs())`.

    Both run under fake tensors, so nothing large is allocated unless `values` is set. Python floats among the inputs
    become 0-dimensional tensors, so the graph holds for any number. If that does not export, or if a number's dtype
    would decide the result's dtype, the numbers are specialised and guarded.

    Args:
        make_module: makes the module.
        make_inputs: makes its positional inputs.
        specialise: specialise all numbers.
        values: make module and inputs in memory; needed for tensors outside the state_dict whose values the module's
            code alone does not decide (`qimeng.spec.fake.made_fake`).
        hidden: submodules that stay as they are, with their calls (`qimeng.graph.leaves`).
        checks: places in the module's code where it raises errors for some values (`qimeng.graph.checks`).
        attributes: buffers that stand for plain attributes (`qimeng.spec.attributes`). One that no call reads before it
            is overwritten is left out.

    Raises:
        ValuesNeeded: there are such tensors and `values` is not set.
        CaptureError: the computation does not run under fake tensors, or torch.export refuses it; the message names
            the reason.
    """
    given = make_module, make_inputs, specialise, values, hidden or {}, checks or {}, attributes
    with _ONE_AT_A_TIME:
        visits = Visits()
        try:
            return with_named_masks(_traced(*given, visits))
        except LoopStays:
            pass
        except CaptureError as error:
            if not (error.by_values and visits.selects):
                raise
            with contextlib.suppress(CaptureError):
                for kept in (False, True):
                    with contextlib.suppress(LoopStays):
                        return with_named_masks(_traced(*given, Visits(Assumed(), kept)))
            raise
        return with_named_masks(_traced(*given, None))


def _traced(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], tuple[Any, ...]],
    specialise: bool,
    values: bool,
    hidden: Mapping[str, Sequence[Call]],
    checks: Mapping[Any, Check],
    attributes: Collection[str],
    experts: Visits | None,
) -> OpGraph:
    """The graph as the module computes it, with its loops as operators; loops over `experts` stay where that is None.

    Raises:
        LoopStays: there is a loop over experts that has no form of fixed size.
    """
    mode = contextlib.nullcontext() if values else fake_tensors()
    with mode, torch.no_grad():
        try:
            module = make_module() if values else made_fake(make_module)
            inputs = tuple(make_inputs())
        except Exception as error:  # user code under fake tensors raises errors of any class
            raise CaptureError(f"cannot be made without allocating memory: {type(error).__name__}: {error}") from error
        module.requires_grad_(False)
        _refuse_scripts(module)
        _refuse_sparse(module)
        as_without_gradients(module)
        hide(module, hidden)
        hold(module, checks)
        module.register_forward_hook(lambda _, inputs, output: opened(output))
        written_into(module)
        leaves, in_spec = _pytree.tree_flatten((inputs, {}))
        structure = _input_structure(leaves, in_spec)
        inputs = _without_constants(module, inputs)
        graph_of = partial(_graph, module, structure=structure, leaves=leaves, attributes=attributes, experts=experts)
        floats = [] if specialise else [i for i, x in enumerate(leaves) if type(x) is float]
        if floats:
            try:
                as_tensors = _pytree.tree_leaves((inputs, {}))
                for i in floats:
                    as_tensors[i] = torch.empty((), dtype=torch.float64)
                args, _ = _pytree.tree_unflatten(as_tensors, in_spec)
                graph = graph_of(inputs=args, floats=set(floats))
                if _numbers_in_plain_arithmetic(graph):
                    return rolled(concatenated(graph))
            except CaptureError:
                pass  # specialised below
        return rolled(concatenated(graph_of(inputs=inputs, floats=set())))


CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)
"""Inputs that torch.export does not take; the graph is made for the one that was given."""


def _refuse_scripts(module: torch.nn.Module) -> None:
    """torch.export goes wrong at a part that is TorchScript, and neither says so nor can the part stay as it is."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(f"its part {name} is TorchScript: give the Python module that torch.jit was given")


def _refuse_sparse(module: torch.nn.Module) -> None:
    """A program holds dense tensors; torch.export says so of some sparse ones, and of others what happens inside."""
    for prefix, part in module.named_modules():
        held = {**vars(part), **part._parameters, **part._buffers}
        for name, x in held.items():
            if not isinstance(x, torch.Tensor):
                continue
            if x.is_nested:
                raise CaptureError(
                    f"its tensor {f'{prefix}.{name}'.lstrip('.')} is nested, which a program cannot hold. To have it "
                    "optimized, keep its values and offsets as dense buffers"
                )
            halves = isinstance(x, torch.sparse.SparseSemiStructuredTensor)
            if x.layout is not torch.strided or halves:
                kind = "semi-structured" if halves else str(x.layout).removeprefix("torch.sparse_").upper()
                declared = {"BSR": "bsr:32:10", "BSC": "bsr:32:10", "semi-structured": "2:4"}.get(kind, "csr:5")
                raise CaptureError(
                    f"its tensor {f'{prefix}.{name}'.lstrip('.')} is sparse ({kind}), which a program cannot hold. To "
                    f"have it optimized, keep the dense weight in a torch.nn.Linear and declare weights={declared!r} "
                    "(qimeng.vocabulary.sparse.detected finds what fits), or keep indices and values as dense buffers"
                )


def _input_structure(leaves: list[Any], in_spec: Any) -> Structure:
    """How the inputs are put together, which a standalone file checks."""
    for x in leaves:
        if not isinstance(x, (torch.Tensor, bool, int, float, str, type(None), *CONSTANTS)):
            raise CaptureError(
                f"an input is a {type(x).__name__}, neither a tensor nor a plain number or string. To have it "
                "optimized, pass its tensors and numbers, and put the object together inside of forward"
            )
    try:
        structure = structure_of(in_spec)
        if any(c.kind == "object" for c in structure.classes()):
            raise UnknownStructure("plain object with tensors in it, which a call may change")
        return structure
    except UnknownStructure as error:
        raise CaptureError(
            f"the module takes a {error}; give tuples, lists, dicts, named tuples or dataclasses"
        ) from None


def _without_constants(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """`inputs` with None in the place of what torch.export does not take, which `module` then puts back itself."""
    leaves, tree = _pytree.tree_flatten(inputs)
    held = {i: x for i, x in enumerate(leaves) if isinstance(x, CONSTANTS)}
    if not held:
        return inputs

    def restored(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        found, around = _pytree.tree_flatten(given)
        return tuple(_pytree.tree_unflatten([held.get(i, x) for i, x in enumerate(found)], around))

    module.register_forward_pre_hook(restored)
    return tuple(_pytree.tree_unflatten([None if i in held else x for i, x in enumerate(leaves)], tree))


def _numbers_in_plain_arithmetic(graph: OpGraph) -> bool:
    """Whether each number only goes into operators of two tensors of which the other is floating.

    There a Python number may stand for a tensor, on any device, and the other's dtype is the result's.
    """
    for node in graph.ops():
        operands = [graph.nodes[v.node] for v in node.operands()]
        if any(o.kind == "scalar" for o in operands):
            if not node.target.startswith("aten."):  # a piece of PyTorch code, which asks for the number itself
                return False
            packet, overload = node.target.removeprefix("aten.").rsplit(".", 1)
            schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
            kinds = [str(a.type) for a in schema.arguments if "Tensor" in str(a.type)]
            others = [graph.meta(v).dtype for v, o in zip(node.operands(), operands, strict=True) if o.kind != "scalar"]
            if kinds != ["Tensor", "Tensor"] or not any("float" in dtype for dtype in others):
                return False
    return not any(graph.nodes[v.node].kind == "scalar" for v in graph.results())


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without what torch logs (in its part `name`) and prints on a failed export, since that raises as well."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """In the block, torch.distributions does not validate its arguments, because no graph can hold that check.

    PyTorch skips it too if Python's assertions are off.
    """
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _DataDetached(TorchFunctionMode):
    """In the block, ``x.data`` is ``x.detach()``: torch.export takes what ``data`` yields for a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of `func`, which is a getter where an attribute is read."""
        if func == _READ_DATA:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _join_buffers(exported: Any, module: torch.nn.Module) -> dict[str, str]:
    """Make every use of a buffer that the module holds under several names a use of the first.

    torch.export treats them as separate buffers, so an update of one would not reach the others.

    Returns:
        Other name to first name.
    """
    others: dict[str, str] = {}
    first: dict[int, str] = {}
    names = {spec.target: spec.arg.name for spec in exported.graph_signature.input_specs if spec.target}
    nodes = {n.name: n for n in exported.graph.nodes}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        known = first.setdefault(id(buffer), name)
        if known != name and name in names and known in names:
            nodes[names[name]].replace_all_uses_with(nodes[names[known]])
            held = exported.state_dict if name in exported.state_dict else exported.constants
            held[name] = buffer.clone()
            others[name] = known
    if others:
        exported.graph_module.recompile()
    return others


def _state_names(exported: Any) -> list[str]:
    return [spec.target for spec in exported.graph_signature.input_specs if spec.target]


def _spelled(name: str) -> str:
    """`name` without Python's keywords, on which torch.fx writes code that does not parse.

    >>> _spelled("layers.for.weight"), _spelled("a b")
    ('layers.for_qimeng.weight', 'a b')
    """
    return ".".join(f"{part}_qimeng" if keyword.iskeyword(part) else part for part in name.split("."))


def _rename_state(exported: Any, names: dict[str, str]) -> dict[str, str]:
    """Give parameters, buffers and constants of `exported` other names, in place; returns those that changed."""
    changed = {old: new for old, new in names.items() if old != new}
    if changed:
        signature = exported.graph_signature
        for spec in (*signature.input_specs, *signature.output_specs):
            spec.target = changed.get(spec.target, spec.target)
        for held in (exported.state_dict, exported.constants):
            for old in [key for key in held if key in changed]:
                held[changed[old]] = held.pop(old)
    return changed


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """In the block, torch.fx does not note the line of code of each node, which takes a quarter of an export."""
    config: Any = fx_config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _graph(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    structure: Structure,
    leaves: list[Any],
    floats: set[int],
    attributes: Collection[str],
    experts: Visits | None,
) -> OpGraph:
    """What `converted` makes of the exported module; where it refuses a result, it is told the lines of code too."""

    def made() -> OpGraph:
        exported, others = _export(module, inputs, experts)
        sums = () if experts is None else all_rows(exported, experts, lambda v: _export(module, inputs, v)[0])
        gather_picked(exported)
        choose_by_masks(exported)
        choose_in_rows(exported)
        return stacked(counted_together(converted(exported, others, structure, leaves, floats, attributes)), sums)

    try:
        with _without_lines():
            return made()
    except CaptureError as error:
        if experts is not None and experts.used:
            raise LoopStays from error
        if not str(error).startswith(refusals.RETURNS):
            raise
    return made()


def _export(module: torch.nn.Module, inputs: tuple[Any, ...], experts: Visits | None) -> tuple[Any, dict[str, str]]:
    """The exported program with its operators taken apart, and the other names of its buffers."""
    with warnings.catch_warnings(), _quiet("torch.fx.experimental.symbolic_shapes"), _unchecked_distributions():
        warnings.simplefilter("ignore")
        exported = None
        try:
            with _DataDetached(), OtherFunctions(), experts or contextlib.nullcontext():
                exported = torch.export.export(module, inputs, strict=False)
            others = _join_buffers(exported, module)
            known = _rename_state(exported, {name: _spelled(name) for name in _state_names(exported)})
            made = decomposed(exported)
            _rename_state(made, {new: old for old, new in known.items()})
            return made, others
        except Exception as error:  # torch.export raises many classes of its own, none of them public
            if "Expected a real tensor" in str(error):  # parameters of modules that the module does not know as its own
                raise ValuesNeeded("the module holds parameters that are not in its state_dict") from error
            kept = _kept_in(exported, module) if exported is not None and refusals.is_of_state(error) else ""
            refused = CaptureError(refusals.of_state(kept) if kept else refusals.of_export(error))
            refused.where = innermost(module, error)
            refused.by_values = refusals.VALUES in str(refused)
            raise refused from error


def _kept_in(exported: Any, module: torch.nn.Module) -> str:
    """The attributes of `module` that hold what torch.export took for constants and a call writes into."""
    names = {
        getattr(n.args[0], "name", "")
        for n in exported.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    }
    constants = [s for s in exported.graph_signature.input_specs if s.target in exported.constants]
    tensors = [exported.constants[s.target] for s in constants if s.arg.name in names]
    return ", ".join(name for name, held in held_in(module).items() if any(x is t for x in held for t in tensors))


__all__ = ["CaptureError", "ValuesNeeded", "capture"]
