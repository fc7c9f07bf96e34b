"""What a writer learns from beyond accepted steps: further families, CUDA C++, and repairs of broken answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.writer import breaking
from experiments.writer.examples import Draw, Example, examples_of, from_spec
from experiments.writer.folder import LEARNT, read, write
from experiments.writer.further import FAMILIES, further
from experiments.writer.repairs import patch_of, repaired
from qimeng.coder.llm.chat import Reply
from qimeng.planner.data.generate import Bytes
from qimeng.planner.data.overlap import reserved
from qimeng.planner.data.signature import structure
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

SMALL = Bytes(1 << 14, 1 << 16)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return examples_of(Draw(0, 4, SMALL, 6, cuda=True))


def is_cuda(example: Example) -> bool:
    return "__global__" in example.answer


def test_further_specs_are_of_each_family_and_can_be_captured() -> None:
    drawn = [further(0, index) for index in range(16)]
    assert {family for family, _ in drawn} == set(FAMILIES)
    assert further(0, 3)[1].source == drawn[3][1].source and drawn[3][1].source != further(1, 3)[1].source
    for family in FAMILIES:
        number, spec = next((n, spec) for n, (found, spec) in enumerate(drawn) if found == family)
        assert structure(capture_spec(spec, verify=False)) not in reserved()
        kinds = {e.traits.kind for e in examples_of(Draw(0, number, None))}
        assert "lowering" in kinds, f"{family}: {kinds}"


def test_nothing_is_learnt_from_the_structure_of_a_benchmarks_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = further(0, 0)
    known = frozenset({structure(capture_spec(spec, verify=False))})
    assert list(from_spec(spec, steps=12))
    monkeypatch.setattr("experiments.writer.examples.reserved", lambda: known)
    assert not list(from_spec(spec, steps=12))


def test_walks_lead_to_cuda_where_they_may(examples: list[Example]) -> None:
    found = [e for e in examples if is_cuda(e)]
    assert found and any(not is_cuda(e) for e in examples)
    for e in found[:3]:
        patch = patch_of(e.request(), Reply(e.reply))
        assert patch.alternatives[0].language == "cuda"
    assert not any(is_cuda(e) for e in examples_of(Draw(0, 4, SMALL, 2)))


CODE = """@triton.jit
def k(x_ptr, y_ptr, B: tl.constexpr):
    lane = tl.arange(0, B)
    value = tl.load(x_ptr + lane)
    tl.store(y_ptr + lane, value * 2)

def region(x0):
    y0 = torch.empty_strided((64,), (1,))
    k[(1,)](x0, y0, B=64)
    return (y0,)
"""


@pytest.mark.parametrize(
    ("change", "gone", "there"),
    [
        ("unknown", "", ""),
        ("odd_block", "B=64)", "B=192)"),
        ("too_large", "B=64)", "B=262144)"),
        ("not_launched", "k[(1,)]", "    pass\n"),
        ("fewer_arguments", "](x0, y0", "](y0, B=64)"),
        ("synchronized", "", "    torch.cuda.synchronize()\n    return (y0,)"),
        ("cut", "return (y0,)", "@triton.jit"),
    ],
)
def test_changes(change: str, gone: str, there: str) -> None:
    found = breaking.CHANGES[change](CODE, random.Random(0))
    assert found is not None and found != CODE and there in found
    assert not gone or gone not in found


def test_changes_drawn_by_chance() -> None:
    rng = random.Random(0)
    assert len(breaking.unbalanced(CODE, rng) or "") == len(CODE) - 1
    assert len((breaking.left_out(CODE, rng) or "").splitlines()) == len(CODE.splitlines()) - 1
    misspelt = breaking.misspelt(CODE, rng) or ""
    assert len(set(misspelt.split()) - set(CODE.split())) >= 1 and len(misspelt) > len(CODE)
    assert breaking.broken("x\n", rng) is None
    assert breaking.broken(CODE, random.Random(1)) == breaking.broken(CODE, random.Random(1)) != CODE


@pytest.mark.slow
def test_broken_answers_are_repaired_with_the_gates_own_messages(examples: list[Example], tmp_path: Path) -> None:
    some = [*(e for e in examples if not is_cuda(e)), *(e for e in examples if is_cuda(e))][-10:]
    found = repaired(some, seed=1)
    assert len(found) >= 7
    said = [e.failed[1] for e in found if e.failed is not None]
    assert len(said) == len(found)
    assert any(text.startswith("Your answer cannot be used: ") for text in said)
    assert any("what the judge says" in text for text in said)
    for e in found:
        assert Example.from_json(e.to_json()) == e and [m.role for m in e.messages][2:] == ["assistant", "user"]
        assert e.key != next(o for o in some if o.answer == e.answer and o.prompt == e.prompt).key
    write(tmp_path, some, share=1.0)
    learnt = list(read(tmp_path, LEARNT))
    assert sum(e.failed is not None for e in learnt) >= len([e for e in learnt if e.failed is None]) / 2


def test_a_repair_is_read_back_without_its_turns() -> None:
    spec = KernelSpec.from_source(further(0, 0)[1].source or "", "s")
    (first, *_) = from_spec(spec)
    assert first.failed is None and Example.from_json(first.to_json().replace('"failed": null, ', "")) == first
