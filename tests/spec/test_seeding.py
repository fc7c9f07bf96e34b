"""Generators are seeded as `torch.manual_seed` does, and nothing is kept of the call."""

from __future__ import annotations

import torch

from qimeng.spec.seeding import seed_generators


def test_the_numbers_are_those_of_pytorchs_own_seed():
    torch.manual_seed(11)
    expected = torch.rand(5)
    seed_generators(11)
    assert torch.equal(torch.rand(5), expected)


def test_nothing_is_kept_for_devices_that_are_not_in_use(monkeypatch):
    queued: list[object] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", queued.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    seed_generators(3)
    assert not queued
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_generators(3)
    assert queued == [3]
