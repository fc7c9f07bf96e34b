"""A small model that writes Triton, trained on accepted patches, against an untrained one and against copying.

    python -m benchmarks.writer data   OUT --store runs/collect/store.sqlite --others 8
    python -m benchmarks.writer train  OUT --minutes 18
    python -m benchmarks.writer answer OUT --requests 120 --minutes 5
    python -m benchmarks.writer judge  OUT --requests 120 --minutes 10
    python -m benchmarks.writer table  OUT
    python -m benchmarks.writer toy    OUT          all of it, tiny, on a CPU, from patches that nobody judged

Every command uses all GPUs of the machine and can be repeated: `data` begins anew, the others go on where they ended.
Another training needs another OUT. OUT holds the examples, `examples.json` (counts), `training.jsonl`,
`answers.jsonl`, `judged.jsonl` (a row for each request and coder) and the two models, which are not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.writer.examples import collect, units
from experiments.writer.folder import ANSWERS, CODERS, JUDGED, LEARNT, PARTS, coders, read, requests, write
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.row import append_line
from qimeng.device import target_device
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


def data(args: argparse.Namespace) -> None:
    """Make the examples."""
    for name in ("untrained", "trained"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    for name in (ANSWERS, JUDGED):
        (args.out / name).unlink(missing_ok=True)
    some = units(args.store, args.seed, args.draw, SIZES, args.sizes, args.walks)
    parts = write(args.out, collect(some, args.processes, args.others), args.processes)
    counts = {name: len(getattr(parts, name)) for name in (LEARNT, *PARTS)}
    learnt = parts.learnt
    counts |= {"verified": sum(e.verified for e in learnt), "chains learnt": len({e.chain for e in learnt})}
    (args.out / "examples.json").write_text(json.dumps({**counts, "environment": asdict(environment(target_device()))}))
    print(json.dumps(counts), flush=True)


def train(args: argparse.Namespace) -> None:
    """Train, within the minutes given."""
    import torch

    from experiments.writer.model import encoded, kept, new_writer
    from experiments.writer.training import Training

    began, untrained = time.monotonic(), args.out / "untrained"
    encodings = untrained / ENCODED
    if not (untrained / "model.safetensors").exists():
        new_writer(tuple(read(args.out, LEARNT)), args.size, untrained, args.seed)
    rows = kept(encodings, untrained, read(args.out, LEARNT))
    if not args.now:
        return
    how = Training(60 * args.minutes, args.steps, args.tokens, args.rate, compiled=args.compiled, seed=args.seed)
    count = torch.cuda.device_count()
    where = {"weights": str(args.weights or ""), "environment": asdict(environment(target_device()))}
    about = {**asdict(how), "size": args.size, "gpus": count, **where}
    append_line(args.out / "training.jsonl", json.dumps(about))
    looked_at = [e for part in PARTS for e in requests(args.out, part, LOOKED_AT)]
    held_out = encoded(untrained, looked_at)
    context = torch.multiprocessing.get_context("spawn")
    stop, meeting = context.Event(), args.out.resolve() / f"meeting-{os.getpid()}"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run_s = 60 * args.now - (time.monotonic() - began)
    source = (args.weights or untrained).resolve()
    some = (count, meeting, stop, source, args.out.resolve(), rows, held_out, how, run_s)
    if count > 1:
        torch.multiprocessing.spawn(train_member, some, nprocs=count)
    else:
        train_member(0, *some)
    meeting.unlink(missing_ok=True)


def train_member(
    rank: int,
    count: int,
    meeting: Path,
    stop: Any,
    source: Path,
    out: Path,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    how: Training,
    run_s: float,
) -> None:
    """What one process does of the training."""
    from experiments.writer.training import Member
    from experiments.writer.training import train as train_model

    if count > 1:  # the first process says when to stop
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def tell(row: dict[str, float]) -> None:
        append_line(out / "training.jsonl", json.dumps(row))
        print(json.dumps(row), flush=True)

    member = Member(f"cuda:{rank}" if count else "cpu", rank, max(count, 1), str(meeting))
    target, stopped = out / "trained", stop.is_set
    train_model(source, target, rows, how, held_out=held_out, member=member, run_s=run_s, stopped=stopped, on_row=tell)


def answer(args: argparse.Namespace) -> None:
    """Have held-out requests answered by the trained and the untrained model."""
    from experiments.writer.answering import Sheet, read_answers, sheets
    from experiments.writer.answering import answer as answer_sheets
    from experiments.writer.judging import REPAIRS

    file, stop_at = args.out / ANSWERS, time.monotonic() + 60 * args.minutes
    asked = [e for part in PARTS for e in requests(args.out, part, args.requests)]
    lengths = {"trained": args.longest, "untrained": SHORT}

    def tell(sheet: Sheet, failure: str) -> None:
        print(sheet.folder.name, sheet.number, len(sheet.asked), failure or "answered", flush=True)

    for _ in range(2):  # first answers, then repairs
        done = read_answers(file)
        some = [s for n, most in lengths.items() for s in sheets(args.out / n, asked, done, REPAIRS, most, args.batch)]
        answer_sheets(some, file, gpu_places(0, args.jobs, visible_gpus()), stop_at - time.monotonic(), tell)


def judge(args: argparse.Namespace) -> None:
    """Judge what was answered, beside copies of the nearest patches and the template coder's own."""
    from experiments.writer.judging import Judged, batches, read_rows, rows_of
    from experiments.writer.judging import judge as judge_batches

    file = args.out / JUDGED
    work = partial(rows_of, coders=partial(coders, args.out.resolve()), environment=environment(target_device()))
    done = list(read_rows(file))
    # the template coder last, and of each part a few in turn, so that a run that is cut off has some of everything
    some = [
        batch
        for names in (CODERS[:-1], CODERS[-1:])
        for both in zip_longest(*(batches(p, requests(args.out, p, args.requests), names, done) for p in PARTS))
        for batch in both
        if batch is not None
    ]

    def tell(row: Judged) -> None:
        print(row.part, row.coder, row.chain, row.kind, row.error or row.tries, flush=True)

    places = gpu_places(0, args.jobs, visible_gpus())
    judge_batches(some, work, file, places, 60 * args.minutes, on_row=tell)
    table(args)


def table(args: argparse.Namespace) -> None:
    """Print the shares."""
    from experiments.writer.judging import read_rows
    from experiments.writer.judging import table as as_table

    print(as_table(read_rows(args.out / JUDGED)), end="")


def toy(args: argparse.Namespace) -> None:
    """Everything at toy size: that it runs, nothing about how good it is."""
    args.store, args.draw, args.sizes, args.others, args.jobs, args.walks = [], 6, 2, 0, 1, 1
    data(args)
    args.size, args.steps, args.minutes, args.now, args.tokens, args.rate = "toy", 20, 5.0, 5.0, 8192, 1e-3
    args.weights = None
    args.compiled = False
    train(args)
    args.requests, args.minutes, args.batch, args.longest = 2, 5.0, 2, 100
    answer(args)
    judge(args)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (data, train, answer, judge, table, toy):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.add_argument("out", type=Path)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1)
        command.set_defaults(function=function)
        if function is data:
            command.add_argument("--store", type=Path, action="append", default=[], help="*.sqlite, or a file of trees")
            command.add_argument("--others", type=int, default=8, help="other sizes at which steps are written again")
            command.add_argument("--draw", type=int, default=0, help="drawn specs whose patches nobody judged")
            command.add_argument("--walks", type=int, default=1, help="through each drawn spec, at each size")
            command.add_argument(
                "--sizes", type=int, default=len(SIZES), help="of four sizes, how many each drawn spec has"
            )
        if function is train:
            command.add_argument("--size", default="small")
            command.add_argument("--minutes", type=float, default=18.0, help="of the training, over all runs")
            command.add_argument("--now", type=float, default=1e6, help="minutes of this run; 0 prepares it")
            command.add_argument("--weights", type=Path, help="folder of a writer to begin with, of the same tokenizer")
            command.add_argument("--steps", type=int, default=1_000_000)
            command.add_argument("--tokens", type=int, default=32_768, help="of a batch, on each GPU")
            command.add_argument("--rate", type=float, default=1e-3)
            command.add_argument("--compiled", action="store_true", help="by torch.compile, which takes a minute")
        if function in (answer, judge):
            command.add_argument("--requests", type=int, default=100, help="of each set")
            command.add_argument("--minutes", type=float, default=10.0)
            command.add_argument("--jobs", type=int, default=4, help="processes on each GPU")
        if function is answer:
            command.add_argument("--batch", type=int, default=64, help="answers written together")
            command.add_argument("--longest", type=int, default=3600, help="tokens of an answer")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
