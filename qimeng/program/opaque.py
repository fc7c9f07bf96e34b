"""Programs of computations that could not be captured: one region that is the reference itself.

Deals in the text of such a program. Knows nothing about why the capture failed.
"""

from __future__ import annotations

from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program
from qimeng.spec import KernelSpec


def opaque_program(spec: KernelSpec) -> Program:
    """`spec` as a program whose source is the spec's own text, or a file that imports the module's class."""
    if spec.source:
        return Program(OpGraph({}, ()), (), {}, spec.source)
    module = spec.module()
    kind = type(getattr(module, "function", module))
    text = f'"""The reference itself: this computation could not be captured as a graph."""\n\nfrom {kind.__module__} import {kind.__qualname__} as Model\n'
    return Program(OpGraph({}, ()), (), {}, text)
