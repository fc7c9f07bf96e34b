"""Submodules that torch.export cannot trace: each becomes one piece of PyTorch code that calls the submodule.

Deals in the inputs and outputs of a submodule, recorded in a run on real values. A placeholder operator replaces it in
the export. The rest of the program relies on what the submodule returned in that run besides the tensors' numbers, so
the code refuses anything else. Knows nothing about the rest of the graph.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.spec import KernelSpec
from qimeng.spec.returned import opened
from qimeng.spec.travel import pack_module

STANDS_FOR = "qimeng.module.default"
"""The placeholder operator: tensors that go in, parameters and buffers, and the key of the call."""

_LIBRARY = torch.library.Library("qimeng", "FRAGMENT")
_LIBRARY.define("module(Tensor[] tensors, str call) -> Tensor[]")
_CALLS: dict[str, Call] = {}


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        label: the submodule's class.
        metas: (shape, stride, dtype) of each tensor that it returns, then of each buffer that it changes.
        leaves: for each leaf of the result whether it is a tensor, and what it is where not.
        tree: how the result is put together.
        text: a Python function ``part`` of the tensors that calls it.
        changed: names of the buffers that it changes.
        places: which of its arguments, opened, are tensors.
    """

    label: str
    metas: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    leaves: tuple[tuple[bool, Any], ...]
    tree: Any
    text: str
    changed: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Content hash."""
        return hashlib.blake2b(f"{self.text}{self.metas}".encode(), digest_size=8).hexdigest()


def call_named(key: str) -> Call:
    """The call that a placeholder stands for."""
    return _CALLS[key]


def call_of(label: str, results: Sequence[torch.Tensor], text: str) -> str:
    """The key of a call of any piece of code, `text`, that returns tensors like `results`."""
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in results)
    call = Call(label, metas, tuple((True, None) for _ in results), None, text)
    _CALLS[call.key] = call
    return call.key


@torch.library.register_fake("qimeng::module", lib=_LIBRARY)
def _shapes_of(tensors: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    device = tensors[0].device if tensors else None
    return [torch.empty_strided(shape, stride, dtype=t, device=device) for shape, stride, t in _CALLS[call].metas]


def recorded(spec: KernelSpec, names: Iterable[str]) -> dict[str, list[Call]]:
    """The calls of the submodules called `names` in one run of `spec`, in order.

    Raises:
        SpecError: one of them changes what it is given or its parameters, is not called, or cannot be packed.
    """
    module, inputs = spec.module(), spec.inputs(0)
    found: dict[str, list[Call]] = {name: [] for name in names}
    for name, calls in found.items():
        _watch(name, module.get_submodule(name), calls)
    with torch.no_grad():
        module(*inputs)
    for name, calls in found.items():
        if not calls:
            raise SpecError(f"submodule {name} is not called")
        _CALLS.update({call.key: call for call in calls})
    return found


def _watch(name: str, module: torch.nn.Module, calls: list[Call]) -> None:
    stack: list[tuple[list[int], dict[str, tuple[int, int]]]] = []

    def fixed(args: Any, kwargs: Any) -> list[int]:
        given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return [t._version for t in (*given, *module.parameters())]

    def buffers() -> dict[str, tuple[int, int]]:
        return {key: (id(t), t._version) for key, t in module.named_buffers()}

    def before(_: Any, args: Any, kwargs: Any) -> None:
        stack.append((fixed(args, kwargs), buffers()))

    def after(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        versions, held = stack.pop()
        now = buffers()
        if fixed(args, kwargs) != versions or now.keys() != held.keys():
            raise SpecError(f"submodule {name} changes its inputs, its parameters or which buffers it has")
        changed = tuple(key for key in now if now[key] != held[key])
        calls.append(_call(name, module, args, kwargs, opened(output), changed))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def _call(name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, changed: tuple[str, ...]) -> Call:
    given, tree = _pytree.tree_flatten((args, kwargs))
    results, out_tree = _pytree.tree_flatten(output)
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    plain = [x for x in (*given, *results) if not isinstance(x, torch.Tensor)]
    if not tensors or not all(isinstance(x, (bool, int, float, str, type(None), torch.dtype)) for x in plain):
        raise SpecError(f"submodule {name} takes or returns something that is neither tensor nor plain number")
    skeleton = copy.deepcopy(module)
    for part in skeleton.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    skeleton = skeleton.to("meta")
    returned = [_fact(x) for x in results]
    names = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
    places = _places(given)
    around = _pytree.tree_unflatten([None if isinstance(x, torch.Tensor) else x for x in given], tree)
    data = base64.b64encode(
        zlib.compress(pack_module(skeleton, (names, places, around, changed, returned)), 9)
    ).decode()
    digest = hashlib.blake2b(data.encode(), digest_size=4).hexdigest()
    updated = [module.get_buffer(key) for key in changed]
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in (*tensors, *updated))
    held = tuple((isinstance(x, torch.Tensor), None if isinstance(x, torch.Tensor) else x) for x in results)
    label = type(module).__name__
    return Call(label, metas, held, out_tree, TEXT.format(digest=digest, data=data, label=label), changed, places)


def _places(leaves: Sequence[Any]) -> tuple[int, ...]:
    return tuple(number for number, x in enumerate(leaves) if isinstance(x, torch.Tensor))


def _fact(x: Any) -> Any:
    """What a program relies on: all of a tensor but its numbers; anything else as it is."""
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


TEXT = '''
held_{digest} = []


def part(*tensors):
    """Call the submodule of class {label} as it is, with its parameters among the tensors."""
    if not held_{digest}:
        import base64
        import pickle
        import zlib

        held_{digest}.append(pickle.loads(zlib.decompress(base64.b64decode("{data}"))))
    module, (names, places, around, changed, returned) = held_{digest}[0]
    leaves, tree = torch.utils._pytree.tree_flatten(around)
    for place, tensor in zip(places, tensors):
        leaves[place] = tensor
    state = dict(zip(names, tensors[len(places) :]))
    state.update({{key: state[key].clone() for key in changed}})
    args, kwargs = torch.utils._pytree.tree_unflatten(leaves, tree)
    result = torch.func.functional_call(module, state, args, kwargs)
    leaves = torch.utils._pytree.tree_leaves(result)
    facts = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
    if repr(facts) != repr(returned):
        raise ValueError(f"made for inputs for which {label} returns {{returned}}; for these it returns {{facts}}")
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return (*tensors, *[state[key] for key in changed])
'''.lstrip()


def hide(module: torch.nn.Module, calls: Mapping[str, Sequence[Call]]) -> None:
    """Replace each submodule that `calls` names by the placeholder."""
    for name, made in calls.items():
        _hide(module, module.get_submodule(name), made)


def _hide(root: torch.nn.Module, module: torch.nn.Module, calls: Sequence[Call]) -> None:
    count = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = calls[count[0]]
        count[0] += 1
        leaves = _pytree.tree_leaves((args, kwargs))
        if _places(leaves) != call.places:
            raise SpecError(
                f"{call.label} cannot be traced and stays as it is, but it is called with other arguments while the "
                "module around it is traced: with a mask, say, that is otherwise left out where it hides nothing. Give "
                "that argument to the module yourself"
            )
        given = [leaves[place] for place in call.places]
        made = iter(torch.ops.qimeng.module([*given, *module.parameters(), *module.buffers()], call.key))
        filled = [next(made) if is_tensor else held for is_tensor, held in call.leaves]
        for key, value in zip(call.changed, made, strict=True):
            module.get_buffer(key).copy_(value)
        return _pytree.tree_unflatten(filled, call.tree)

    def restart(*_: Any) -> None:
        count[0] = 0

    module.forward = forward
    root.register_forward_pre_hook(restart)


def innermost(module: torch.nn.Module, error: BaseException) -> str:
    """Name of the submodule whose own code raised `error`; empty where that is the module itself."""
    names = {id(m): name for name, m in module.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        here = known.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_varnames else None
        found = names.get(id(here), found)
        trace = trace.tb_next
    return found


__all__ = ["STANDS_FOR", "Call", "call_named", "call_of", "hide", "innermost", "recorded"]
