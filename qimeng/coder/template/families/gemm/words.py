"""What rule-based planners and prompts say about the gemm family.

Deals in names of actions and in tiny modules that are no one's problem. Knows nothing about kernels.
"""

from __future__ import annotations

import torch

from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.device import Device
from qimeng.family import Sample
from qimeng.graph.ops import category, is_product, precision_of
from qimeng.graph.region import Region

TILE_ELEMENTS = 128 * 256
"""Elements of a usual output tile of a matrix product."""

_FP32_PRODUCT = (("precision", "fp16x3"), ("split", "more"), ("precision", "bf16x3"), ("tiling", "taller"))
INTENTS = {
    "default": _FP32_PRODUCT,
    "highest": _FP32_PRODUCT,
    "high": (("precision", "fp16"), ("split", "more"), ("precision", "tf32"), ("tiling", "taller")),
    "windows": (("precision", "tf32"), ("layout", "pack"), ("split", "more"), ("tiling", "taller")),
    "half": (("split", "more"), ("tiling", "smaller"), ("pipeline", "stages")),
}
"""What to try, in order, by precision mode (``half`` for fp16 and bf16 operands: lowering has tried large tiles and
packed operands; ``windows`` for convolutions where TF32 is legal: lowering has tried planes of a copy)."""


def intents(region: Region, schedule: GemmSchedule | None, device: Device, mode: str) -> tuple[tuple[str, str], ...]:
    """Precisions first; the depth is split where the result has fewer tiles than the GPU has multiprocessors.

    Three bf16 products are not worth trying where three of fp16 are right: those keep six bits more and are as fast.
    Planes were chosen for a convolution among others in TF32, which were wrong or slower.
    """
    half = any(region.graph.meta(v).dtype in ("float16", "bfloat16") for v in region.inputs)
    products = [n for n in region.ops if is_product(region.graph, n)]
    key = "half" if half else precision_of([n.packet for n in products], mode)
    convolution = all(category(n) == "convolution" for n in products)
    windows = key == "high" and convolution
    found = INTENTS["windows" if windows else key]
    if not _few_tiles(region, device):
        found = tuple(i for i in found if i[0] != "split")
    if schedule is None:
        return found
    done = ("tf32", ("fp16", "fp16x3", "bf16x6")) if windows else ("bf16x3", ("fp16x3",))
    return tuple(i for i in found if i != ("precision", done[0]) or schedule.precision not in done[1])


def _few_tiles(region: Region, device: Device) -> bool:
    product = next(n for n in region.ops if is_product(region.graph, n))
    meta = product.metas[0]
    return meta is not None and meta.numel // TILE_ELEMENTS < device.sms


class _Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def samples() -> tuple[Sample, ...]:
    """A layer with its activation, for few rows and for more."""
    return (_Linear, ((128, 256),)), (_Linear, ((512, 256),))


__all__ = ["INTENTS", "TILE_ELEMENTS", "intents", "samples"]
