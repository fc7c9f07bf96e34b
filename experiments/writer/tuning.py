"""The steps that train a pretrained writer: fine-tuning, reinforcement, and conversations on what is held out.

Deals in one folder (`experiments.writer.folder`), and in time. Every step can be repeated and continues. The folder
gets the models ``pretrained``, ``tuned`` and ``reinforced``, `tuning.jsonl` and `reinforcement.jsonl` (figures),
`rounds.jsonl` (conversations of the reinforcement) and `turns.jsonl` (conversations on what is held out).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from experiments.writer.examples import Example
from experiments.writer.folder import LEARNT, PARTS, ROUNDS, check_data, read, requests
from experiments.writer.grading import JudgeGrader, verdicts
from experiments.writer.turns import Conversation, read_conversations, turns_table
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.bench.row import append_line
from qimeng.coder.llm.chat import Message
from qimeng.finetune.conversations import encoded
from qimeng.finetune.members import Member, together
from qimeng.finetune.progress import fingerprint
from qimeng.finetune.rl import Rl, reinforce
from qimeng.finetune.rollout import Asked, Trajectory, Turn, rollout
from qimeng.finetune.sampling import Sampler
from qimeng.finetune.sft import Sft, fine_tune
from qimeng.finetune.weights import FinetuneError, adapted, load, load_adapted, save

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

    with _pool(jobs) as pool:
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


def turns(
    out: Path,
    writers: Sequence[str],
    count: int = 100,
    group: int = 4,
    most: int = 3,
    temperature: float = 0.7,
    max_tokens: int = 1536,
    length: int = 6144,
    batch: int = 64,
    jobs: int = 4,
    minutes: float = 10.0,
    device: str | None = None,
    seed: int = 0,
) -> None:
    """Conversations of several turns on what is held out, with real repairs; appended to `turns.jsonl`.

    Requests whose conversations the end of the time cut off get no row: those left would be the quick ones.

    Args:
        out: the folder.
        writers: folders in `out` of models.
        count: requests of each set.
        group: conversations about each; with one at temperature 0 it is the likeliest.
        most: replies of a conversation.
        temperature: of sampling.
        max_tokens: longest reply.
        length: longest prompt and reply together.
        batch: replies drawn together.
        jobs: judges on each GPU.
        minutes: after which nothing is begun, and what still runs is cut off; 0 only prints the table.
        device: name of a device to estimate for; the GPU of this machine by default.
        seed: of sampling.

    Raises:
        FinetuneError: the file has conversations with other settings, or other weights, of such a writer.
    """
    check_data(out)
    stop_at, file = time.monotonic() + 60 * minutes, out / "turns.jsonl"
    where = environment(target_of(device))
    before = read_conversations(file)
    done = {(r.writer, r.part, r.key) for r in before if not r.error}
    asked = {part: requests(out, part, count) for part in PARTS}
    each = max(1, batch // group)
    in_turn = zip_longest(*([(part, e) for e in asked[part]] for part in PARTS))  # so that each has some if time is up
    mixed = [one for some in in_turn for one in some if one is not None]
    asked_how = f"{group} x {most} replies of {max_tokens} in {length} tokens, temperature {temperature:g}, seed {seed}"
    device_of, work = target_of(device), partial(verdicts, device=device)
    try:
        with _pool(jobs) as pool:
            grader = JudgeGrader([e for _, e in mixed], device_of, pool, work, stop_at=stop_at)
            for writer in writers if minutes else ():
                kind = place()
                lm, tokenizer = load_adapted(out / writer, torch.bfloat16 if kind == "cuda" else torch.float32, kind)
                settings = f"{asked_how}, weights {fingerprint(lm, adapters=True)}"
                _check_same(file, writer, settings, before)
                sampler = Sampler(
                    lm, tokenizer, temperature=temperature, max_tokens=max_tokens, length=length, batch=batch
                )
                left = [(part, e) for part, e in mixed if (writer, part, e.key) not in done]
                for some in (left[n : n + each] for n in range(0, len(left), each)):
                    if time.monotonic() > stop_at:
                        break
                    found = rollout(sampler, grader, [Asked(e.key, e.messages) for _, e in some], group, most, seed)
                    late = {one.key for one in found if not one.counted} if time.monotonic() > stop_at else set()
                    for number, one in enumerate(found):
                        part, example = some[number // group]
                        if one.key not in late:
                            row = Conversation.of(writer, part, example, number % group, one, where, settings)
                            append_line(file, row.to_json())
                    cut = f", {len(late)} of them cut off" if late else ""
                    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in grader.spent.items())
                    print(f"{writer}: {len(some)} of {len(left)} requests{cut}; {spent}", flush=True)
                del lm, sampler
    finally:  # whatever ends it, what is there is shown
        print(turns_table(read_conversations(file)), end="", flush=True)


def _check_same(file: Path, writer: str, settings: str, before: Sequence[Conversation]) -> None:
    """Refuse to add to conversations of a writer that were held otherwise."""
    other = next((r.settings for r in before if r.writer == writer and r.settings not in ("", settings)), None)
    if other is not None:
        text = f"{file} has conversations of {writer} with other settings ({other}; now {settings})"
        raise FinetuneError(f"{text}: move the file away, or ask a copy of the model's folder with another name")


def target_of(device: str | None) -> Any:
    """The device that is written for."""
    from qimeng.envs.steps.setup import make_device

    return make_device(device)


def _pool(jobs: int) -> Pool:
    return Pool(gpu_places(0, jobs, visible_gpus()))


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
    "loaded",
    "place",
    "rl",
    "said",
    "sft",
    "target_of",
    "turns",
]
