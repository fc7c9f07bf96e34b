"""Texts to train a tokenizer on: what the environment prints along random episodes.

Nothing is judged for it: a tokenizer learns how texts look, not which program is fast, so times are those of a formula.
Deals in observations. Knows nothing about tokenizers or models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from qimeng.envs.steps.formula import FormulaEvaluator
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, Budget
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Observation
from qimeng.planner.lm.reading import state_and_actions


def random_walk(task: Task, steps: int, seed: int = 0) -> Iterator[Observation]:
    """What is seen along an episode of uniformly drawn legal actions, from the start; at most `steps` + 1 states."""
    draw, session = random.Random(seed), Session(task, Budget(seconds=float("inf"), evaluations=1 << 30, steps=steps))
    session.begin()
    while True:
        seen = session.observe()
        yield seen
        choices = [a for a in seen.actions if a != STOP]
        if not choices or session.exhausted() is not None:
            return
        session.step(draw.choice(choices))


def corpus(tasks: Sequence[Task], episodes: int = 4, steps: int = 16, seed: int = 0) -> Iterator[str]:
    """Texts of the states and actions of `episodes` random walks through each task."""
    for number, judged in enumerate(tasks):
        task = replace(judged, evaluator=FormulaEvaluator(judged.context.device))
        for episode in range(episodes):
            for seen in random_walk(task, steps, seed + number * episodes + episode):
                state, actions = state_and_actions(seen)
                yield state
                yield from actions


__all__ = ["corpus", "random_walk"]
