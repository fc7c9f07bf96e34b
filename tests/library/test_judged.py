"""The judge gives code that compiles at its first call the time for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.judge.gates.first_call import first_call_s, warms_up
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Request
from qimeng.library import COMPILE_S
from qimeng.program.program import Program, torch_implementation
from qimeng.testing import sample_graph


def test_a_first_call_that_compiles_may_take_longer() -> None:
    program = Program.start(sample_graph())
    patch = TemplateCoder().write(Request(program, Action("library", (), "inductor"), DEVICES["h200"]))
    assert first_call_s(patch.alternatives, 10.0) == COMPILE_S < first_call_s(patch.alternatives, 600.0)
    assert [first_call_s(patch.alternatives, 10.0, most_s) for most_s in (3.0, 30.0)] == [10.0, 30.0]
    assert first_call_s([torch_implementation(program.regions[0])], 10.0) == 10.0
    assert warms_up(patch.apply(program)) and not warms_up(program)


def test_a_worker_warms_a_program_up(tmp_path: Any, monkeypatch: Any) -> None:
    from qimeng.envs.workers.worker import COMMANDS, Worker
    from qimeng.spec import KernelSpec

    calls: Sequence[Any] = []
    spec = KernelSpec.from_module(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    monkeypatch.chdir(tmp_path)
    worker = Worker(spec, torch.device("cpu"))
    program = Program.start(capture(lambda: torch.nn.Linear(4, 4), lambda: (torch.empty(2, 4),)))
    worker.load(program.source)
    worker.model.register_forward_hook(lambda *_: cast(list[Any], calls).append(1))
    with torch.no_grad():
        worker.warm(seed=3)
    assert calls == [1] and "warm" in COMMANDS
