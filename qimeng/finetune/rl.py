"""Multi-turn reinforcement learning of a model that writes code: draw conversations, grade them, update.

Deals in trajectories, advantages and updates. The formulas are in `rewards`, `advantages`, `mismatch` and
`policy_loss`; the course is Dr. Kernel's (arXiv 2602.05885), without a penalty for leaving the first policy. A killed
run continues from its last checkpoint. Knows nothing about how replies are graded.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from qimeng.finetune.advantages import ADVANTAGES
from qimeng.finetune.conversations import Row, batch_of, batches, log_probabilities
from qimeng.finetune.mismatch import agrees, mean_ratio
from qimeng.finetune.policy_loss import CLIP_HIGH, CLIP_LOW, clipped_share, policy_loss
from qimeng.finetune.progress import adamw, fingerprint, keep, kept, put
from qimeng.finetune.rewards import kept as kept_by_share
from qimeng.finetune.rollout import Asked, Grader, Trajectory, rollout
from qimeng.finetune.sampling import Sampler
from qimeng.finetune.weights import FinetuneError, trained

CHECKPOINT = "rl.pt"

Figures = dict[str, float]


@dataclass(frozen=True)
class Rl:
    """How a model is trained by reinforcement.

    Attributes:
        steps: rounds of drawing, grading and updating.
        seconds: wall-clock limit over all runs, kept as `run_s` of `reinforce` is.
        requests: different requests of a round.
        group: conversations about each.
        turns: most replies of a conversation.
        gamma: worth of a reward a turn later. With 1, Dr. Kernel's value, a repair is worth as much as a right first
            reply where a conversation ends with the first right one.
        temperature: of sampling.
        max_tokens: longest reply.
        length: longest prompt and reply together.
        batch: replies drawn together.
        tokens: tokens that gradients are computed for at once.
        updates: steps of the optimizer in a round.
        rate: learning rate of AdamW (betas 0.9, 0.95; no decay).
        clip: largest norm of the gradient.
        advantages: ``"leave-one-out"`` (TRLOO) or ``"grpo"``.
        mismatch: whether trajectories on which sampler and trainer differ are dropped (MRS).
        shares: whether right answers whose kernels do little of the work are dropped by chance (PRS).
        low: clip of a token's ratio below 1.
        high: clip above 1.
        mixed: whether a GPU computes in bfloat16; in float32 weights without it, sampler and trainer differ less.
        keep_s: seconds between two checkpoints.
        seed: of requests, replies and draws.
    """

    steps: int = 100
    seconds: float = math.inf
    requests: int = 8
    group: int = 8
    turns: int = 3
    gamma: float = 1.0
    temperature: float = 1.0
    max_tokens: int = 1024
    length: int = 4096
    batch: int = 64
    tokens: int = 16_384
    updates: int = 1
    rate: float = 1e-5
    clip: float = 1.0
    advantages: str = "leave-one-out"
    mismatch: bool = True
    shares: bool = True
    low: float = CLIP_LOW
    high: float = CLIP_HIGH
    mixed: bool = True
    keep_s: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.advantages not in ADVANTAGES:
            raise FinetuneError(f"advantages = {self.advantages!r} is none of {', '.join(ADVANTAGES)}")
        if self.temperature <= 0:
            raise FinetuneError(f"temperature = {self.temperature} draws nothing by chance: take one above 0, say 1")
        if self.group < 2:
            raise FinetuneError(f"group = {self.group}: an answer is compared with others, so take at least 2")


@dataclass(frozen=True, eq=False)
class Sample:
    """One reply, as an update sees it.

    Attributes:
        row: its tokens.
        sampler: log-probabilities where they were drawn.
        advantage: beside other replies to the same request at the same turn.
        trajectory: number of its conversation.
        kept: whether it may be learnt from.
    """

    row: Row
    sampler: torch.Tensor
    advantage: float
    trajectory: int
    kept: bool


def samples_of(trajectories: Sequence[Trajectory], how: Rl, rng: random.Random) -> list[Sample]:
    """The replies of a round, with their advantages.

    Advantages are found over all replies whose conversation counts, before any is dropped.

    Args:
        trajectories: of the round.
        how: which advantages, and whether PRS drops replies.
        rng: of that.
    """
    found = [(n, t, turn) for n, one in enumerate(trajectories) if one.counted for t, turn in enumerate(one.turns)]
    gains = torch.tensor([trajectories[n].returns(how.gamma)[t] for n, t, _ in found], dtype=torch.float64)
    groups = [(trajectories[n].key, t) for n, t, _ in found]
    advantages = ADVANTAGES[how.advantages](gains, groups).tolist()
    samples = []
    for (n, _, turn), advantage in zip(found, advantages, strict=True):
        graded, sampled = turn.graded, turn.sampled
        held = not how.shares or kept_by_share(graded.right, graded.share, rng)
        samples.append(Sample(sampled.row, sampled.log_probabilities, advantage, n, held and bool(sampled.row.reply)))
    return samples


def reinforce(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Asked],
    grader: Grader,
    how: Rl,
    folder: Path,
    *,
    run_s: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    on_row: Callable[[Mapping[str, float]], None] = lambda row: None,
    on_trajectories: Callable[[int, Sequence[Trajectory]], None] = lambda step, some: None,
) -> Figures:
    """Train what is trainable of `model`, in place; the last row of figures.

    Figures of a round: ``reward`` (mean return), ``first_right`` and ``right`` (shares of conversations that are right
    at their first turn, and at any), ``speedup`` (median of right replies), ``agreeing`` (share of conversations that
    MRS keeps), ``ratio`` (median of their mean ratios), ``learnt`` (replies in the update), ``clipped``, ``loss``,
    ``drawn`` (tokens of replies), seconds of ``draw_s``, ``grade_s`` and ``update_s``.

    Args:
        model: on its device, with an adapter or without.
        tokenizer: its tokenizer.
        asked: requests to draw from.
        grader: gates and judge.
        how: for how long, and how.
        folder: where the checkpoint is.
        run_s: seconds of this run; no round is begun that would last longer, were it like the one before.
        stopped: whether to end this run.
        on_row: told the figures of each round.
        on_trajectories: told each round's conversations.

    Raises:
        FinetuneError: there is no request, replies cannot be drawn from such a model, or the folder holds another
            training.
    """
    if not asked:
        raise FinetuneError("there is no request to learn from: make examples first")
    began, device = time.monotonic(), next(model.parameters()).device
    weights = trained(model)
    optimizer = adamw(weights.values(), how.rate)
    settings = {**asdict(how), "asked": len(asked), "trained": sum(p.numel() for p in weights.values())}
    settings["model"] = fingerprint(model)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0}
    found = kept(folder / CHECKPOINT, settings, str(device))
    if found is not None:
        put(weights, found["weights"])
        optimizer.load_state_dict(found["optimizer"])
        state = found["state"]
    sampler = Sampler(
        model,
        tokenizer,
        temperature=how.temperature,
        max_tokens=how.max_tokens,
        length=how.length,
        batch=how.batch,
        mixed=how.mixed,
    )
    timed = _Timed(grader)
    step, before, saved = int(state["step"]), float(state["seconds"]), time.monotonic()
    figures, longest = Figures(step=float(step)), 0.0

    def seconds() -> float:
        return before + time.monotonic() - began

    def save() -> None:
        held = {name: p.detach() for name, p in weights.items()}
        now = {"step": step, "seconds": seconds()}
        parts = {"weights": held, "optimizer": optimizer.state_dict(), "settings": settings, "state": now}
        keep(folder / CHECKPOINT, parts)

    def left() -> float:
        return min(how.seconds - seconds(), run_s - (time.monotonic() - began))

    try:
        while step < how.steps and left() > longest and not stopped():
            rng = random.Random(f"{how.seed}/{step}")
            chosen = rng.sample(list(asked), min(how.requests, len(asked)))
            start, timed.seconds = time.monotonic(), 0.0
            trajectories = rollout(sampler, timed, chosen, how.group, how.turns, rng.getrandbits(32))
            drawn = time.monotonic()
            on_trajectories(step, trajectories)
            samples = samples_of(trajectories, how, rng)
            figures = summary(trajectories) | update(model, optimizer, samples, how, rng)
            step += 1
            figures |= {"step": step, "seconds": seconds(), "grade_s": timed.seconds}
            figures |= {"draw_s": drawn - start - timed.seconds, "update_s": time.monotonic() - drawn}
            figures["drawn"] = float(sum(len(turn.sampled.row.reply) for one in trajectories for turn in one.turns))
            longest = time.monotonic() - start
            on_row(figures)
            if time.monotonic() - saved > how.keep_s:
                save()
                saved = time.monotonic()
    finally:  # also where Ctrl-C or a signal ends it
        save()
    return figures


def update(
    model: Any, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], how: Rl, rng: random.Random
) -> Figures:
    """One round's steps of the optimizer; figures of the update (see `reinforce`).

    Replies without an advantage give no gradient, and do not count in the mean over tokens.

    Args:
        model: whose trainable parameters `optimizer` has.
        optimizer: takes the steps.
        samples: the round's replies.
        how: steps, clip, what is dropped.
        rng: of the order.
    """
    model.eval()  # with dropout, likelihoods would be others than those that replies were drawn with
    told = [n for n, s in enumerate(samples) if s.row.reply]
    old = _old(model, [samples[n].row for n in told], how)
    before = dict(zip(told, old, strict=True))
    ratios: dict[int, float] = {}
    agreeing: dict[int, bool] = {}
    for trajectory in dict.fromkeys(samples[n].trajectory for n in told):
        own = [n for n in told if samples[n].trajectory == trajectory]
        trainer, sampler = torch.cat([before[n] for n in own]), torch.cat([samples[n].sampler for n in own])
        ratios[trajectory], agreeing[trajectory] = mean_ratio(trainer, sampler), agrees(trainer, sampler)
    learnt = [
        n
        for n in told
        if samples[n].kept
        and abs(samples[n].advantage) > 1e-9
        and (agreeing[samples[n].trajectory] or not how.mismatch)
    ]
    rng.shuffle(learnt)
    figures = Figures(learnt=float(len(learnt)), loss=0.0, clipped=0.0)
    figures["agreeing"] = mean(agreeing.values()) if agreeing else 0.0
    figures["ratio"] = median(ratios.values()) if ratios else 1.0
    count = min(how.updates, len(learnt))
    shares = [_step(model, optimizer, [(samples[n], before[n]) for n in learnt[k::count]], how) for k in range(count)]
    if shares:
        figures["loss"], figures["clipped"] = mean(s[0] for s in shares), mean(s[1] for s in shares)
    return figures


def _old(model: Any, rows: Sequence[Row], how: Rl) -> list[torch.Tensor]:
    """The trainer's log-probabilities of each row's reply, before an update."""
    found: dict[int, torch.Tensor] = {}
    device = next(model.parameters()).device
    with torch.no_grad():
        for numbers in batches(rows, how.tokens):
            batch = batch_of(rows, numbers).to(device)
            each = log_probabilities(model, batch, how.temperature, how.mixed, exact=True).cpu()
            owner = batch.owner.cpu()
            found |= {n: each[owner == n] for n in numbers}
    return [found[n] for n in range(len(rows))]


def _step(
    model: Any, optimizer: torch.optim.Optimizer, some: Sequence[tuple[Sample, torch.Tensor]], how: Rl
) -> tuple[float, float]:
    """One step of the optimizer; the loss and the share of clipped tokens."""
    rows, device = [sample.row for sample, _ in some], next(model.parameters()).device
    total = sum(len(row.reply) for row in rows)
    loss, clipped = 0.0, 0.0
    for numbers in batches(rows, how.tokens):
        batch = batch_of(rows, numbers).to(device)
        old = torch.cat([some[n][1] for n in numbers]).to(device)
        gains = torch.tensor([sample.advantage for sample, _ in some], device=device, dtype=torch.float32)[batch.owner]
        new = log_probabilities(model, batch, how.temperature, how.mixed, exact=True)
        mask = torch.ones_like(old)
        part = policy_loss(new, old, gains, mask, how.low, how.high) * (len(old) / total)
        part.backward()
        loss += part.item()
        clipped += clipped_share(new, old, gains, mask, how.low, how.high) * len(old) / total
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], how.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, clipped


def summary(trajectories: Sequence[Trajectory]) -> Figures:
    """What a round's conversations came to (see `reinforce`); those that do not count are left out."""
    some = [one for one in trajectories if one.counted and one.turns]
    if not some:
        return Figures(reward=0.0, first_right=0.0, right=0.0, speedup=0.0, counted=0.0)
    fast = [turn.graded.speedup for one in some for turn in one.turns if turn.graded.right]
    return Figures(
        reward=mean(one.returns()[0] for one in some),
        first_right=mean(one.turns[0].graded.right for one in some),
        right=mean(any(turn.graded.right for turn in one.turns) for one in some),
        speedup=median(fast) if fast else 0.0,
        counted=len(some) / len(trajectories),
    )


class _Timed(Grader):
    """Another grader, whose seconds are counted."""

    def __init__(self, grader: Grader):
        self._grader, self.seconds = grader, 0.0

    def grade(self, answers: Any) -> Any:
        began = time.monotonic()
        found = self._grader.grade(answers)
        self.seconds += time.monotonic() - began
        return found


__all__ = ["Rl", "Sample", "reinforce", "samples_of", "summary", "update"]
