import ast
import random

import pytest

from experiments.trust.mutation import CLASSES, Mutation, choose, mutations

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def rows(x_ptr, w_ptr, y_ptr, PB: tl.constexpr, RB: tl.constexpr):
    p = tl.program_id(0) * PB + tl.arange(0, PB)[:, None]
    r = tl.arange(0, RB)[None, :]
    ok = r < 300
    v1 = tl.load(x_ptr + p * 300 + r, mask=ok, other=0)
    v2 = tl.load(w_ptr + r, mask=ok & (p < 64), other=0)
    v3 = 1.0 / (1.0 + tl.exp(-v1))
    v4 = tl.where(ok, v3, 0.0)
    v5 = tl.sqrt(tl.sum(v4 * v4, axis=1)[:, None] + 1e-6)
    v6 = tl.where(v1 > 0.0, v3 * v2, v1)
    tl.store(y_ptr + p * 300 + r, v6 / v5, mask=ok)


@triton.jit
def tile(acc, row0, y_ptr, BM: tl.constexpr):
    rm = row0 + tl.arange(0, BM)[:, None]
    tl.store(y_ptr + rm * 16, acc)


@triton.jit
def product(a_ptr, b_ptr, y_ptr, BM: tl.constexpr, BK: tl.constexpr):
    row0 = tl.program_id(0) * BM
    acc = tl.zeros([BM, 16], tl.float32)
    for i in range(0, 3 * 2):
        a = tl.load(a_ptr + i * BK)
        b = tl.load(b_ptr + i * BK)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tile(acc, row0, y_ptr, BM)


def run(x, w):
    y = torch.empty_like(x)
    rows[(16,)](x, w, y, PB=4, RB=512)
    return (y,)
"""


@pytest.fixture(scope="module")
def found() -> list[Mutation]:
    return mutations(KERNEL)


def test_every_mutant_is_a_text_of_its_own_that_parses(found: list[Mutation]) -> None:
    texts = [m.apply(KERNEL) for m in found]
    assert len({KERNEL, *texts}) == len(found) + 1
    assert {m.kind for m in found} == set(CLASSES)
    for mutation, text in zip(found, texts, strict=True):
        ast.parse(text)
        old, new = mutation.diff(KERNEL).splitlines()
        assert old.startswith("- ") and new.startswith("+ ") and old[2:] != new[2:]


@pytest.mark.parametrize(
    ("kind", "operator", "line"),
    [
        ("arithmetic", "/ became *", "v3 = (1.0 * (1.0 + tl.exp(-v1)))"),
        ("arithmetic", "a sign dropped", "v3 = 1.0 / (1.0 + tl.exp((v1)))"),
        ("arithmetic", "sqrt dropped", "v5 = (tl.sum(v4 * v4, axis=1)[:, None] + 1e-6)"),
        ("arithmetic", "epsilon dropped", "v5 = tl.sqrt(tl.sum(v4 * v4, axis=1)[:, None] + 0.0)"),
        ("arithmetic", "sum became max", "v5 = tl.sqrt(tl.max(v4 * v4, axis=1)[:, None] + 1e-6)"),
        ("arithmetic", "a comparison changed", "v6 = tl.where(v1 >= 0.0, v3 * v2, v1)"),
        ("arithmetic", "the branches of a choice swapped", "v6 = tl.where(v1 > 0.0, v1, v3 * v2)"),
        ("arithmetic", "the accumulator dropped", 'acc = tl.dot(a, b, input_precision="ieee")'),
        ("index", "a wrong stride", "v1 = tl.load(x_ptr + p * 301 + r, mask=ok, other=0)"),
        ("index", "an address off by one", "v2 = tl.load(w_ptr + r + 1, mask=ok & (p < 64), other=0)"),
        ("index", "an index off by one", "r = tl.arange(0, RB)[None, :] + 1"),
        ("index", "an index off by one", "rm = row0 + tl.arange(0, BM)[:, None] + 1"),
        ("boundary", "a mask one wider", "ok = r <= 300"),
        ("boundary", "a mask one narrower", "ok = r < 300 - 1"),
        ("boundary", "a mask dropped", "tl.store(y_ptr + p * 300 + r, v6 / v5)"),
        ("boundary", "a condition of a mask dropped", "v2 = tl.load(w_ptr + r, mask=ok, other=0)"),
        (
            "boundary",
            "masked elements filled with another value",
            "v1 = tl.load(x_ptr + p * 300 + r, mask=ok, other=1)",
        ),
        ("boundary", "the identity of a reduction changed", "v4 = tl.where(ok, v3, 1.0)"),
        ("boundary", "the mask of a reduction dropped", "v4 = (v3)"),
        ("boundary", "last step of a loop left out", "for i in range(0, (3 * 2) - 1):"),
        ("boundary", "last block not launched", "rows[(15,)](x, w, y, PB=4, RB=512)"),
        ("precision", "a product of planes dropped", "for i in range(0, 2 * 2):"),
        ("precision", "a product in tf32", 'acc = tl.dot(a, b, acc, input_precision="tf32")'),
        ("precision", "a product in bfloat16", "acc = tl.dot((a).to(tl.bfloat16), (b).to(tl.bfloat16), acc)"),
        (
            "precision",
            "accumulated in float16",
            'acc = (tl.dot(a, b, acc, input_precision="ieee")).to(tl.float16).to(tl.float32)',
        ),
        (
            "precision",
            "a value rounded to bfloat16",
            "v3 = (1.0 / (1.0 + tl.exp(-v1))).to(tl.bfloat16).to(tl.float32)",
        ),
    ],
)
def test_a_mistake_is_found_and_belongs_to_its_class(found, kind, operator, line):
    lines = [m.diff(KERNEL).splitlines()[1][2:] for m in found if (m.kind, m.operator) == (kind, operator)]
    assert line in lines


def test_indices_are_no_arithmetic_and_formulas_no_indices(found: list[Mutation]) -> None:
    lines = {kind: {m.line for m in found if m.kind == kind} for kind in CLASSES}
    numbered = {text.strip(): number for number, text in enumerate(KERNEL.splitlines(), 1)}
    assert numbered["ok = r < 300"] not in lines["arithmetic"] | lines["index"]
    assert numbered["v3 = 1.0 / (1.0 + tl.exp(-v1))"] not in lines["index"] | lines["boundary"]
    assert numbered["rm = row0 + tl.arange(0, BM)[:, None]"] not in lines["arithmetic"] | lines["precision"]


def test_a_choice_is_seeded_and_takes_the_classes_in_turns(found: list[Mutation]) -> None:
    chosen = choose(found, 12, "seed")
    assert chosen == choose(found, 12, "seed") and chosen != choose(found, 12, "other")
    assert all(sum(m.kind == kind for m in chosen) == 3 for kind in CLASSES)
    assert len({m.operator for m in chosen}) == 12  # no operator twice as long as there are others
    everything = choose(found, len(found) + 5, 0)
    assert len(everything) == len(found) == len(set(everything))


def test_a_text_without_kernels_has_no_mutants() -> None:
    assert mutations("def run(x):\n    return (x + 1.0,)\n") == []


def test_words_before_a_place_may_be_in_any_alphabet() -> None:
    text = KERNEL.replace("import torch\n", '"""Größe der Blöcke: 4 × 512 µs"""\nimport torch\n', 1)
    mutation = random.Random(0).choice(mutations(text))
    assert ast.parse(mutation.apply(text))
    assert {m.after for m in mutations(text)} == {m.after for m in mutations(KERNEL)}
