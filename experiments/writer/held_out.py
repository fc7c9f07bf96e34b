"""Conversations with trained writers about what is held out, on every GPU of the machine.

Deals in one folder (`experiments.writer.folder`), and in time. It can be repeated and continues. The folder gets
`turns.jsonl`; while several processes ask, each has a file of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from experiments.writer.examples import Example
from experiments.writer.folder import PARTS, check_data, requests
from experiments.writer.grading import JudgeGrader, verdicts
from experiments.writer.tuning import judges, place, target_of
from experiments.writer.turns import Conversation, read_conversations, turns_table
from qimeng.bench.environment import environment
from qimeng.bench.row import append_line
from qimeng.finetune.members import Member, together
from qimeng.finetune.progress import fingerprint
from qimeng.finetune.rollout import Asked, rollout
from qimeng.finetune.sampling import Sampler
from qimeng.finetune.weights import FinetuneError, load_adapted

FILE = "turns.jsonl"


@dataclass(frozen=True)
class Talk:
    """How conversations are held.

    Attributes:
        count: requests of each set.
        group: conversations about each; with one at temperature 0 it is the likeliest.
        most: replies of a conversation.
        temperature: of sampling.
        max_tokens: longest reply.
        length: longest prompt and reply together.
        batch: replies drawn together, on each GPU.
        seed: of sampling.
    """

    count: int = 100
    group: int = 4
    most: int = 3
    temperature: float = 0.7
    max_tokens: int = 1536
    length: int = 6144
    batch: int = 64
    seed: int = 0

    def __str__(self) -> str:
        drawn = f"{self.group} x {self.most} replies of {self.max_tokens} in {self.length} tokens"
        return f"{drawn}, temperature {self.temperature:g}, seed {self.seed}"


def turns(
    out: Path, writers: Sequence[str], how: Talk, jobs: int = 4, minutes: float = 10.0, device: str | None = None
) -> None:
    """Conversations of several turns on what is held out, with real repairs; appended to `turns.jsonl`.

    Requests whose conversations the end of the time cut off get no row: those left would be the quick ones.

    Args:
        out: the folder.
        writers: folders in `out` of models.
        how: which conversations.
        jobs: judges on each GPU.
        minutes: after which nothing is begun, and what still runs is cut off; 0 only prints the table.
        device: name of a device to estimate for; the GPU of this machine by default.

    Raises:
        FinetuneError: the file has conversations with other settings, or other weights, of such a writer.
    """
    check_data(out)
    until = time.time() + 60 * minutes
    _gather(out)
    try:
        if minutes:
            together(_member, place(), torch.cuda.device_count(), out, writers, how, jobs, until, device)
    finally:  # whatever ends it, what is there is shown
        _gather(out)
        print(turns_table(read_conversations(out / FILE)), end="", flush=True)


def _gather(out: Path) -> None:
    """Move what several processes wrote to one file."""
    for part in sorted(out.glob("turns-*.jsonl")):
        for row in read_conversations(part):
            append_line(out / FILE, row.to_json())
        part.unlink()


def _member(
    member: Member,
    stopped: Callable[[], bool],
    out: Path,
    writers: Sequence[str],
    how: Talk,
    jobs: int,
    until: float,
    device: str | None,
) -> None:
    """What one process asks, `until` a time of the clock on the wall."""
    stop_at = time.monotonic() + until - time.time()
    if member.device.startswith("cuda"):
        torch.cuda.set_device(member.device)
    file, before = out / f"turns-{member.rank}.jsonl", read_conversations(out / FILE)
    done = {(r.writer, r.part, r.key) for r in before if not r.error}
    where, dtype = environment(target_of(device)), torch.bfloat16 if place() == "cuda" else torch.float32
    mine = _in_turn(out, how.count)[member.rank :: member.count]
    with judges(jobs, member) as pool:
        work = partial(verdicts, device=device)
        grader = JudgeGrader([e for _, e in mine], target_of(device), pool, work, stop_at=stop_at)
        for writer in writers:
            lm, tokenizer = load_adapted(out / writer, dtype, member.device)
            settings = f"{how}, weights {fingerprint(lm, adapters=True)}"
            _check_same(out / FILE, writer, settings, before)
            some = {"temperature": how.temperature, "max_tokens": how.max_tokens, "length": how.length}
            sampler = Sampler(lm, tokenizer, batch=how.batch, **some)  # type: ignore[arg-type]
            left = [(part, e) for part, e in mine if (writer, part, e.key) not in done]
            each = max(1, how.batch // how.group)
            for asked in (left[n : n + each] for n in range(0, len(left), each)):
                if time.monotonic() > stop_at or stopped():
                    break
                questions = [Asked(e.key, e.messages) for _, e in asked]
                found = rollout(sampler, grader, questions, how.group, how.most, how.seed)
                late = {one.key for one in found if not one.counted} if time.monotonic() > stop_at else set()
                for number, one in enumerate(found):
                    part, example = asked[number // how.group]
                    if one.key not in late:
                        row = Conversation.of(writer, part, example, number % how.group, one, where, settings)
                        append_line(file, row.to_json())
                cut = f", {len(late)} of them cut off" if late else ""
                spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in grader.spent.items())
                print(f"{writer}: {len(asked)} of {len(left)} requests{cut}; {spent}", flush=True)
            del lm, sampler


def _in_turn(out: Path, count: int) -> list[tuple[str, Example]]:
    """What is asked, one of each set by turns, so that each has some if time is up."""
    asked = zip_longest(*([(part, e) for e in requests(out, part, count)] for part in PARTS))
    return [one for some in asked for one in some if one is not None]


def _check_same(file: Path, writer: str, settings: str, before: Sequence[Conversation]) -> None:
    """Refuse to add to conversations of a writer that were held otherwise."""
    other = next((r.settings for r in before if r.writer == writer and r.settings not in ("", settings)), None)
    if other is not None:
        text = f"{file} has conversations of {writer} with other settings ({other}; now {settings})"
        raise FinetuneError(f"{text}: move the file away, or ask a copy of the model's folder with another name")


__all__ = ["FILE", "Talk", "turns"]
