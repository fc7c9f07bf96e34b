"""One region of a program as a specification of its own, so that the same judge judges it.

Deals in a region's PyTorch text, its parameters, and the values that reach it in an eager run of the program. The text
needs only torch, whatever library the model is from. Knows nothing about evaluators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from qimeng.envs.judge.region_values import DrawnLeaf, DrawnOrigin, all_different, leaf_of
from qimeng.envs.workers.regions import inputs_of_region
from qimeng.errors import IllegalAction
from qimeng.graph.cut import Cut, cut
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import category, mode_alone
from qimeng.graph.region import Region
from qimeng.program.program import Program, load_source, torch_implementation
from qimeng.program.recurrent import recurrent_section
from qimeng.program.settled import Settled
from qimeng.spec import EXAMPLES, KernelSpec
from qimeng.spec.kept import take_state
from qimeng.spec.modes import precision
from qimeng.spec.origin import ExampleOrigin
from qimeng.spec.seeding import seed_generators
from qimeng.spec.ties import same_as, tied

PLAIN = frozenset({"view", "pointwise", "reduction", "scan", "gemm", "attention", "convolution"})
"""Categories of operators that accept any numbers (`qimeng.graph.ops.category`)."""
MOVES = frozenset("aten.cat aten.stack aten.max_pool2d_with_indices aten.max_pool3d_with_indices".split())
"""Operators of other categories that do so too."""


class RegionModule(torch.nn.Module):
    """The text of a region as a module: the reference of the region's own specification.

    Its parameters and buffers have the names that they have in the network. What depends on them alone is computed
    once, and again when one of them changes, as in a program.

    Args:
        text: Python text, of torch alone.
        entry: name of the region's function in it.
        arguments: of that function, in order: ``("input", position)``, ``("state", key)`` or ``("once", position)``.
        once: arguments of the text's function of what is computed once, likewise; None where there is none.
    """

    def __init__(
        self,
        text: str,
        entry: str,
        arguments: Sequence[tuple[str, Any]],
        once: Sequence[tuple[str, Any]] | None = None,
    ):
        super().__init__()
        self.text, self.entry, self.arguments = text, entry, tuple(arguments)
        self.once = None if once is None else tuple(once)

    def hold(self, key: str, value: torch.Tensor, parameter: bool, saved: bool = True) -> None:
        """Take a parameter or buffer under its dotted name.

        Args:
            key: the name.
            value: the tensor.
            parameter: or else a buffer.
            saved: whether it is part of the state dictionary.
        """
        *path, last = key.split(".")
        home: torch.nn.Module = self
        for part in path:
            home = home._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]
        if parameter:
            home._parameters[last] = torch.nn.Parameter(value.detach(), requires_grad=False)
        else:
            home.register_buffer(last, value.detach(), persistent=saved)

    def forward(self, *inputs: Any) -> Any:
        """The region's outputs, as a tuple."""
        space = _namespace(self.text)
        once: tuple[Any, ...] = ()
        if self.once is not None:
            given = [self._held(key) for _, key in self.once]
            stamp = [(id(t), t._version) for t in given]
            known = _computed.get(self)
            if known is None or known[0] != stamp:
                known = _computed[self] = (stamp, space["_settled"](*given), given)
            once = known[1]
        read: dict[str, Callable[[Any], Any]] = {
            "input": inputs.__getitem__,
            "state": self._held,
            "once": once.__getitem__,
        }
        return space[self.entry](*[read[kind](where) for kind, where in self.arguments])

    def _qimeng_flatten(self) -> None:
        """As programs with recurrent layers do (`qimeng.program.recurrent`)."""
        if (recurrent := _namespace(self.text).get("_Recurrent")) is not None:
            recurrent._qimeng_flatten(self)

    def _held(self, key: str) -> torch.Tensor:
        path, _, last = key.rpartition(".")
        held = getattr(self.get_submodule(path), last)
        assert isinstance(held, torch.Tensor)
        return held


_computed: WeakKeyDictionary[RegionModule, tuple[Any, Any, Any]] = WeakKeyDictionary()
"""What modules computed once: the parameters' versions, the results, and the parameters, so that ids stay theirs."""


@lru_cache(64)
def _namespace(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<region>", "exec"), space)
    return space


@dataclass(frozen=True)
class RegionSpec:
    """A region to be judged alone.

    Attributes:
        spec: the specification.
        program: the start program: the region on PyTorch.
        region: the region in it; signature and id are those in the whole program.
    """

    spec: KernelSpec
    program: Program
    region: Region


def region_spec(
    spec: KernelSpec, program: Program, region: Region, device: str, reference: torch.nn.Module | None = None
) -> RegionSpec:
    """`region` of `program` as a specification whose examples are the values that reach it in an eager run.

    Args:
        spec: of the whole program.
        program: on any partition that has the region.
        region: one that every call computes.
        device: where the eager run is made.
        reference: the module of `spec` on that device; made anew by default.

    Raises:
        IllegalAction: the region cannot be judged alone; the message says why.
    """
    found = cut(region)
    reference = reference or spec.module(device)
    state = reference.state_dict() | dict(reference.named_buffers())
    values = _captured(spec, program, region, state, device)
    by_value = dict(zip(region.inputs, values, strict=True))
    inputs = tuple(_laid_out(region, v, by_value[v]) for v in found.inputs)
    chosen = [_is_chosen(region, v) for v in found.inputs]
    module, any_value = _module(found, state).train(spec.training), _accepts_any(region)
    held = KernelSpec(
        f"{spec.name}: {region.label()}",
        _origin(module, inputs, chosen, spec.dtype, any_value),
        spec.dtype,
        mode_alone((n.packet for n in region.ops), spec.mode),
        spec.training,
        tolerances=spec.tolerances,
        accepts_any=any_value,
        deterministic=spec.deterministic,
    )
    graph = replace(found.graph, call=held.call(len(inputs)))
    regions = tuple(replace(r, graph=graph) for r in found.regions)
    return RegionSpec(held, Program(graph, regions), regions[-1])


def _captured(
    spec: KernelSpec, program: Program, region: Region, state: dict[str, torch.Tensor], device: str
) -> tuple[Any, ...]:
    """The region's arguments in a run of the whole on PyTorch, with these parameters and the user's own inputs."""
    plain = Program(program.graph, program.regions, captured=program.captured, rewrites=program.rewrites)
    entries = [plain.implementation(r).entry for r in plain.called]
    source = load_source(plain.source)
    with torch.no_grad(), precision(spec.mode):
        with torch.device(device):
            model = source.Model()
        model.to(device)
        take_state(model, state)
        seed_generators(spec.seed)
        number = [r.id for r in plain.called].index(region.id)
        return inputs_of_region(source, model, spec.inputs(0, device, EXAMPLES), entries, number)


def _laid_out(region: Region, value: Value, tensor: Any) -> torch.Tensor:
    """What was captured for `value`, with the strides that the graph says.

    Raises:
        IllegalAction: in the run it lies in memory otherwise.
    """
    meta = region.graph.meta(value)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != meta.shape:
        raise IllegalAction(f"{value} is no tensor of shape {meta.shape} in an eager run")
    moved = any(n > 1 and s != t for n, s, t in zip(meta.shape, meta.stride, tensor.stride(), strict=True))
    if moved or str(tensor.dtype) != f"torch.{meta.dtype}":
        raise IllegalAction(f"{value} has strides {tensor.stride()} and {tensor.dtype} in an eager run, not {meta}")
    return tensor.as_strided(meta.shape, meta.stride)


def _module(found: Cut, state: dict[str, torch.Tensor]) -> RegionModule:
    graph, region = found.graph, found.region
    number = {names: i for i, names in enumerate(n.name for n in graph.nodes.values() if n.kind == "input")}
    parts = [(r, torch_implementation(r)) for r in found.regions]
    settled = Settled.of(graph, parts) if len(parts) > 1 else None
    once = {v: i for i, v in enumerate(settled.outputs)} if settled is not None else {}

    def place(v: Value) -> tuple[str, Any]:
        if v in once:
            return "once", once[v]
        node = graph.nodes[v.node]
        return ("input", number[v.node]) if node.kind == "input" else ("state", node.target)

    text = (
        recurrent_section(graph)
        + "\n".join(m.source for _, m in parts)
        + ("" if settled is None else f"\n{settled.text()}\n")
    )
    given = None if settled is None else [place(v) for v in settled.inputs]
    module = RegionModule(text, parts[-1][1].entry, [place(v) for v in region.inputs], given)
    for node in graph.nodes.values():
        if node.kind in ("parameter", "buffer"):
            module.hold(node.target, state[node.target], node.kind == "parameter", node.literal is None)
    return module


def _is_chosen(region: Region, value: Value) -> bool:
    """Whether `value` is the positions that a `topk` along rows found, which are all different in a row."""
    node = region.graph.nodes[value.node]
    if node.packet != "aten.topk" or value.port != 1:
        return False
    dim = node.args[2] if len(node.args) > 2 else dict(node.kwargs).get("dim", -1)
    return dim in (-1, len(region.graph.meta(value).shape) - 1)


def _origin(
    module: RegionModule, inputs: Sequence[torch.Tensor], chosen: Sequence[bool], native: str, any_value: bool
) -> ExampleOrigin:
    """The values as examples of inputs, and the parameters; of large ones the law alone."""
    leaves = [
        all_different(leaf_of(x, any_value)) if is_chosen else leaf_of(x, any_value)
        for x, is_chosen in zip(inputs, chosen, strict=True)
    ]
    drawn = []
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        leaf = leaf_of(tensor.detach(), any_value)
        tensor.data = torch.empty(0, dtype=tensor.dtype) if isinstance(leaf, DrawnLeaf) else leaf.value
        drawn += [(key, leaf)] if isinstance(leaf, DrawnLeaf) else []
    order, same = tuple(range(len(leaves))), same_as(inputs, leaves)
    return DrawnOrigin(module, tied(leaves), order, getattr(torch, native), same=same, drawn=tuple(drawn))


def _accepts_any(region: Region) -> bool:
    """Whether the operators take whatever values their inputs have: no whole numbers, and no position among them."""
    plain = all(category(node) in PLAIN or node.packet in MOVES for node in region.ops)
    dtypes = {region.graph.meta(v).dtype for v in region.inputs}
    return plain and all("float" in d or d == "bool" for d in dtypes) and not any(node.literal for node in region.ops)


__all__ = ["RegionModule", "RegionSpec", "region_spec"]
