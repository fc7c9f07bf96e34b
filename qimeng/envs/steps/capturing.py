"""Capturing a specification's graph where there are cores to spare.

Deals in specifications and graphs. Only torch.export, which needs no device, runs on another machine. Knows nothing
about how a graph is captured (`qimeng.program.verify`).
"""

from __future__ import annotations

import platform
from functools import partial

import torch

from qimeng.envs.workers.offload import NotHere, done_elsewhere, offered
from qimeng.graph.opgraph import OpGraph
from qimeng.program.content import digest_of
from qimeng.program.verify import capture_spec, exported
from qimeng.spec import KernelSpec
from qimeng.spec.patience import left_s, within
from qimeng.version import VERSION


def captured(spec: KernelSpec, verify: bool = True, device: str = "cpu") -> OpGraph:
    """The graph of `spec`: see `qimeng.program.verify.capture_spec`, whose arguments and errors it has.

    torch.export runs on another machine. What it gives is compared with the module here, where the device is; and what
    it refuses there is captured here.
    """
    if not offered():
        return capture_spec(spec, verify, device)
    seconds, tools = left_s(), _versions()
    work = partial(_export_for_another, spec.to_bytes(), seconds, tools)
    (found,) = done_elsewhere([(digest_of("capture", spec.digest, tools, size=16), work)], seconds)
    return capture_spec(spec, verify, device, known=found)


def _export_for_another(spec: bytes, seconds: float, tools: str) -> OpGraph:
    """On a machine with cores to spare.

    Raises:
        NotHere: another PyTorch is installed here.
        CaptureError: see `captured`.
    """
    if _versions() != tools:
        raise NotHere(f"other versions than on the machine that asks: {tools}")
    with within(seconds):
        return exported(KernelSpec.from_bytes(spec))


def _versions() -> str:
    torch_version = torch.__version__.partition("+")[0]
    return f"torch {torch_version}, qimeng {VERSION}, python {platform.python_version()}"


__all__ = ["captured"]
