"""Which rows a small element of a convolution's copied input sends to the exact form: those whose windows reach it.

Triton's interpreter must be chosen before it is imported, so the cases run in a process of their own (this file as a
script) that prints one JSON row a case and form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.families.gemm.guard import EXTREME
from qimeng.coder.template.families.gemm.losses import losses_of
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.staging import under
from tests.coder.product_cases import HEADER, Case, add, arguments, printed, shapes
from tests.interpreted import rows_of

ONE: dict[str, Any] = {"staged": True, "packed": "b", "precision": "fp16", "block_k": 32}
TWO: dict[str, Any] = {**ONE, "precision": "fp16x3"}
MOVED: dict[str, Any] = {**ONE, "shifted": True, "descriptors": True}
LIMITS = {"fp16": 2e-3, "fp16x3": 3e-6}
SMALL = 1e-12


@cache
def cases() -> dict[str, Case]:
    """The cases of this file: six images each (see `alter`)."""
    found: dict[str, Case] = {}
    line, image, volume = (6, 32, 40), (6, 32, 11, 5), (6, 16, 5, 3, 3)
    small, large = (6, 32, 9, 4), (6, 32, 19, 18)
    conv, up = functional.conv2d, functional.conv_transpose2d
    for name, function, size, weight, forms in (
        ("padded", lambda s, x: conv(x, s.w, padding=1), large, (20, 32, 3, 3), [TWO, MOVED]),
        ("stride", lambda s, x: conv(x, s.w, None, 2, 1), image, (20, 32, 3, 3), [{**ONE, "splits": 2}]),
        ("gaps", lambda s, x: conv(x, s.w, None, (3, 1)), image, (20, 32, 2, 3), [ONE]),
        ("dilated", lambda s, x: conv(x, s.w, None, (1, 2), 2, 2), image, (20, 32, 3, 3), [ONE]),
        ("wide borders", lambda s, x: conv(x, s.w, padding=(4, 0)), image, (20, 32, 3, 3), [ONE]),
        ("few channels", lambda s, x: conv(x, s.w, None, 2, 3), (6, 3, 19, 18), (20, 3, 7, 7), [ONE]),
        ("groups", lambda s, x: conv(x, s.w, padding=1, groups=2), image, (20, 16, 3, 3), [ONE]),
        ("cut", lambda s, x: conv(x, s.w, padding=(0, 1)).view(6, 20, 3, 3, 5).relu(), image, (20, 32, 3, 3), [ONE]),
        ("sums", lambda s, x: conv(x, s.w, padding=1).sum(1, keepdim=True), image, (20, 32, 3, 3), [ONE]),
        ("one row", lambda s, x: conv(x, s.w), (6, 32, 3, 19), (20, 32, 3, 3), [ONE]),
        ("one result", lambda s, x: conv(x, s.w), (6, 32, 3, 3), (20, 32, 3, 3), [ONE]),
        ("line", lambda s, x: functional.conv1d(x, s.w, None, 1, 2, 2), line, (20, 32, 3), [ONE, MOVED]),
        ("thin line", lambda s, x: functional.conv1d(x, s.w, None, 2, 1), (6, 3, 40), (20, 3, 3), [ONE]),
        ("volume", lambda s, x: functional.conv3d(x, s.w, None, (2, 1, 1), 1), volume, (20, 16, 3, 3, 3), [ONE]),
        ("thin volume", lambda s, x: functional.conv3d(x, s.w), (6, 3, 7, 5, 6), (20, 3, 3, 2, 3), [ONE]),
        ("phases", lambda s, x: up(x, s.w, None, 2, 1), small, (32, 20, 3, 3), [ONE]),
        ("phases of a line", lambda s, x: functional.conv_transpose1d(x, s.w, None, 2, 1), line, (32, 20, 3), [MOVED]),
        ("three phases", lambda s, x: up(x, s.w, None, 3, 1, 0, 1, 2), small, (32, 20, 4, 4), [ONE]),
    ):
        add(found, name, function, shapes(size), forms, w=weight)
    return found


def alter(x: torch.Tensor) -> torch.Tensor:
    """`x` as zeros but for one element in the last row, and, by image: a small one in the first, middle or last row;
    none; an infinity; a magnitude out of range."""
    last = x.shape[2] - 1
    rows = x.zero_().view(*x.shape[:3], -1)
    rows[:, 0, last, -1] = 1.0
    for image, row in enumerate((0, last // 2, last)):
        rows[image, -1, row, 0] = SMALL
    rows[4, 1, last, 0] = float("inf")
    rows[5] *= 1e25
    return x


class Kernels:
    """The kernels of a form of a case."""

    def __init__(self, case: Case, number: int):
        from qimeng.program.program import load_source

        self.prefix = f"g{number}"
        self.graph, self.region, plan, self.impl = printed(case, number, case.schedules[number])
        self.plan = under(plan, schedule_of(case, number))
        self.module = case.module()
        self.loaded = load_source(HEADER + self.impl.source, f"losses_{number}")
        without = re.sub(rf"^    {self.prefix}_exact\[.*\n", "", self.impl.source, flags=re.MULTILINE)
        self.bare = load_source(HEADER + without, f"bare_{number}")

    def call(self, x: torch.Tensor, exact: bool = True) -> torch.Tensor:
        """The result, or without the tiles of the exact form."""
        given = arguments(self.graph, self.region, self.module, (x,))
        loaded = self.loaded if exact else self.bare
        buffers = getattr(loaded, self.impl.prepare)(*[given[i] for i in self.impl.prepare_inputs])
        result: torch.Tensor = getattr(loaded, self.impl.entry)(*given, *buffers)[0]
        return result

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        """The losses of each image."""
        table: torch.Tensor = getattr(self.loaded, f"{self.prefix}_stage")(x)[2]
        return table


def schedule_of(case: Case, number: int) -> GemmSchedule:
    return GemmSchedule(block_m=32, block_n=32, block_k=32).but(**case.schedules[number])


def reached(case: Case, x: torch.Tensor, count: int) -> list[list[int]]:
    """Of each image, the steps along the result's first spatial dimension, `count` with all phases, that read a small
    element."""
    module = case.module().double()
    next(module.parameters()).fill_(1.0)
    y = module((x == SMALL).double())
    y = (y.squeeze(2) if y.dim() > 3 else y)[..., None].flatten(3).amax((1, 3))
    return [sorted({int(o) // -(-y.shape[1] // count) for o in row.nonzero()}) for row in y]


def looked_at(case: Case, number: int) -> dict[str, Any]:
    """Which losses a form of a case notes, which it should, and how far its results are off."""
    torch.manual_seed(1)
    kernels, x = Kernels(case, number), alter(*case.inputs())
    got, losses, module = kernels.call(x), kernels.losses(x), kernels.module.double()
    exact = module(x.double())
    next(module.parameters()).abs_()
    size = module(x.double().abs())
    off = torch.where(exact.isfinite() & (size > 0), (got.double() - exact).abs() / size, 0.0)
    found = losses_of(kernels.plan)
    return {
        "base": 2 * kernels.plan.shape[3],
        "shifted": kernels.plan.shift is not None,
        "losses": losses.tolist(),
        "reached": reached(case, x, found.count),
        "error": float(off.max()),
        "finite": torch.equal(got.isfinite(), exact.isfinite()),
        "tried": int(((exact != 0) & (exact.abs() < 1e-6)).sum()),
    }


def interpret() -> None:
    """Print what is seen of each case, and which tiles are left to the exact form."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    torch.set_grad_enabled(False)
    for name, case in cases().items():
        for number, changes in enumerate(case.schedules):
            print(json.dumps({"case": name, "form": changes, **looked_at(case, number)}), flush=True)
    case = cases()["padded"]
    kernels, (x,) = Kernels(case, 0), case.inputs()
    x[1, 3, 9, 4] = SMALL
    rows = kernels.call(x, exact=False).movedim(1, -1).flatten(0, 2)
    print(json.dumps({"left out": (rows == 0).all(1).nonzero().flatten().tolist()}), flush=True)


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return list(once("gemm_losses", lambda: rows_of(__file__)))


FORMS = [(name, number) for name, case in cases().items() for number in range(len(case.schedules))]


@pytest.mark.parametrize(("name", "number"), FORMS)
def test_rows_that_reach_a_small_element_are_noted_and_right(
    rows: list[dict[str, Any]], name: str, number: int
) -> None:
    changes = cases()[name].schedules[number]
    (row,) = [r for r in rows if (r.get("case"), r.get("form")) == (name, changes)]
    assert row["shifted"] is bool(changes.get("shifted"))
    assert row["finite"] and row["error"] <= LIMITS[changes["precision"]], row
    *images, infinite, large = row["losses"]
    assert set(infinite) | set(large) == {EXTREME}
    loose = row["shifted"] or "phases" in name
    for losses, reached in zip(images, row["reached"], strict=False):
        assert set(losses) <= {row["base"], row["base"] + 1}
        noted = {o for o, loss in enumerate(losses) if loss > row["base"]}
        between = set(range(min(reached), max(reached) + 1)) if reached else set()
        assert between <= noted
        assert noted <= ({o + i for o in between for i in range(-2, 3)} if loose else between)


def test_only_tiles_that_reach_it_are_left_to_the_exact_form(rows: list[dict[str, Any]]) -> None:
    first, last = 19 * 18 + 8 * 18, 19 * 18 + 11 * 18  # rows 8 to 10 of the second image
    tiles = range(first // 32, -(-last // 32))
    assert rows[-1]["left out"] == [i for tile in tiles for i in range(tile * 32, tile * 32 + 32)]


if __name__ == "__main__":
    interpret()
