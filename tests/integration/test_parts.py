"""Which submodules of a model are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qimeng.errors import SpecError
from qimeng.integration.parts import LEAST_SHARE, MEDIUM, SMALL, choose
from qimeng.integration.profile import ROOT, arguments, visits
from tests.integration.small_models import Stack

X = torch.randn(4, 8)
CPU = torch.device("cpu")


def names(model: nn.Module, patterns: tuple[str, ...] = (), x: Any = X) -> list[tuple[str, ...]]:
    return [part.names for part in choose(visits(model, (x,), {}, CPU), patterns)]


def test_a_small_model_is_one_part() -> None:
    assert names(Stack(3)) == [(ROOT,)]


def test_in_a_large_one_what_is_repeated_is_a_part() -> None:
    layers = SMALL // 2 + 1  # of two modules each
    found = names(Stack(layers, 64), x=torch.randn(2048, 64))  # long enough for a clock on a busy machine
    assert found[0] == tuple(f"layers.{i}" for i in range(layers))
    assert set(found[1:]) <= {("head",)}


def test_where_nothing_repeated_takes_half_of_the_time_a_larger_model_is_one_part() -> None:
    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8 + i) for i in range(SMALL + 8))

        def forward(self, x: torch.Tensor) -> Any:
            return [layer(x) for layer in self.layers]

    assert SMALL < SMALL + 8 < MEDIUM
    assert names(Widening()) == [(ROOT,)]


def test_named_parts() -> None:
    assert names(Stack(3), ("layers.*",)) == [("layers.0", "layers.1", "layers.2")]
    assert sorted(names(Stack(2), ("layers.1.linear", "head"))) == [("head",), ("layers.1.linear",)]
    with pytest.raises(SpecError, match=r"parts: 'layer.\*' fits no submodule"):
        names(Stack(2), ("layer.*",))


def test_shares_are_of_the_model_s_time() -> None:
    found = choose(visits(Stack(3), (X,), {}, CPU), ("layers.*", "head"))
    assert 0 < sum(part.share for part in found) <= 1
    assert all(part.share >= 0 for part in found) and LEAST_SHARE < 1


def test_submodules_that_get_other_objects_are_left_out() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Keeping(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, Cache()))

    class Cache:
        pass

    class Keeping(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x + 1

    assert names(Cached(), ("*",)) == [(ROOT,)]
    with pytest.raises(SpecError):
        names(Cached(), ("first",))


def test_arguments_are_copies_of_those_of_the_call() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    model = nn.Sequential(nn.Linear(8, 8), InPlace())
    seen = visits(model, (X,), {}, CPU)
    key = seen["1"].keys[0]
    assert key is not None and seen["1"].calls == 1
    (given,), kwargs = arguments(model, (X,), {}, {"1": key})["1"]
    assert not kwargs and torch.equal(given, model[0](X))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
