"""Tokens drawn in slots are those that `generate` of transformers takes, whatever stands beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.finetune.decoding import Decoder
from qimeng.finetune.weights import adapted, tiny
from qimeng.planner.lm.mini import MiniSize

SIZE = MiniSize(hidden=32, layers=2, heads=4, kv_heads=2, inner=64, positions=256)

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 3], [40], [7, 7, 7, 9, 9], [3, 4, 5], [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]]

LIMITS = [20, 3, 40, 1, 17, 33]


@pytest.fixture
def model() -> Any:
    return tiny(["write one two more digits 0123456789"], SIZE, 260, seed=3)[0].eval()


def greedy(model: Any, prompt: list[int], limit: int, end: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
        eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    return [int(i) for i in out[0, len(prompt) :]]


@pytest.mark.parametrize(("slots", "rank"), [(2, 0), (4, 4), (8, 0)])
def test_the_likeliest_tokens_are_those_of_generate(model: Any, slots: int, rank: int) -> None:
    model = adapted(model, rank).eval()
    free = [greedy(model, prompt, limit, -1) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    end = free[0][4]  # so that some end early
    wanted = [greedy(model, prompt, limit, end) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert any(len(said) < limit for said, limit in zip(wanted, LIMITS, strict=True))
    decoder = Decoder(model, end, slots=slots, length=64, temperature=0.0)
    for _ in range(2):
        found = decoder.draw(PROMPTS, LIMITS)
        assert [said for said, _ in found] == wanted
    for prompt, (said, scores) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
        assert torch.allclose(scores, logits.log_softmax(-1).max(-1).values, atol=1e-4)


def test_tokens_are_drawn_as_often_as_they_are_likely(model: Any) -> None:
    decoder = Decoder(model, -1, slots=500, length=8, temperature=0.5)
    torch.manual_seed(0)
    said = torch.tensor([said[0] for said, _ in decoder.draw([PROMPTS[0]] * 4000, [1] * 4000)])
    with torch.no_grad():
        wanted = (model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.5).softmax(-1)
    counted = said.bincount(minlength=len(wanted)) / 4000
    assert float((counted - wanted).abs().sum()) < 0.35  # of 2; chance alone gives about 0.2
    torch.manual_seed(0)
    assert [s[0] for s, _ in decoder.draw([PROMPTS[0]] * 4000, [1] * 4000)] == said.tolist()


def test_changed_weights_are_seen(model: Any) -> None:
    decoder = Decoder(model, -1, slots=4, length=64, temperature=0.0)
    before = decoder.draw(PROMPTS[:2], [6, 6])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    after = decoder.draw(PROMPTS[:2], [6, 6])
    assert [s for s, _ in after] == [greedy(model, p, 6, -1) for p in PROMPTS[:2]] != [s for s, _ in before]


def test_what_does_not_fit_is_refused(model: Any) -> None:
    decoder = Decoder(model, -1, slots=2, length=16)
    for prompts, limits in (([[]], [1]), ([[1]], [0]), ([[1] * 10], [7])):
        with pytest.raises(ValueError, match="fit the length"):
            decoder.draw(prompts, limits)
    assert decoder.draw([], []) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
def test_a_recorded_step_draws_the_same(model: Any, mixed: bool) -> None:
    model = model.cuda()
    decoder = Decoder(model, -1, slots=4, length=64, temperature=0.0, mixed=mixed)
    plain = Decoder(model, -1, slots=4, length=64, temperature=0.0, mixed=mixed)
    plain.graphs = False
    for _ in range(2):
        found, wanted = decoder.draw(PROMPTS, LIMITS), plain.draw(PROMPTS, LIMITS)
        assert decoder.graphs and [s for s, _ in found] == [s for s, _ in wanted]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
