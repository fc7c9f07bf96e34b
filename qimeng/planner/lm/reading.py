"""What the language model reads: a state and its legal actions as token ids.

Deals in texts and tokenizers. Knows nothing about models. Environments and planners read through the same `Reader`, so
that a model sees in use what it saw in training.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from qimeng.envs.gym.action_features import ACTION_FEATURES, action_feature_bounds, action_features
from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.gym.observation import action_texts, feature_bounds, features, render_text
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.interfaces import Observation

Offering = Callable[[Task, Observation], np.ndarray]
"""Says for each action of a state, one bool, whether it may be chosen."""

PAD = -1
"""Token id of a place that holds no token: left of a state, right of an action."""

PROMPT = "\nnext: "
"""Ends the state's text."""

TAIL = 4
"""Of a state's text that is too long, one part in `TAIL` at its end is kept (the last steps), and the rest from its
beginning: what is left out are the regions that take the least time."""

TOGETHER = 256
"""Observations that are turned into token ids at once: the tokenizer spreads their texts over the cores."""

_ID = re.compile(r"\br[0-9a-f]{8}\b")
_TIME = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?) ms\b")
_SHAPES = re.compile(r" \[[^\]]*\]")


def short_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Region ids, which are hashes, become ``r1``, ``r2`` … in the order in which they appear, the same in all texts.

    A text then says nothing about which computation it is beyond what it does, and takes fewer tokens.

    >>> short_names(["r98eeb523 linear, radbab06d relu", "fusion: r98eeb523 with radbab06d"])
    ('r1 linear, r2 relu', 'fusion: r1 with r2')
    """
    names: dict[str, str] = {}
    return tuple(_ID.sub(lambda m: names.setdefault(m[0], f"r{len(names) + 1}"), text) for text in texts)


def short_times(text: str) -> str:
    """Milliseconds as two significant digits with a fitting unit: fewer tokens, and no digits that are noise.

    >>> short_times("time 0.009557 ms, best 1.249 ms, eager 1.2e+03 ms, bound 0.000149 ms")
    'time 9.6us, best 1.2ms, eager 1200ms, bound 0.15us'
    """
    return _TIME.sub(lambda m: _short_time(float(m[1])), text)


def _short_time(ms: float) -> str:
    unit, value = ("ms", ms) if ms >= 1 else ("us", ms * 1e3)
    rounded = float(f"{value:.2g}")
    return f"{rounded:.0f}{unit}" if rounded >= 10 else f"{rounded:g}{unit}"


def state_and_actions(observation: Observation) -> tuple[str, tuple[str, ...]]:
    """The texts that are read: the state with its prompt, and each of `observation.actions`.

    Shapes, which the state names for each region, are left out of the actions: that halves their tokens.
    """
    state, *actions = short_names([short_times(render_text(observation)) + PROMPT, *action_texts(observation)])
    return state, tuple(_SHAPES.sub("", a) for a in actions)


@dataclass(frozen=True)
class Text:
    """An observation as far as it is read: small, and easily sent from one process to another.

    Attributes:
        state: with its prompt.
        actions: of each action.
        features: of the state, float32 (`qimeng.envs.gym.observation.FEATURES`).
        action_features: of each action, float32, actions x `qimeng.envs.gym.action_features`.
    """

    state: str
    actions: tuple[str, ...]
    features: np.ndarray
    action_features: np.ndarray

    @classmethod
    def of(cls, observation: Observation) -> Text:
        """What is read of `observation`."""
        return cls(*state_and_actions(observation), features(observation), action_features(observation))


class Reader:
    """Turns observations into arrays of token ids.

    Args:
        tokenizer: a Hugging Face tokenizer with an end-of-sequence token, which ends every action.
        length: most tokens of a state's text.
        action_length: most tokens of an action's text, its end included; a longer one loses those before its end.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, length: int = 512, action_length: int = 32):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
        self.tokenizer, self.length, self.action_length = tokenizer, length, action_length

    def arrays(self, observation: Observation, offered: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """What a policy is given of a state.

        ``state_ids`` (length,) and ``action_ids`` (256 * action_length,) are int32. A state is padded with `PAD` on the
        left, an action on the right; what is no action is all `PAD`. ``features`` and ``action_features`` (256 *
        number of `ACTION_FEATURES`) are float32.

        Args:
            observation: what is read.
            offered: one bool for each action; those that are not offered are left out, the others keep their places.
        """
        text = Text.of(observation)
        return {**self.ids(text.state, text.actions, offered), **_numbers(text)}

    def rows(self, texts: Sequence[Text]) -> Iterator[dict[str, np.ndarray]]:
        """`arrays` of many observations, in less time."""
        for start in range(0, len(texts), TOGETHER):
            some = texts[start : start + TOGETHER]
            tokens = iter(self._tokens([part for text in some for part in (text.state, *text.actions)]))
            for text in some:
                first = next(tokens)
                actions = [next(tokens) for _ in text.actions]
                yield {**self._laid_out(first, actions, range(len(actions))), **_numbers(text)}

    def ids(self, state: str, actions: Sequence[str], offered: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """``state_ids`` and ``action_ids`` of `arrays`, from texts."""
        places = [i for i in range(len(actions)) if offered is None or offered[i]]
        first, *others = self._tokens([state, *(actions[i] for i in places)])
        return self._laid_out(first, others, places)

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found

    def _laid_out(self, state: list[int], actions: Sequence[list[int]], places: Sequence[int]) -> dict[str, np.ndarray]:
        if len(state) > self.length:
            tail = self.length // TAIL
            state = state[: self.length - tail] + state[len(state) - tail :]
        state_ids = np.full(self.length, PAD, dtype=np.int32)
        state_ids[self.length - len(state) :] = state
        action_ids = np.full((MAX_ACTIONS, self.action_length), PAD, dtype=np.int32)
        for place, tokens in zip(places[:MAX_ACTIONS], actions, strict=False):
            whole = [*tokens[: self.action_length - 1], self.tokenizer.eos_token_id]
            action_ids[place, : len(whole)] = whole
        return {"state_ids": state_ids, "action_ids": action_ids.reshape(-1)}

    def space(self) -> spaces.Dict:
        """The space of `arrays`: a `Dict` of boxes, as stable-baselines3 takes it."""
        top = len(self.tokenizer) - 1
        low, high = feature_bounds()
        lows, highs = (np.tile(bound, MAX_ACTIONS) for bound in action_feature_bounds())
        return spaces.Dict(
            {
                "state_ids": spaces.Box(PAD, top, (self.length,), np.int32),
                "action_ids": spaces.Box(PAD, top, (MAX_ACTIONS * self.action_length,), np.int32),
                "features": spaces.Box(low, high, dtype=np.float32),
                "action_features": spaces.Box(lows, highs, dtype=np.float32),
            }
        )


def _numbers(text: Text) -> dict[str, np.ndarray]:
    padded = np.zeros((MAX_ACTIONS, len(ACTION_FEATURES)), dtype=np.float32)
    padded[: len(text.action_features)] = text.action_features[:MAX_ACTIONS]
    return {"features": text.features, "action_features": padded.reshape(-1)}


@dataclass(frozen=True)
class Beginning:
    """How an episode began: its seed, or else the state that the environment's random generator had."""

    seed: int | None
    generator: Any


class ReadObservation(gymnasium.Wrapper[dict[str, Any], Any, dict[str, Any], Any], RecordConstructorArgs):
    """The environment as a language model reads it: the arrays of `Reader.arrays` instead of text.

    Args:
        env: a `KernelOptimizationEnv`, wrapped or not.
        reader: turns its states into token ids.
        offer: says which of the legal actions may be chosen; all by default.
        whole: whether those that may not be chosen are read as well.

    Attributes:
        began: how the episode under way began.
        taken: indices of its steps so far, each with the action that it named (empty where it named none).
    """

    def __init__(
        self,
        env: gymnasium.Env[dict[str, Any], Any],
        reader: Reader,
        offer: Offering | None = None,
        whole: bool = False,
    ):
        # `offer` may hold every tree: copying those takes half a minute
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, reader=reader, offer=offer, whole=whole)
        gymnasium.Wrapper.__init__(self, env)
        self.reader, self.offer, self.whole = reader, offer, whole
        self.observation_space = reader.space()
        self.began, self.taken = Beginning(None, None), list[tuple[int, str]]()
        self._offered: np.ndarray | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        generator = None if seed is not None else self._base().np_random.bit_generator.state
        self.began, self.taken = Beginning(seed, generator), []
        _, info = self.env.reset(seed=seed, options=options)
        return self._read(), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        self.taken.append((int(action), self.named(int(action))))
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._read(), reward, terminated, truncated, info

    def named(self, index: int) -> str:
        """The action with this index in the present state; empty where there is none."""
        actions = self._base().observed.actions
        return str(actions[index]) if 0 <= index < len(actions) else ""

    def episode(self) -> dict[str, Any]:
        """How the episode under way began, and what was taken since."""
        return {"seed": self.began.seed, "generator": self.began.generator, "taken": self.taken}

    def bring_back(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Take the steps of an episode again, as `episode` gave it; what is seen after them."""
        if episode["seed"] is None:
            self._base().np_random.bit_generator.state = episode["generator"]
        seen, _ = self.reset(seed=episode["seed"])
        for index, action in episode["taken"]:
            if self.named(index) != action:
                warnings.warn(
                    f"the checkpoint's episode took {action!r} as action {index}, which is now {self.named(index)!r}: "
                    "the actions or the tree have changed, so the episode is begun anew",
                    stacklevel=2,
                )
                return self.reset()[0]
            seen, *_ = self.step(index)
        return seen

    def counted(self) -> tuple[int, float]:
        """States that `offer` was asked about here, and the sum of the shares of their actions that it offered."""
        return getattr(self.offer, "states", 0), getattr(self.offer, "shares", 0.0)

    def action_masks(self) -> np.ndarray:
        """Which indices name an action that is offered (sb3-contrib looks for this)."""
        masks = self._base().action_masks()
        if self._offered is not None:
            masks[: len(self._offered)] &= self._offered
        return masks

    def _read(self) -> dict[str, np.ndarray]:
        base = self._base()
        self._offered = None if self.offer is None else self.offer(base.session.task, base.observed)
        return self.reader.arrays(base.observed, None if self.whole else self._offered)

    def _base(self) -> KernelOptimizationEnv:
        base = self.env.unwrapped
        assert isinstance(base, KernelOptimizationEnv)
        return base


__all__ = [
    "PAD",
    "Beginning",
    "Offering",
    "ReadObservation",
    "Reader",
    "Text",
    "short_names",
    "short_times",
    "state_and_actions",
]
