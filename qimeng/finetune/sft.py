"""Supervised fine-tuning: a language model learns the replies of conversations.

Deals in rows of tokens, passes, seconds and checkpoints. The loss is the mean over the replies' tokens; a prompt's
tokens have none. A killed run continues from its last checkpoint. Knows nothing about what the texts mean.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qimeng.finetune.conversations import (
    Batch,
    Row,
    batch_of,
    batches,
    check_head,
    log_probabilities,
    reply_logits,
    rows_that_fit,
)
from qimeng.finetune.members import Member
from qimeng.finetune.progress import adamw, fingerprint, keep, kept, put, schedule
from qimeng.finetune.weights import FinetuneError, trained

CHECKPOINT = "sft.pt"

TOGETHER = 8
"""Updates between two looks at the clock, which several members take together."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Sft:
    """How a model is fine-tuned.

    Attributes:
        epochs: passes over the conversations.
        seconds: wall-clock limit over all runs; the learning rate follows whatever ends first.
        length: longest conversation; others are left out.
        tokens: tokens of an update on each device, padding included.
        rate: highest learning rate of AdamW (betas 0.9, 0.95; no decay).
        clip: largest norm of the gradient.
        keep_s: seconds between two checkpoints.
        seed: of the order.
    """

    epochs: float = 2.0
    seconds: float = math.inf
    length: int = 4096
    tokens: int = 16_384
    rate: float = 3e-4
    clip: float = 1.0
    keep_s: float = 180.0
    seed: int = 0


def fine_tune(
    model: Any,
    rows: Sequence[Row],
    how: Sft,
    folder: Path,
    *,
    held_out: Sequence[Row] = (),
    member: Member = Member(),  # noqa: B008
    run_s: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    on_row: Callable[[Mapping[str, float]], None] = lambda row: None,
) -> Figures:
    """Train what is trainable of `model`, in place; the last row of figures.

    With several members each learns from batches of its own, and gradients are averaged: all have the same weights.
    Only the first keeps checkpoints, looks at what is held out, and is listened to.

    Figures: ``step``, ``loss`` (mean since the last row), ``tokens_per_s``, ``seconds``, and of what is held out
    ``held_loss`` (a token) and ``held_exact`` (share of replies each of whose tokens is the likeliest).

    Args:
        model: on its device, with an adapter (`qimeng.finetune.weights.adapted`) or without.
        rows: conversations as tokens (`qimeng.finetune.conversations.encoded`).
        how: for how long, and how.
        folder: where the checkpoint is.
        held_out: what it is looked at with, at the end.
        member: which of several processes this is; it has joined the others. `model` is on its device.
        run_s: seconds of this run; what is left is for another one.
        stopped: whether to end this run early.
        on_row: told figures every 20 updates and at the end.

    Raises:
        FinetuneError: no conversation fits the length, the model's scores are not those of its last layer, or the
            folder holds another training.
    """
    began, device = time.monotonic(), next(model.parameters()).device
    fitting = rows_that_fit(rows, how.length)
    if not fitting:
        raise FinetuneError(f"none of {len(rows)} conversations has at most {how.length} tokens: raise the length")
    check_head(model)
    weights = trained(model)
    optimizer = adamw(weights.values(), how.rate)
    settings = {**asdict(how), "rows": len(fitting), "trained": sum(p.numel() for p in weights.values())}
    settings["model_and_data"] = fingerprint(model, *(row.ids for row in fitting))
    settings["members"] = member.count
    each = -(-len(batches(fitting, how.tokens)) // member.count)
    last = max(1, round(how.epochs * each))
    state = _resumed(kept(folder / CHECKPOINT, settings, str(device)), weights, optimizer)
    model.train()
    step, before, tokens, saved = state["step"], state["seconds"], state["tokens"], time.monotonic()
    figures, losses = Figures(examples=float(len(fitting)), step=float(step)), list[torch.Tensor]()

    def seconds() -> float:
        return float(before + time.monotonic() - began)

    def save(spent: float) -> None:
        now = {"step": step, "seconds": spent, "tokens": tokens}
        held = {name: p.detach() for name, p in weights.items()}
        parts = {"weights": held, "optimizer": optimizer.state_dict(), "settings": settings, "state": now}
        keep(folder / CHECKPOINT, parts)

    def tell(spent: float) -> None:
        figures.update({"step": step, "seconds": spent, "tokens_per_s": tokens / max(spent, 1e-9)})
        if losses:
            figures["loss"] = float(torch.stack(losses).mean())
            losses.clear()
        on_row(figures)

    spent, first = 0.0, member.rank == 0
    try:
        for batches_of_all in _order(fitting, how, step, member.count):
            if member.count == 1 or step % TOGETHER == 0:
                over = seconds() >= how.seconds or time.monotonic() - began >= run_s or stopped()
                spent = member.shared(-1.0 if over else seconds() / how.seconds)
            if step >= last or spent < 0:
                break
            for group in optimizer.param_groups:
                group["lr"] = how.rate * schedule(max(step / last, spent))
            batch = batch_of(fitting, batches_of_all[member.rank]).to(device)
            total = sum(len(fitting[n].reply) for some in batches_of_all for n in some)
            losses.append(_update(model, optimizer, batch, total, how.clip, member))
            step, tokens = step + 1, tokens + sum(len(fitting[n].ids) for some in batches_of_all for n in some)
            if first and step % 20 == 0:
                tell(seconds())
            if first and time.monotonic() - saved > how.keep_s:
                save(seconds())
                saved = time.monotonic()
    finally:  # also where Ctrl-C or a signal ends it
        ended = seconds()
        if first:
            save(ended)
    if first and held_out:
        figures |= looked_at(model, held_out, how.length)
    if first:
        tell(ended)
    return figures


def _resumed(
    found: Mapping[str, Any] | None, weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state that a checkpoint holds, after its weights are put where they belong; that of a beginning without."""
    if found is None:
        return {"step": 0, "seconds": 0.0, "tokens": 0}
    put(weights, found["weights"])
    optimizer.load_state_dict(found["optimizer"])
    state: dict[str, Any] = found["state"]
    return state


def _update(
    model: Any, optimizer: torch.optim.Optimizer, batch: Batch, total: int, clip: float, member: Member
) -> torch.Tensor:
    """One step of the optimizer, for the mean over the `total` tokens of all members; the loss of this one's batch."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    each = -log_probabilities(model, batch)
    (each.sum() * (member.count / total)).backward()
    member.average(weights)
    torch.nn.utils.clip_grad_norm_(weights, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return each.detach().mean()


def looked_at(model: Any, rows: Sequence[Row], length: int) -> Figures:
    """``held_loss`` and ``held_exact`` of `rows`, see `fine_tune`; those longer than `length` do not count."""
    device = next(model.parameters()).device
    fitting = rows_that_fit(rows, length)
    was, total, count, exact = model.training, 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for row in fitting:
            batch = batch_of([row], [0]).to(device)
            logits = reply_logits(model, batch)
            total += float(torch.nn.functional.cross_entropy(logits, batch.wanted, reduction="sum"))
            count += len(batch.wanted)
            exact += int((logits.argmax(-1) == batch.wanted).all())
    model.train(was)
    return {"held_loss": total / max(count, 1), "held_exact": exact / max(len(fitting), 1)}


def _order(rows: Sequence[Row], how: Sft, first: int, count: int) -> Iterator[list[list[int]]]:
    """Rows of each update and member, from number `first` on; rows meet others in each pass; no end."""
    passed, epoch = 0, 0
    while True:
        rng = random.Random(f"{how.seed}/{epoch}")
        numbers = rng.sample(range(len(rows)), len(rows))
        some = [[numbers[n] for n in batch] for batch in batches([rows[n] for n in numbers], how.tokens)]
        rng.shuffle(some)
        some += [some[n % len(some)] for n in range(-len(some) % count)]
        for start in range(0, len(some), count):
            if passed >= first:
                yield some[start : start + count]
            passed += 1
        epoch += 1


__all__ = ["CHECKPOINT", "Sft", "fine_tune", "looked_at"]
