"""Parameters of a process: the same for the same seed, whatever was done to them between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.envs.workers import worker_setup
from qimeng.envs.workers.worker import Worker
from qimeng.envs.workers.worker_setup import Parameters
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec


@pytest.mark.parametrize("kept_bytes", [worker_setup.KEPT_BYTES, 0])
def test_a_seed_makes_the_same_parameters_again(kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_setup, "KEPT_BYTES", kept_bytes)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    parameters = Parameters(KernelSpec.from_module(module, (torch.randn(2, 4),)), torch.device("cpu"))
    given = {k: v.clone() for k, v in parameters.set(None).items()}
    first = {k: v.clone() for k, v in parameters.set(5).items()}
    other = {k: v.clone() for k, v in parameters.set(6).items()}
    assert not torch.equal(first["0.weight"], given["0.weight"])
    assert not torch.equal(first["0.weight"], other["0.weight"])
    for value in parameters.set(5).values():
        value.zero_()
    for seed, expected in ((5, first), (5, first), (None, given), (5, first)):
        torch.testing.assert_close(dict(parameters.set(seed)), expected, rtol=0, atol=0)


def test_recurrent_layers_of_a_program_have_their_weights_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence around each parameter would leave them apart, and cuDNN would copy them in every call that is timed."""
    spec = KernelSpec.from_module(torch.nn.LSTM(4, 8), (torch.randn(3, 2, 4),))
    source = Program.start(capture_spec(spec)).source
    flattened: list[list[int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda w: True)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(
        torch, "_cudnn_rnn_flatten_weight", lambda weights, *_: flattened.append([w.data_ptr() for w in weights])
    )
    worker = Worker(spec, torch.device("cpu"))
    worker.load(source)
    assert flattened[-1] == [p.data_ptr() for p in worker.model.parameters()]
