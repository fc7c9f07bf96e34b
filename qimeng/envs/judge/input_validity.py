"""Finds out which values of inputs and buffers a computation accepts.

Some modules check their inputs: a binary cross entropy needs targets in [0, 1], a distribution a positive scale. On a
CPU they raise. On a GPU a failed check inside a kernel ends the whole process. So inputs are tried on the CPU first,
unless the graph shows that no operator looks at values. Knows nothing about references or verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import category
from qimeng.spec import EXAMPLES, KernelSpec, perturb_parameters
from qimeng.spec.patience import BRIEF_S, patience
from qimeng.spec.perturb import seed_of
from qimeng.spec.together import TOGETHER

SECONDS = 2.0
"""Time limit in seconds, after which no further distribution is tried."""
SEEDS = (1, 2, 3, 4)
"""Seeds for distributions that differ much from seed to seed; others are tried once."""

CARELESS = ("view", "pointwise", "reduction", "scan", "gemm", "attention", "convolution")
"""Categories of operators that take any floating-point numbers."""
MOVING = frozenset(
    f"aten.{name}"
    for name in "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d cat "
    "constant_pad_nd flip roll upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_trilinear3d".split()
)
"""Others that do."""
LOOKED_UP = ("aten.embedding", "aten.index_select", "aten.index", "aten.gather")
"""Operators that take any numbers as their first operand; the others are indices."""
ASSERTED = ("aten.log", "aten.log1p")
"""What a graph has in the place of a binary cross entropy, whose kernel checks that its inputs lie between 0 and 1."""
NORMS = ("aten._native_batch_norm_legit_no_training", "aten.native_batch_norm")


def takes_any_values(graph: OpGraph | None) -> bool:
    """Whether no operator of `graph` raises for some floating-point numbers among inputs, parameters and buffers.

    Such numbers meet arithmetic alone there. Indices are looked up only where they depend on none of them: no
    distribution changes those.
    """
    if graph is None or not graph.nodes:
        return False
    numbers: set[str] = set()
    for node in graph.nodes.values():
        if node.literal is not None and node.kind == "op":
            return False
        if node.kind != "op":
            is_number = any("float" in m.dtype or "complex" in m.dtype for m in node.metas if m is not None)
            if node.kind == "scalar" or (is_number and node.kind != "constant"):
                numbers.add(node.name)
            continue
        reached = [v.node in numbers for v in node.operands()]
        if not any(reached):
            continue
        numbers.add(node.name)
        if node.packet in LOOKED_UP and reached[0] and not any(reached[1:]):
            continue
        known = category(node) in CARELESS or node.packet in MOVING
        first = node.metas[0]
        is_plain = first is not None and ("float" in first.dtype or first.dtype == "bool")
        if not known or node.packet in ASSERTED or not is_plain:
            return False
    return True


def has_norms_alone(graph: OpGraph) -> bool:
    """Whether buffers are statistics of batch norms, and of nothing else."""
    buffers = {n.name for n in graph.nodes.values() if n.kind == "buffer"}
    return all(n.packet in NORMS for n in graph.ops() if any(v.node in buffers for v in n.operands()))


def refused_distributions(spec: KernelSpec, names: Iterable[str]) -> set[str]:
    """Those of `names` on whose inputs `spec` raises, at reduced size on the CPU; it has to run on the user's own.

    Returns nothing if the module is too slow or does not run on the CPU.
    """
    if spec.accepts_any:
        return set()
    small, began = spec.reduced(), time.monotonic()
    if not small.is_small:
        return set()

    def runs(distribution: str) -> bool:
        seeds = SEEDS if distribution in TOGETHER else SEEDS[:1]
        return all(_run(small, seed, distribution) is not None for seed in seeds)

    others = [n for n in names if n != "given"]
    if not others or not runs(EXAMPLES):
        return set()
    return {n for n in others if time.monotonic() - began < SECONDS and not runs(n)}


def takes_other_buffers(spec: KernelSpec) -> bool:
    """Whether `spec` runs, and gives as few values that are not finite, with other constants, masks and integers.

    Tried at reduced size on the CPU, because an index out of range would end a GPU's whole process.
    """
    if spec.accepts_any:
        return True
    small = spec.reduced()
    if not small.is_small:
        return False
    usual = _run(small, 1)
    if usual is None:
        return False
    for number in range(2):
        other = _run(small, 1, change=seed_of(number, share=1, fixed=True))
        if other is None or _not_finite(other) > _not_finite(usual):
            return False
    return True


def _run(spec: KernelSpec, seed: int, distribution: str = "given", change: int | None = None) -> Any:
    """What `spec` returns on the CPU; None where it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), patience("forward", BRIEF_S):
            module = spec.module()
            if change is not None:
                perturb_parameters(module, change)
            return module(*spec.inputs(seed, "cpu", distribution))
    except Exception:  # noqa: BLE001  the user's module may raise anything
        return None


def _not_finite(tree: Any) -> int:
    tensors = [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(int((~x.isfinite()).sum()) for x in tensors)


__all__ = ["has_norms_alone", "refused_distributions", "takes_any_values", "takes_other_buffers"]
