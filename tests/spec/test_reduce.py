"""Smaller versions of the same computation."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from qimeng.spec import KernelSpec, check, reduce
from qimeng.spec.reduce import ENOUGH, shrink


def shapes(spec: KernelSpec) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in _pytree.tree_leaves(spec.reduced().inputs(0)) if isinstance(x, torch.Tensor)]


def source(sizes: str, init: str, forward: str, inputs: str, arguments: str = "[]") -> KernelSpec:
    return KernelSpec.from_source(
        f"import torch\n{sizes}\n\n\nclass Model(torch.nn.Module):\n"
        f"    def __init__(self, *a):\n        super().__init__()\n        {init}\n\n"
        f"    def forward(self, *x):\n        return {forward}\n\n\n"
        f"def get_inputs():\n    return {inputs}\n\n\ndef get_init_inputs():\n    return {arguments}\n"
    )


@pytest.mark.parametrize("limit", [8, 16, 64, 256])
def test_shrunk_sizes(limit: int) -> None:
    sizes = [8192, 4096, 4095, 1000, 512, 96, 64, 7]
    table = shrink(sizes, limit)
    assert all(table[s] <= max(limit, s if s <= limit else limit) for s in sizes)
    assert table[4095] % 2 == 1 and table[7] == 7
    assert all(table[a] % table[b] == 0 for a, b in [(8192, 512), (4096, 64)] if table[b] <= table[a])
    assert len(set(table.values())) >= min(len(sizes), 4)


def test_files_by_their_constants() -> None:
    mm = source("N = 2048 * 4\nM, K = 1024, 4095", "pass", "x[0] @ x[1]", "[torch.rand(N, K), torch.rand(K, M)]")
    (n, k), (k2, m) = shapes(mm)
    assert k == k2 and k % 2 == 1 and n % 2 == 0 and max(n * k, k * m, n * m) <= ENOUGH and n != m
    assert min(n, k, m) >= 32, "still several tiles"
    assert mm.reduced().reduced() is mm.reduced()
    assert mm.reduced().name == mm.name and mm.reduced().digest != mm.digest


def test_files_with_sizes_in_tuples_functions_and_classes() -> None:
    norm = source(
        "shape = (64, 512, 256)\nbatch: int = 128",
        "self.n = torch.nn.LayerNorm(a[0])",
        "self.n(x[0])",
        "[torch.rand(batch, *shape)]",
        "[shape]",
    )
    assert len(shapes(norm)[0]) == 4 and shapes(norm)[0][0] >= 8
    inline = source("", "self.m = torch.nn.Linear(512, 256)", "self.m(x[0])", "[torch.rand(65536, 512)]")
    ((rows, inner),) = shapes(inline)
    assert inner == 512 and rows < 1024, "sizes inside the class stay, and with them those that must fit"


def test_files_whose_sizes_must_keep_their_proportion() -> None:
    spec = source(
        "channels = 64\nwidth = 32\nbatch = 512",
        "self.n = torch.nn.LayerNorm(channels)",
        "self.n(torch.cat([x[0], x[0]], -1))",
        "[torch.rand(batch, channels, width)]",
    )
    ((_, channels, width),) = shapes(spec)
    assert channels == 2 * width < 64


def test_files_that_cannot_be_smaller_stay() -> None:
    spec = source("N = 1024", "pass", "x[0].reshape(1024, 1024)", "[torch.rand(N, N)]")
    assert spec.reduced() is spec
    small = source("N = 128", "pass", "x[0] + 1", "[torch.rand(N, N)]")
    assert small.reduced() is small, "small already"


def test_functions_by_equal_sizes() -> None:
    spec = KernelSpec.of(
        lambda a, b, i: (a @ b)[i], (torch.rand(512, 1024), torch.rand(1024, 511), torch.tensor([0, 500]))
    )
    (m, k), (k2, n), (i,) = shapes(spec)
    assert k == k2 and n % 2 == 1 and i == 2 and max(m * k, k * n) <= ENOUGH
    spec.check()
    transposed = KernelSpec.of(torch.relu, (torch.rand(1024, 2048).t(),)).reduced().inputs(0)[0]
    assert not transposed.is_contiguous() and transposed.t().is_contiguous()


def test_modules_by_their_batch() -> None:
    spec = KernelSpec.of(torch.nn.Linear(512, 64), (torch.rand(4096, 512),))
    assert shapes(spec) == [(64, 512)]
    heavy = KernelSpec.of(torch.nn.Linear(512, 512), (torch.rand(4096, 512),))
    assert shapes(heavy)[0][0] < 4096, "large weights stay, the batch does not"
    fixed = KernelSpec.of(torch.nn.Flatten(0), (torch.rand(8, 4),))
    assert fixed.reduced() is fixed


def test_a_run_ends_where_its_size_is_known_well_enough() -> None:
    spec = source("N = 512", "pass", "((x[0] @ x[0]) + 1) * 2", "[torch.rand(N, N)]")
    whole = reduce._size(spec.origin, False, fake=True)
    part = reduce._size(spec.origin, False, fake=True, enough=lambda s: s.largest > ENOUGH)
    assert whole is not None and part is not None
    assert (part.ended, part.largest, whole.ended, whole.largest) == (True, 512 * 512, False, 512 * 512)
    assert part.total < whole.total


def test_a_computation_that_was_made_smaller_is_not_run_again_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = source("N = 512", "pass", "((x[0] @ x[0]) + 1) * 2", "[torch.rand(N, N)]")
    small = spec.reduced()
    size = reduce.elements(small.origin, small.training)
    monkeypatch.setattr(reduce, "_size", None)
    assert small.is_small and size <= reduce.RUNNABLE


def test_a_long_loop_is_run_at_small_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, bool]] = []
    real = reduce._size

    def noted(origin: Any, *arguments: Any, **options: Any) -> Any:
        """Keeps the size and whether the run came to its end."""
        found = real(origin, *arguments, **options)
        ran.append((origin.examples(0, "cpu")[0].shape[0], found.ended))
        return found

    monkeypatch.setattr(reduce, "_size", noted)
    loop = "functools.reduce(lambda h, r: torch.tanh(h + r), x[0] * 2)"
    spec = source("import functools\nSTEPS, N = 4096, 8192", "pass", loop, "[torch.rand(STEPS, N)]")
    ((steps, _),) = shapes(spec)
    assert steps < 4096 and all(ended for size, ended in ran if size > steps)
    assert (steps, False) in ran


@pytest.mark.parametrize("seconds", [0.01, 60.0])
def test_the_search_for_a_smaller_size_ends_in_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    tried: list[bool] = []

    def slow(*arguments: Any, **options: Any) -> None:
        """No size runs."""
        tried.append(True)
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    spec = source("N, K = 2048, 4096", "pass", "x[0] + 1", "[torch.rand(N, K)]")
    monkeypatch.setattr(reduce, "_size", slow)
    monkeypatch.setattr(reduce, "SEARCH_S", seconds)
    assert reduce.reduce_origin(spec.origin, spec.training) == (spec.origin, None)
    assert len(tried) == 2 if seconds < 1 else len(tried) > 2  # its own size, and one smaller one


@pytest.mark.parametrize(("much", "index", "values"), [(1 << 24, False, True), (1, False, False), (1, True, True)])
def test_a_check_runs_with_values_where_that_is_quick_or_an_index_may_be_out_of_range(
    monkeypatch: pytest.MonkeyPatch, much: int, index: bool, values: bool
) -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(isinstance(x, FakeTensor))
        return x * 2

    monkeypatch.setattr(check, "MUCH", much)
    KernelSpec.of(forward, (torch.arange(4) if index else torch.rand(4),)).check()
    assert (seen[-1] is False) == values


def test_a_long_computation_is_tried_on_a_gpu_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "functools.reduce(lambda h, _: torch.tanh(h), range(STEPS), x[0])"
    long, short = (
        source(f"import functools\nN, STEPS = 2048, {count}", "pass", steps, "[torch.randn(N, N)]")
        for count in (reduce.LONG + 1, reduce.LONG)
    )
    assert (long.is_long, short.is_long) == (True, False)
    assert short.tried_on("cuda") is short.reduced() and short.reduced() is not short
    monkeypatch.setattr(reduce, "reduce_origin", None)
    assert long.tried_on("cuda") is long
    long.check("cuda")
    assert long.domains == ("real",)
