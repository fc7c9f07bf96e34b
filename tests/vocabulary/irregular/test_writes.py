"""Writes of rows by index: what is covered and refused, what is printed, and values in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import uncovered, word_of
from qimeng.graph.region import Region
from qimeng.program.program import Program
from tests.interpreted import rows_of
from tests.vocabulary.irregular.samples import CONTEXT, action_of, after, start_of

Function = Callable[..., Any]
BF16 = torch.bfloat16


class Call(nn.Module):
    """A function of the inputs."""

    def __init__(self, function: Function):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Cache(nn.Module):
    """A step of attention that writes keys and values of new tokens into a cache of fixed length, as transformers'."""

    keys: Tensor
    values: Tensor

    def __init__(self, heads: int = 2, length: int = 32, width: int = 16):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, heads, length, width))
        self.register_buffer("values", torch.zeros(1, heads, length, width))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mask = torch.arange(self.keys.shape[2]) <= at[:, None]
        return functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)


def put(*where: slice | int) -> Function:
    """``y[where] = rows``; a number stands for the input of that number, the last input is the rows."""

    def function(x: Tensor, *others: Tensor) -> Tensor:
        y = x.clone()
        y[tuple(others[w] if isinstance(w, int) else w for w in where)] = others[-1]
        return y

    return function


def start(function: Function, *inputs: Tensor) -> Program:
    return start_of(KernelSpec.from_module(Call(function), inputs))


def writing(program: Program) -> Region:
    return next(r for r in program.called if any(n.packet in ("aten.index_put", "aten.scatter") for n in r.ops))


def lowered(program: Program) -> Program:
    """The program, all of it in one region where that fits, with a kernel for each region that writes by index."""
    while any(a.kind == "fusion" for a in legal_actions(program, CONTEXT)):
        program = after(program, action_of(program, "fusion"))
    for region in [r for r in program.called if word_of(r) == "writes"]:
        if program.schedule(region) is None:  # regions that are equal are lowered together
            found = [a for a in legal_actions(program, CONTEXT) if a.kind == "lowering" and region.id in a.regions]
            program = after(program, found[0])
    return program


def rows(size: int, count: int) -> Tensor:
    """Positions, each once."""
    torch.manual_seed(0)
    return torch.randperm(size)[:count]


def test_the_printed_kernels(golden: Callable[[str, str], None]) -> None:
    program = lowered(start(put(slice(None), 0), torch.randn(8, 64, 16), rows(64, 20), torch.randn(8, 20, 16)))
    golden("writes.py.txt", program.implementation(writing(program)).source)


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (put(0), (torch.randn(40, 6), torch.arange(0), torch.randn(0, 6)), "an empty tensor"),
        (put(0, slice(None), 1), (torch.randn(20, 3, 20), rows(20, 9), rows(20, 9), torch.randn(9, 3)), "neighbours"),
        (
            lambda x, i, y: x.scatter(0, i, y, reduce="multiply"),
            (torch.ones(20), rows(20, 9), torch.ones(9)),
            "reduces",
        ),
    ],
    ids=["empty", "apart", "multiplied"],
)
def test_what_is_not_covered_says_why(function: Function, inputs: tuple[Tensor, ...], reason: str) -> None:
    assert reason in str(uncovered(writing(start(function, *inputs))))


def test_an_index_is_not_computed_where_it_is_used() -> None:
    program = start(lambda x, i, y: x.index_copy(0, i + 1, y), torch.randn(40, 6), rows(30, 20), torch.randn(20, 6))
    assert [a for a in legal_actions(program, CONTEXT) if a.kind == "fusion"] == []
    assert uncovered(writing(program)) is None


def test_few_rows_are_left_to_the_family_tile() -> None:
    program = start(put(0), torch.randn(40, 6), rows(40, 3), torch.randn(3, 6))
    program = after(program, next(a for a in legal_actions(program, CONTEXT) if a.kind == "lowering"))
    found = [program.schedule(r) for r in program.called]
    assert "tile" in [s.family for s in found if s is not None]
    assert "writes" not in [word_of(r) for r in program.called]


def test_a_cache_of_fixed_length_is_written_by_kernels() -> None:
    program = lowered(start_of(KernelSpec.from_module(Cache(), tokens(12))))
    found = [s.family for r in program.called if (s := program.schedule(r)) is not None]
    assert found == ["writes", "writes"]


def test_it_compiles_without_spills(tmp_path: Path) -> None:
    inputs = torch.randn(2, 64, 128, dtype=BF16), rows(64, 20), torch.randn(2, 20, 128, dtype=BF16)
    program = lowered(start(lambda x, i, y: torch.relu(x.index_copy(1, i, y * 2)), *inputs))
    (region,) = program.called
    job = job_of(region, program.implementation(region))
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job])
    assert found.error is None and [k.spills for k in found.kernels] == [0, 0]


# -- values, in a process of its own where Triton interprets


def tokens(count: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (*(torch.randn(1, 2, count, 16) for _ in range(3)), torch.arange(count) + 5)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(shape).to(dtype)


def twice(size: int, *shape: int) -> Tensor:
    """An index in which positions come more than once."""
    torch.manual_seed(1)
    return torch.randint(0, size, shape)


def scattered(dim: int) -> Function:
    return lambda x, i, y: x.scatter(dim, i, y)


SPREAD = rows(40, 12)[:, None].expand(12, 24)

CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "rows": (put(0), (floats(40, 24), rows(40, 12), floats(12, 24))),
    "columns": (put(slice(None), 0), (floats(20, 30), rows(30, 12), floats(20, 12))),
    "inside": (put(slice(None), slice(None), 0), (floats(2, 3, 17, 5), rows(17, 9), floats(2, 3, 9, 5))),
    "a vector": (put(0), (floats(300), twice(300, 280), floats(280))),
    "negative": (put(0), (floats(40, 6), rows(40, 12) - 40, floats(12, 6))),
    "int32": (put(0), (floats(40, 6), rows(40, 12).int(), floats(12, 6))),
    "twice": (put(0), (floats(40, 6), twice(40, 700), floats(700, 6))),
    "a large table": (put(0), (floats(40000), twice(40000, 700), floats(700))),
    "two dimensions": (put(slice(None), 0), (floats(3, 40, 6), rows(40, 12).view(4, 3), floats(3, 4, 3, 6))),
    "two indices": (put(0, 1), (floats(20, 30, 5), rows(20, 4)[:, None], rows(30, 6), floats(4, 6, 5))),
    "pairs": (put(slice(None), 0, 1), (floats(2, 20, 30), twice(20, 99), twice(30, 99) - 30, floats(2, 99))),
    "one row for all": (put(0), (floats(40, 24), rows(40, 12), floats(24))),
    "one number": (put(0), (floats(40, 24), rows(40, 12), floats())),
    "index_fill": (lambda x, i: x.index_fill(1, i, 2.0), (floats(4, 40), rows(40, 12))),
    "transposed": (put(0), (floats(24, 40).t(), rows(40, 12), floats(24, 12).t())),
    "every other": (put(0), (floats(40, 24), rows(40, 24)[::2], floats(24, 24)[::2])),
    "bf16": (put(0), (floats(40, 24, dtype=BF16), rows(40, 12), floats(12, 24, dtype=BF16))),
    "int64": (put(0), (torch.arange(80).view(40, 2) << 40, rows(40, 12), -torch.arange(24).view(12, 2))),
    "bool": (put(0), (floats(40, 24) > 0, rows(40, 12), floats(12, 24) > 0)),
    "operators around": (
        lambda x, i, y: torch.relu(x * 2).index_copy(1, i, y.exp()) + 1,
        (floats(3, 40, 6), rows(40, 12), floats(3, 12, 6)),
    ),
    "one after another": (
        lambda x, i, j, y: torch.softmax(x.index_copy(1, i, y).index_copy(1, j, y * 2), 1),
        (floats(5, 40), rows(40, 12), twice(40, 12), floats(5, 12)),
    ),
    "scatter": (scattered(0), (floats(40, 24), twice(40, 30, 24), floats(30, 24))),
    "scatter inside": (scattered(1), (floats(3, 40, 5), twice(40, 3, 20, 5), floats(3, 20, 5))),
    "scatter of a part": (scattered(0), (floats(40, 24), twice(40, 11, 20), floats(12, 26))),
    "scatter of a part, across": (scattered(-1), (floats(8, 40), twice(40, 5, 20), floats(6, 30))),
    "scatter of rows": (scattered(0), (floats(40, 24), SPREAD, floats(12, 24))),
    "scatter of rows that are not contiguous": (scattered(0), (floats(40, 24), SPREAD, floats(24, 12).t())),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 0.5), (floats(8, 40), twice(40, 8, 20))),
}  # fmt: skip
QUICK = ["pairs", "int64", "a large table", "operators around", "scatter of a part", "a cache"]


def rows_of_case(name: str) -> Iterator[dict[str, Any]]:
    """Whether the values are PyTorch's; on the CPU the last of several rows that are written to one place counts."""
    if name == "a cache":
        yield from cached()
        return
    function, inputs = CASES[name]
    program = lowered(start(function, *inputs))
    wanted = function(*inputs)
    found = program.load().Model()(*inputs)
    same = torch.allclose(found, wanted, atol=1e-6, rtol=1e-6) if found.is_floating_point() else found.equal(wanted)
    families = [s.family for r in program.called if (s := program.schedule(r)) is not None]
    like = (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    yield {"case": name, "same": same and like and families == ["writes"]}


def cached() -> Iterator[dict[str, Any]]:
    """Two steps: what the first wrote is there in the second, in the result and in the buffers."""
    eager, inputs = Cache(), tokens(12)
    model = lowered(start_of(KernelSpec.from_module(Cache(), inputs))).load().Model()
    for step in (0, 9):
        given = (*inputs[:3], inputs[3] + step)
        same = torch.allclose(model(*given), eager(*given), atol=1e-5)
        yield {"case": "a cache", "same": same and torch.equal(model.get_buffer("keys"), eager.keys)}


def beyond() -> Iterator[dict[str, Any]]:
    """A row whose position does not exist is left out, where PyTorch raises an error; no memory is touched."""
    x, y = floats(40, 6), floats(12, 6)
    at = rows(40, 12)
    model = lowered(start(put(0), x, at, y)).load().Model()
    outside = at.clone()
    outside[2], outside[5], outside[7] = 40, -41, 1 << 40
    inside = (outside >= -40) & (outside < 40)
    yield {"case": "beyond", "same": torch.equal(model(x, outside, y), x.index_copy(0, outside[inside], y[inside]))}


def check(names: list[str]) -> None:
    found = rows_of("-m", "tests.vocabulary.irregular.test_writes", *names)
    assert {row["case"] for row in found} == set(names)
    assert all(row["same"] for row in found), [row for row in found if not row["same"]]


def test_quick_values() -> None:
    check([*QUICK, "beyond"])


@pytest.mark.slow
def test_other_values() -> None:
    check([name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    from qimeng.envs.estimate.interpreter import mend

    mend()
    torch.set_num_threads(1)  # several write the rows of an index in any order
    for case in sys.argv[1:]:
        for row in beyond() if case == "beyond" else rows_of_case(case):
            print(json.dumps(row), flush=True)
