"""Output classes come back as the module's."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from qimeng.envs.workers.outputs import describe, difference
from qimeng.graph.capture import CaptureError
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.rand(8, 6)
Pair = namedtuple("Pair", "first second")


class Outer:
    class Typed(NamedTuple):
        y: Any
        n: int = 0


@dataclasses.dataclass
class Record:
    value: Any
    more: Any = None
    count: int = 0


@dataclasses.dataclass
class Derived(Record):
    last: Any = None


def model_of(thing: Any, *inputs: Any) -> Any:
    return Program.start(capture_spec(KernelSpec.of(thing, inputs))).load().Model()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Pair(x * 2, [x + 1, None]),
        lambda x: Outer.Typed(x * 2, 3),
        lambda x: Record(x * 2, Pair(x, x + 1), 3),
        lambda x: (Record(x * 2), OrderedDict(b=x + 1, a=x * 3)),
        lambda x: torch.topk(x, 2),
        lambda x: {"max": (x * 2).max(-1)},
    ],
    ids=["named_tuple", "typed_named_tuple", "record", "ordered_dict", "topk", "max"],
)
def test_rebuilt_in_their_class(make: Any) -> None:
    expected, found = make(X), model_of(make, X)(X)
    assert type(found) is type(expected)
    assert difference(describe(found, {"x": X})[0], describe(expected, {"x": X})[0]) is None
    for a, b in zip(describe(found, {})[1], describe(expected, {})[1], strict=True):
        assert torch.equal(a, b)
    if isinstance(found, Record):
        assert type(found.more) is Pair and found.count == 3


def test_what_cannot_be_imported_gets_a_class_alike() -> None:
    program = Program.start(capture_spec(KernelSpec.of(lambda x: Pair(x * 2, Record(x)), (X,))))
    source = program.source.replace(repr(__name__), "'nowhere_to_be_found'")
    assert source != program.source
    found = load_source(source).Model()(X)
    assert type(found).__name__ == "Pair" and found._fields == ("first", "second") and torch.equal(found[0], X * 2)
    assert type(found.second).__name__ == "Record" and found.second.more is None


def test_other_classes_stay_on_pytorch() -> None:
    with pytest.raises(CaptureError, match="the module returns a Derived, a class with bases of its own"):
        capture_spec(KernelSpec.of(lambda x: Derived(x * 2), (X,)))
    with pytest.raises(CaptureError, match="the module returns a dict with a key of type PosixPath"):
        capture_spec(KernelSpec.of(lambda x: {Path("x"): x * 2}, (X,)))
