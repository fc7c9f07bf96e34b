"""Training a writer within a time limit, on one device or on every GPU of a machine, in as many runs as it takes.

Deals in tokens, batches, seconds and checkpoints. With several GPUs each works on batches of its own and the gradients
are averaged. Knows nothing about what the texts mean.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from experiments.writer.model import Row
from qimeng.finetune import progress
from qimeng.finetune.kernels import ANY_LENGTH
from qimeng.finetune.members import Member

TOGETHER = 8
"""Updates between two looks at the clock, which all GPUs take together."""

KEPT_S = 60.0
"""Seconds between two checkpoints."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Training:
    """How a writer is trained.

    Attributes:
        seconds: wall-clock limit of the whole training, over all runs; the learning rate follows it.
        steps: most updates.
        tokens: tokens of a batch on each device, padding included.
        rate: highest learning rate; it rises over a twentieth of the time and falls to a twentieth along a cosine.
        prompt_weight: weight of a prompt's token in the loss; an answer's has 1.
        compiled: whether `torch.compile` makes the model's blocks quicker first, once for all of them and all lengths.
        seed: of the order.
    """

    seconds: float = 1080.0
    steps: int = 1_000_000
    tokens: int = 32_768
    rate: float = 1e-3
    prompt_weight: float = 0.1
    compiled: bool = False
    seed: int = 0


class Scores(torch.nn.Module):
    """A language model that is asked at some places only, which saves most of the memory of training.

    Args:
        model: a causal language model of `transformers`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens after `places`, which count through `ids` (batch x length) row by row."""
        # rows are padded on the right, where nothing that is scored looks: no mask, so that attention is plain causal
        with sdpa_kernel(ANY_LENGTH):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        scores: torch.Tensor = self.model.lm_head(hidden.flatten(0, 1)[places])
        return scores


def train(
    source: Path,
    target: Path,
    rows: Sequence[Row],
    how: Training,
    *,
    held_out: Sequence[Row] = (),
    member: Member | None = None,
    run_s: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    on_row: Callable[[Figures], None] = lambda row: None,
) -> Figures:
    """Train the writer in `source` and save it in `target`; the last row of figures.

    What is there of a training with the same settings (``checkpoint.pt`` in `target`) is gone on with.

    Args:
        source: folder of a writer.
        target: folder of the trained one.
        rows: what it learns.
        how: for how long, and how.
        held_out: what it is looked at with, as the figures ``held_loss`` (an answer's token) and ``held_exact`` (share
            of answers each of whose tokens is the likeliest after those before it).
        member: which of several processes this is, and on which device.
        run_s: seconds of this run.
        stopped: whether to end this run early.
        on_row: told loss and speed every 50 updates, by the first member.

    Raises:
        ValueError: no row fits the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    member = member or Member()
    member.join()
    began, device, kind = time.monotonic(), member.device, member.device.partition(":")[0]
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=kind == "cuda"
    )
    longest = model.config.max_position_embeddings
    rows = [row for row in rows if len(row[0]) <= longest]
    settings = {**asdict(how), "rows": len(rows), "count": member.count, "size": model.num_parameters()}
    kept, state = target / "checkpoint.pt", {"step": 0, "seconds": 0.0, "tokens": 0}
    found = progress.kept(kept, settings, device)
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        state = found["state"]
    scores: Any = Scores(model)
    if how.compiled:  # the whole model took longer than a minute
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    if member.count > 1:
        scores = torch.nn.parallel.DistributedDataParallel(scores)
    step, before, tokens = int(state["step"]), float(state["seconds"]), int(state["tokens"])
    saved, figures, running = time.monotonic(), Figures(examples=float(len(rows))), True
    share = before / how.seconds
    for places in _order(rows, how, member, step):
        seconds = before + time.monotonic() - began
        if step % TOGETHER == 0:
            over = stopped() or time.monotonic() - began > run_s
            share = member.shared(-1.0 if over else max(seconds / how.seconds, step / how.steps))
        running = 0 <= share < 1 and step < how.steps
        if not running or (member.rank == 0 and time.monotonic() - saved > KEPT_S):
            if member.rank == 0:
                _keep(kept, model, optimizer, settings, {"step": step, "seconds": seconds, "tokens": tokens})
            saved = time.monotonic()
        if not running:
            break
        for group in optimizer.param_groups:
            group["lr"] = how.rate * progress.schedule(share)
        batch = _batch([rows[i] for i in places], how.prompt_weight)
        loss = _loss(scores, batch, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch[0].numel() * member.count
        if member.rank == 0 and (step % 50 == 0 or step == how.steps):
            seconds = before + time.monotonic() - began
            figures |= {"step": step, "loss": loss.item(), "seconds": seconds, "tokens_per_s": tokens / seconds}
            if held_out and step % 500 == 0:
                figures |= looked_at(model, held_out, device)
            on_row(figures)
    if member.rank == 0:
        figures |= looked_at(model, held_out, device) if held_out else {}
        on_row(figures)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        model.save_pretrained(target)
    member.leave()
    return figures


def looked_at(model: Any, rows: Sequence[Row], device: str) -> Figures:
    """``held_loss`` and ``held_exact`` of `rows`, see `train`."""
    model.eval()
    total, count, exact = 0.0, 0, 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for row in rows:
            ids, places, wanted, _ = (t.to(device) for t in _batch([row], 0.0))
            with torch.autocast(device.partition(":")[0], torch.bfloat16):
                logits = Scores(model)(ids, places).float()
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += wanted.numel()
            exact += int((logits.argmax(-1) == wanted).all())
    model.train()
    return {"held_loss": total / max(count, 1), "held_exact": exact / max(len(rows), 1)}


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Ids (batch x length), places that are scored, the tokens wanted after them, their weights."""


def _loss(scores: Any, batch: tuple[torch.Tensor, ...], device: str) -> torch.Tensor:
    """Weighted mean cross-entropy of the next token."""
    if device.startswith("cuda"):  # what is not pinned is copied once the GPU has nothing else to do
        batch = tuple(t.pin_memory() for t in batch)
    ids, places, wanted, weights = (t.to(device, non_blocking=True) for t in batch)
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        logits = scores(ids, places)
    each = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
    return (each * weights).sum() / weights.sum()


def _batch(rows: Sequence[Row], prompt_weight: float) -> Batch:
    """`rows` padded on the right."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for place, (tokens, head) in enumerate(rows):
        ids[place, : len(tokens)] = torch.from_numpy(tokens.astype(int))
        weights[place, 1:head], weights[place, head : len(tokens)] = prompt_weight, 1.0
    wanted = weights.flatten().nonzero().squeeze(1)
    return ids, wanted - 1, ids.flatten()[wanted], weights.flatten()[wanted]


def _order(rows: Sequence[Row], how: Training, member: Member, first: int) -> Iterator[list[int]]:
    """Rows of this member's batches, of like length each, from update `first` on; no end."""
    if not rows:
        raise ValueError("there is nothing to learn from: no example fits the model")
    rng, passed = random.Random(how.seed), 0
    while True:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) * rng.uniform(0.9, 1.1))
        batches: list[list[int]] = [[]]
        for i in order:
            longest = max(len(rows[i][0]), len(rows[batches[-1][-1]][0]) if batches[-1] else 0)
            if batches[-1] and longest * (len(batches[-1]) + 1) > how.tokens:
                batches.append([])
            batches[-1].append(i)
        rng.shuffle(batches)
        batches += batches[: -len(batches) % member.count]
        for batch in batches[member.rank :: member.count]:
            if passed >= first:
                yield batch
            passed += 1


def _keep(path: Path, model: Any, optimizer: Any, settings: Figures, state: Figures) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": settings, "state": state}
    progress.keep(path, parts)


__all__ = ["Scores", "Training", "looked_at", "train"]
