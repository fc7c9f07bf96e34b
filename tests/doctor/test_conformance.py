"""Small kernels that show what works here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qimeng.doctor import conformance, machine
from qimeng.doctor.kernels import CHECKS


def test_every_kernel_is_right_in_the_interpreter() -> None:
    found = list(conformance.conformance("cpu"))
    assert len(found) == len(CHECKS) >= 10
    assert [c for c in found if not c.works] == []
    assert all(c.details and c.name.endswith(", interpreted") for c in found)


def test_every_kernel_compiles_for_a_gpu() -> None:
    code = """
import json
import torch, triton
from triton.runtime.jit import JITFunction
from qimeng.backend.triton_driver import NoDriver
from qimeng.device import device_named
from qimeng.doctor import kernels
triton.runtime.driver.set_active(NoDriver(device_named("h100")))
run, compiled = JITFunction.run, []
def compile_only(kernel, *args, grid, warmup, **options):
    compiled.append(bool(run(kernel, *args, grid=grid, warmup=True, **options).asm["cubin"]))
JITFunction.run = compile_only
for check in kernels.CHECKS:
    check("cpu")
print(json.dumps(compiled))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)) >= len(CHECKS) and all(json.loads(found.stdout))


@pytest.mark.gpu
def test_every_kernel_is_right_on_the_gpu() -> None:
    assert [c for c in conformance.conformance("cuda") if not c.works] == []


def test_a_kernel_that_ends_its_process_is_the_only_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import json, os, sys
first = int(sys.argv[2])
print(json.dumps([["good", "Shows it."], ["dies", "Never."], ["wrong", "Never."], ["last", "Shows more."]]), flush=True)
for number in range(first, 4):
    if number == 1:
        print("driver says no", file=sys.stderr)
        os._exit(7)
    print(json.dumps("2 values differ" if number == 2 else ""), flush=True)
"""
    monkeypatch.setattr(conformance, "PROGRAM", program)
    found = [(c.name, c.works, c.details) for c in conformance.conformance("cuda")]
    assert found == [
        ("good, on the GPU", True, "Shows it."),
        ("dies, on the GPU", False, "its process ended with 7: driver says no"),
        ("wrong, on the GPU", False, "2 values differ"),
        ("last, on the GPU", True, "Shows more."),
    ]


def test_folders_without_space_or_rights_say_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._folder("cache", tmp_path / "new").works
    monkeypatch.setattr(machine, "SPACE", 1 << 60)
    assert machine._folder("cache", tmp_path).works is False
    (tmp_path / "file").write_text("")
    found = machine._folder("cache", tmp_path / "file" / "below")
    assert found.works is False and "set TMPDIR or QIMENG_CACHE" in found.details


def test_a_process_that_only_compiles_does_without_pytorch() -> None:
    light = "compile_for(80) and 'torch' not in __import__('sys').modules"
    assert machine._kernel("light", light) == machine.Check("light", True, "")
