"""What rule-based planners and prompts say about the attention family.

Deals in names of actions and in tiny modules that are no one's problem. Knows nothing about kernels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from qimeng.family import Sample
from qimeng.graph.region import Region

INTENTS = {
    "default": (("precision", "tf32x3"), ("pipeline", "stages"), ("tiling", "taller")),
    "high": (("precision", "tf32"), ("pipeline", "stages"), ("tiling", "taller")),
    "half": (
        ("split", "more"),
        ("pipeline", "stages"),
        ("tiling", "deeper"),
        ("pipeline", "warps"),
        ("tiling", "smaller"),
    ),
}
"""What to try, in order, by precision mode (``half`` for fp16 and bf16 operands)."""


def intents(region: Region, mode: str, few: bool) -> tuple[tuple[str, str], ...]:
    """Precisions first, then the pipeline and the blocks.

    Args:
        region: the region.
        mode: precision mode.
        few: there are fewer programs than the GPU has multiprocessors, so that keys may be shared further.
    """
    half = any(region.graph.meta(v).dtype in ("float16", "bfloat16") for v in region.inputs)
    found = INTENTS["half" if half else "high" if mode == "high" else "default"]
    return tuple(i for i in found if few or i[0] != "split")


class _Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v)


def samples() -> tuple[Sample, ...]:
    """Attention of a few heads."""
    return ((_Attention, ((2, 4, 128, 64),) * 3),)


__all__ = ["INTENTS", "intents", "samples"]
