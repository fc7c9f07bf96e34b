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
    Row,
    batch_of,
    batches,
    check_head,
    log_probabilities,
    reply_logits,
    rows_that_fit,
)
from qimeng.finetune.progress import adamw, fingerprint, keep, kept, put, schedule
from qimeng.finetune.weights import FinetuneError, trained

CHECKPOINT = "sft.pt"

Figures = dict[str, float]


@dataclass(frozen=True)
class Sft:
    """How a model is fine-tuned.

    Attributes:
        epochs: passes over the conversations.
        seconds: wall-clock limit over all runs; the learning rate follows whatever ends first.
        length: longest conversation; others are left out.
        tokens: tokens of an update, padding included.
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
    run_s: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    on_row: Callable[[Mapping[str, float]], None] = lambda row: None,
) -> Figures:
    """Train what is trainable of `model`, in place; the last row of figures.

    Figures: ``step``, ``loss`` (mean since the last row), ``tokens_per_s``, ``seconds``, and of what is held out
    ``held_loss`` (a token) and ``held_exact`` (share of replies each of whose tokens is the likeliest).

    Args:
        model: on its device, with an adapter (`qimeng.finetune.weights.adapted`) or without.
        rows: conversations as tokens (`qimeng.finetune.conversations.encoded`).
        how: for how long, and how.
        folder: where the checkpoint is.
        held_out: what it is looked at with, at the end.
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
    each = len(batches(fitting, how.tokens))
    last = max(1, round(how.epochs * each))
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "tokens": 0}
    found = kept(folder / CHECKPOINT, settings, str(device))
    if found is not None:
        put(weights, found["weights"])
        optimizer.load_state_dict(found["optimizer"])
        state = found["state"]
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

    try:
        for numbers in _order(fitting, how, step):
            if step >= last or seconds() >= how.seconds or time.monotonic() - began >= run_s or stopped():
                break
            for group in optimizer.param_groups:
                group["lr"] = how.rate * schedule(max(step / last, seconds() / how.seconds))
            batch = batch_of(fitting, numbers).to(device)
            loss = -log_probabilities(model, batch).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), how.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            step, tokens = step + 1, tokens + sum(len(fitting[n].ids) for n in numbers)
            if step % 20 == 0:
                tell(seconds())
            if time.monotonic() - saved > how.keep_s:
                save(seconds())
                saved = time.monotonic()
    finally:  # also where Ctrl-C or a signal ends it
        spent = seconds()
        save(spent)
    if held_out:
        figures |= looked_at(model, held_out, how.length)
    tell(spent)
    return figures


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


def _order(rows: Sequence[Row], how: Sft, first: int) -> Iterator[list[int]]:
    """Rows of each update, from number `first` on; rows meet others in each pass; no end."""
    passed, epoch = 0, 0
    while True:
        rng = random.Random(f"{how.seed}/{epoch}")
        numbers = rng.sample(range(len(rows)), len(rows))
        some = [[numbers[n] for n in batch] for batch in batches([rows[n] for n in numbers], how.tokens)]
        rng.shuffle(some)
        for batch in some:
            if passed >= first:
                yield batch
            passed += 1
        epoch += 1


__all__ = ["CHECKPOINT", "Sft", "fine_tune", "looked_at"]
