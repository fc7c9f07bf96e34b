"""Products of fp32 operands that vary within a row: right by planes where these hold the values, else by exact forms.

Triton's interpreter must be chosen before it is imported, so the cases run in a process of their own (this file as a
script) that prints one JSON row a case.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiments.trust.hard_products import BENIGN, HARD, WEIGHTED, Product, Shape
from tests.interpreted import rows_of

FLAT, DEEP = (24, 96, 40), (20, 1100, 36)
BASE: dict[str, Any] = {"block_m": 32, "block_n": 32, "block_k": 32, "warps": 4, "stages": 2, "promote": 64}
VARIANTS: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "weight, end to end": ("weight", FLAT, {"cat": True, "packed": "b"}),
    "prologue, together": ("prologue", FLAT, {"packed": "b"}),
    "row sum, in two pieces": ("row sum", FLAT, {"block_n": 64, "warps": 1}),
    "batch, split in the loop": ("batch", FLAT, {"inline": "ab"}),
    "split depth, scales found before": (
        "two inputs",
        DEEP,
        {"cat": True, "block_k": 256, "promote": 256, "splits": 2},
    ),
    "tiles that overhang by a whole piece": (
        "two inputs",
        (24, 128, 128),
        {"precision": "fp16", "block_n": 256, "warps": 8, "splits": 2},
    ),
    "one plane": ("weight", FLAT, {"precision": "fp16", "packed": "b"}),
    "one plane, split in the loop": ("two inputs", FLAT, {"precision": "fp16", "inline": "ab"}),
    "bf16x6": ("two inputs", FLAT, {"precision": "bf16x6"}),
    "bf16x6 in the loop": ("two inputs", FLAT, {"precision": "bf16x6", "inline": "ab"}),
    "tf32": ("weight", FLAT, {"precision": "tf32", "packed": "b"}),
    "tf32x3": ("two inputs", FLAT, {"precision": "tf32x3"}),
}
"""Form, sizes and changes of the schedule."""

ALL = "weight, end to end"
"""The variant that sees all classes."""

OTHERS = [variant for variant in VARIANTS if variant != ALL]

SOME = ("units 1e-6 to 1e6, weights inverse", "a mask of finfo.min, weight 0", "one infinity", "one NaN")
"""Classes that the others see."""

LIMIT = 1.9e-6 + 6e-8 * 1100**0.5
LOOSE = {
    "tiles that overhang by a whole piece": 4e-3,
    "one plane": 4e-3,
    "one plane, split in the loop": 4e-3,
    "tf32": 4e-3,
}


def classes(variant: str) -> dict[str, Any]:
    """What `variant` is tried on."""
    known = {**BENIGN, **HARD}
    return known if variant == ALL else {name: known[name] for name in ("normal", *SOME)}


def interpret(variants: list[str]) -> None:
    """Run variants on their classes, and print how far each is off."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    torch.set_grad_enabled(False)
    for variant in variants:
        form, sizes, changes = VARIANTS[variant]
        made = Printed(form, sizes, {**BASE, "precision": "fp16x3", **changes})
        for name, make in classes(variant).items():
            torch.manual_seed(2)
            row = {"variant": variant, "class": name, **made.measured(make(Shape(*sizes)))}
            print(json.dumps(row), flush=True)
        if variant == ALL:
            deep = Printed(form, DEEP, {**BASE, "precision": "fp16x3", **changes})
            for depth, bits, product in ((FLAT[1], 11, made), (DEEP[1], 10, deep)):
                print(json.dumps({"variant": "planes", "depth": depth, **product.split(bits)}), flush=True)


class Printed:
    """A product as the template prints it."""

    def __init__(self, form: str, sizes: tuple[int, int, int], changes: dict[str, Any]):
        from qimeng.coder.template.families.gemm.host import print_gemm
        from qimeng.coder.template.families.gemm.plan import plan_gemm
        from qimeng.coder.template.families.gemm.schedule import GemmSchedule
        from qimeng.graph.capture import capture
        from qimeng.graph.region import make_region
        from qimeng.program.program import load_source

        operands = Shape(*sizes).normal()
        self.module = Product(form, operands)
        self.graph = capture(lambda: self.module, lambda: self.module.inputs(operands))
        self.region = make_region(self.graph, [n.name for n in self.graph.ops()])
        self.impl = print_gemm(plan_gemm(self.region), GemmSchedule(**changes), "g")
        head = "import torch\nimport triton\nimport triton.language as tl\n\n"
        self.loaded = load_source(head + self.impl.source, f"guard_{id(self)}")
        bare = re.sub(r"^    g_exact\[.*\n", "", self.impl.source, flags=re.MULTILINE)
        bare = bare.replace(" = torch.empty_strided(", " = torch.nan * torch.zeros(1).new_empty_strided(")
        self.bare = load_source(head + bare, f"guard_bare_{id(self)}")

    def call(self, loaded: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The product, by the kernels or by those without the exact forms."""
        held = dict(self.module.named_parameters())
        nodes = [self.graph.nodes[v.node] for v in self.region.inputs]
        given = [held[n.target] if n.kind == "parameter" else inputs[int(n.target)] for n in nodes]
        prepare = [given[i] for i in self.impl.prepare_inputs]
        buffers = getattr(loaded, self.impl.prepare)(*prepare) if self.impl.prepare else ()
        return getattr(loaded, self.impl.entry)(*given, *buffers)[0]

    def split(self, bits: int) -> dict[str, float]:
        """Whether the first plane of a packed weight has `bits`, and the share of an element that both lose."""
        torch.manual_seed(2)
        weight = torch.randn(self.module.weight.shape)
        planes, inverse, _ = getattr(self.loaded, self.impl.prepare)(weight)
        first, second = (p.double() for p in planes.chunk(2))
        rows, columns = weight.shape
        first, second = first[:rows, :columns], second[:rows, :columns]
        exact = weight.double() / inverse[:rows, None].double()
        lost = ((first + second * 2.0 ** (-1 - bits)) - exact).abs() / exact.abs()
        last = torch.exp2(first.abs().log2().floor() + 1 - bits)
        return {
            "rounded": bool((first % last == 0).all()),
            "finite": bool(second.isfinite().all()),
            "lost": float(lost.max()),
        }

    def measured(self, operands: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        """Errors, relative to |result| + rms of its row and to |A| |B|, and whether the exact forms had a part."""
        inputs = self.module.inputs(operands)
        if self.module.form in WEIGHTED:
            self.module.weight.copy_(operands[1].T)
        got, eager = self.call(self.loaded, inputs), _first(self.module(*inputs))
        planes_alone = torch.equal(got.nan_to_num(1.25), self.call(self.bare, inputs).nan_to_num(1.25))
        exact = _first(self.module.double()(*[x.double() for x in inputs]))
        self.module.float()
        size = inputs[0].double().abs() @ operands[1].double().abs() * (2.0 if self.module.form == "prologue" else 1.0)
        odd = ~eager.isfinite()
        off = torch.where(odd | ~got.isfinite(), 0.0, (got.double() - exact).abs())
        rms = torch.where(odd, 0.0, exact).square().mean(-1, keepdim=True).sqrt()
        wrong = odd & ~((got == eager) | (got.isnan() & eager.isnan())) | ~odd & ~got.isfinite()
        return {
            "error": float((off / (exact.abs() + rms)).nan_to_num(0.0, 0.0).max()),
            "componentwise": float(torch.where((size > 1e-30) & (size < 1e38), off / size, 0.0).max()),
            "wrong": int(wrong.sum()),
            "planes_alone": planes_alone,
        }


def _first(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return list(once("gemm_guard", lambda: rows_of(__file__, ALL)))


@pytest.fixture(scope="module")
def others(once: Callable[..., Any]) -> list[dict[str, Any]]:
    """Those of the other variants."""
    return list(once("gemm_guard_others", lambda: rows_of(__file__, *OTHERS)))


def check(rows: list[dict[str, Any]], variant: str) -> None:
    """Every class is within fp32's error (or the mode's), and not finite exactly where eager is not."""
    found, limit = [row for row in rows if row["variant"] == variant], LOOSE.get(variant, LIMIT)
    assert [r["class"] for r in found] == list(classes(variant))
    for row in found:
        assert row["wrong"] == 0, row
        assert row["error"] <= limit, row
        assert row["componentwise"] <= limit, row


def test_every_class_is_right(rows: list[dict[str, Any]]) -> None:
    check(rows, ALL)


def test_planes_compute_what_nets_have_and_exact_forms_what_planes_lose(rows: list[dict[str, Any]]) -> None:
    lost = (
        "units 1e-6 to 1e6, weights inverse",
        "a mask of finfo.min, weight 0",
        "large where the other is zero",
        "1e37 by 1e-10",
        "subnormal by 1e30",
        "1e-19 by 1e-19",
        "one infinity",
    )
    for row in (r for r in rows if r["variant"] == ALL):
        if row["class"] in BENIGN or row["class"] in lost:
            assert row["planes_alone"] is (row["class"] in BENIGN), row


def test_the_first_plane_has_its_bits_and_both_keep_twenty_two(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if row["variant"] == "planes"]
    assert [row["depth"] for row in found] == [FLAT[1], DEEP[1]]
    for row in found:
        assert row["rounded"] and row["finite"] and row["lost"] <= 2.0**-22, row


@pytest.mark.slow
@pytest.mark.parametrize("variant", OTHERS)
def test_other_variants_are_right(others: list[dict[str, Any]], variant: str) -> None:
    check(others, variant)


if __name__ == "__main__":
    interpret(sys.argv[1:])
