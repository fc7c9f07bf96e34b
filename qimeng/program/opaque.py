"""Programs of computations that could not be captured: one region that is the reference itself.

Deals in the text of such a program. Knows nothing about why the capture failed.
"""

from __future__ import annotations

import base64
import io
import keyword
import pickle
import tokenize
import zlib
from functools import partial
from types import FunctionType
from typing import Any

import torch

from qimeng.graph.opgraph import OpGraph
from qimeng.program.origin import note_reference
from qimeng.program.program import Program
from qimeng.spec import KernelSpec
from qimeng.spec.origin import ExampleOrigin, FunctionModule, SourceOrigin, init_arguments, seeded

NOTE = '"""Left on PyTorch as it is; the notes of the result say why."""\n'
MOST_BYTES = 4 << 20
"""Of a module beside the values of its state_dict, packed; as much as a captured program holds."""


def opaque_program(spec: KernelSpec) -> Program:
    """`spec` as a program whose source is the reference.

    For a KernelBench-style file that is its own text, its class renamed, with a `Model` that needs no arguments. For
    a module or function it is a file that imports the class by its qualified name, and holds what the module has beside
    its state_dict; one that cannot be imported or pickled raises when `Model` is made, and says so.
    """
    text = _from_text(spec) if spec.source else _from_object(spec)
    return Program(OpGraph({}, ()), (), {}, note_reference(text))


def _from_text(spec: KernelSpec) -> str:
    assert isinstance(spec.origin, SourceOrigin)
    name = "Reference"
    while name in spec.source:
        name += "_"
    space = spec.origin.namespace
    text = f"{_renamed(spec.source, 'Model', name).rstrip()}\n\n\n"
    doc = '"""The reference, made with its own arguments; the notes of the result say why it is left as it is."""'
    made, body = f"{name}({_ARGUMENTS})", _finishing(spec, "made") + ["return made"]
    head = ["def Model(*unused, **ignored):", f"    {doc}"]
    if isinstance(space.Model, type):
        made, body = f"super().__init__({_ARGUMENTS})", _finishing(spec, "self")
        head = [f"class Model({name}):", f"    {doc}", "", "    def __init__(self, *unused, **ignored):"]
    indent = " " * (8 if isinstance(space.Model, type) else 4)
    lines = [
        "import torch",
        "",
        "with torch.random.fork_rng():",
        f"    torch.manual_seed({spec.seed})  # for what it draws that is not in its state_dict",
        f"    args, kwargs = {_arguments_text(spec.origin)}",
        f"    {'' if made.startswith('super') else 'made = '}{made}",
        *body,
    ]
    return text + "\n".join(head + [f"{indent}{line}".rstrip() for line in lines]) + "\n"


_ARGUMENTS = "*args, **kwargs"


def _arguments_text(origin: SourceOrigin) -> str:
    """The expression that gives the constructor's positional and keyword arguments (see `init_arguments`)."""
    with seeded(0, "cpu"):
        given = origin.namespace.get_init_inputs()
    args, _ = init_arguments(origin.namespace.Model, given)
    if isinstance(given, dict):
        return "(), get_init_inputs()"
    one_by_one = len(args) == len(given) and all(a is b for a, b in zip(args, given, strict=True))
    return "get_init_inputs(), {}" if one_by_one else "get_init_inputs()"


def _finishing(spec: KernelSpec, name: str) -> list[str]:
    """Lines that give the module called `name` the spec's dtype and mode; other dtypes in it stay as they are."""
    lines = []
    if spec.dtype != "float32":
        lines += [
            f"for part in {name}.modules():",
            "    for tensor in (*part._parameters.values(), *part._buffers.values()):",
            "        if tensor is not None and tensor.dtype is torch.float32:",
            f"            tensor.data = tensor.data.to(torch.{spec.dtype})",
        ]
    return [
        *lines,
        f"if {name}.training is not {spec.training}:  # its parts may be in modes of their own",
        f"    {name}.train({spec.training})",
    ]


def _renamed(text: str, old: str, new: str) -> str:
    """`text` with the name `old` changed to `new` wherever it is a name of its own (no attribute, no string).

    >>> _renamed("class A(x.A): pass  # A", "A", "B")
    'class B(x.A): pass  # A'
    """
    lines, previous = text.splitlines(True), ""
    places = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == old and previous != ".":
            places.append(token.start)
        previous = token.string
    for row, column in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)


def _from_object(spec: KernelSpec) -> str:
    assert isinstance(spec.origin, ExampleOrigin)
    module = spec.origin.held
    function = module.function if isinstance(module, FunctionModule) else None
    thing = type(module) if function is None else function
    home, name = getattr(thing, "__module__", "") or "", getattr(thing, "__qualname__", type(thing).__qualname__)
    parts = [*home.split("."), *name.split(".")]
    if home == "__main__" or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        return _refusing(name, home, "cannot be imported")
    outer, _, rest = name.partition(".")
    reached = f"{outer}.{rest}" if rest else outer
    if function is None:
        try:
            held = _packed(module)
        except Exception as error:  # noqa: BLE001  pickling calls the user's own code, which may raise anything
            return _refusing(name, home, f"cannot be pickled: {error}")
        return MADE.format(**locals())
    return (
        f"{NOTE}\nimport torch\n\nfrom {home} import {outer}\n\n\nclass Model(torch.nn.Module):\n"
        f'    """{name} as a module."""\n\n'
        "    def forward(self, *inputs, **named):\n"
        f"        return {reached}(*inputs, **named)\n"
    )


MADE = f'''{NOTE}
import base64
import pickle
import zlib

import torch
from {{home}} import {{outer}}

HELD = "{{held}}"


class Model({{reached}}):
    """{{name}} as it was given, with zeros for what its state_dict holds: load that."""

    def __init__(self, *unused):
        made = pickle.loads(zlib.decompress(base64.b64decode(HELD)))
        self.__dict__.update(made.__dict__)
        for value in self.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
'''


def _refusing(name: str, home: str, reason: str) -> str:
    return (
        f"{NOTE}\n\nclass Model:\n"
        f'    """Stands for {name} of {home}."""\n\n'
        "    def __init__(self, *unused):\n"
        f"        raise ImportError({f'use the module you gave: {name} of {home} {reason}'!r})\n"
    )


def _packed(module: torch.nn.Module) -> str:
    """`module` without the values that its state_dict holds, as text."""
    state = {id(t): t for t in module.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)}

    class Pickler(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__":
                raise ValueError(f"no file can import its {thing.__qualname__}")
            if type(thing) not in (torch.Tensor, torch.nn.Parameter) or id(thing) not in state:
                return NotImplemented
            if type(thing) is torch.Tensor:
                return partial(torch.empty_strided, dtype=thing.dtype), (tuple(thing.size()), thing.stride())
            value = thing.detach()
            state[id(value)] = value
            return torch.nn.Parameter, (value, thing.requires_grad)

    with io.BytesIO() as file:
        Pickler(file).dump(module)
        data = zlib.compress(file.getvalue(), 9)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it holds {len(data) >> 20} MiB beside its state_dict")
    return base64.b64encode(data).decode()


__all__ = ["opaque_program"]
