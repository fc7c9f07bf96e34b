"""The steps of an experiment with a writer: make examples, train, have requests answered, judge the answers.

Deals in one folder (`experiments.writer.folder`) and in time. Every step uses all GPUs of the machine and can be
repeated: `data` begins anew, the others continue. The folder holds the examples, `examples.json` (counts),
`training.jsonl`, `answers.jsonl`, `judged.jsonl` (a row for each request and coder) and the two models.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.writer.examples import collect, units
from experiments.writer.folder import ANSWERS, CODERS, JUDGED, LEARNT, PARTS, coders, read, requests, write
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.row import append_line
from qimeng.device import target_device
from qimeng.finetune.members import Member, together
from qimeng.planner.data.generate import Bytes

if TYPE_CHECKING:
    from experiments.writer.model import Row
    from experiments.writer.training import Training

SIZES = tuple(Bytes(1 << n, 1 << (n + 2)) for n in (16, 18, 20, 22))
"""Inputs of drawn specs: 64 KiB to 16 MiB, so that judging takes seconds."""

SHORT = 400
"""Tokens after which an untrained model is cut off: it does not end by itself."""

ENCODED = "encoded.npz"
"""What is learnt, as tokens; beside the tokenizer whose they are."""

LOOKED_AT = 48
"""Held-out examples of each part that training is looked at with."""


def data(
    out: Path,
    stores: Sequence[Path] = (),
    draw: int = 0,
    sizes: int = len(SIZES),
    walks: int = 1,
    others: int = 8,
    processes: int = 1,
    seed: int = 0,
    further: int = 0,
    cuda: bool = False,
    repairs: float = 0.0,
) -> None:
    """Make the examples.

    Args:
        out: the folder.
        stores: of collections, or files of trees: what was judged.
        draw: drawn specs whose patches nobody judged.
        sizes: of four sizes, how many each drawn spec has.
        walks: through each drawn spec, at each size.
        others: other sizes at which steps are written again.
        processes: that write.
        seed: of the drawn specs.
        further: specs of the families that are not drawn otherwise: convolutions, windows, scans, recurrences.
        cuda: whether walks lead to CUDA C++ too.
        repairs: share of what is learnt that is learnt once more as a repair.
    """
    for name in ("untrained", "trained", "pretrained", "tuned", "reinforced"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (ANSWERS, JUDGED):
        (out / name).unlink(missing_ok=True)
    some = units(list(stores), seed, draw, SIZES, sizes, walks, further, cuda)
    parts = write(out, collect(some, processes, others), processes, repairs)
    counts = {name: len(getattr(parts, name)) for name in (LEARNT, *PARTS)}
    learnt = parts.learnt
    counts |= {"verified": sum(e.verified for e in learnt), "chains learnt": len({e.chain for e in learnt})}
    counts |= {
        "repairs": sum(e.failed is not None for e in learnt),
        "cuda": sum("__global__" in e.answer for e in learnt),
    }
    (out / "examples.json").write_text(json.dumps({**counts, "environment": asdict(environment(target_device()))}))
    print(json.dumps(counts), flush=True)


def train(out: Path, how: Training, size: str = "small", now_minutes: float = 1e6, weights: Path | None = None) -> None:
    """Train, within the minutes given.

    Args:
        out: the folder.
        how: seconds over all runs, steps, tokens of a batch on each GPU, rate, seed, whether compiled.
        size: of the model.
        now_minutes: of this run; 0 prepares it.
        weights: folder of a writer to begin with, of the same tokenizer.
    """
    import torch

    from experiments.writer.model import encoded, kept, new_writer

    began, untrained = time.monotonic(), out / "untrained"
    encodings = untrained / ENCODED
    if not (untrained / "model.safetensors").exists():
        new_writer(tuple(read(out, LEARNT)), size, untrained, how.seed)
    rows = kept(encodings, untrained, read(out, LEARNT))
    if not now_minutes:
        return
    count = torch.cuda.device_count()
    where = {"weights": str(weights or ""), "environment": asdict(environment(target_device()))}
    about = {**asdict(how), "size": size, "gpus": count, **where}
    append_line(out / "training.jsonl", json.dumps(about))
    looked_at = [e for part in PARTS for e in requests(out, part, LOOKED_AT)]
    held_out = encoded(untrained, looked_at)
    run_s = 60 * now_minutes - (time.monotonic() - began)
    some = ((weights or untrained).resolve(), out.resolve(), rows, held_out, how, run_s)
    together(train_member, "cuda" if count else "cpu", count, *some)


def train_member(
    member: Member,
    stopped: Callable[[], bool],
    source: Path,
    out: Path,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    how: Training,
    run_s: float,
) -> None:
    """What one process does of the training."""
    from experiments.writer.training import train as train_model

    def tell(row: dict[str, float]) -> None:
        append_line(out / "training.jsonl", json.dumps(row))
        print(json.dumps(row), flush=True)

    train_model(
        source, out / "trained", rows, how, held_out=held_out, member=member, run_s=run_s, stopped=stopped, on_row=tell
    )


def answer(
    out: Path, count: int = 100, minutes: float = 10.0, jobs: int = 4, batch: int = 64, longest: int = 3600
) -> None:
    """Have held-out requests answered by the trained and the untrained model.

    Args:
        out: the folder.
        count: requests of each set.
        minutes: after which nothing is begun.
        jobs: processes on each GPU.
        batch: answers written together.
        longest: tokens of an answer.
    """
    from experiments.writer.answering import Sheet, read_answers, sheets
    from experiments.writer.answering import answer as answer_sheets
    from experiments.writer.judging import REPAIRS

    file, stop_at = out / ANSWERS, time.monotonic() + 60 * minutes
    asked = [e for part in PARTS for e in requests(out, part, count)]
    lengths = {"trained": longest, "untrained": SHORT}

    def tell(sheet: Sheet, failure: str) -> None:
        print(sheet.folder.name, sheet.number, len(sheet.asked), failure or "answered", flush=True)

    for _ in range(2):  # first answers, then repairs
        done = read_answers(file)
        some = [s for n, most in lengths.items() for s in sheets(out / n, asked, done, REPAIRS, most, batch)]
        answer_sheets(some, file, gpu_places(0, jobs, visible_gpus()), stop_at - time.monotonic(), tell)


def judge(out: Path, count: int = 100, minutes: float = 10.0, jobs: int = 4) -> None:
    """Judge what was answered, beside copies of the nearest patches and the template coder's own.

    Args:
        out: the folder.
        count: requests of each set.
        minutes: after which nothing is begun.
        jobs: processes on each GPU.
    """
    from experiments.writer.judging import Judged, batches, read_rows, rows_of
    from experiments.writer.judging import judge as judge_batches

    file = out / JUDGED
    work = partial(rows_of, coders=partial(coders, out.resolve()), environment=environment(target_device()))
    done = list(read_rows(file))
    # the template coder last, and of each part a few in turn, so that a run that is cut off has some of everything
    some = [
        batch
        for names in (CODERS[:-1], CODERS[-1:])
        for both in zip_longest(*(batches(p, requests(out, p, count), names, done) for p in PARTS))
        for batch in both
        if batch is not None
    ]

    def tell(row: Judged) -> None:
        print(row.part, row.coder, row.chain, row.kind, row.error or row.tries, flush=True)

    places = gpu_places(0, jobs, visible_gpus())
    judge_batches(some, work, file, places, 60 * minutes, on_row=tell)
    table(out)


def table(out: Path) -> None:
    """Print the shares."""
    from experiments.writer.judging import read_rows
    from experiments.writer.judging import table as as_table

    print(as_table(read_rows(out / JUDGED)), end="")


def toy(out: Path, processes: int = 1) -> None:
    """Everything at toy size, from patches that nobody judged: that it runs, nothing about how good it is."""
    from experiments.writer.training import Training

    data(out, draw=6, sizes=2, others=0, processes=processes)
    train(out, Training(300.0, 20, 8192, 1e-3), "toy", 5.0)
    answer(out, 2, 5.0, 1, 2, 100)
    judge(out, 2, 5.0, 1)


__all__ = ["answer", "data", "judge", "table", "toy", "train"]
