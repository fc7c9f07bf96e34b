"""Special functions by approximate units: right by the judge's own rule on every distribution, and fewer instructions.

The interpreter must be chosen before triton is imported, so the cases run in one process of their own (this file as a
script), which prints a JSON row a case. There the units have the largest error that their documentation allows.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.special import FAST, SPECIAL
from qimeng.spec import DISTRIBUTIONS
from qimeng.spec.distributions import WILD
from tests.interpreted import rows_of

CASES: dict[str, Callable[..., Any]] = {
    "mish": functional.mish,
    "softplus": lambda x: functional.softplus(x, beta=2.0),
    "log_sigmoid": functional.logsigmoid,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "elu": functional.elu,
    "exp_large": lambda x: torch.exp(x * 8),
    "log": lambda x: torch.log(x.abs() + 1e-30),
    "log_near_one": lambda x: torch.log(1 + 0.1 * torch.tanh(x)),
    "log2_near_one": lambda x: torch.log2(1 - 0.2 * torch.sigmoid(x)),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p_small": lambda x: torch.log1p(x * 1e-3),
    "roots": lambda x: torch.sqrt(x.abs()) + torch.rsqrt(x.abs() + 1e-3),
    "softmax": lambda x: torch.softmax(x * 4, -1),
    "gelu": functional.gelu,
    "gelu_by_hand": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf": lambda x: torch.erf(x) + torch.erf(x * 0.1),
    "erf_ends": lambda x: torch.erf(x * 1e30) + torch.erf(x * 1e-8),
    "sin": torch.sin,
    "cos": torch.cos,
    "waves_large": lambda x: torch.sin(x * 1e3) + torch.cos(x * 30),
    "waves_huge": lambda x: x + (torch.sin(x * 1e30).abs() + torch.cos(x * 1e20).abs() > 2.001),
    "tan": torch.tan,
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1),
}
HALF = ("tanh", "log_near_one", "log1p_small", "gelu", "erf", "sin", "waves_large")
HALF_CASES = [f"{case} {dtype}" for dtype in ("float16", "bfloat16") for case in HALF]
KL = lambda x, y: functional.kl_div(torch.log(x), y, reduction="batchmean")  # noqa: E731


def _cases() -> Iterator[tuple[str, Any]]:
    from qimeng.spec import KernelSpec

    shape = (12, 100)
    for name, function in CASES.items():
        for dtype in ("float32", "float16", "bfloat16") if name in HALF else ("float32",):
            yield f"{name} {dtype}", KernelSpec.from_function(function, (torch.randn(shape),), dtype=dtype)
    rows = tuple(torch.randn(shape).softmax(-1) for _ in range(2))
    yield "kl_div float32", KernelSpec.from_function(KL, rows)


def _program(spec: Any, graph: Any) -> tuple[Any, str]:
    """All in one region, lowered with its special functions fast, which half types have from the start."""
    from qimeng.actions import Context, check_action
    from qimeng.coder.template.coder import TemplateCoder
    from qimeng.device import device_named
    from qimeng.family import covering
    from qimeng.graph.region import merge
    from qimeng.interfaces import Action, Request
    from qimeng.program.program import Program

    context = Context(device_named("h200"), TemplateCoder())
    program = Program.start(graph)
    if len(program.regions) > 1:
        program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    for kind, param in (("lowering", ""), ("special", "fast")):
        if (schedule := program.schedule(program.regions[0])) is not None and schedule.fast:
            break
        action = Action(kind, (program.regions[0].id,), param)
        check_action(program, action, context)
        program = context.coder.write(Request(program, action, context.device)).apply(program)
    return context.coder.reprint(program, graph), ",".join(covering(program.regions[0])[1].special)


def _rows() -> Iterator[dict[str, Any]]:
    from qimeng.envs.errors import error_budget
    from qimeng.envs.errors.float64 import tensors_in
    from qimeng.envs.estimate.interpreter import mend
    from qimeng.envs.judge.reference import References
    from qimeng.program.verify import capture_spec

    mend()
    torch.set_num_threads(1)
    yield _sweep()
    for name, spec in _cases():
        row: dict[str, Any] = {"case": name, "distributions": []}
        try:
            draw_seed = partial(random.Random(0).getrandbits, 62)  # exp of some draws is mostly infinite
            refs = References(spec, graph := capture_spec(spec, verify=False), torch.device("cpu"), draw_seed)
            program, row["special"] = _program(spec, graph)
            row["source"] = program.implementation(program.regions[0]).source
            model = program.load().Model()
            shares = []
            for trial in refs.every_distribution():
                found = tensors_in(model(*refs.inputs(trial.draw)))
                for actual, expected in zip(found, trial.outputs, strict=True):
                    error, text = error_budget.check(actual, expected)
                    if text and refs.look_again(trial, 0, actual, error) is not None:
                        text = None  # as the judge decides: eager is as far off on inputs nearby
                    if trial.draw.distribution in WILD:
                        row["wild"] = text or row.get("wild")
                        continue
                    row["text"] = text or row.get("text")
                    shares.append(max(error.max / expected.budget.max, error.rms / expected.budget.rms))
                row["distributions"].append(trial.draw.distribution)
            row["share"] = max(shares)
        except Exception:  # noqa: BLE001  a row must come back whatever a kernel does
            row["raised"] = traceback.format_exc()[-1500:]
        yield row


def _sweep() -> dict[str, Any]:
    """The error of gelu far below zero, in ulp of fp32 (2^-23), and what it makes of numbers that are none."""
    from qimeng.program.verify import capture_spec
    from qimeng.spec import KernelSpec

    wild = torch.tensor([-math.inf, -1e30, math.nan, math.inf, -0.0, 0.0, 20.0, 1e30])
    x = torch.cat([torch.linspace(-14, 0, 100_000), wild])
    spec = KernelSpec.from_function(lambda x: functional.gelu(x) * 1.0, (x,))
    y = _program(spec, capture_spec(spec, verify=False))[0].load().Model()(x)
    below, z = x[: -len(wild)].double(), y[: -len(wild)].double()
    exact = below * 0.5 * torch.special.erfc(-below / math.sqrt(2))
    normal = exact.abs() > torch.finfo(torch.float32).tiny  # from -13.1 on
    error = ((z - exact) / exact).abs()[normal] * 2**23
    tiny = z[~normal].abs().max()
    return {
        "case": "sweep",
        "ulps": float(error.max()),
        "tiny": float(tiny),
        "wild": [str(v) for v in y[-len(wild) :].tolist()],
    }


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in once("special", lambda: rows_of(__file__))}


OPEN = {"log", "log1p", "log1p_small", "log_near_one", "sin", "cos", "tan", "waves_large"}
"""Of infinity some give no number, and of 1e9 the waves have no digit; the judge refuses them there."""


@pytest.mark.parametrize("case", [*(f"{c} float32" for c in (*CASES, "kl_div")), *HALF_CASES])
def test_the_fast_form_is_right_on_wild_inputs(rows, case):
    if case.split()[0] in OPEN and rows[case].get("wild"):
        pytest.xfail(rows[case]["wild"])
    assert rows[case].get("wild") is None, rows[case]["wild"]


@pytest.mark.parametrize("case", [*(f"{c} float32" for c in (*CASES, "kl_div")), *HALF_CASES])
def test_the_fast_form_is_within_the_budget_on_every_distribution(rows, case):
    row = rows[case]
    assert "raised" not in row, row["raised"]
    if case == "log_near_one bfloat16" and row.get("text"):
        pytest.xfail("the unit's logarithm of 1 may be 2^-22, beside a row of zeros")
    assert row.get("text") is None, row["text"]
    probabilities = case.startswith("kl_div")  # their domain allows no other distribution
    infinite = {"x30", "rounded", "slices", *WILD} if "large" in case else set(WILD)
    assert set(DISTRIBUTIONS) - set(row["distributions"]) <= (
        set(DISTRIBUTIONS) - {"given"} if probabilities else infinite
    )
    assert row["special"]
    narrow = ("gelu", "log1p_small")  # among slices unlike the others
    assert row["share"] < (1.0 if case.startswith(narrow) else 0.8), "no luck is needed"
    units = ("lg2.approx", "tanh.approx", "ex2.approx", "tl.exp2", "sqrt.approx", "bitcast=True")
    assert any(unit in row["source"] for unit in units)
    assert not any(slow in row["source"] for slow in ("tl.erf", "tl.sin", "tl.cos"))


def test_fast_gelu_keeps_its_digits_far_below_zero(rows):
    assert rows["sweep"]["ulps"] < 12 and rows["sweep"]["tiny"] < 2e-38
    assert rows["sweep"]["wild"] == ["nan", "-0.0", "nan", "inf", "-0.0", "0.0", "20.0", str(float(torch.tensor(1e30)))]
    assert all("tl.erf" not in rows[f"{case} float32"]["source"] for case in ("gelu", "gelu_by_hand"))
    assert all("16.0" in rows[f"{case} float32"]["source"] for case in ("gelu", "gelu_by_hand"))
    assert "16.0" not in rows["erf float32"]["source"] and "16.0" not in rows["gelu float16"]["source"]


@cache
def instructions(folder: Path, op: str, fast: str) -> int:
    """Machine instructions of a kernel for sm_90 that applies `op` to each element."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name = f"kernel_{op}_{fast or 'accurate'}"
    lines = ["i = tl.program_id(0) * RB + tl.arange(0, RB)", "x = tl.load(x_ptr + i)"]
    lines += [*ops.write(op, "y", ["x"], fast=fast), "tl.store(y_ptr + i, y)"]
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x_ptr, y_ptr, RB: tl.constexpr):\n"
    path = folder / f"{name}.py"
    path.write_text(head + "\n".join(f"    {line}" for line in lines) + "\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(module.kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"RB": 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return sum(";" in line and "NOP" not in line for line in compiled.asm["sass"].splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(
    ("op", "dtype", "share"),
    [
        ("log1p", "float32", 0.5),
        ("log1p_unit", "float32", 0.5),
        ("tanh", "float32", 0.85),
        ("sigmoid", "float32", 0.7),
        ("erf", "float32", 0.65),
        ("erf", "float16", 0.4),
        ("gelu_gate", "float32", 0.9),
        ("sin", "float32", 0.3),
        ("cos", "float32", 0.3),
    ],
)
def test_the_fast_form_takes_fewer_instructions(folder, op, dtype, share):
    accurate = {"gelu_gate": "erf", "log1p_unit": "log1p"}.get(op, op)
    assert instructions(folder, op, dtype) < share * instructions(folder, accurate, "")


def test_how_far_a_softplus_is_above_a_relu_takes_no_logarithm(rows):
    assert all("lg2" not in rows[f"{case} float32"]["source"] for case in ("softplus", "log_sigmoid"))


def test_every_function_has_an_accurate_form_and_doubles_keep_it():
    for op in SPECIAL:
        assert ops.known(op) and ops.known("inverse")
        assert ops.write(op, "y", ["x"], "float64", "float32") == ops.write(op, "y", ["x"], "float64")
        assert ops.write(op, "y", ["x"], "float32", "float32") == FAST[op]("y", "x") != ops.write(op, "y", ["x"])
    assert ops.write("add", "y", ["a", "b"], fast="float32") == ops.write("add", "y", ["a", "b"])


if __name__ == "__main__":
    for result in _rows():
        print(json.dumps(result), flush=True)
