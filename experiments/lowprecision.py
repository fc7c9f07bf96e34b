"""Linear layers with declared weights on a GPU, beside PyTorch, torch.compile and the libraries' own kernels.

    python -m experiments.lowprecision rows.jsonl --seconds 30 --only int4

A row of JSON for each layer (weights, rows, sizes of Llama's layers; ``fp8a`` and ``int8a`` declare activations too,
with PyTorch's products of codes as rivals): what the usual search found by the judge's clock,
and in turns, each in a CUDA graph with a cold L2, milliseconds of the result, of PyTorch on the declared weights in
bf16, of PyTorch's own int4 and int8 products, and of torchao and gemlite (`pip install gemlite==0.6.0`) where they
are installed; a library that fails is written down with its reason. ``--sweep`` times each configuration
that the action `dequantize` or `multiply_codes` begins with instead, without a judge. Deals in running and writing
down.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from experiments.products import ROUNDS, timer
from experiments.quantized_rivals import codes_of, rivals
from qimeng import KernelSpec, QimengError, plan_and_code
from qimeng.actions import Context, legal_actions
from qimeng.bench.environment import environment
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device, current_device
from qimeng.envs.steps.result import Result
from qimeng.family import covering
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec.declared import activation_form, weight_form
from qimeng.vocabulary.lowprecision.forms import FP8, INT4, INT8, scaled

LAYERS = {"q": (4096, 4096), "up": (4096, 14336), "down": (14336, 4096), "kv": (4096, 1024), "wide": (8192, 8192)}
"""K and N of Llama 3 8B's layers, and of the 70B's first one."""

CASES: dict[str, tuple[str, int, str]] = {
    f"{weights} {layer} {rows}": (weights, rows, layer)
    for weights in ("int8", "int4", "fp8")
    for layer, sizes in (("q", (1, 8, 64, 2048)), ("up", (1, 16)), ("down", (1, 8)), ("kv", (1, 32)), ("wide", (1, 4)))
    for rows in sizes
} | {
    f"{weights}a {layer} {rows}": (f"{weights}a", rows, layer)
    for weights in ("fp8", "int8")
    for layer in ("q", "up", "down")
    for rows in (16, 64, 512, 2048, 8192)
}
"""Name of a case to its weights (with "a" at the end: activations as well), rows and layer."""

MODES = ("default", "max-autotune-no-cudagraphs")
"""Of torch.compile, timed by the judge."""

Calls = dict[str, Callable[[], Any]]


def layer_of(case: str) -> tuple[nn.Linear, Tensor, str]:
    """The layer in bf16, its input and its weights' form."""
    weights, rows, name = CASES[case]
    depth, columns = LAYERS[name]
    torch.manual_seed(0)
    layer = nn.Linear(depth, columns, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    return layer, torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16), weights


def declared(weights: str) -> dict[str, Any]:
    """What a spec declares in a case."""
    kind = weights.removesuffix("a")
    return {"weights": kind} | ({"activations": kind} if kind != weights else {})


def libraries(layer: nn.Linear, x: Tensor, weights: str) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Name to what makes the call: PyTorch on what is declared, and each library's product of such weights."""
    if "activations" in declared(weights):
        spec = KernelSpec.from_module(layer, (x,), **declared(weights))
        return {"eager": lambda: partial(spec.module(str(x.device)), x), **rivals(layer, x, weights.removesuffix("a"))}

    def eager() -> Callable[[], Any]:
        weight = weight_form(weights).declared(layer.weight)
        return lambda: functional.linear(x, weight)

    def int4pack() -> Callable[[], Any]:
        packed, scales = _tiny(layer.weight)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)

    def int8pack() -> Callable[[], Any]:
        codes, scale = scaled(layer.weight, INT8)
        bytes_, column = codes.round().to(torch.int8), scale.flatten().to(torch.bfloat16)
        return lambda: torch.ops.aten._weight_int8pack_mm(x, bytes_, column)

    own = {"int4": {"torch int4pack": int4pack}, "int8": {"torch int8pack": int8pack}}.get(weights, {})
    others = {"torchao": _torchao, "gemlite": _gemlite}
    return {"eager": eager, **own} | {
        name: partial(_calls, make, layer, x, weights) for name, make in others.items() if find_spec(name) is not None
    }


def _calls(make: Callable[[nn.Linear, str], nn.Module], layer: nn.Linear, x: Tensor, weights: str) -> Callable[[], Any]:
    return partial(make(layer, weights), x)


def _tiny(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales as `_weight_int4pack_mm` takes them: codes from 0 to 15 for -8 to 7, zeros in the middle."""
    rows, depth = weight.shape
    codes, scale = scaled(weight.view(rows, depth // 128, 128), INT4)
    whole = (codes.round() + 8).to(torch.uint8).view(rows, depth)
    packed = torch.ops.aten._convert_weight_to_int4pack(whole[:, ::2] << 4 | whole[:, 1::2], 8)
    size = scale.squeeze(-1).T.to(torch.bfloat16)
    return packed, torch.stack([size, torch.zeros_like(size)], -1).contiguous()


def _torchao(layer: nn.Linear, weights: str) -> nn.Module:
    from torchao import quantization as ways

    made = nn.Sequential(deepcopy(layer))
    named = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
    options = {"group_size": 128} if weights == "int4" else {}
    ways.quantize_(made, getattr(ways, named[weights])(**options))
    return made


def _gemlite(layer: nn.Linear, weights: str) -> nn.Module:
    """GemLite's layer on the very codes of the declaration, its scales of int4 rounded to bf16."""
    from gemlite import helper

    weight, dtype = layer.weight, layer.weight.dtype
    if weights == "int4":
        rows, depth = weight.shape
        codes, scale = scaled(weight.view(rows, depth // 128, 128), INT4)
        whole, size = (codes.round() + 8).to(torch.uint8).view(rows, depth), scale.squeeze(-1).to(dtype)
        made = helper.A16Wn(device="cuda", dtype=dtype).from_weights(whole, size, torch.full_like(size, 8), 4, 128)
    else:
        codes, scale = scaled(weight, INT8 if weights == "int8" else FP8)
        bytes_ = codes.round().to(torch.int8) if weights == "int8" else codes.to(torch.float8_e4m3fn)
        kind = helper.A16W8_INT8 if weights == "int8" else helper.A16W8_FP8
        made = kind(device="cuda", dtype=dtype).from_weights(bytes_, scales=scale)
    found: nn.Module = made
    return found


def in_turns(calls: Calls) -> tuple[dict[str, float], dict[str, str]]:
    """Median milliseconds of each call, all taking turns; and why others could not be timed."""
    ready, failed = {}, {}
    for name, call in calls.items():
        try:
            ready[name] = timer(call)
        except Exception as error:  # noqa: BLE001 - a library may raise anything for what it does not take
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    taken = [{name: take() for name, take in ready.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(t[name] for t in taken) for name in ready}, failed


def beside(case: str, found: Calls) -> dict[str, Any]:
    """Times of `found` and of the libraries on the same input, and how far each result is from the declared one."""
    layer, x, weights = layer_of(case)
    failed, calls = {}, dict(found)
    for name, make in libraries(layer, x, weights).items():
        try:
            calls[name] = make()
        except Exception as error:  # noqa: BLE001 - as above
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    times, others = in_turns(calls)
    exact = exact_of(layer, x, weights)
    off, usual = {}, {}
    for name in times:
        left = calls[name]().double() - exact
        off[name] = float(left.abs().max() / exact.square().mean().sqrt())
        usual[name] = float((left.square().mean() / exact.square().mean()).sqrt())
    different = {"largest_difference_over_rms": off, "rms_difference_over_rms": usual}
    return {"turns_ms": times, **different, "not_timed": failed | others}


def exact_of(layer: nn.Linear, x: Tensor, weights: str) -> Tensor:
    """The declared computation in float64."""
    words = declared(weights)
    if "activations" in words:
        given = activation_form(words["activations"], words["weights"]).declared(x.double())
    else:
        given = x.double()
    return functional.linear(given, weight_form(words["weights"]).declared(layer.weight.double()))


def searched(case: str, seconds: float) -> dict[str, Any]:
    """What the usual search finds for one layer."""
    layer, x, weights = layer_of(case)
    spec = KernelSpec.from_module(layer, (x,), **declared(weights), name=case)
    result = plan_and_code(spec, seconds=seconds, planner="heuristic", compile_modes=MODES)
    module = result.module
    return judged(result) | beside(case, {"qimeng": lambda: module(x)})


def judged(result: Result) -> dict[str, Any]:
    """The judge's figures."""
    final = result.evaluation
    accuracy = final.accuracy
    return {
        "headline": result.headline,
        "mode": result.mode,
        "verification": result.verification,
        "ms": final.timing.device_ms if final.timing else None,
        "eager_ms": final.eager.device_ms if final.eager else None,
        "compiled_ms": {mode: t.device_ms for mode, t in final.compiled.items()},
        "accuracy": asdict(accuracy) if accuracy else None,
        "schedules": [str(s) for r in result.program.called if (s := result.program.schedule(r))]
        if result.program
        else [],
        "steps": [[s.text, s.accepted, s.gain] for s in result.steps],
        "seconds": round(result.seconds, 1),
        "stopped": result.stopped,
    }


def swept(case: str, device: Device) -> dict[str, Any]:
    """Times of each configuration that the case's action begins with; products of codes alone as well."""
    layer, x, weights = layer_of(case)
    coded = "activations" in declared(weights)
    spec = KernelSpec.from_module(layer, (x,), **declared(weights))
    start, context = Program.start(capture_spec(spec, verify=False, device="cuda")), Context(device, TemplateCoder())
    kind = "multiply_codes" if coded else "dequantize"
    action = next(a for a in legal_actions(start, context) if a.kind == kind)
    patch = context.coder.write(Request(start, action, device))
    calls: Calls = {}
    for number, made in enumerate(patch.alternatives):
        program = patch.apply(start, number)
        if coded:
            region = next(r for r in program.called if program.schedule(r) is None)
            making = Request(program, Action("lowering", (region.id,)), device)
            program = context.coder.write(making).apply(program)
        loaded = program.load()
        module = loaded.Model().to("cuda")
        module.load_state_dict(layer.state_dict())
        calls[str(made.schedule)] = partial(module, x)
        if coded:
            calls[f"product alone, {made.schedule}"] = alone(program, getattr(loaded, made.entry), layer, x)
    return beside(case, calls)


def alone(program: Program, entry: Callable[..., Any], layer: nn.Linear, x: Tensor) -> Callable[[], Any]:
    """The product of a program on codes that are there already."""
    region = next(r for r in program.called if "linear" in r.label())
    plan = covering(region)[1]
    kind = "fp8" if plan.coded.floating else "int8"
    (left, left_scale), (right, right_scale) = codes_of(x, kind), codes_of(layer.weight, kind)
    given = {"a_codes": left, "a_scale": left_scale, "b_codes": right, "b_scale": right_scale}
    arguments = [given[name] for name in plan.inputs]
    return lambda: entry(*arguments)[0]


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    only: Annotated[str, typer.Option(help="Words in a case's name, such as 'int4' or 'int8 q'.")] = "",
    rows: Annotated[int, typer.Option(help="Rows of the cases; of any number by default.")] = 0,
    seconds: Annotated[float, typer.Option(help="Budget of each search.")] = 30.0,
    sweep: Annotated[bool, typer.Option(help="Time configurations, without a judge.")] = False,
) -> None:
    """Measure the layers one after the other."""
    device = current_device()
    if device is None:
        raise typer.BadParameter("this needs a GPU")
    facts = asdict(environment(device))
    for case in (c for c in CASES if only in c and rows in (0, CASES[c][1])):
        weights, count, layer = CASES[case]
        depth, columns = LAYERS[layer]
        head = {"case": case, "weights": weights, "rows": count, "k": depth, "n": columns, "dtype": "bfloat16"}
        try:
            with torch.no_grad():
                row = swept(case, device) if sweep else searched(case, seconds)
        except (QimengError, RuntimeError) as error:  # one case may fail, the others go on
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        with out.open("a") as file:
            file.write(json.dumps(head | row | {"environment": facts}) + "\n")
        print(json.dumps(head | {k: v for k, v in row.items() if k != "steps"}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
