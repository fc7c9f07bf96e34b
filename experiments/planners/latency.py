"""How long a decision of the mini model takes: 64 actions, a state of 512 tokens, 2 CPU cores."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from qimeng.bench.environment import environment
from qimeng.device import target_device
from qimeng.graph.capture import capture
from qimeng.planner.lm.corpus import corpus, random_walk
from qimeng.planner.lm.mini import make_mini, train_tokenizer
from qimeng.planner.lm.reading import Reader, state_and_actions
from qimeng.planner.lm.scoring import ActionScorer
from qimeng.testing import fake_task

THREADS, ACTIONS, TOKENS, REPEATS = 2, 64, 512, 20


class Chain(torch.nn.Module):
    """A chain of layers, long enough for a full state and for more than 64 legal actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256 + 64 * i, 320 + 64 * i) for i in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Linear, activation, normalization, twelve times."""
        for layer in self.layers:
            y = torch.nn.functional.gelu(layer(x))
            x = y - y.mean(-1, keepdim=True)
        return torch.softmax(x, -1)


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Milliseconds of each of `REPEATS` calls, after two that do not count."""
    found = []
    for _ in range(REPEATS + 2):
        began = clock()
        call()
        found.append((clock() - began) * 1e3)
    return found[2:]


def latency() -> None:
    """Make the model, find a state with enough actions, time it, and print one line of JSON.

    It has the parameters, the megabytes of half-precision weights, the tokens of the row, the milliseconds of reading
    (text to ids), of scoring and of the whole decision (medians of 20), the largest of the 20, and the CPU milliseconds
    of a decision on one core, which other programs on the machine hardly change.
    """
    torch.set_num_threads(THREADS)
    task = fake_task(capture(Chain, lambda: (torch.empty(2048, 256),)))
    tokenizer = train_tokenizer(corpus([task]))
    lm = make_mini(len(tokenizer))
    scorer, reader = ActionScorer(lm).eval(), Reader(tokenizer, TOKENS)
    seen = max(random_walk(task, 24), key=lambda o: len(o.actions))
    state, actions = state_and_actions(seen)
    assert len(actions) >= ACTIONS, f"only {len(actions)} actions"
    actions = actions[:ACTIONS]

    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        arrays = reader.ids(state, actions)
        action_ids = torch.from_numpy(arrays["action_ids"]).long().view(1, -1, reader.action_length)
        return torch.from_numpy(arrays["state_ids"]).long()[None], action_ids

    given = tensors()
    assert (given[0] >= 0).sum() == TOKENS
    with torch.inference_mode():
        rows = {"reading": timed(tensors), "scoring": timed(lambda: scorer(*given))}
        rows["decision"] = timed(lambda: scorer(*tensors())[0].argmax())
        torch.set_num_threads(1)
        cpu = timed(lambda: scorer(*tensors())[0].argmax(), time.process_time)
    parameters = sum(p.numel() for p in lm.parameters())
    print(
        json.dumps(
            {
                "threads": THREADS,
                "actions": ACTIONS,
                "state_tokens": TOKENS,
                "action_tokens": int((given[1] >= 0).sum()),
                "vocabulary": len(tokenizer),
                "parameters": parameters,
                "half_mb": parameters * 2 / 1e6,
                **{f"{name}_ms": round(statistics.median(found), 1) for name, found in rows.items()},
                "decision_max_ms": round(max(rows["decision"]), 1),
                "one_core_cpu_ms": round(statistics.median(cpu), 1),
                "environment": asdict(environment(target_device())),
            }
        )
    )


__all__ = ["latency"]
