"""Capturing a specification's graph where there are cores to spare.

Deals in specifications and graphs. What depends on the GPU at hand is done here, on the graph that comes back; where
none comes, all of it. Knows nothing about how a graph is captured (`qimeng.program.verify`).
"""

from __future__ import annotations

import platform
from functools import partial

import torch

from qimeng.envs.workers.offload import NotHere, done_elsewhere, library_version, offered
from qimeng.graph.on_device import for_device
from qimeng.graph.opgraph import OpGraph
from qimeng.program.content import digest_of
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.patience import left_s, within


def captured(spec: KernelSpec, verify: bool = True, device: str = "cpu") -> OpGraph:
    """The graph of `spec`: see `qimeng.program.verify.capture_spec`, whose arguments and errors it has.

    On another machine it is captured and compared with the module on the CPU. What cannot be told there, such as how
    results lie in this GPU's memory, is told here; and what is refused there, or too large for a CPU, is captured here.
    """
    if not offered():
        return capture_spec(spec, verify, device)
    seconds, tools = left_s(), _versions()
    key = digest_of("capture", spec.digest, verify, tools, size=16)
    work = partial(_capture_for_another, spec.to_bytes(), verify, seconds, tools)
    (found,) = done_elsewhere([(key, work)], seconds)
    return capture_spec(spec, verify, device) if found is None else for_device(spec, device, found)


def _capture_for_another(spec: bytes, verify: bool, seconds: float, tools: str) -> OpGraph:
    """On a machine with cores to spare.

    Raises:
        NotHere: another PyTorch is installed here.
        CaptureError: see `captured`.
    """
    if _versions() != tools:
        raise NotHere(f"other versions than on the machine that asks: {tools}")
    with within(seconds):
        return capture_spec(KernelSpec.from_bytes(spec), verify)


def _versions() -> str:
    torch_version = torch.__version__.partition("+")[0]
    return f"torch {torch_version}, qimeng {library_version()}, python {platform.python_version()}"


__all__ = ["captured"]
