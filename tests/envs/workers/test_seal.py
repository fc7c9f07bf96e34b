"""The seal names what was changed, and stays whole where an honest program only uses what there is."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import types

import pytest
import torch

from qimeng.envs.errors import accuracy
from qimeng.envs.workers import tensor_bits
from qimeng.envs.workers.stopwatch import Stopwatch
from qimeng.envs.workers.tamper_check import Seal, shadowed, unlike


@pytest.fixture
def seal() -> Seal:
    return Seal()


def test_use_breaks_nothing(seal):
    import torch._dynamo  # PyTorch changes names of its own when it loads its compiler

    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.rand(3))
    torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())(torch.rand(2, 3))
    assert seal.broken() == []


CHANGES = {
    "torch.allclose": lambda patch: patch.setattr(torch, "allclose", lambda *a: True),
    "torch.Tensor.__repr__": lambda patch: patch.setattr(torch.Tensor, "__repr__", lambda t: ""),
    "Tensor.abs": lambda patch: patch.setattr(torch.Tensor, "abs", lambda t: t * 0),
    "time.perf_counter": lambda patch: patch.setattr(time, "perf_counter", lambda: 0.0),
    "builtins.max": lambda patch: patch.setattr("builtins.max", lambda *a: 0),
    "sys.modules['json']": lambda patch: patch.setitem(sys.modules, "json", types.ModuleType("json")),
    "json.load": lambda patch: patch.setitem(json.load.__kwdefaults__, "cls", dict),
    "torch.nn.functional.relu": lambda patch: patch.setattr(torch.nn.functional.relu, "__defaults__", (True,)),
    "json.dumps": lambda patch: patch.setattr(json, "dumps", lambda *a: "{}"),
    "qimeng.envs.workers.tensor_bits.same": lambda patch: patch.setattr(tensor_bits, "same", lambda a, b: True),
    "qimeng.envs.workers.stopwatch.Stopwatch.once": lambda patch: patch.setattr(
        Stopwatch, "once", lambda *a: (1.0, 1.0)
    ),
    "qimeng.envs.errors.accuracy.measure": lambda patch: patch.setattr(
        accuracy.measure, "__code__", (lambda *a: 0).__code__
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_named(seal, name):
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[name](patch)
        found = seal.broken()
    assert name in found
    assert seal.broken() == []


def test_a_keyword_that_a_function_had_not_is_seen(seal, monkeypatch):
    monkeypatch.setattr(tensor_bits.same, "__kwdefaults__", {"exact": False})
    assert "qimeng.envs.workers.tensor_bits.same" in seal.broken()  # a module that took it is named as well


def test_who_replaces_what_the_check_is_made_of_is_seen_by_the_one_apart(seal, monkeypatch):
    broken = seal.apart()
    monkeypatch.setattr("builtins.all", lambda items: True)
    monkeypatch.setattr("qimeng.envs.workers.tamper_check._all", lambda items: True)
    found = broken()
    monkeypatch.undo()
    assert "builtins.all" in found and broken() == []


def test_doors_through_which_others_are_called_back(seal):
    from torch.overrides import TorchFunctionMode

    with TorchFunctionMode():
        assert seal.broken() == ["a function mode of torch"]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *a: None)
    assert seal.broken() == ["global hooks of torch.nn.Module"]
    hook.remove()


def test_a_profiling_function_is_seen():
    """In a process of its own: CPython 3.11 may loop for ever where code that ran often is profiled."""
    code = (
        "import sys; from qimeng.envs.workers.tamper_check import Seal; seal = Seal(); "
        "sys.setprofile(lambda *a: None); found = seal.broken(); sys.setprofile(None); "
        "assert found == ['a profiling function'], found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


SETTINGS = {
    "a callback of the garbage collector": (lambda: gc.callbacks.append(print), lambda: gc.callbacks.remove(print)),
    "torch's number of threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_num_threads(torch.get_num_threads() - 1),
    ),
    "torch's autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "a setting of torch.backends": (
        lambda: torch.backends.cudnn.__setattr__("benchmark", True),
        lambda: torch.backends.cudnn.__setattr__("benchmark", False),
    ),
    "the processor's rounding": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_others_would_not_have(name):
    seal, (change, restore) = Seal(), SETTINGS[name]
    change()
    found = seal.broken()
    restore()
    assert found == [name] and seal.broken() == []


def test_an_operator_below_its_name(seal):
    library = torch.library.Library("aten", "IMPL")
    with pytest.warns(UserWarning, match="Overriding"):
        library.impl("equal", lambda a, b: True, "CPU")
    found = seal.broken()
    library._destroy()
    assert found == ["an operator of torch"] and seal.broken() == []


def test_a_method_of_one_object():
    watch = Stopwatch(torch.device("cpu"))
    assert shadowed(watch) == []
    watch.once = lambda *a: (1.0, 1.0)
    assert shadowed(watch) == ["Stopwatch.once of one object"]


def test_who_replaces_what_looks_for_changes_is_seen_all_the_same(monkeypatch):
    seal = Seal()
    broken = seal.apart()
    assert broken() == []
    monkeypatch.setattr(Seal, "broken", lambda self: [])
    seal._spaces.clear()
    assert seal.broken() == []
    assert broken() == ["qimeng.envs.workers.tamper_check.Seal.broken"]


def test_data_of_an_object_that_measures_may_not_change():
    watch = Stopwatch(torch.device("cpu"))
    before = dict(vars(watch))
    assert unlike(watch, before) == []
    watch._flush = torch.zeros(8)
    assert unlike(watch, before) == ["Stopwatch._flush"]
    watch._flush, watch.more = None, 1
    assert unlike(watch, before) == ["Stopwatch.more"]
