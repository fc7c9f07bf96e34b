"""Which modules are imported before processes are forked."""

from __future__ import annotations

import sys

import pytest
import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.workers import model_libraries
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.model_libraries import library_modules
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

FILE = """
import torch
from transformers import LlamaConfig

class Model(torch.nn.Module):
    def forward(self, x):
        return x.relu()

def get_inputs():
    return [torch.rand(4, 4)]

def get_init_inputs():
    return []
"""


def test_modules_of_a_library_that_the_file_imports_and_no_others() -> None:
    spec = KernelSpec.from_source(FILE)
    found = library_modules(spec)
    assert "transformers" in found and all(name.split(".")[0] == "transformers" for name in found)
    assert set(found) <= set(sys.modules)


def test_a_module_of_ones_own_needs_none_and_a_librarys_class_needs_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(4, 4),))
    assert library_modules(spec) == ()
    monkeypatch.setattr(model_libraries, "LIBRARIES", ("torch",))
    assert "torch.nn.modules.activation" in library_modules(spec)


def test_the_judge_prepares_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(ForkServer, "prepare", lambda self, names: told.append(tuple(names)))
    spec = KernelSpec.from_source(FILE)
    GpuEvaluator(spec, capture_spec(spec), torch_device="cpu").close()
    assert "transformers" in told[0]
