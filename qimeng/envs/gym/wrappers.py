"""The environment's text as token ids, which is what neural policies and stable-baselines3 take.

Deals in tokenizers. Knows nothing about what the text says.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.time_shares import MAX_ACTIONS

_WORDS = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]|\n")


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer: a call, and the size of its vocabulary."""

    def __call__(self, text: str, *, max_length: int, truncation: bool, padding: str) -> Any:
        """A mapping with ``input_ids`` and ``attention_mask``, each of `max_length` integers."""

    def __len__(self) -> int:
        """Number of token ids."""


class HashTokenizer:
    """Words, single digits and punctuation, each numbered by the hash of its text; id 0 is padding.

    Needs no files and no training; two words share an id where their hashes meet.

    Args:
        size: number of token ids.
    """

    def __init__(self, size: int = 8192):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __call__(self, text: str, *, max_length: int, truncation: bool = True, padding: str = "max_length") -> Any:
        """Ids and mask of `text`, cut or padded to `max_length`.

        >>> HashTokenizer(100)("tile 64", max_length=4)["attention_mask"]
        [1, 1, 1, 0]
        """
        ids = [self._number(word) for word in _WORDS.findall(text)][:max_length]
        pad = max_length - len(ids)
        return {"input_ids": ids + [0] * pad, "attention_mask": [1] * len(ids) + [0] * pad}

    def _number(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
        return 1 + int.from_bytes(digest, "big") % (self.size - 1)


class TokenizeObservation(gymnasium.Wrapper[dict[str, Any], Any, dict[str, Any], Any], RecordConstructorArgs):
    """A `Dict` of boxes instead of text: ``input_ids``, ``attention_mask``, ``features``.

    Args:
        env: a `KernelOptimizationEnv`, wrapped or not.
        tokenizer: any Hugging Face tokenizer; `HashTokenizer` by default.
        length: tokens of the state's text; a longer one is cut, a shorter one padded.
        action_length: tokens of each action's text, in one row ``action_ids`` of 256 x `action_length`; 0 leaves
            them out.
    """

    def __init__(
        self,
        env: gymnasium.Env[dict[str, Any], Any],
        tokenizer: Tokenizer | None = None,
        length: int = 512,
        action_length: int = 0,
    ):
        RecordConstructorArgs.__init__(self, tokenizer=tokenizer, length=length, action_length=action_length)
        gymnasium.Wrapper.__init__(self, env)
        self.tokenizer: Tokenizer = tokenizer or HashTokenizer()
        self.length, self.action_length = length, action_length
        top = len(self.tokenizer) - 1
        inner = env.observation_space
        assert isinstance(inner, spaces.Dict)
        boxes: dict[str, spaces.Space[Any]] = {
            "input_ids": spaces.Box(0, top, (length,), np.int64),
            "attention_mask": spaces.Box(0, 1, (length,), np.int8),
            "features": inner["features"],
        }
        if action_length:
            boxes["action_ids"] = spaces.Box(0, top, (MAX_ACTIONS * action_length,), np.int64)
        self.observation_space = spaces.Dict(boxes)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._tokens(observation), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._tokens(observation), reward, terminated, truncated, info

    def action_masks(self) -> np.ndarray:
        """Which indices name an action (sb3-contrib looks for this)."""
        return self._base().action_masks()

    def _base(self) -> KernelOptimizationEnv:
        base = self.env.unwrapped
        assert isinstance(base, KernelOptimizationEnv)
        return base

    def _tokens(self, observation: dict[str, Any]) -> dict[str, Any]:
        found = self._encode(observation["text"], self.length)
        tokens = {
            "input_ids": np.asarray(found["input_ids"], dtype=np.int64),
            "attention_mask": np.asarray(found["attention_mask"], dtype=np.int8),
            "features": observation["features"],
        }
        if self.action_length:
            ids = np.zeros((MAX_ACTIONS, self.action_length), dtype=np.int64)
            for i, text in enumerate(self._base().actions_text()):
                ids[i] = self._encode(text, self.action_length)["input_ids"]
            tokens["action_ids"] = ids.reshape(-1)
        return tokens

    def _encode(self, text: str, length: int) -> Any:
        return self.tokenizer(text, max_length=length, truncation=True, padding="max_length")


__all__ = ["HashTokenizer", "TokenizeObservation", "Tokenizer"]
