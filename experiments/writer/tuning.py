"""The steps that train a pretrained writer: fine-tuning and reinforcement.

Deals in one folder (`experiments.writer.folder`), and in time. Every step can be repeated and continues. The folder
gets the models ``pretrained``, ``tuned`` and ``reinforced``, `tuning.jsonl` and `reinforcement.jsonl` (figures), and
`rounds.jsonl` (conversations of the reinforcement).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.writer.examples import Example
from experiments.writer.folder import LEARNT, PARTS, ROUNDS, check_data, read, requests
from experiments.writer.grading import JudgeGrader, verdicts
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.bench.row import append_line
from qimeng.coder.llm.chat import Message
from qimeng.finetune.conversations import encoded
from qimeng.finetune.members import Member, together
from qimeng.finetune.rl import Rl, reinforce
from qimeng.finetune.rollout import Asked, Trajectory, Turn
from qimeng.finetune.sft import Sft, fine_tune
from qimeng.finetune.weights import FinetuneError, adapted, load, save

PRETRAINED, TUNED, REINFORCED = "pretrained", "tuned", "reinforced"

LOOKED_AT = 48
"""Held-out examples of each part that fine-tuning is looked at with."""


def place() -> str:
    """Where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def loaded(name: str | Path, rank: int, seed: int = 0, mixed: bool = True, device: str = "") -> tuple[Any, Any]:
    """Model and tokenizer, to be trained: with an adapter of this rank beside weights in bfloat16, or whole for 0.

    Without `mixed` weights are in float32 all the same.
    """
    device = device or place()
    dtype = torch.bfloat16 if mixed and rank and device.startswith("cuda") else torch.float32
    model, tokenizer = load(name, dtype, device)
    return adapted(model, rank, seed), tokenizer


def sft(out: Path, model: str, how: Sft, rank: int = 16, now_minutes: float = 1e6, target: str = TUNED) -> None:
    """Fine-tune a pretrained model on what is learnt.

    Args:
        out: the folder.
        model: see `qimeng.finetune.weights.load`.
        how: epochs, seconds over all runs, tokens of a pack and an update, rate, seed.
        rank: of the adapter; 0 trains the whole model.
        now_minutes: of this run.
        target: folder in `out` of the trained model.
    """
    began = time.time()
    check_data(out)
    _pretrained(out, model)
    settings = {**asdict(how), "rank": rank, "model": model, "target": target, "gpus": torch.cuda.device_count()}
    tell = _teller(out / "tuning.jsonl", settings)
    until = began + 60 * now_minutes
    together(_sft_member, place(), torch.cuda.device_count(), out, how, rank, target, until, tell)


def _sft_member(
    member: Member,
    stopped: Callable[[], bool],
    out: Path,
    how: Sft,
    rank: int,
    target: str,
    until: float,
    tell: Callable[[Mapping[str, float]], None],
) -> None:
    """What one process does of the fine-tuning, `until` a time of the clock on the wall."""
    member.join()
    lm, tokenizer = loaded(out / PRETRAINED, rank, how.seed, device=member.device)
    rows = encoded(tokenizer, [said(e) for e in read(out, LEARNT)])
    held_out = encoded(tokenizer, [said(e) for part in PARTS for e in requests(out, part, LOOKED_AT)])
    some: dict[str, Any] = {"held_out": held_out, "member": member, "stopped": stopped, "on_row": tell}
    fine_tune(lm, rows, how, out / target, run_s=until - time.time(), **some)
    if member.rank == 0:
        save(lm, tokenizer, out / target)
    member.leave()


def _pretrained(out: Path, model: str) -> None:
    """Have the pretrained model in the folder.

    Raises:
        FinetuneError: another one is there.
    """
    folder = out / PRETRAINED
    named = folder / "named.json"
    if (folder / "model.safetensors").exists():
        before = json.loads(named.read_text()) if named.exists() else model
        if before != model:
            raise FinetuneError(f"{folder} holds {before}, not {model}: take another OUT, or delete that folder")
        return
    save(*load(model, torch.bfloat16), folder)
    named.write_text(json.dumps(model))


def conversations(out: Path, file: Path) -> int:
    """Write what is learnt as JSON lines with ``messages``, which `qimeng finetune` reads; how many there are."""
    lines = []
    for example in read(out, LEARNT):
        turns = [{"role": m.role, "content": m.text} for m in said(example)]
        lines.append(json.dumps({"messages": turns, "key": example.key, "verified": example.verified}))
    file.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def said(example: Example) -> tuple[Message, ...]:
    """The conversation with the answer that was accepted."""
    return (*example.messages, Message("assistant", example.reply))


def rl(
    out: Path,
    how: Rl,
    source: str = TUNED,
    target: str = REINFORCED,
    rank: int = 16,
    asked: int = 2000,
    jobs: int = 4,
    now_minutes: float = 1e6,
    device: str | None = None,
) -> None:
    """Train a fine-tuned model by reinforcement, on requests that are learnt from.

    Args:
        out: the folder.
        how: rounds, seconds over all runs, group, turns, rate, what is left out, seed.
        source: folder in `out` of the model to begin with.
        target: folder in `out` of the trained one.
        rank: of the adapter; 0 trains the whole model.
        asked: requests to draw from, what a judge accepted first.
        jobs: judges on each GPU.
        now_minutes: of this run.
        device: name of a device to estimate for; the GPU of this machine by default.
    """
    began = time.monotonic()
    check_data(out)
    lm, tokenizer = loaded(out / source, rank, how.seed, how.mixed)
    examples = sorted((e for e in read(out, LEARNT) if e.failed is None), key=lambda e: (not e.verified, e.key))[:asked]
    tell = _teller(
        out / "reinforcement.jsonl", {**asdict(how), "rank": rank, "source": source, "target": target}, device
    )
    run_s = 60 * now_minutes - (time.monotonic() - began)

    def keep(step: int, some: Sequence[Trajectory]) -> None:
        for one in some:
            turns = [_kept(turn) for turn in one.turns]
            append_line(out / ROUNDS, json.dumps({"target": target, "step": step, "key": one.key, "turns": turns}))

    with judges(jobs) as pool:
        stop_at = time.monotonic() + min(run_s, how.seconds)
        grader = JudgeGrader(examples, target_of(device), pool, partial(verdicts, device=device), stop_at=stop_at)
        questions = [Asked(e.key, e.messages) for e in examples]
        some: dict[str, Any] = {"run_s": run_s, "on_row": lambda row: tell({**row, **grader.spent})}
        reinforce(lm, tokenizer, questions, grader, how, out / target, on_trajectories=keep, **some)
    save(lm, tokenizer, out / target)


def _kept(turn: Turn) -> dict[str, Any]:
    """A reply as a row keeps it; `then` is what was said of it, where it is quoted there."""
    graded = turn.graded
    then = [message.text for message in graded.then[2:]]
    return {"text": turn.sampled.text, "failure": graded.failure, "reward": graded.reward, "then": then}


def target_of(device: str | None) -> Any:
    """The device that is written for."""
    from qimeng.envs.steps.setup import make_device

    return make_device(device)


def judges(jobs: int, member: Member = Member()) -> Pool:  # noqa: B008
    """So many judges on each GPU; on a member's own one where several processes have judges."""
    own = visible_gpus()[member.rank : member.rank + 1] if member.count > 1 else visible_gpus()
    return Pool(gpu_places(0, jobs, own, len(os.sched_getaffinity(0)) // member.count))


def _teller(path: Path, settings: Mapping[str, Any], device: str | None = None) -> Any:
    """Writes settings, then figures, to a file and to the screen."""
    append_line(path, json.dumps({**settings, "environment": asdict(environment(target_of(device)))}))
    return partial(_tell, path)


def _tell(path: Path, row: Mapping[str, float]) -> None:
    append_line(path, json.dumps(dict(row)))
    print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)


__all__ = [
    "PRETRAINED",
    "REINFORCED",
    "TUNED",
    "conversations",
    "judges",
    "loaded",
    "place",
    "rl",
    "said",
    "sft",
    "target_of",
]
