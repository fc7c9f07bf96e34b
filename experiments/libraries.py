"""Families of fp32 and bf16 kernels beside their best libraries, on a GPU.

    python -m experiments.libraries rows.jsonl --seconds 400 --each 25

A row of JSON for each case: in turns, with a cold L2, milliseconds of what `plan_and_code` makes in `--each` seconds,
of PyTorch in eager mode (cuDNN, its attentions), of torch.compile, and of the libraries that are installed:
quack-kernels, liger-kernel, fla-core, accelerated-scan. A library that is missing, or does not take a case, is named in
`not_timed`.
``--tiny`` tries the script on the CPU at small sizes, with Triton's interpreter; its times mean nothing. Deals in
running and writing down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import qimeng
from experiments.case_rows import Place, write_rows
from experiments.sparse import Calls, in_turns

SHOWN = ("failed", "best_ms", "over", "not_timed")
"""Of a row, what is printed as well."""

OURS = "generated (plan_and_code)"
"""What a row calls the result of this library."""

Library = Callable[..., Any]
Libraries = dict[str, Library]


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        name: family, sizes, dtype.
        function: in PyTorch.
        shapes: of its inputs; one of a single number is a parameter's, and is drawn around one.
        dtype: of its inputs.
        libraries: name to the same by a library, or to why it cannot be imported.
        index: the last input is an index below this; 0 where none is.
    """

    name: str
    function: Library
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    libraries: Libraries
    index: int = 0

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        """Drawn anew, always the same."""
        torch.manual_seed(0)
        made = [torch.randn(s, device=device, dtype=self.dtype) + (len(s) == 1) for s in self.shapes]
        if self.index:
            made[-1] = torch.randint(self.index, self.shapes[-1], device=device)
        return tuple(made)


def library(module: str, name: str) -> Library:
    """`name` of `module`, imported at the first call, so that a missing library fails as a call and not before."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


LIGER, FLA = "liger_kernel.transformers.functional", "fla.modules.norm.layernorm"


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Zhang and Sennrich 2019, over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A residual added before the normalization; the sum is an output too."""
    total = x + residual
    return functional.rms_norm(total, (x.shape[-1],), weight, 1e-6), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Over the last dimension."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of 32 groups of channels."""
    return functional.group_norm(x, 32, weight, bias, 1e-5)


def l2_norm(x: Tensor) -> Tensor:
    """Each row over its length."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return torch.softmax(x, -1)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Mean over rows."""
    return functional.cross_entropy(x, target)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Shazeer 2020."""
    return functional.silu(a) * b


def geglu(a: Tensor, b: Tensor) -> Tensor:
    """Shazeer 2020, with the tanh form of GELU."""
    return functional.gelu(a, approximate="tanh") * b


def depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of single channels, as large as its input."""
    return functional.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=weight.shape[0])


def causal_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """One that sees no later position, as in Mamba."""
    return functional.conv1d(functional.pad(x, (weight.shape[-1] - 1, 0)), weight, groups=weight.shape[0])


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """3 x 3, as large as its input."""
    return functional.conv2d(x, weight, padding=1)


def max_pool3d(x: Tensor) -> Tensor:
    """Windows of 3 at a stride of 2."""
    return functional.max_pool3d(x, 3, 2, 1)


def cumulative_sum(x: Tensor) -> Tensor:
    """Along rows."""
    return x.cumsum(-1)


def gated_scan(gates: Tensor, tokens: Tensor) -> Tensor:
    """``state = gate * state + token`` along the last dimension, as a Python loop."""
    state, states = tokens[..., 0], [tokens[..., 0]]
    for step in range(1, tokens.shape[-1]):
        state = gates[..., step] * state + tokens[..., step]
        states.append(state)
    return torch.stack(states, -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of q, k and v."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal_attention(q, k, v)


def cases(tiny: bool) -> list[Case]:
    """Every case; those that say most come first."""
    half, full = torch.bfloat16, torch.float32
    r, d, wide, words = (4, 64, 128, 96) if tiny else (16384, 4096, 8192, 32768)
    b, c, side = (1, 32, 6) if tiny else (32, 256, 56)
    heads = (1, 2, 32, 16) if tiny else (4, 16, 4096, 128)
    length = 8 if tiny else 256
    rows = (r, d)
    quack_rms, quack_layer = library("quack.rmsnorm", "rmsnorm"), library("quack.rmsnorm", "layernorm_fwd")
    quack_softmax, quack_loss = library("quack.softmax", "softmax"), library("quack.cross_entropy", "cross_entropy")
    liger_rms = partial(library(LIGER, "liger_rms_norm"), eps=1e-6, in_place=False)
    liger_add = partial(library(LIGER, "liger_fused_add_rms_norm"), eps=1e-6, in_place=False)
    rms: Libraries = {"quack": partial(quack_rms, eps=1e-6), "liger": liger_rms}
    rms["fla"] = lambda x, w: library(FLA, "rms_norm")(x, w, None, eps=1e-6)
    layer: Libraries = {
        "quack": lambda x, w, b: quack_layer(x, w.float(), b.float(), 1e-5),
        "liger": partial(library(LIGER, "liger_layer_norm"), eps=1e-5),
        "fla": partial(library(FLA, "layer_norm"), eps=1e-5),
    }
    soft: Libraries = {"quack": quack_softmax, "liger": library(LIGER, "liger_softmax")}
    loss: Libraries = {"quack": partial(quack_loss, reduction="mean"), "liger": library(LIGER, "liger_cross_entropy")}
    group: Libraries = {
        "liger": lambda x, w, b: library(LIGER, "liger_group_norm")(x.flatten(2), w, b, c, 32, 1e-5).view_as(x)
    }
    found = []
    for dtype, name in ((half, "bf16"), (full, "fp32")):
        found += [
            Case(f"rms_norm {name}", rms_norm, (rows, (d,)), dtype, rms),
            Case(f"softmax {name}", softmax, ((r, wide),), dtype, soft),
            Case(f"layer_norm {name}", layer_norm, (rows, (d,), (d,)), dtype, layer),
            Case(f"cross_entropy {name}", cross_entropy, ((r // 2, words), (r // 2,)), dtype, loss, words),
        ]
    image = (b, c, side, side)
    found += [
        Case("add_rms_norm bf16", add_rms_norm, (rows, rows, (d,)), half, {"liger": liger_add}),
        Case("swiglu bf16", swiglu, ((r, wide), (r, wide)), half, {"liger": library(LIGER, "liger_swiglu")}),
        Case("geglu bf16", geglu, ((r, wide), (r, wide)), half, {"liger": library(LIGER, "liger_geglu")}),
        Case("group_norm bf16", group_norm, (image, (c,), (c,)), half, group),
        Case("l2_norm bf16", l2_norm, ((r * 8, 128),), half, {"fla": library("fla.modules.norm.l2norm", "l2norm")}),
        Case("depthwise 3x3 bf16", depthwise, (image, (c, 1, 3, 3)), half, {}),
        Case("depthwise 7x7 fp32", depthwise, (image, (c, 1, 7, 7)), full, {}),
        Case("causal depthwise 4 bf16", causal_depthwise, ((8, d, 2048), (d, 1, 4)), half, {}),
        Case("max_pool3d fp32", max_pool3d, ((4, c // 2, side, side, side),), full, {}),
        Case("convolution 3x3 bf16", convolution, (image, (c, c, 3, 3)), half, {}),
        Case("cumsum fp32", cumulative_sum, ((r // 4, wide * 4),), full, {}),
        Case("causal attention bf16", causal_attention, (heads, heads, heads), half, {"cuDNN": cudnn_attention}),
    ]
    scan: Libraries = {"accelerated-scan": library("accelerated_scan.scalar", "scan")}
    return [*found, Case("gated scan fp32", gated_scan, ((8, 1024, length), (8, 1024, length)), full, scan)]


def measured(case: Case, place: str, each: float) -> dict[str, Any]:
    """Times, how far ours is ahead of each, and the distance of each from float64."""
    inputs = case.inputs(place)
    spec = qimeng.KernelSpec.from_function(case.function, inputs)
    found = qimeng.plan_and_code(spec, seconds=each, planner="heuristic", search="greedy", compile_modes=())
    ours, compiled = found.module, torch.compile(case.function)
    calls: Calls = {OURS: partial(ours, *inputs), "eager": partial(case.function, *inputs)}
    calls |= {"torch.compile": partial(compiled, *inputs)}
    calls |= {name: partial(call, *inputs) for name, call in case.libraries.items()}
    row = in_turns(calls, place)
    times = row["turns_ms"]
    exact = _first(case.function(*(x.double() if x.is_floating_point() else x for x in inputs)))
    scale = exact.square().mean().sqrt()
    row["largest_difference_over_rms"] = {
        name: float((_first(calls[name]()).double() - exact).abs().max() / scale) for name in times
    }
    row |= {
        "best_ms": times[OURS],
        "steps": [str(s.action) for s in found.recipe.steps],
        "headline": found.headline,
    }
    return row | {"over": {name: ms / times[OURS] for name, ms in times.items() if name != OURS}}


def _first(out: Any) -> Tensor:
    made: Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return made


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="After so many no further case is begun.")] = 400.0,
    each: Annotated[float, typer.Option(help="Seconds for the optimization of a case.")] = 25.0,
    only: Annotated[str, typer.Option(help="Words that a case's name begins with, with commas.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small sizes on the CPU, to try the script.")] = False,
) -> None:
    """Measure the cases one after the other."""
    place = Place.of(tiny)
    chosen = [c for c in cases(tiny) if c.name.startswith(tuple(only.split(",")))]
    measures = ((({"case": c.name}), partial(measured, c, place.name, each)) for c in chosen)
    write_rows(out, measures, place, seconds, SHOWN)


if __name__ == "__main__":
    typer.run(main)
