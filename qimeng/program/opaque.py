"""Programs of computations that could not be captured: one region that is the reference itself.

Deals in the text of such a program. Knows nothing about why the capture failed.
"""

from __future__ import annotations

import io
import keyword
import tokenize

from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

NOTE = '"""Left on PyTorch as it is: this computation could not be captured as a graph."""\n'


def opaque_program(spec: KernelSpec) -> Program:
    """`spec` as a program whose source is the reference.

    For a KernelBench-style file that is its own text, its class renamed, with a `Model` that needs no arguments. For
    a module or function it is a file that imports the class by its qualified name; one that cannot be imported
    raises when `Model` is made, and says so.
    """
    text = _from_text(spec) if spec.source else _from_object(spec)
    return Program(OpGraph({}, ()), (), {}, text)


def _from_text(spec: KernelSpec) -> str:
    name = "Reference"
    while name in spec.source:
        name += "_"
    return (
        f"{_renamed(spec.source, 'Model', name).rstrip()}\n\n\n"
        f"class Model({name}):\n"
        '    """The reference, made with its own arguments; this computation could not be captured as a graph."""\n\n'
        "    def __init__(self, *unused):\n"
        "        super().__init__(*get_init_inputs())\n"
        f"        self.to(__import__('torch').{spec.dtype})\n"
        f"        if self.training is not {spec.training}:  # its parts may be in modes of their own\n"
        f"            self.train({spec.training})\n"
    )


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
    module = spec.module()
    function = getattr(module, "function", None)
    thing = type(module) if function is None else function
    home, name = getattr(thing, "__module__", "") or "", getattr(thing, "__qualname__", type(thing).__qualname__)
    parts = [*home.split("."), *name.split(".")]
    if home == "__main__" or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        return (
            f"{NOTE}\n\nclass Model:\n"
            f'    """Stands for {name} of {home}, which no file can import."""\n\n'
            "    def __init__(self, *unused):\n"
            f"        raise ImportError({f'use the module you gave: {name} of {home} cannot be imported'!r})\n"
        )
    outer, _, rest = name.partition(".")
    reached = f"{outer}.{rest}" if rest else outer
    if function is None:
        return f"{NOTE}\nfrom {home} import {outer}\n\nModel = {reached}\n"
    return (
        f"{NOTE}\nimport torch\n\nfrom {home} import {outer}\n\n\nclass Model(torch.nn.Module):\n"
        f'    """{name} as a module."""\n\n'
        "    def forward(self, *inputs):\n"
        f"        return {reached}(*inputs)\n"
    )
