"""Conversations in which a broken answer is repaired: the answer, what the gates say to it, the right answer.

The messages are those of the real gates (reading a reply, `qimeng.finetune.screens`), as the LLM coder would show
them. Deals in examples. Knows nothing about models. Source: Dr. Kernel (arXiv 2602.05885) starts from conversations of
several turns as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context

from experiments.writer.breaking import broken
from experiments.writer.edits import reply_of
from experiments.writer.examples import LIMITS, WORDS, Example
from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.coder.llm.coder import LLMCoder, told
from qimeng.coder.llm.prompt import write_messages
from qimeng.coder.llm.shown import shown_source
from qimeng.coder.llm.words import Words
from qimeng.device import device_named
from qimeng.envs.sandbox.layer import end_with_parent
from qimeng.errors import QimengError
from qimeng.finetune.screens import Screens
from qimeng.interfaces import Patch, Request

TOGETHER = 16
"""Examples that one process breaks and has compiled together."""

TRIES = 2
"""Changes that are tried for an example, until a gate refuses one."""


class Says(Chat):
    """Gives one answer.

    Args:
        reply: that answer.
    """

    name = "said"

    def __init__(self, reply: Reply):
        self.reply = reply

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """The answer, `count` times."""
        for _ in range(count):
            yield self.reply


def patch_of(request: Request, reply: Reply) -> Patch:
    """The patch that the LLM coder makes of `reply`.

    Raises:
        ChatError: it cannot be read.
        IllegalAction: the action does not apply.
    """
    return LLMCoder(Says(reply), again=0, words=Words(WORDS), limits=LIMITS, languages=("triton", "cuda")).write(
        request
    )


def refused_turn(
    request: Request, messages: Sequence[Message], patch: Patch, reason: str
) -> tuple[Message, Message] | None:
    """The model's turn and the gate's, as the LLM coder goes on after a refused patch; None where they do not fit."""
    asked = replace(request, failed=patch, reason=reason, refused=0)
    try:
        found = write_messages(asked, limits=LIMITS, words=Words(WORDS))
    except ChatError:
        return None
    return (found[2], found[3]) if len(found) == 4 and found[:2] == tuple(messages[:2]) else None


def repaired(examples: Sequence[Example], seed: int = 0, processes: int | None = None) -> list[Example]:
    """For each example one more, in which a broken answer came first; none where no gate refused what was tried.

    Args:
        examples: those of one spec follow one another.
        seed: of the changes.
        processes: compilations at once; one a core by default.
    """
    rng = random.Random(seed)
    left = list(examples)
    found: list[Example] = []
    for _ in range(TRIES):
        waiting: list[tuple[Example, Request, Patch]] = []
        again: list[Example] = []
        for example in left:
            text = broken(example.answer, rng)
            if text is None:
                continue
            reply = Reply(reply_of(text, example.base))
            try:
                request = example.request()
                waiting.append((example, request, patch_of(request, reply)))
            except ChatError as error:
                _, *_, said, answered = told(example.messages, reply, error)
                found.append(replace(example, failed=(said.text, answered.text)))
            except QimengError:  # this version makes another program of it
                continue
        by_device: dict[str, list[tuple[Example, Request, Patch]]] = {}
        for one in waiting:
            by_device.setdefault(one[0].device, []).append(one)
        for device, some in by_device.items():
            refusals = Screens(device_named(device), processes).refusals([(r.program, p) for _, r, p in some])
            for (example, request, patch), refusal in zip(some, refusals, strict=True):
                turn = refused_turn(request, example.messages, patch, refusal.error or "") if refusal else None
                if turn is None:
                    again.append(example)
                else:
                    base = shown_source(patch.alternatives[0])
                    found.append(replace(example, failed=(turn[0].text, turn[1].text), base=base))
        left = again
    return found


def repairs(examples: Iterable[Example], share: float, processes: int = 1, seed: int = 0) -> Iterator[Example]:
    """`repaired` for a share of `examples`, drawn by their keys, in several processes."""
    chosen = (e for e in examples if random.Random(f"{seed}/{e.key}").random() < share)
    ordered = iter(sorted(chosen, key=lambda e: (e.source, e.dtype, e.mode)))  # each spec is captured once
    groups = iter(lambda: list(islice(ordered, TOGETHER)), [])
    work = partial(repaired, seed=seed, processes=1 if processes > 1 else None)
    several = ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) if processes > 1 else nullcontext()
    with several as pool:
        for some in pool.map(work, groups) if pool is not None else map(work, groups):
            yield from some


__all__ = ["Says", "patch_of", "refused_turn", "repaired", "repairs"]
