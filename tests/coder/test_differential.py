"""Every operator that the templates claim against PyTorch, at special values, in every dtype that PyTorch computes it.

The interpreter must be chosen before triton is imported, so that the cases run in a process of their own (this file as
a script), which prints a JSON row a case and dtype. There functions err as far as a GPU's may.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiments.trust.differential import disagrees, rows, unreached
from experiments.trust.operator_cases import cases
from experiments.trust.special_values import COLUMNS, DTYPES, operands
from tests.interpreted import rows_of

TAKEN_APART = {
    "_prelu_kernel", "_unsafe_view", "addcdiv", "addcmul", "all", "clamp_max", "clamp_min", "detach", "dot",
    "fill", "frac", "lift_fresh_copy", "masked_fill", "matmul", "mv", "native_batch_norm", "ones",
    "ones_like", "reshape", "rsub", "square", "std", "t", "transpose", "tril", "triu", "zeros", "zeros_like",
}  # fmt: skip
"""Operators that torch.export takes apart before a template sees them; their parts have cases."""


WHOLE = ("float32", "int32")
"""Dtypes in which every case is tried."""
SHARE = 0.1
"""Share of the cases in the others, and of those in other forms (`python -m benchmarks.judge differential`: all)."""


def run(*arguments: str) -> list[dict[str, Any]]:
    return rows_of(__file__, *arguments, timeout=3000)


def wrong(found: list[dict[str, Any]]) -> list[str]:
    """What differs, in words."""
    return [
        f"{row['dtype']} {row['case']}: {row.get('raised', row.get('shown'))}"
        for row in found
        if "raised" in row or row.get("mismatches")
    ]


@pytest.fixture(scope="module")
def found(once: Callable[..., Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = once("differential", lambda: run("plain", "1", *WHOLE))
    return rows


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", WHOLE)
def test_every_operator_is_pytorchs_at_special_values(found: list[dict[str, Any]], dtype: str) -> None:
    of_dtype = [row for row in found if row["dtype"] == dtype]
    assert sum("values" in row for row in of_dtype) > 100
    assert not wrong(of_dtype), "\n".join(wrong(of_dtype))


def test_every_rule_is_reached(found: list[dict[str, Any]]) -> None:
    assert set(unreached(found)) <= TAKEN_APART


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("forms", "dtypes"),
    [("plain", [d for d in DTYPES if d not in WHOLE]), ("forms", ["float32", "bfloat16", "float64"])],
    ids=["dtypes", "forms"],
)
def test_other_dtypes_and_other_forms_agree_too(forms: str, dtypes: list[str]) -> None:
    found = run(forms, str(SHARE), *dtypes)
    assert {row["dtype"] for row in found if "values" in row} == set(dtypes)
    assert not (bad := wrong(found)), "\n".join(bad)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_compiled_kernels_agree(dtype: str) -> None:
    assert not (bad := wrong(list(rows([dtype], device="cuda", forms=False)))), "\n".join(bad)


def test_names_are_unique() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("y", "eager", "agree"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (float("inf"), 3.4e38, False),
        (1.0, 1.0000001, True),
        (1.0, 1.00001, False),
        (-1e-45, 1e-45, False),
        (0.0, 1e-45, True),
    ],
)
def test_what_counts_as_equal(y: float, eager: float, agree: bool) -> None:
    assert bool(disagrees(torch.tensor([y]), torch.tensor([eager]), None, 8.0)) != agree


def test_what_the_fast_units_make_0_counts_as_equal() -> None:
    y, eager = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1e-39, -1e-44, 1e-37])
    assert disagrees(y, eager, None, 8.0, fast=True).tolist() == [False, False, True]
    assert disagrees(y, eager, None, 8.0).all()


def test_a_warning_of_pytorch_ends_nothing() -> None:
    (row,) = rows(("float32",), only=f"var, correction {COLUMNS}")
    assert "UserWarning" not in row.get("raised", "")  # outside the interpreter the kernel itself cannot run


def test_the_values_hold_every_pair() -> None:
    given = operands("float32")
    pairs = {
        (str(a), str(b)) for a, b in zip(given["x"].flatten().tolist(), given["y"].flatten().tolist(), strict=True)
    }
    assert {("0.0", "-0.0"), ("-inf", "nan"), ("inf", "inf"), ("nan", "0.0")} <= pairs


def _main(forms: str, share: str, *dtypes: str) -> None:
    from experiments.trust.units import approximate
    from qimeng.envs.estimate.interpreter import mend

    mend()
    approximate()
    torch.set_num_threads(1)
    with torch.no_grad():
        for row in rows(dtypes, forms=forms == "forms", share=float(share)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
