"""Arguments of the Python API are as strict as the command line's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from qimeng import DeviceError, KernelSpec, SpecError, optimize, plan_and_code
from qimeng.arguments import names_of
from qimeng.envs.steps.setup import make_device
from qimeng.testing import FakeCoder, FakeEvaluator

X = torch.rand(4, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seconds": -1}, "seconds must be a number from 0 on, got -1"),
        ({"seconds": math.nan}, "seconds must be a number from 0 on, got nan"),
        ({"seconds": "5"}, "seconds must be a number from 0 on, got '5'"),
        ({"evaluations": -3}, "evaluations must be a whole number from 0 on, got -3"),
        ({"evaluations": 2.5}, "evaluations must be a whole number"),
        ({"evaluations": True}, "evaluations must be a whole number"),
        ({"planner": 3}, r"planner must be a name or an object with choose\(\), got 3"),
        ({"planner": nn.ReLU}, "planner must be a name or an object"),
        ({"coder": None}, r"coder must be a name or an object with write\(\), got None"),
        ({"search": 3}, r"search must be a name or an object with run\(\), got 3"),
        ({"evaluator": "gpu"}, r"evaluator must be an object with submit\(\) and gather\(\), got 'gpu'"),
        ({"store": 3}, "store must be a name or an object"),
        ({"on_step": 3}, "on_step must be a function, got 3"),
        ({"kwargs": [X]}, "kwargs must be a dict of keyword inputs by name, got list"),
        ({"compile_modes": "fast"}, "torch.compile has no mode fast"),
        ({"compile_modes": 3}, "compile_modes must be names"),
    ],
)
def test_bad_arguments_are_one_clear_error(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"coder": FakeCoder(), "evaluator": FakeEvaluator(), "planner": "random", "seconds": 5}
    with pytest.raises(ValueError, match=message):
        plan_and_code(nn.ReLU(), (X,), **given | changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"parts": 3}, ValueError, "parts must be names"),
        ({"cache": 3}, ValueError, "cache must be True, False or a folder, got 3"),
        ({"plannr": "lm"}, TypeError, r"optimize\(\) has no option plannr"),
        ({"planner": 3}, ValueError, "planner must be a name or an object"),
        ({"mode": "hig"}, SpecError, "unknown precision mode 'hig'; known: default, highest, high"),
        ({"example_inputs": X}, SpecError, r"got Tensor; write \(x,\)"),
        ({"example_inputs": (X[:, :3],)}, SpecError, r"fails on its example inputs \(float32\[4, 3\]\): RuntimeError"),
    ],
)
def test_bad_arguments_for_a_whole_model(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimize(nn.Linear(8, 8), **{"example_inputs": (X,), "seconds": 0, **changed})


def test_inputs_beside_a_spec_or_a_file_are_refused() -> None:
    for thing in (KernelSpec.from_module(nn.ReLU(), (X,)), "examples/softmax_problem.py"):
        with pytest.raises(SpecError, match="example inputs are for a module or a function"):
            plan_and_code(thing, (X,))
    with pytest.raises(SpecError, match=r"ReLU is a class: give a module that it makes, ReLU\(…\)"):
        plan_and_code(nn.ReLU, (X,))


def test_one_name_or_several() -> None:
    assert names_of("modes", "default") == ("default",)
    assert names_of("modes", ["a", "b"]) == ("a", "b") and names_of("modes", ()) == ()


def test_devices_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    here = make_device("h100")
    monkeypatch.setattr("qimeng.envs.steps.setup.current_device", lambda: here)
    for given in (torch.device("cuda"), "cuda", torch.device("cuda:0"), "cuda:0"):
        assert make_device(given) is here
    with pytest.raises(DeviceError, match="set CUDA_VISIBLE_DEVICES=1"):
        make_device(torch.device("cuda:1"))
    with pytest.raises(DeviceError, match="kernels are made for GPUs"):
        make_device(torch.device("cpu"))
    monkeypatch.setattr("qimeng.envs.steps.setup.current_device", lambda: None)
    with pytest.raises(DeviceError, match="there is no GPU here; name the one that is meant"):
        make_device(torch.device("cuda"))
