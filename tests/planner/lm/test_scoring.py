"""One pass over all actions gives what scoring each action by itself gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.planner.lm.reading import PAD
from qimeng.planner.lm.scoring import TOGETHER, ActionScorer, Scale

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "qwen3": dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    ),
    "gpt2": dict(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
STATES = [[3, 4, 5, 6, 7], [9, 8]]
ACTIONS = [[[1], [2, 3, 4], [2, 3, 5, 6]], [[7, 7], [11]]]


def scorer(
    name: str = "llama", scale: Scale | None = None, features: int = 0, action_features: int = 0
) -> ActionScorer:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CONFIGS[name])
    return ActionScorer(AutoModelForCausalLM.from_config(config), features, scale, action_features).eval()


def ids(states: list[list[int]], actions: list[list[list[int]]], extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tensors, with `extra` places more than needed on every axis."""
    length = max(map(len, states)) + extra
    count = max(map(len, actions)) + extra
    width = max(len(a) for row in actions for a in row) + extra
    first = torch.full((len(states), length), PAD)
    second = torch.full((len(states), count, width), PAD)
    for b, (state, row) in enumerate(zip(states, actions, strict=True)):
        first[b, length - len(state) :] = torch.tensor(state)
        for a, action in enumerate(row):
            second[b, a, : len(action)] = torch.tensor(action)
    return first, second


def naive(model: ActionScorer, state: list[int], action: list[int]) -> float:
    """The joint log-probability of one action, by the model as it is."""
    logits = model.lm(torch.tensor([state + action])).logits[0].log_softmax(-1)
    return float(sum(logits[len(state) - 1 + i, token] for i, token in enumerate(action)))


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_at_once_is_one_by_one(name: str, extra: int) -> None:
    model = scorer(name)
    with torch.no_grad():
        found = model.log_probs(*ids(STATES, ACTIONS, extra))
        for b, (state, row) in enumerate(zip(STATES, ACTIONS, strict=True)):
            for a, action in enumerate(row):
                assert float(found[b, a]) == pytest.approx(naive(model, state, action), abs=1e-4)


def test_rows_that_are_computed_in_groups_keep_their_places_and_gradients() -> None:
    model = scorer()
    torch.nn.init.normal_(model.value[2].weight)
    torch.nn.init.normal_(model.worth[2].weight)
    states = [[1 + i % 9] * (1 + 5 * i % 11) for i in range(2 * TOGETHER + 1)]
    actions = [[[2, 3]] * (1 + i % 3) for i in range(len(states))]
    logits, values = model(*ids(states, actions))
    alone = [model(*ids([s], [a])) for s, a in zip(states, actions, strict=True)]
    for row, value, (one, worth), listed in zip(logits, values, alone, actions, strict=True):
        assert torch.allclose(row[: len(listed)], one[0], atol=1e-5) and torch.allclose(value, worth, atol=1e-5)
    gradients = []
    for loss in (logits[logits.isfinite()].square().sum(), sum(one.square().sum() for one, _ in alone)):
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.lm.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*gradients, strict=True))


def test_the_value_is_of_the_state_alone() -> None:
    model = scorer(features=2)
    torch.nn.init.normal_(model.value[2].weight)
    states, actions = ids(STATES, ACTIONS)
    features = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    with torch.no_grad():
        _, values = model(states, actions, features)
        _, alone = model(states, actions[:, :0], features)
        _, other = model(states, actions, features + 1)
    torch.testing.assert_close(values, alone)
    assert values[0] != values[1] and not torch.allclose(values, other)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_logit_is_the_joint_or_the_mean_over_the_temperature(temperature: float) -> None:
    states, actions = ids(STATES, ACTIONS)
    count = torch.tensor([[1, 3, 4], [2, 1, 0]])
    with torch.no_grad():
        joint = scorer().log_probs(states, actions)
        plain, _ = scorer(scale=Scale("none", temperature))(states, actions)
        mean, _ = scorer(scale=Scale("tokens", temperature))(states, actions)
    there = count > 0
    torch.testing.assert_close(plain[there], joint[there] / temperature)
    torch.testing.assert_close(mean[there], (joint / count)[there] / temperature)
    assert torch.isneginf(plain[~there]).all() and torch.isneginf(mean[~there]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_adds_what_it_makes_of_an_action_s_end_and_numbers(name: str) -> None:
    model = scorer(name, action_features=2)
    states, actions = ids(STATES, ACTIONS, 2)
    numbers = torch.randn(*actions.shape[:2], 2)
    with torch.no_grad():
        before, _ = model(states, actions, None, numbers)
        torch.nn.init.normal_(model.worth[2].weight)
        after, _ = model(states, actions, None, numbers)
        for b, (state, row) in enumerate(zip(STATES, ACTIONS, strict=True)):
            for a, action in enumerate(row):
                seen = model.lm(torch.tensor([state + action]), output_hidden_states=True).hidden_states[-1][0, -1]
                added = float(model.worth(torch.cat((seen, numbers[b, a]))))
                assert float(after[b, a] - before[b, a]) == pytest.approx(added, abs=1e-4) != 0.0


def test_the_order_of_actions_changes_no_score() -> None:
    model = scorer()
    states, actions = ids(STATES[:1], ACTIONS[:1])
    with torch.no_grad():
        torch.testing.assert_close(model.log_probs(states, actions).flip(1), model.log_probs(states, actions.flip(1)))


def test_a_gradient_step_makes_the_wanted_action_likelier() -> None:
    model = scorer().train()
    states, actions = ids(STATES, ACTIONS)
    wanted = torch.tensor([2, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        logits, values = model(states, actions)
        loss = torch.nn.functional.cross_entropy(logits, wanted) + (values - 1).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 4
    with torch.no_grad():
        assert model(states, actions)[0].argmax(1).tolist() == wanted.tolist()


def test_a_scale_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="normalize must be one of none, tokens, not 'words'"):
        Scale("words")
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        Scale(temperature=0)
