"""Whether a problem says anything: would a constant pass for its result?

Deals in a few runs of PyTorch eager, judged by KernelBench's own rule. Knows nothing about candidates. Such problems
are flagged, not left out (KernelBench issue 165, https://github.com/ScalingIntelligence/KernelBench/issues/165).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils import _pytree

from qimeng.envs.accuracy import kernelbench_close
from qimeng.envs.modes import precision
from qimeng.envs.timing import DeviceLock, lock_path
from qimeng.spec import KernelSpec

SEEDS = (11, 12)
"""Two inputs; public, since nothing is judged with them."""


def degenerate(spec: KernelSpec, device: str) -> str:
    """Why the result of `spec` can be guessed, or an empty string.

    Args:
        spec: the computation, at the size that counts (a long softmax is nearly zero, a short one is not).
        device: PyTorch's name of the device to run it on; on a GPU the device's lock is held meanwhile.
    """
    lock = DeviceLock(lock_path(torch.device(device))) if device.startswith("cuda") else None
    try:
        with lock.held() if lock else nullcontext(), torch.no_grad(), precision(spec.mode):
            return _guess(spec, device)
    finally:
        if lock is not None:
            lock.close()
            torch.cuda.empty_cache()


def _guess(spec: KernelSpec, device: str) -> str:
    module = spec.module(device)
    has_inputs, outputs = _run(module, spec, device, SEEDS[0])
    if _close([_constant(y, 0.0) for y in outputs], outputs):
        return "zeros pass"
    if any(y.numel() > 1 for y in outputs) and _close(
        [_constant(y, float(y.float().mean())) for y in outputs], outputs
    ):
        return "a constant passes"
    if has_inputs and _close(_run(module, spec, device, SEEDS[1])[1], outputs):
        return "the output does not depend on the inputs"
    return ""


def _run(module: torch.nn.Module, spec: KernelSpec, device: str, seed: int) -> tuple[bool, list[torch.Tensor]]:
    """Whether there are tensors among the inputs of a call, and those among its outputs."""
    inputs = spec.inputs(seed, device)
    torch.manual_seed(seed)
    return bool(_tensors(inputs)), _tensors(module(*inputs))


def _constant(like: torch.Tensor, value: float) -> torch.Tensor:
    """A tensor of one value; it takes no memory, which large problems need themselves."""
    return torch.full((), value, device=like.device).to(like.dtype).expand(like.shape)


def _close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(kernelbench_close(a, b) for a, b in zip(found, wanted, strict=True))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
