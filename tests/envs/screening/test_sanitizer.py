"""compute-sanitizer as a stand-in that runs the program and prints reports in the real format."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.judge.gates.pipeline import Candidate
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.sanitized import sanitized
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.sandbox import Sandbox
from qimeng.envs.screening import sanitizer
from qimeng.envs.screening.sanitizer import read_report, sanitize
from qimeng.errors import QimengError
from qimeng.interfaces import Asked, Evaluation, FinalOptions, Gate
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at softmax_kernel+0x1b0 in program.py:31
=========     by thread (31,0,0) in block (7,0,0)
=========     Address 0x7f3c7ec00100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00000 of size 256 bytes
=========
========= ERROR SUMMARY: 32 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at gemm_kernel+0x460 in program.py:41
=========     and Read access at gemm_kernel+0x7a0 in program.py:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARNINGS = "========= Warning: Race reported\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"
UNWRITTEN = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at cublasLt::splitKreduce_kernel+0x70
=========     by thread (16,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("tool", "log", "own", "outcome", "words"),
    [
        ("memcheck", CLEAN, {"softmax_kernel"}, "clean", "compute-sanitizer memcheck: 0 errors"),
        ("memcheck", OUT_OF_BOUNDS, {"softmax_kernel"}, "errors", "32 errors, the first: Invalid __global__ write"),
        ("memcheck", OUT_OF_BOUNDS, None, "errors", "at softmax_kernel+0x1b0 in program.py:31"),
        ("memcheck", OUT_OF_BOUNDS, {"softmax"}, "others", "kernels that are not the program's"),
        ("racecheck", RACE, {"gemm_kernel"}, "errors", "Race reported between Write access"),
        ("racecheck", WARNINGS, {"gemm_kernel"}, "others", "2 warnings"),
        ("initcheck", UNWRITTEN, {"gemm_kernel"}, "others", "1 errors in kernels that are not the program's"),
        ("memcheck", "", None, "failed", "did not finish: last words"),
    ],
)
def test_reports_are_read(tool, log, own, outcome, words):
    report = read_report(tool, log, "first words\nlast words\n", own)
    assert (report.outcome, report.refuses) == (outcome, outcome == "errors")
    assert words in report.text


FAKE = f"""#!{sys.executable}
import pathlib, subprocess, sys
at = sys.argv.index
tool, log = sys.argv[at("--tool") + 1], pathlib.Path(sys.argv[at("--log-file") + 1])
code = int(sys.argv[at("--error-exitcode") + 1])
done = subprocess.run(sys.argv[at("--log-file") + 2 :])
text = (pathlib.Path(__file__).parent / f"{{tool}}.txt").read_text() if done.returncode == 0 else ""
log.write_text(text)
sys.exit(done.returncode or (0 if "0 errors" in text else code))
"""


@pytest.fixture
def tool(tmp_path: Path) -> dict[str, str]:
    """Variables of an environment in which the stand-in is found; its reports lie beside it."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.write_text(FAKE)
    path.chmod(0o755)
    (path.parent / "memcheck.txt").write_text(CLEAN)
    (path.parent / "racecheck.txt").write_text(RACE)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


SPEC = KernelSpec.from_function(torch.relu, (torch.randn(4, 8),))


REACHES = """for reach in (lambda: open('{outside}/secret').read(), lambda: __import__('os').listdir('{home}')):
    try:
        reach()
    except PermissionError as error:
        tried.append(type(error).__name__)"""


def test_the_program_runs_under_the_tool_in_a_sandbox(tool, tmp_path):
    program = Program.start(capture_spec(SPEC))
    found = sanitize("memcheck", program.source, SPEC.to_bytes(), "cpu", tmp_path / "a", environment=tool)
    assert found.outcome == "clean", found
    (tmp_path / "secret").write_text("secret")
    reaches = REACHES.format(outside=tmp_path, home=os.getcwd())
    broken = in_forward(program.source, f"tried = []\n{reaches}\nraise RuntimeError(f'it ran\\x1b[2J {{tried}}')")
    found = sanitize("memcheck", broken, SPEC.to_bytes(), "cpu", tmp_path / "b", environment=tool)
    assert found.outcome == "failed" and "it ran\\x1b[2J" in found.text
    if "landlock" not in Sandbox("tool").layers_available().entered:
        pytest.skip("this machine lacks landlock")
    assert "['PermissionError', 'PermissionError']" in found.text, found


def in_forward(source: str, lines: str) -> str:
    """A program's text with more lines at the beginning of its `forward`."""
    more = indent(lines, " " * 8)
    changed, count = re.subn(r"(def forward\(.*\):\n)", lambda found: f"{found[1]}{more}\n", source)
    assert count == 1
    return changed


def test_what_hangs_is_ended_and_what_is_missing_is_said(tool, tmp_path, monkeypatch):
    hangs = "import time\ntime.sleep(60)\n"
    found = sanitize("memcheck", hangs, SPEC.to_bytes(), "cpu", tmp_path / "c", limit_s=0.2, environment=tool)
    assert found.outcome == "timeout" and "stopped after 0.2 s" in found.text
    monkeypatch.setattr(sanitizer, "_USUAL", ())
    found = sanitize("initcheck", "", b"", "cpu", tmp_path / "d", environment={"PATH": str(tmp_path)})
    assert found.outcome == "missing" and "comes with the CUDA toolkit" in found.text


def test_the_final_verification_asks_the_tools(monkeypatch, calm):
    logs = {"memcheck": CLEAN, "racecheck": RACE}
    monkeypatch.setattr(
        "qimeng.envs.judge.sanitized.sanitize", lambda tool, *a, **k: read_report(tool, logs[tool], "", a[-1])
    )
    graph = capture_spec(SPEC)
    program = Program.start(graph)
    judge = GpuEvaluator(SPEC, graph, torch_device="cpu", timeout_s=60.0)
    try:
        found = judge.evaluate(program, asked=Asked.FINAL, options=FinalOptions(sanitize=("memcheck",)))
        assert found.ok and found.notes == ("compute-sanitizer memcheck: 0 errors",), found
        assert "sanitize" in found.seconds
        tools, parts = ("memcheck", "racecheck"), judge._parts

        def run(*own: str) -> Any:
            return SimpleNamespace(
                parts=parts, clock=Clock(), candidates=[Candidate(0, program, own=dict.fromkeys(own))]
            )

        refused = sanitized(program, Evaluation(Gate.PASSED), tools, run("gemm_kernel"), SPEC.to_bytes())
        assert refused.failure == "sanitizer" and refused.lasting and "racecheck: 1 errors" in (refused.error or "")
        others = sanitized(program, Evaluation(Gate.PASSED), tools, run(), SPEC.to_bytes())
        assert others.ok and len(others.notes) == 2 and "not the program's" in others.notes[1]
        with pytest.raises(QimengError, match="no tool leakcheck; known: memcheck"):
            judge.evaluate(program, asked=Asked.FINAL, options=FinalOptions(sanitize=("leakcheck",)))
    finally:
        judge.close()


def test_without_a_gpu_it_is_said_that_nothing_was_run(monkeypatch):
    judge = EstimatingEvaluator(SPEC, DEVICES["h200"])
    monkeypatch.setattr(judge, "_judged", lambda request, known, thorough: Evaluation(Gate.PASSED))
    program, options = Program.start(capture_spec(SPEC)), FinalOptions(sanitize=("memcheck",))
    found = judge.evaluate(program, asked=Asked.FINAL, options=options)
    assert found.notes == ("compute-sanitizer memcheck needs a GPU: not run",)
