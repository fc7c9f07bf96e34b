"""Parameters of a process: the same for the same seed, whatever was done to them between."""

from __future__ import annotations

import pytest
import torch

from qimeng import KernelSpec
from qimeng.envs.workers import worker_setup
from qimeng.envs.workers.worker_setup import Parameters


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
