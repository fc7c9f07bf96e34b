"""Every problem of the suite is captured, verified, lowered and right, and what stays on PyTorch is what is said here.

The interpreter must be chosen before triton is imported, so the problems run in one process of their own
(`tests.suite.run`); the compiler sees the same kernels in this one, under ``--slow``, since it takes its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.interpreted import rows_of
from tests.suite.problem import Problem, problems

Row = dict[str, Any]


def by_problem(*arguments: str) -> dict[str, Row]:
    """The rows that `tests.suite.run` prints, by problem."""
    return {row["problem"]: row for row in rows_of("-m", "tests.suite.run", *arguments, timeout=1500)}


@pytest.fixture(scope="module")
def lowered(once: Callable[..., Any]) -> dict[str, Row]:
    rows: dict[str, Row] = once("suite", by_problem)
    return rows


def each(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("problem", problems(), ids=lambda p: p.name)(function)


@each
def test_captured_lowered_and_right(lowered: dict[str, Row], problem: Problem) -> None:
    row = lowered[problem.name]
    assert "raised" not in row, row
    assert not row["wrong"], "\n".join(row["wrong"])
    if problem.whole:
        assert problem.whole in row["whole"]
        return
    assert not row["whole"], row["whole"]
    assert set(row["left"]) == set(problem.stays), row["left"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_every_kernel_compiles_for_a_device(tmp_path: Path) -> None:
    """Every eighth problem, for time's sake."""
    programs = {p.name: lowered_program(p) for p in problems()[::8] if not p.whole}
    found = Compilers(shared_server(), device_named("h200"), str(tmp_path)).programs(list(programs.values()))
    failed = {name: c.error for name, t in zip(programs, found, strict=True) for c in t.values() if c.failure}
    assert sum(map(len, found)) > 40 and not failed, json.dumps(failed, indent=1)


def lowered_program(problem: Problem) -> Program:
    """The starting program with each region lowered that can be."""
    spec = KernelSpec.of(problem.make(), problem.examples(), **problem.options)
    program, coder = Program.start(capture_spec(spec, verify=False)), TemplateCoder()
    for region in program.regions:
        if not program.implementation(region).generated and coder.can_implement(region) is None:
            patch = coder.write(Request(program, Action("lowering", (region.id,)), device_named("h200")))
            program = patch.apply(program)
    return program


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_random_trajectories_are_right() -> None:
    """Every twelfth problem, for time's sake; `TRITON_INTERPRET=1 python -m tests.suite.run --steps 8 --seed N`."""
    rows = by_problem("--steps", "3", "--seed", "0", *(p.name for p in problems()[1::12]))
    assert sum(row.get("actions", 0) for row in rows.values()) > 12
    wrong = {name: row.get("raised") or row["wrong"] for name, row in rows.items() if row.get("raised") or row["wrong"]}
    assert not wrong, json.dumps(wrong, indent=1)
